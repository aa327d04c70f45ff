"""Cached block outputs give the same captures, and a full forward where they cannot be used."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import polyhead.integrations.huggingface
from polyhead.surgery import find_layers, read_heads
from polyhead.surgery.adapters.head_weights import pack_heads
from polyhead.surgery.calibration import streams
from polyhead.surgery.calibration.streams import Streams, uncached_pieces
from tests.integrations.huggingface import models
from tests.surgery.gated import FAMILIES, batches_of_tokens, build


@pytest.mark.parametrize("name", ["bert", "llama", "bart", "qwen2"])
def test_a_text_is_read_on_from_where_it_stopped_and_looks_the_same(name):
    family = FAMILIES[name]
    model = build(family)
    model.set_attn_implementation(polyhead.integrations.huggingface.register())
    layers = [layer for layer in find_layers(model) if layer.stack == find_layers(model)[0].stack]
    heads = read_heads(model, layers[0])
    swapped = pack_heads(model, layers[0], replace(heads, output=heads.output * 0.5))
    batches = [models.inputs(family), models.inputs(family)]
    pieces = Streams(model, batches).before(layers[1], swapped)
    ran = []
    hook = model.get_submodule(layers[0].output).register_forward_hook(lambda *_: ran.append(1))
    for which in (swapped, None):
        for piece, plain in zip(pieces, uncached_pieces(batches), strict=True):
            seen = piece.capture(model, layers[1], swapped=which)
            assert not ran  # the first block rests
            expected = plain.capture(model, layers[1], swapped=which)
            torch.testing.assert_close(seen.heads, expected.heads, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(seen.written, expected.written, rtol=1e-9, atol=1e-9)
            ran.clear()
    hook.remove()
    now, before = (pieces[0].capture(model, layers[1], swapped=which).heads for which in (swapped, None))
    assert not torch.allclose(now, before)
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_text_too_long_to_keep_and_a_model_that_cannot_be_entered_run_from_the_beginning(monkeypatch):
    model = build(FAMILIES["bert"])
    layer = find_layers(model)[1]
    assert Streams(model, batches_of_tokens()).before(layer, {})[0].now is not None
    monkeypatch.setattr(streams, "MAX_CACHE_BYTES", 10)
    assert Streams(model, batches_of_tokens()).before(layer, {})[0].now is None
    monkeypatch.undo()
    # What a block gives is not what the next is given.
    model.encoder.layer[1].register_forward_pre_hook(lambda _, given: (given[0] + model.encoder.layer[0].training + 1,))
    model.encoder.layer[0].register_forward_hook(lambda _, given, gave: (gave, None))
    assert Streams(model, batches_of_tokens()).before(layer, {})[0].now is None
