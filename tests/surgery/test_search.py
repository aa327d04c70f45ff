"""Moving heads between layers, budgets and repair in order: held to what can be computed by hand."""

from __future__ import annotations

import pytest
import torch

from polyhead.errors import OptionError
from polyhead.surgery import OutputRepair, PruneHeads, apply, find_layers, fingerprint, gather_moments, undo
from polyhead.surgery.as_if import GivenOutputs, Outputs, as_if, plain_outputs
from polyhead.surgery.choosing import PruningOrder
from polyhead.surgery.criteria import Evidence, Judge
from polyhead.surgery.head_weights import read_heads
from polyhead.surgery.in_order import AIMS, adds_to_stream, apply_in_order, solve_in_order
from polyhead.surgery.quality import Fidelity, Probe, language_slope
from polyhead.surgery.repair import Problem
from polyhead.surgery.search import measured_orders, refined
from polyhead.surgery.shrinking import Shrinker, Size, Target, other_flops
from tests.huggingface import models
from tests.surgery.gated import FAMILIES, build

LOSSES = {"a": (1.0, 2.0, 9.0), "b": (0.5, 4.0, 5.0), "c": (0.1, 0.3, 0.6)}


def outputs_of(path: str, taken: int) -> Outputs:
    return Outputs(tuple(range(taken)), torch.zeros(1), torch.zeros(1))


def loss(outputs) -> float:
    """Layers by themselves, but for a and c, which are bad together."""
    own = sum(LOSSES[path][len(x.heads) - 1] for path, x in outputs.items())
    return 7.0 + own + (3.0 if "a" in outputs and "c" in outputs else 0.0)


def test_losses_are_measured_layer_by_layer():
    orders = {path: PruningOrder((2, 0, 1), (0.0, 0.0, 0.0)) for path in LOSSES}
    told = []
    found = measured_orders(orders, outputs_of, loss, progress=lambda done, of: told.append((done, of)))
    assert {path: order.losses for path, order in found.items()} == {k: pytest.approx(v) for k, v in LOSSES.items()}
    assert told[-1] == (9, 9)
    short = measured_orders(orders, outputs_of, loss, most=2)
    assert short["b"] == PruningOrder((2, 0), pytest.approx(LOSSES["b"][:2]))


def test_heads_move_to_where_the_model_loses_less():
    orders = {path: PruningOrder((2, 0, 1), losses) for path, losses in LOSSES.items()}
    found = refined({"a": 2, "c": 2}, orders, outputs_of, loss)
    assert found.first_loss == pytest.approx(7 + 2 + 0.3 + 3)
    assert found.counts == {"b": 1, "c": 3}  # the best of all four
    assert found.loss == pytest.approx(7 + 0.5 + 0.6)
    assert refined({"a": 2, "c": 2}, orders, outputs_of, loss, tries=1).counts == {"a": 2, "c": 2}
    with pytest.raises(OptionError, match="tries must be at least 1"):
        refined({}, orders, outputs_of, loss, tries=0)


@pytest.fixture(scope="module")
def batches():
    return [{"input_ids": models.tokens(seed=seed)} for seed in range(6)]


@pytest.mark.parametrize("name", ["llama", "bert", "gpt2"])
def test_as_if_heads_were_gone_is_the_model_without_them(name, batches):
    model = build(FAMILIES[name])
    model.set_attn_implementation("sdpa")
    layers = {layer.path: layer for layer in find_layers(model)}
    before = fingerprint(model)
    gone = dict.fromkeys(layers, (0, 1))
    moments = gather_moments(model, batches)
    solved = {
        path: Outputs.solved(Problem.of(moments[path], read_heads(model, layer), 1e-3), gone[path])
        for path, layer in layers.items()
    }
    edits = [PruneHeads(layer.number, (0, 1)) for layer in layers.values()]
    for outputs, repair in ((plain_outputs(model, layers, gone), None), (solved, OutputRepair(moments, 1e-3))):
        with torch.no_grad(), as_if(model, layers, outputs):
            found = model(**batches[0])[0]
        assert fingerprint(model) == before
        record = apply(model, edits, repair=repair)
        with torch.no_grad():
            torch.testing.assert_close(model(**batches[0])[0], found, rtol=1e-4, atol=1e-5)
        undo(model, record)
        if repair is not None:
            record = apply(model, edits, repair=GivenOutputs(outputs))
            with torch.no_grad():
                torch.testing.assert_close(model(**batches[0])[0], found, rtol=1e-4, atol=1e-5)
            undo(model, record)
    with pytest.raises(ZeroDivisionError), as_if(model, layers, solved):
        _ = 1 / 0
    assert fingerprint(model) == before


def stream_behind(model, path: str, batch) -> torch.Tensor:
    """What the second norm of a block of Llama is given."""
    seen = []
    norm = model.get_submodule(path.replace("self_attn", "post_attention_layernorm"))
    hook = norm.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with torch.no_grad():
        model(**batch)
    hook.remove()
    return seen[0].flatten(0, 1).double()


