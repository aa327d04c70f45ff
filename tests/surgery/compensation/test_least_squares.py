"""Closed-form compensation against a direct solver, on planted redundancy and whole models."""

from __future__ import annotations

import itertools

import pytest
import torch

from polyhead.errors import OptionError
from polyhead.surgery import (
    MergeHeads,
    OutputCompensation,
    OutputMoments,
    PruneHeads,
    apply,
    collect_moments,
    find_layers,
    fingerprint,
    pruning_order,
    undo,
)
from polyhead.surgery.adapters.head_weights import read_heads
from polyhead.surgery.compensation.least_squares import OutputRegression
from polyhead.surgery.selection.criteria import PruningOrder
from tests.surgery.blocks import block, loss_with, of_layer, outputs_of_heads, text


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("ridge", [0, 0.03])
def test_repair_is_the_least_squares_solution_over_the_text(bias, ridge):
    model, batches, kept = block(bias=bias), text(), [0, 1, 3]
    rows = outputs_of_heads(model, batches)
    old, shift = model.attention.out_proj.weight.detach().T, model.attention.out_proj.bias
    with torch.no_grad():
        target = rows @ old + (0 if shift is None else shift)
    channels = torch.cat([torch.arange(7 * head, 7 * head + 7) for head in kept])
    # The ridge as rows of their own: a least-squares problem that any solver can be given.
    centre = rows.mean(0) if bias else torch.zeros(35, dtype=torch.float64)
    size = (ridge * (rows - centre).square().mean() * len(rows)) ** 0.5
    design = torch.cat((rows[:, channels], size * torch.eye(21, dtype=torch.float64)))
    wanted = torch.cat((target, size * old[channels]))
    if bias:
        ones = torch.cat((torch.ones(len(rows)), torch.zeros(21))).double()[:, None]
        design = torch.cat((design, ones), 1)
    solution = torch.linalg.lstsq(design, wanted, driver="gelsd").solution
    moments = collect_moments(model, batches)
    apply(model, [PruneHeads(0, (2, 4))], compensation=OutputCompensation(moments, ridge=ridge))
    torch.testing.assert_close(model.attention.out_proj.weight.T, solution[:21], rtol=1e-7, atol=1e-9)
    if bias:
        torch.testing.assert_close(model.attention.out_proj.bias, solution[21], rtol=1e-7, atol=1e-9)
    else:
        assert model.attention.out_proj.bias is None


def test_a_head_that_says_what_others_say_is_replaced_without_loss():
    model, batches = block(), text()
    layer = model.attention
    with torch.no_grad():  # head 3 attends as head 1 and its value is a linear map of the other's, which W_O can undo
        for linear in (layer.q_proj, layer.k_proj):
            linear.weight[21:28], linear.bias[21:28] = linear.weight[7:14].clone(), linear.bias[7:14].clone()
        turn = torch.randn(7, 7, dtype=torch.float64)
        layer.v_proj.weight[21:28] = turn @ layer.v_proj.weight[7:14]
        layer.v_proj.bias[21:28] = turn @ layer.v_proj.bias[7:14]
    fresh = text()[0]["x"]
    whole = model(fresh)
    moments, heads = of_layer(model, batches)
    assert set(pruning_order(moments, heads, ridge=1e-12).heads[:1]) <= {1, 3}
    record = apply(model, [PruneHeads(0, (3,))], compensation=OutputCompensation({"attention": moments}, ridge=1e-12))
    torch.testing.assert_close(model(fresh), whole, rtol=0, atol=1e-7)
    undo(model, record)
    assert torch.equal(model(fresh), whole)
    apply(model, [PruneHeads(0, (3,))])
    assert (model(fresh) - whole).abs().max() > 1e-2


def test_a_large_ridge_leaves_the_heads_as_they_were():
    model, twin = block(bias=False), block(bias=False)
    twin.load_state_dict(model.state_dict())
    moments = collect_moments(model, text())
    apply(model, [PruneHeads(0, (2,))], compensation=OutputCompensation(moments, ridge=1e12))
    apply(twin, [PruneHeads(0, (2,))])
    torch.testing.assert_close(model.attention.out_proj.weight, twin.attention.out_proj.weight, rtol=1e-9, atol=1e-9)


