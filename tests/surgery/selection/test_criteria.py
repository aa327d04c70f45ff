"""Criteria on models with planted heads: each finds its head, and all return valid orders."""

from __future__ import annotations

import pytest
import torch

from polyhead.errors import OptionError
from polyhead.surgery import choose_heads, find_layers, loss_weights
from polyhead.surgery.adapters.head_weights import read_heads
from polyhead.surgery.calibration.moments import Sensitivity, gradient_statistics
from polyhead.surgery.options import CRITERIA
from polyhead.surgery.selection.criteria import magnitudes, orders_by, pruning_order, redundancy_order
from polyhead.surgery.selection.evidence import Evidence, Objectives
from polyhead.surgery.selection.quality import language_slope
from tests.surgery.gated import FAMILIES, build

PATH = "model.layers.0.self_attn"


@pytest.fixture(scope="module")
def evidence(batches) -> Evidence:
    model = build(FAMILIES["llama"])
    model.set_attn_implementation("sdpa")
    with torch.no_grad():  # head 1 of layer 0 writes nothing
        linear = model.get_submodule(f"{PATH}.o_proj")
        linear.weight[:, linear.in_features // 4 : linear.in_features // 2] = 0
    objectives = Objectives(slope=language_slope, ablated="language", gradient="language", slopes=3, ablations=1)
    return Evidence(model, batches, objectives)


@pytest.mark.parametrize("name", CRITERIA)
def test_every_criterion_orders_all_heads_but_one_of_every_layer(evidence, name):
    orders = orders_by(name, evidence)
    assert list(orders) == [layer.path for layer in find_layers(evidence.model)]
    for order in orders.values():
        assert len(order.heads) == len(order.losses) == len(set(order.heads)) == 3
    assert sum(map(len, choose_heads(orders, 5).values())) == 5


@pytest.mark.parametrize("name", [name for name in CRITERIA if name not in ("random", "taylor", "ablation")])
def test_a_head_that_writes_nothing_goes_first(evidence, name):
    order = orders_by(name, evidence)[PATH]
    assert order.heads[0] == 1
    assert order.losses[0] == pytest.approx(0, abs=1e-6)


def test_ablation_and_taylor_of_a_head_that_writes_nothing_are_zero(evidence):
    assert evidence.ablation[PATH][1] == evidence.slopes("taylor")[PATH][1] == 0
    assert all(score != 0 for head, score in enumerate(evidence.ablation[PATH]) if head != 1)


def test_seeds_change_the_random_order_and_nothing_else(evidence):
    assert orders_by("random", evidence, seed=1) == orders_by("random", evidence, seed=1)
    assert orders_by("random", evidence, seed=1) != orders_by("random", evidence, seed=2)
    assert orders_by("plain", evidence, seed=1) == orders_by("plain", evidence, seed=2)


def test_weightings_are_those_of_the_gradients(evidence, batches):
    heads, moments = evidence.heads[PATH], evidence.moments[PATH]
    weight = loss_weights(evidence.model, batches, language_slope)[PATH]
    plain, by_layer = (orders_by("compensated", evidence, weighting=x)[PATH] for x in ("none", "layer"))
    assert by_layer.heads == plain.heads
    assert by_layer.losses == pytest.approx([loss * weight for loss in plain.losses], rel=1e-6)
    found = gradient_statistics(evidence.model, batches, language_slope)[PATH].sensitivity
    assert found.weight == pytest.approx(weight, rel=1e-6)
    torch.testing.assert_close(found.root() @ found.root().T, found.products)
    by_direction = orders_by("compensated", evidence, weighting="direction")[PATH]
    assert by_direction == pruning_order(moments, heads, root=found.root())
    with pytest.raises(OptionError, match="weighting must be one of none, layer, direction, token, got 'much'"):
        orders_by("compensated", evidence, weighting="much")  # type: ignore[arg-type]


def test_an_error_costs_by_its_direction():
    products = torch.tensor([[4.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    found = Sensitivity(products)
    assert found.weight == 2
    errors = torch.tensor([[1.0, 0.0], [0.0, 5.0]], dtype=torch.float64)
    torch.testing.assert_close((errors @ found.root()).square().sum(1), torch.tensor([4.0, 0.0]).double())


def test_of_heads_that_write_alike_the_smaller_goes():
    written = torch.tensor([[2.0, 0.0], [0.0, 1.0], [1.0, 0.1], [0.0, 0.0]], dtype=torch.float64)
    order = redundancy_order(written @ written.T)
    assert order.heads == (3, 2, 1)  # silent, then the like of head 0, then what is left but the largest
    assert order.losses[0] == 0
    assert order.losses[1] == pytest.approx(1 - 1 / 1.01**0.5)
    assert order.losses[2] == pytest.approx(order.losses[1] + 1)


def test_magnitudes_do_not_change_with_the_coordinates_between_value_and_output(evidence):
    from dataclasses import replace

    layer = find_layers(evidence.model)[1]
    heads = read_heads(evidence.model, layer)
    basis = torch.linalg.qr(torch.randn(heads.value.shape[1], heads.value.shape[1], dtype=torch.float64))[0] * 3
    changed = replace(
        heads,
        value=(basis @ heads.value.double()).float(),
        output=(torch.linalg.inv(basis).T @ heads.output.double()).float(),
    )
    assert magnitudes(changed) == pytest.approx(magnitudes(heads), rel=1e-5)


def test_a_judge_that_cannot_say_is_told_of(evidence):
    silent = Evidence(evidence.model, evidence.batches, Objectives())
    with pytest.raises(OptionError, match="criterion must be one of compensated, plain"):
        orders_by("charm", silent)
    with pytest.raises(OptionError, match="objectives without ablated"):
        orders_by("ablation", silent)
    with pytest.raises(OptionError, match="similarity to the unpruned model has none there"):
        orders_by("taylor", silent)
    with pytest.raises(OptionError, match="objectives without slope"):
        orders_by("plain", silent, weighting="layer")