def test_in_order_each_aim_is_least_squares_for_what_it_aims_at(batches):
    """The last layer's matrix, solved directly from rows, and for the stream what is left is smallest."""
    model = build(FAMILIES["llama"])
    model.set_attn_implementation("sdpa")
    layers = {layer.path: layer for layer in find_layers(model)}
    first, last = layers
    gone = {first: (0, 1), last: (1, 2)}
    assert adds_to_stream(model, layers[last], batches[0])
    whole = torch.cat([stream_behind(model, last, batch) for batch in batches])
    off = {}
    for aim in AIMS:
        outputs = solve_in_order(model, gone, lambda: batches, aim=aim, ridge=1e-9)
        with as_if(model, layers, outputs):
            off[aim] = float(
                (torch.cat([stream_behind(model, last, batch) for batch in batches]) - whole).square().sum()
            )
    assert off["stream"] == min(off.values())
    assert off["stream"] < 0.999 * off["layer"]
    # No small change of the last matrix brings the stream nearer.
    best = solve_in_order(model, gone, lambda: batches, aim="stream", ridge=1e-12)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        step = torch.randn(best[last].matrix.shape, generator=generator, dtype=torch.float64) * 1e-2
        moved = {**best, last: Outputs(best[last].heads, best[last].matrix + step, best[last].bias)}
        errors = []
        for outputs in (best, moved):
            with as_if(model, layers, outputs):
                rows = torch.cat([stream_behind(model, last, batch) for batch in batches])
            errors.append(float((rows - whole).square().sum()))
        assert errors[0] < errors[1]


def test_streams_are_found_by_numbers_and_not_where_there_are_none(batches):
    for name in ("bert", "gpt2", "gpt_neox"):
        model = build(FAMILIES[name])
        expected = name != "gpt_neox"  # attention and feed-forward are added there at once
        assert all(adds_to_stream(model, layer, batches[0]) == expected for layer in find_layers(model)), name


def test_edits_in_order_say_how_far_they_are_and_refuse_what_is_no_aim(batches):
    model = build(FAMILIES["llama"])
    edits, told = [PruneHeads(number, (0, 1)) for number in range(2)], []
    record = apply_in_order(model, edits, lambda: batches, aim="stream", progress=lambda *x: told.append(x))
    assert told == [(1, 2), (2, 2)]
    undo(model, record)
    with pytest.raises(OptionError, match="aim must be one of layer, output, stream, got 'high'"):
        apply_in_order(model, edits, lambda: batches, aim="high")  # type: ignore[arg-type]


def test_targets_are_read_and_refused():
    assert Target.parse("2x-cache") == Target("cache", 2.0)
    assert [str(Target.parse(x)) for x in ("12.5%-heads", "2x-cache", "1.2x-faster")] == [
        "12.5% fewer heads",
        "2 times less cache",
        "1.2 times fewer FLOPs",
    ]
    for text in ("30%", "0%-heads", "100%-heads", "1x-cache", "2x-smaller", "fast"):
        with pytest.raises(OptionError, match="a target is a share of the heads"):
            Target.parse(text)
    assert Size(0.7, 1.0, 0.9).reaches(Target("heads", 0.3))
    assert not Size(0.7, 1.0, 0.9).reaches(Target("cache", 1.1))


def test_a_budget_takes_the_fewest_heads_that_reach_it(batches):
    model = build(FAMILIES["llama"])
    model.set_attn_implementation("sdpa")
    evidence = Evidence(model, batches, Judge(slope=language_slope))
    shrinker = Shrinker(evidence)
    for text in ("30%-heads", "1.1x-faster"):
        target = Target.parse(text)
        gone = shrinker.reach(target)
        count = sum(map(len, gone.values()))
        assert shrinker.size(gone).reaches(target)
        assert not shrinker.size(shrinker.gone(count - 1)).reaches(target)
    with pytest.raises(OptionError, match="a layer keeps a head at least, which leaves 25% of the heads"):
        shrinker.reach(Target("heads", 0.9))
    by_keys = Shrinker(evidence, by_key_heads=True)
    gone = by_keys.reach(Target("cache", 1.3))
    assert by_keys.size(gone).cache == 0.75
    assert {len(heads) for heads in gone.values()} == {2}
    with pytest.raises(OptionError, match="key heads go by the criterion repaired"):
        Shrinker(evidence, by_key_heads=True, criterion="plain")


def test_flops_outside_of_attention_are_those_of_its_linear_layers():
    model = build(FAMILIES["llama"])
    shrinker_work = Shrinker(
        Evidence(model, [{"input_ids": models.tokens()}], Judge(slope=language_slope)), weighting="none"
    ).work
    body = sum(p.numel() for name, p in model.named_parameters() if "mlp" in name and p.ndim == 2)
    assert other_flops(model, shrinker_work) == 2 * 512 * (body + model.lm_head.weight.numel())


def test_a_curve_has_its_controls(batches):
    model = build(FAMILIES["bert"])
    before = fingerprint(model)
    shrinker = Shrinker(Evidence(model, batches, Judge(slope=Probe())))
    told = []
    found = shrinker.curve(
        Fidelity(model, batches), shares=(0.25, 0.26, 0.5, 0.99), seeds=(0, 1), progress=lambda *x: told.append(x)
    )
    assert [point.gone for point in found] == [2, 4]
    assert told[-1] == (8, 8)
    assert all(len(point.random) == 2 for point in found)
    assert all(point.repaired.value > point.not_repaired.value for point in found)
    assert found[0].repaired.value > found[1].repaired.value
    assert fingerprint(model) == before


def test_tokens_that_count_twice_are_as_tokens_that_are_there_twice(batches):
    model = build(FAMILIES["llama"])
    model.set_attn_implementation("sdpa")
    paths = [layer.path for layer in find_layers(model)]
    gone = dict.fromkeys(paths, (0, 1))
    counts = [2.0, 1.0, 0.0, 1.0, 1.0, 1.0]
    weights = {path: [torch.full((3, 23), count) for count in counts] for path in paths}
    repeated = [batch for batch, count in zip(batches, counts, strict=True) for _ in range(int(count))]
    found = solve_in_order(model, gone, lambda: batches, aim="stream", weights=weights)
    expected = solve_in_order(model, gone, lambda: repeated, aim="stream")
    for path in paths:
        torch.testing.assert_close(found[path].matrix, expected[path].matrix, rtol=1e-6, atol=1e-8)
