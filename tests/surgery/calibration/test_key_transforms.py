"""Key forms are detected numerically; other transforms raise."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from polyhead.errors import OptionError
from polyhead.layers import MultiHeadAttention
from polyhead.layers.positions import ALiBi, Rotary
from polyhead.surgery import AlignHeads, KeyTransform, apply, find_key_transforms
from tests.integrations.huggingface import models
from tests.surgery.gated import FAMILIES, build


@pytest.mark.parametrize(
    ("positions", "norm", "transform"),
    [
        (Rotary(10), None, KeyTransform("half", 10)),
        (Rotary(10, interleaved=True), None, KeyTransform("interleaved", 10)),
        (Rotary(10, rotary_dim=6), "rms", KeyTransform("half", 6, "rms", (0,) * 10)),
        (Rotary(10, rotary_dim=6, interleaved=True), None, KeyTransform("interleaved", 6)),
        (None, "layer", KeyTransform("none", 0, "layer")),
        (None, None, KeyTransform()),
    ],
)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_the_form_of_our_layers_is_seen_in_their_numbers(positions, norm, transform, kv_heads):
    layer = MultiHeadAttention(42, 2, num_kv_heads=kv_heads, head_dim=10, positions=positions, qk_norm=norm)
    assert find_key_transforms(layer, {"query": torch.randn(2, 11, 42)}) == {"": transform}
    assert not layer._forward_hooks
    assert not layer.q_proj._forward_hooks


def test_what_is_neither_turned_nor_the_same_is_refused():
    model = build(FAMILIES["llama"])
    attention = model.model.layers[0].self_attn
    attention.register_forward_pre_hook(_swap_turn, with_kwargs=True)
    with pytest.raises(OptionError, match=r"'model.layers.0.self_attn' .* changed in another way"):
        find_key_transforms(model, models.inputs(FAMILIES["llama"]))


def _swap_turn(module: nn.Module, given: tuple, named: dict) -> tuple:
    """Rotation angles that no two channels share."""
    cos, sin = named["position_embeddings"]
    return given, {**named, "position_embeddings": (cos + torch.rand_like(cos), sin)}


def test_one_token_shows_no_turn_and_alibi_no_layer():
    layer = MultiHeadAttention(12, 3)
    with pytest.raises(OptionError, match="at least two tokens, got 1 token"):
        find_key_transforms(layer, {"query": torch.randn(2, 1, 12)})
    assert (
        find_key_transforms(
            nn.ModuleDict({"a": MultiHeadAttention(12, 4, positions=ALiBi(4))})["a"], {"query": torch.randn(2, 5, 12)}
        )
        == {}
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"pairing": "odd"},
        {"pairing": "half"},
        {"rotary_dim": 4},
        {"pairing": "half", "rotary_dim": 3},
        {"norm": "rms"},
        {"classes": (0,)},
    ],
)
def test_a_form_that_cannot_be_is_refused(wrong):
    with pytest.raises(OptionError):
        KeyTransform(**wrong)


def test_a_form_of_other_heads_is_refused():
    layer = MultiHeadAttention(12, 3)
    with pytest.raises(OptionError, match="rotary_dim 8 and 0 classes for heads of 4 channels"):
        apply(layer, [AlignHeads(0, ((0, 1, 2),), KeyTransform("half", 8))])
    with pytest.raises(OptionError, match=r"every one of the 3 KV heads must be in a group, got none with \[2\]"):
        apply(layer, [AlignHeads(0, ((0, 1),))])
