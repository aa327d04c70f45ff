"""A masked trial computes the same as the pruned model."""

from __future__ import annotations

import pytest
import torch

from polyhead.surgery import OutputCompensation, PruneHeads, apply, collect_moments, find_layers, fingerprint, undo
from polyhead.surgery.adapters.head_weights import read_heads
from polyhead.surgery.compensation.least_squares import (
    OutputRegression,
    PrecomputedProjections,
    swapped_projections,
    unchanged_projections,
)
from tests.surgery.gated import FAMILIES, build


@pytest.mark.parametrize("name", ["llama", "bert", "gpt2"])
def test_as_if_heads_were_gone_is_the_model_without_them(name, batches):
    model = build(FAMILIES[name])
    model.set_attn_implementation("sdpa")
    layers = {layer.path: layer for layer in find_layers(model)}
    before = fingerprint(model)
    removed = dict.fromkeys(layers, (0, 1))
    moments = collect_moments(model, batches)
    solved = {
        path: OutputRegression.of(moments[path], read_heads(model, layer), 1e-3).without(removed[path])
        for path, layer in layers.items()
    }
    edits = [PruneHeads(layer.number, (0, 1)) for layer in layers.values()]
    for outputs, compensation in (
        (unchanged_projections(model, layers, removed), None),
        (solved, OutputCompensation(moments, 1e-3)),
    ):
        with torch.no_grad(), swapped_projections(model, layers, outputs):
            found = model(**batches[0])[0]
        assert fingerprint(model) == before
        record = apply(model, edits, compensation=compensation)
        with torch.no_grad():
            torch.testing.assert_close(model(**batches[0])[0], found, rtol=1e-4, atol=1e-5)
        undo(model, record)
        if compensation is not None:
            record = apply(model, edits, compensation=PrecomputedProjections(outputs))
            with torch.no_grad():
                torch.testing.assert_close(model(**batches[0])[0], found, rtol=1e-4, atol=1e-5)
            undo(model, record)
    with pytest.raises(ZeroDivisionError), swapped_projections(model, layers, solved):
        _ = 1 / 0
    assert fingerprint(model) == before
