"""Criteria on models with planted heads: each finds the head that it is about, and all give orders of one kind."""

from __future__ import annotations

import pytest
import torch

from polyhead.errors import OptionError
from polyhead.surgery import PruneHeads, apply, choose_heads, find_layers, loss_weights, undo
from polyhead.surgery.choosing import pruning_order
from polyhead.surgery.criteria import CRITERIA, Evidence, Judge, magnitudes, orders_by, redundancy_order
from polyhead.surgery.head_weights import read_heads
from polyhead.surgery.quality import Fidelity, Perplexity, Probe, language_slope
from polyhead.surgery.sensitivity import Sensitivity, loss_sensitivities
from tests.huggingface import models
from tests.surgery.gated import FAMILIES, build

PATH = "model.layers.0.self_attn"


@pytest.fixture(scope="module")
def batches():
    return [{"input_ids": models.tokens(seed=seed)} for seed in range(6)]


@pytest.fixture(scope="module")
def evidence(batches) -> Evidence:
    model = build(FAMILIES["llama"])
    model.set_attn_implementation("sdpa")
    with torch.no_grad():  # head 1 of layer 0 writes nothing
        linear = model.get_submodule(f"{PATH}.o_proj")
        linear.weight[:, linear.in_features // 4 : linear.in_features // 2] = 0
    judge = Judge(slope=language_slope, ablated="language", gradient="language", slopes=3, ablations=1)
    return Evidence(model, batches, judge)


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
    few = [batches[0], batches[2], batches[4]]
    weight = loss_weights(evidence.model, few, language_slope)[PATH]
    plain, by_layer = (orders_by("repaired", evidence, weighting=x)[PATH] for x in ("none", "layer"))
    assert by_layer.heads == plain.heads
    assert by_layer.losses == pytest.approx([loss * weight for loss in plain.losses], rel=1e-6)
    found = loss_sensitivities(evidence.model, few, language_slope)[PATH]
    assert found.weight == pytest.approx(weight, rel=1e-6)
    torch.testing.assert_close(found.root() @ found.root().T, found.products)
    by_direction = orders_by("repaired", evidence, weighting="direction")[PATH]
    assert by_direction == pruning_order(moments, heads, root=found.root())
    with pytest.raises(OptionError, match="weighting must be one of none, layer, direction, token, got 'much'"):
        orders_by("repaired", evidence, weighting="much")  # type: ignore[arg-type]


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
    turn = torch.linalg.qr(torch.randn(heads.value.shape[1], heads.value.shape[1], dtype=torch.float64))[0] * 3
    turned = replace(
        heads,
        value=(turn @ heads.value.double()).float(),
        output=(torch.linalg.inv(turn).T @ heads.output.double()).float(),
    )
    assert magnitudes(turned) == pytest.approx(magnitudes(heads), rel=1e-5)


def test_a_judge_that_cannot_say_is_told_of(evidence):
    silent = Evidence(evidence.model, evidence.batches, Judge())
    with pytest.raises(OptionError, match="a criterion is one of repaired, plain"):
        orders_by("charm", silent)
    with pytest.raises(OptionError, match="a judge without such a loss"):
        orders_by("ablation", silent)
    with pytest.raises(OptionError, match="likeness to the whole model is flat there"):
        orders_by("taylor", silent)
    with pytest.raises(OptionError, match="a judge without slope"):
        orders_by("plain", silent, weighting="layer")


def test_figures_of_a_model_stand_beside_those_of_the_whole(batches):
    model = build(FAMILIES["llama"])
    perplexity, fidelity = Perplexity(model, batches), Fidelity(model, batches)
    with torch.no_grad():
        means = [model(**batch, labels=batch["input_ids"]).loss for batch in batches]
    assert perplexity.whole == pytest.approx(float(torch.stack(means).mean().exp()), rel=1e-5)
    assert perplexity.measure().error == 0
    assert fidelity.measure().value == pytest.approx(1, abs=1e-6)
    with torch.no_grad():
        model.get_submodule(f"{PATH}.o_proj").weight.mul_(-3)
    assert perplexity.measure().value != perplexity.whole
    assert perplexity.measure().error > 0
    assert fidelity.measure().value < 0.999
    cosines = []
    with torch.no_grad():
        for batch in batches:
            linear = model.get_submodule(f"{PATH}.o_proj")
            found = model.model(**batch).last_hidden_state
            linear.weight.div_(-3)
            whole = model.model(**batch).last_hidden_state
            linear.weight.mul_(-3)
            cosines.append(torch.cosine_similarity(found, whole, dim=-1).double())
    rows = torch.cat(cosines).mean(1)  # of equally many tokens each
    assert fidelity.measure().value == pytest.approx(float(rows.mean()), abs=1e-6)
    assert fidelity.measure().error == pytest.approx(float(rows.std()) / len(rows) ** 0.5, rel=1e-3)
    assert fidelity.loss() == pytest.approx(1 - fidelity.measure().value)
    for kind in (Perplexity, Fidelity):
        with pytest.raises(OptionError, match="measured on some text, got no batch"):
            kind(model, [])


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_padding_does_not_count_for_fidelity(name):
    model = build(FAMILIES[name], dtype=torch.float32)
    ids, mask = models.tokens(), torch.ones(models.BATCH, models.TOKENS, dtype=torch.int64)
    mask[1, 13:] = 0
    padded = Fidelity(model, [{"input_ids": ids[:2], "attention_mask": mask[:2]}])
    alone = Fidelity(model, [{"input_ids": ids[:1]}, {"input_ids": ids[1:2, :13]}])
    record = apply(model, [PruneHeads(0, (0, 1))])
    assert padded.measure().value < 0.999
    assert padded.measure().value == pytest.approx(alone.measure().value, abs=1e-5)
    assert padded.measure().error == pytest.approx(alone.measure().error, abs=1e-5)
    undo(model, record)
    assert padded.measure().value == pytest.approx(1, abs=1e-6)


def test_a_probe_has_the_curvature_of_likeness(batches):
    """Its mean squared slope along an error is twice what fidelity loses by that error, for small ones."""
    model = build(FAMILIES["bert"])
    path = find_layers(model)[-1].path
    batch = batches[0]
    found = loss_sensitivities(model, [batch] * 60, Probe())[path]
    error = torch.randn(32, generator=torch.Generator().manual_seed(1)) * 1e-2
    fidelity = Fidelity(model, [batch])
    linear = model.get_submodule(find_layers(model)[-1].output)
    hook = linear.register_forward_hook(lambda _, __, y: y + error)
    lost = fidelity.loss()
    hook.remove()
    # The last attention layer: a token's error reaches its own final state alone.
    assert float(error.double() @ found.products @ error.double()) / 2 == pytest.approx(lost, rel=0.2)
