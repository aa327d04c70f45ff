"""Layer-by-layer compensation: each aim against a direct solution, and failures restore the model."""

from __future__ import annotations

import pytest
import torch
from polyhead.surgery.compensation.sequential import AIMS, adds_to_stream, solve_in_order

from polyhead.errors import OptionError
from polyhead.surgery import (
    OutputCompensation,
    PruneHeads,
    apply,
    apply_in_order,
    collect_moments,
    find_layers,
    fingerprint,
    undo,
)
from polyhead.surgery.calibration import streams
from polyhead.surgery.calibration.streams import Piece
from polyhead.surgery.compensation.least_squares import OutputProjection, OutputRegression, swapped_projections
from tests.integrations.huggingface import models
from tests.surgery.gated import FAMILIES, build


@pytest.mark.parametrize("name", ["llama", "bert", "gpt2"])
def test_whole_models_are_repaired_at_once_and_in_order(name):
    """Both ways approximate the original better than pruning alone, on the calibration text."""
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
            record = apply(model, edits, compensation=OutputCompensation(collect_moments(model, batches)))
        else:
            record = apply_in_order(model, edits, lambda: batches)
        off[how] = float((result() - whole).square().mean())
        assert record.before == before
        assert record.after == fingerprint(model)
        undo(model, record)
        assert fingerprint(model) == before
    assert off["once"] < 0.9 * off["plain"]
    assert off["in order"] < 0.9 * off["plain"]


def test_a_failure_in_the_middle_of_an_order_takes_everything_back(monkeypatch):
    model = build(FAMILIES["llama"])
    before, solved, solve = fingerprint(model), [], OutputRegression.without

    def fails_at_the_second(problem, removed):
        if solved:
            raise RuntimeError("no more memory")
        solved.append(removed)
        return solve(problem, removed)

    edits = [PruneHeads(number, (0, 1)) for number in range(2)]
    batches = [{"input_ids": models.tokens()}]
    with pytest.raises(OptionError, match="for the model with fingerprint another, got one with"):
        apply_in_order(model, edits, lambda: batches, expect="another")
    for some in (edits, edits[1:]):
        with pytest.raises(OptionError, match="got no batch"):
            apply_in_order(model, some, list, expect=before)
    monkeypatch.setattr(OutputRegression, "without", fails_at_the_second)
    with pytest.raises(RuntimeError, match="no more memory"):
        apply_in_order(model, edits, lambda: batches, ridge=0.1, expect=before)
    assert len(solved) == 1
    assert fingerprint(model) == before


@pytest.mark.parametrize("name", ["llama", "bert", "gpt_neox"])
@pytest.mark.parametrize("aim", AIMS)
def test_each_layer_goes_on_where_the_last_stopped_and_finds_the_same(batches, monkeypatch, name, aim):
    """Caching runs the first block for only one more row, and gives the same as a full forward."""
    model = build(FAMILIES[name])
    layers = find_layers(model)
    removed, ran, found = {layer.path: (0, 1) for layer in layers}, [], []
    model.get_submodule(layers[0].output).register_forward_pre_hook(lambda _, given: ran.append(len(given[0])))
    for kept_bytes in (streams.MAX_CACHE_BYTES, 0):
        ran.clear()
        monkeypatch.setattr(streams, "MAX_CACHE_BYTES", kept_bytes)
        found.append((solve_in_order(model, removed, lambda: batches, aim=aim), sum(ran)))
    (ours, rows), (plain, _) = found
    sides, text = 1 if aim == "layer" else 2, sum(len(batch["input_ids"]) for batch in batches)
    assert rows == sides * (2 * text + 1) + (len(batches[0]["input_ids"]) if aim == "stream" else 0)
    for path, outputs in plain.items():
        torch.testing.assert_close(ours[path].matrix, outputs.matrix, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(ours[path].bias, outputs.bias, rtol=1e-9, atol=1e-9)


def stream_behind(model, path: str, batch) -> torch.Tensor:
    """Return the input of the second norm of a Llama block."""
    seen = []
    norm = model.get_submodule(path.replace("self_attn", "post_attention_layernorm"))
    hook = norm.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with torch.no_grad():
        model(**batch)
    hook.remove()
    return seen[0].flatten(0, 1).double()


def test_in_order_each_aim_is_least_squares_for_what_it_aims_at(batches):
    """The last matrix equals the direct solution, and for "stream" the remaining error is smallest."""
    model = build(FAMILIES["llama"])
    model.set_attn_implementation("sdpa")
    layers = {layer.path: layer for layer in find_layers(model)}
    first, last = layers
    removed = {first: (0, 1), last: (1, 2)}
    assert adds_to_stream(model, layers[last], Piece(batches[0]))
    whole = torch.cat([stream_behind(model, last, batch) for batch in batches])
    off = {}
    for aim in AIMS:
        outputs = solve_in_order(model, removed, lambda: batches, aim=aim, ridge=1e-9)
        with swapped_projections(model, layers, outputs):
            off[aim] = float(
                (torch.cat([stream_behind(model, last, batch) for batch in batches]) - whole).square().sum()
            )
    assert off["stream"] == min(off.values())
    assert off["stream"] < 0.999 * off["layer"]
    # No small change of the last matrix brings the stream nearer.
    best = solve_in_order(model, removed, lambda: batches, aim="stream", ridge=1e-12)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        step = torch.randn(best[last].matrix.shape, generator=generator, dtype=torch.float64) * 1e-2
        moved = {**best, last: OutputProjection(best[last].heads, best[last].matrix + step, best[last].bias)}
        errors = []
        for outputs in (best, moved):
            with swapped_projections(model, layers, outputs):
                rows = torch.cat([stream_behind(model, last, batch) for batch in batches])
            errors.append(float((rows - whole).square().sum()))
        assert errors[0] < errors[1]


def test_streams_are_found_by_numbers_and_not_where_there_are_none(batches):
    for name in ("bert", "gpt2", "gpt_neox"):
        model = build(FAMILIES[name])
        expected = name != "gpt_neox"  # attention and feed-forward are added there at once
        assert all(adds_to_stream(model, layer, Piece(batches[0])) == expected for layer in find_layers(model)), name


def test_edits_in_order_say_how_far_they_are_and_refuse_what_is_no_aim(batches):
    model = build(FAMILIES["llama"])
    edits, told = [PruneHeads(number, (0, 1)) for number in range(2)], []
    record = apply_in_order(model, edits, lambda: batches, aim="stream", progress=lambda *x: told.append(x))
    assert told == [(1, 2), (2, 2)]
    undo(model, record)
    with pytest.raises(OptionError, match="aim must be one of layer, output, stream, got 'high'"):
        apply_in_order(model, edits, lambda: batches, aim="high")  # type: ignore[arg-type]


def test_tokens_that_count_twice_are_as_tokens_that_are_there_twice(batches):
    model = build(FAMILIES["llama"])
    model.set_attn_implementation("sdpa")
    paths = [layer.path for layer in find_layers(model)]
    removed = dict.fromkeys(paths, (0, 1))
    counts = [2.0, 1.0, 0.0, 1.0, 1.0, 1.0]
    weights = {path: [torch.full((3, 23), count) for count in counts] for path in paths}
    repeated = [batch for batch, count in zip(batches, counts, strict=True) for _ in range(int(count))]
    found = solve_in_order(model, removed, lambda: batches, aim="stream", weights=weights)
    expected = solve_in_order(model, removed, lambda: repeated, aim="stream")
    for path in paths:
        torch.testing.assert_close(found[path].matrix, expected[path].matrix, rtol=1e-6, atol=1e-8)
