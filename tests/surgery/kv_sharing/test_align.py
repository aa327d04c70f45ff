"""Aligning heads brings them nearer to each other and leaves the function unchanged."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import polyhead.integrations.huggingface
from polyhead.layers import MultiHeadAttention
from polyhead.layers.positions import Rotary
from polyhead.surgery import (
    AlignHeads,
    KeyTransform,
    aligned,
    apply,
    change_key_basis,
    change_value_basis,
    edits_from_json,
    edits_to_json,
    find_key_transforms,
    find_layers,
    fingerprint,
    read_heads,
    undo,
)
from polyhead.surgery.kv_sharing.grouping import neighbours
from tests.integrations.huggingface import models
from tests.surgery.drawn_heads import allowed_map, conditioned
from tests.surgery.gated import FAMILIES, ROUNDED, build, result_of


@pytest.mark.parametrize("name", ["llama", "qwen3", "bert", "whisper", "cohere", "gpt_neox"])
def test_aligned_heads_are_nearer_and_the_function_is_unchanged(name):
    family = FAMILIES[name]
    model = build(family)
    model.set_attn_implementation(polyhead.integrations.huggingface.register())
    transforms = find_key_transforms(model, models.inputs(family))
    layers = [layer for layer in find_layers(model) if not layer.refusals]
    original = result_of(model, family)
    edits = [
        AlignHeads(x.number, neighbours(x.layout.num_kv_heads, 1), transforms[x.path], stack=x.stack) for x in layers
    ]
    assert edits_from_json(edits_to_json(edits)) == tuple(edits)
    before = {layer.path: read_heads(model, layer) for layer in layers}
    record = apply(model, edits)
    assert (result_of(model, family) - original).abs().max() <= (1e-5 if name in ROUNDED else 1e-8)
    for layer in layers:
        heads, old = read_heads(model, layer), before[layer.path]
        assert distance_from_first(heads.value) < distance_from_first(old.value)
        assert distance_from_first(heads.key) < distance_from_first(old.key)
        assert torch.equal(heads.key[0], old.key[0])
    undo(model, record)
    assert fingerprint(model) == record.before
    assert torch.equal(result_of(model, family), original)


def distance_from_first(by_head: Tensor) -> float:
    return float((by_head - by_head[:1]).norm())


def test_equal_heads_in_different_bases_become_equal():
    layer = MultiHeadAttention(33, 3, num_kv_heads=3, head_dim=10, positions=Rotary(10, rotary_dim=6)).double()
    heads = read_heads(layer, find_layers(layer)[0])
    transform = KeyTransform("half", 6)
    equal = replace(
        heads,
        key=heads.key[:1].repeat(3, 1, 1),
        key_bias=torch.randn(1, 10).double().repeat(3, 1),
        value=heads.value[:1].repeat(3, 1, 1),
    )
    maps = torch.stack([allowed_map(transform, 10, seed) for seed in range(3)])
    values = torch.stack([conditioned(10, seed, 5.0) for seed in range(3)])  # from head to head: condition at most 25
    disguised = change_value_basis(change_key_basis(equal, maps, transform), values)
    assert distance_from_first(disguised.key) > 1
    recovered = aligned(disguised, ((0, 1, 2),), transform)
    assert distance_from_first(recovered.key) < 1e-9
    assert distance_from_first(recovered.value) < 1e-9
    assert distance_from_first(recovered.key_bias) < 1e-9
    assert recovered.origins == (0, None, None)
