"""Repair in closed form: held to least squares solved directly, on planted redundancy and in whole models."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from polyhead.errors import OptionError, ShapeError
from polyhead.layers import MultiHeadAttention
from polyhead.surgery import (
    MergeHeads,
    OutputMoments,
    OutputRepair,
    PruneHeads,
    apply,
    apply_in_order,
    choose_heads,
    find_layers,
    fingerprint,
    gather_moments,
    pruning_order,
    undo,
)
from polyhead.surgery.choosing import PruningOrder
from polyhead.surgery.head_weights import read_heads
from polyhead.surgery.repair import Problem
from tests.huggingface import models
from tests.surgery.gated import FAMILIES, build


class Block(nn.Module):
    """A layer under a name, called as models are."""

    def __init__(self, layer: MultiHeadAttention) -> None:
        super().__init__()
        self.attention = layer

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.attention(x).output


def block(*, bias: bool = True, heads: int = 5) -> Block:
    return Block(MultiHeadAttention(7 * heads, heads, bias=bias).double())


def text(width: int = 35, count: int = 4) -> list[dict[str, torch.Tensor]]:
    return [{"x": torch.randn(3, 19, width, dtype=torch.float64) + 0.5} for _ in range(count)]


def outputs_of_heads(model: Block, batches: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """What W_O is given, [tokens, channels]."""
    seen = []
    hook = model.attention.out_proj.register_forward_pre_hook(lambda _, given: seen.append(given[0].flatten(0, 1)))
    with torch.no_grad():
        for batch in batches:
            model(**batch)
    hook.remove()
    return torch.cat(seen)


def of_layer(model: Block, batches: list[dict[str, torch.Tensor]]):
    (layer,) = find_layers(model)
    return gather_moments(model, batches)["attention"], read_heads(model, layer)


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
    moments = gather_moments(model, batches)
    apply(model, [PruneHeads(0, (2, 4))], repair=OutputRepair(moments, ridge=ridge))
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
    record = apply(model, [PruneHeads(0, (3,))], repair=OutputRepair({"attention": moments}, ridge=1e-12))
    torch.testing.assert_close(model(fresh), whole, rtol=0, atol=1e-7)
    undo(model, record)
    assert torch.equal(model(fresh), whole)
    apply(model, [PruneHeads(0, (3,))])
    assert (model(fresh) - whole).abs().max() > 1e-2


def test_a_large_ridge_leaves_the_heads_as_they_were():
    model, twin = block(bias=False), block(bias=False)
    twin.load_state_dict(model.state_dict())
    moments = gather_moments(model, text())
    apply(model, [PruneHeads(0, (2,))], repair=OutputRepair(moments, ridge=1e12))
    apply(twin, [PruneHeads(0, (2,))])
    torch.testing.assert_close(model.attention.out_proj.weight, twin.attention.out_proj.weight, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("bias", [True, False])
def test_the_order_of_pruning_costs_what_solving_anew_says(bias):
    model = block(bias=bias)
    moments, heads = of_layer(model, text())
    order = pruning_order(moments, heads, ridge=1e-9)
    problem = Problem.of(moments, heads, 1e-9)
    energy = float((problem.matrix * (problem.products @ problem.matrix)).sum())
    left = list(range(5))
    for step, head in enumerate(order.heads):
        costs = {}
        for candidate in left:
            kept = [x for x in left if x != candidate]
            costs[candidate] = problem.loss(kept, problem.solve(kept)[0])
        assert min(costs, key=costs.get) == head
        assert order.losses[step] / energy == pytest.approx(costs[head], rel=1e-5)
        left.remove(head)
    assert len(order.heads) == 4


def test_repaired_reconstruction_loses_less_than_plain():
    model = block()
    moments, heads = of_layer(model, text())
    problem = Problem.of(moments, heads, 1e-4)
    for kept in itertools.combinations(range(5), 3):
        assert problem.loss(kept, problem.solve(kept)[0]) < problem.loss(kept)
    assert problem.loss(range(5)) == 0


def test_heads_of_a_model_are_chosen_where_they_cost_least():
    orders = {"a": PruningOrder((2, 0), (1.0, 9.0)), "b": PruningOrder((1, 3, 0), (2.0, 3.0, 20.0))}
    assert choose_heads(orders, 3) == {"a": (2,), "b": (1, 3)}
    assert choose_heads(orders, 2, weights={"a": 9.0, "b": 1.0}) == {"b": (1, 3)}
    assert choose_heads(orders, 5) == {"a": (0, 2), "b": (0, 1, 3)}
    with pytest.raises(OptionError, match="0 to 5 heads can go, one staying in each, got 6"):
        choose_heads(orders, 6)
    with pytest.raises(OptionError, match="weights are given for each layer"):
        choose_heads(orders, 1, weights={"a": 1.0})


@pytest.mark.parametrize("seed", range(3))
def test_moments_of_any_split_merged_in_any_order_are_those_of_one_pass(seed):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(97, 13, generator=generator, dtype=torch.float64)
    whole = OutputMoments.empty(13).update(rows)
    cuts = sorted(torch.randint(0, 98, (4,), generator=generator).tolist())
    parts = [OutputMoments.empty(13).update(part) for part in rows.tensor_split(cuts)]
    merged = OutputMoments.empty(13)
    for index in torch.randperm(len(parts), generator=generator):
        merged = merged.merge(parts[index])
    assert merged.count == whole.count == 97
    torch.testing.assert_close(merged.total, whole.total)
    torch.testing.assert_close(merged.products, whole.products)
    with pytest.raises(ShapeError, match="got 13 channels and 7"):
        whole.merge(OutputMoments.empty(7))


def test_padding_is_no_calibration_text_in_encoders_and_decoders():
    family = FAMILIES["bart"]
    model = build(family)
    given = models.inputs(family)
    source, target = torch.ones(3, 23), torch.ones(3, 11)
    source[0, 20:], target[1, 4:] = 0, 0
    found = gather_moments(model, [{**given, "attention_mask": source, "decoder_attention_mask": target}])
    counts = {path.rpartition(".")[0].rpartition(".")[0]: x.count for path, x in found.items()}
    assert counts == {"model.encoder.layers": 3 * 23 - 3, "model.decoder.layers": 3 * 11 - 7}
    assert not model.training
    assert all(not x.module._forward_pre_hooks for x in find_layers(model))


@pytest.mark.parametrize(
    ("edits", "batches", "words"),
    [
        ([PruneHeads(0, (1,))], [], "calibration needs some text, got no batch"),
        ([PruneHeads(0, (1,))], [{"x": torch.zeros(1, 34, 35).double()}], "as many tokens as .*channels, 35, got 34"),
        ([MergeHeads(0, (0, 1))], text(), "that were merged, regrouped or new"),
    ],
)
def test_repair_says_what_it_needs(edits, batches, words):
    model = block()
    before = fingerprint(model)
    with pytest.raises(OptionError, match=words):
        apply(model, edits, repair=OutputRepair(gather_moments(model, batches)))
    assert fingerprint(model) == before


def test_bad_ridges_and_missing_moments_are_refused():
    model = block()
    for ridge in (-1, float("inf"), "much"):
        with pytest.raises(OptionError, match="ridge must be a number of at least 0"):
            OutputRepair({}, ridge=ridge)
    with pytest.raises(OptionError, match="moments of every edited layer, got none of 'attention'"):
        apply(model, [PruneHeads(0, (1,))], repair=OutputRepair({}))
    with pytest.raises(OptionError, match="whose heads are known, got \\['nowhere'\\]"):
        gather_moments(model, text(), paths=["nowhere"])


def test_dead_heads_make_a_singular_system_that_a_ridge_cures():
    model, batches = block(), text()
    with torch.no_grad():
        model.attention.v_proj.weight[7:14] = 0
        model.attention.v_proj.bias[7:14] = 0
    moments, before = gather_moments(model, batches), fingerprint(model)
    with pytest.raises(OptionError, match="a singular system with ridge 0; give more text or a larger ridge"):
        apply(model, [PruneHeads(0, (3,))], repair=OutputRepair(moments, ridge=0))
    assert fingerprint(model) == before
    heads = read_heads(model, find_layers(model)[0])
    with pytest.raises(OptionError, match="a singular system with ridge 0"):
        pruning_order(moments["attention"], heads, ridge=0)
    assert pruning_order(moments["attention"], heads).heads[0] == 1  # the dead one
    apply(model, [PruneHeads(0, (3,))], repair=OutputRepair(moments))
    assert model.attention.out_proj.weight.isfinite().all()
    with pytest.raises(OptionError, match="computed of some tokens, got none"):
        OutputMoments.empty(7).compute(centred=True)


def test_layers_that_write_nothing_are_left_as_they_are():
    model, batches = block(bias=False), text()
    with torch.no_grad():
        model.attention.v_proj.weight.zero_()
    old = model.attention.out_proj.weight.detach().clone()
    moments, heads = of_layer(model, batches)
    assert pruning_order(moments, heads) == PruningOrder((0, 1, 2, 3), (0.0,) * 4)
    apply(model, [PruneHeads(0, (4,))], repair=OutputRepair({"attention": moments}))
    assert torch.equal(model.attention.out_proj.weight, old[:, :28])


@pytest.mark.parametrize("name", ["llama", "bert", "gpt2"])
def test_whole_models_are_repaired_at_once_and_in_order(name):
    """Both ways bring a model nearer to what it gave than pruning alone, on the text that they were calibrated on."""
    family = FAMILIES[name]
    model = build(family)
    model.set_attn_implementation("sdpa")
    batches = [{"input_ids": models.tokens(seed=seed)} for seed in range(6)]

    def result() -> torch.Tensor:
        with torch.no_grad():
            return torch.stack([model(**batch, output_hidden_states=True).hidden_states[-1] for batch in batches])

    whole, before = result(), fingerprint(model)
    edits = [PruneHeads(number, (0, 1)) for number in range(2)]
    off = {}
    for how in ("plain", "once", "in order"):
        if how == "plain":
            record = apply(model, edits)
        elif how == "once":
            record = apply(model, edits, repair=OutputRepair(gather_moments(model, batches)))
        else:
            record = apply_in_order(model, edits, lambda: batches)
        off[how] = float((result() - whole).square().mean())
        assert record.before == before
        assert record.after == fingerprint(model)
        undo(model, record)
        assert fingerprint(model) == before
    assert off["once"] < 0.9 * off["plain"]
    assert off["in order"] < 0.9 * off["plain"]


def test_a_failure_in_the_middle_of_an_order_takes_everything_back():
    model = build(FAMILIES["llama"])
    before, calls = fingerprint(model), []

    def batches():
        calls.append(1)
        return [{"input_ids": models.tokens()}] if len(calls) == 1 else []

    edits = [PruneHeads(number, (0, 1)) for number in range(2)]
    with pytest.raises(OptionError, match="for the model with fingerprint another, got one with"):
        apply_in_order(model, edits, lambda: [{"input_ids": models.tokens()}], expect="another")
    assert fingerprint(model) == before
    with pytest.raises(OptionError, match="got no batch"):
        apply_in_order(model, edits, batches, ridge=0.1, expect=before)
    assert len(calls) == 2
    assert fingerprint(model) == before