def test_repaired_reconstruction_loses_less_than_plain():
    model = block()
    moments, heads = of_layer(model, text())
    problem = OutputRegression.of(moments, heads, 1e-4)
    for kept in itertools.combinations(range(5), 3):
        as_it_was = problem.matrix[problem.channels(kept)]
        assert loss_with(problem, kept, problem.solve(kept)[0]) < loss_with(problem, kept, as_it_was)
    assert loss_with(problem, range(5), problem.matrix) == 0


@pytest.mark.parametrize(
    ("edits", "batches", "words"),
    [
        ([PruneHeads(0, (1,))], [], "calibration needs some text, got no batch"),
        ([PruneHeads(0, (1,))], [{"x": torch.zeros(1, 34, 35).double()}], "as many tokens as .*channels, 35, got 34"),
        ([MergeHeads(0, (0, 1))], text(), "that were merged, regrouped or added"),
    ],
)
def test_repair_says_what_it_needs(edits, batches, words):
    model = block()
    before = fingerprint(model)
    with pytest.raises(OptionError, match=words):
        apply(model, edits, compensation=OutputCompensation(collect_moments(model, batches)))
    assert fingerprint(model) == before


def test_moments_of_another_model_of_the_same_shape_are_refused():
    model, other = block(), block()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.normal_()
    before = fingerprint(model)
    with pytest.raises(OptionError, match="with another output matrix than attention; collect them from this model"):
        apply(model, [PruneHeads(0, (1,))], compensation=OutputCompensation(collect_moments(other, text())))
    assert fingerprint(model) == before
    with pytest.raises(OptionError, match="of one layer, got layers with different output matrices"):
        collect_moments(model, text())["attention"].merge(collect_moments(other, text())["attention"])
    rounded = block()
    rounded.load_state_dict({name: x.bfloat16().double() for name, x in model.state_dict().items()})
    apply(model, [PruneHeads(0, (1,))], compensation=OutputCompensation(collect_moments(rounded, text())))


def test_bad_ridges_and_missing_moments_are_refused():
    model = block()
    for ridge in (-1, float("inf"), "much"):
        with pytest.raises(OptionError, match="ridge must be a number of at least 0"):
            OutputCompensation({}, ridge=ridge)
    with pytest.raises(OptionError, match="moments of every edited layer, got none of 'attention'"):
        apply(model, [PruneHeads(0, (1,))], compensation=OutputCompensation({}))
    with pytest.raises(OptionError, match="with a known head layout, got \\['nowhere'\\]"):
        collect_moments(model, text(), paths=["nowhere"])


def test_dead_heads_make_a_singular_system_that_a_ridge_cures():
    model, batches = block(), text()
    with torch.no_grad():
        model.attention.v_proj.weight[7:14] = 0
        model.attention.v_proj.bias[7:14] = 0
    moments, before = collect_moments(model, batches), fingerprint(model)
    with pytest.raises(OptionError, match="a singular system with ridge 0; pass more text or a larger ridge"):
        apply(model, [PruneHeads(0, (3,))], compensation=OutputCompensation(moments, ridge=0))
    assert fingerprint(model) == before
    heads = read_heads(model, find_layers(model)[0])
    with pytest.raises(OptionError, match="a singular system with ridge 0"):
        pruning_order(moments["attention"], heads, ridge=0)
    assert pruning_order(moments["attention"], heads).heads[0] == 1  # the dead one
    apply(model, [PruneHeads(0, (3,))], compensation=OutputCompensation(moments))
    assert model.attention.out_proj.weight.isfinite().all()
    with pytest.raises(OptionError, match="at least one token, got none"):
        OutputMoments.empty(7).compute(centred=True)


def test_layers_that_write_nothing_are_left_as_they_are():
    model, batches = block(bias=False), text()
    with torch.no_grad():
        model.attention.v_proj.weight.zero_()
    old = model.attention.out_proj.weight.detach().clone()
    moments, heads = of_layer(model, batches)
    assert pruning_order(moments, heads) == PruningOrder((0, 1, 2, 3), (0.0,) * 4)
    apply(model, [PruneHeads(0, (4,))], compensation=OutputCompensation({"attention": moments}))
    assert torch.equal(model.attention.out_proj.weight, old[:, :28])
