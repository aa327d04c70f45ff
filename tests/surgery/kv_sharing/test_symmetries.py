"""Key forms are detected numerically, and the maps they allow leave the function unchanged."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import polyhead.integrations.huggingface
from polyhead.errors import OptionError, ShapeError
from polyhead.layers import MultiHeadAttention
from polyhead.layers.positions import Rotary
from polyhead.surgery import (
    AlignHeads,
    KeyTransform,
    apply,
    change_key_basis,
    change_value_basis,
    find_key_transforms,
    find_layers,
    read_heads,
    undo,
)
from polyhead.surgery.kv_sharing.grouping import neighbours
from polyhead.surgery.kv_sharing.symmetries import CONDITION
from tests.integrations.huggingface import models
from tests.surgery.drawn_heads import allowed_map, conditioned
from tests.surgery.gated import FAMILIES, ROUNDED, build

HALF, INTERLEAVED, PARTIAL, NONE = (
    KeyTransform("half", 8),
    KeyTransform("interleaved", 8),
    KeyTransform("half", 2),
    KeyTransform(),
)
FORMS = {
    "gpt2": NONE,
    "bert": NONE,
    "whisper": NONE,
    "bart": NONE,
    "vit": NONE,
    "llama": HALF,
    "qwen2": HALF,
    "gemma2": HALF,
    "phi3": HALF,
    "modernbert": HALF,
    "cohere": INTERLEAVED,
    "gpt_neox": PARTIAL,
    "stablelm": PARTIAL,
    "qwen3": replace(HALF, norm="rms", classes=tuple(range(8))),
    "gemma3_text": replace(HALF, norm="rms", classes=tuple(range(8))),
}


class Turned:
    """Maps keys and values by random allowed maps; for `apply(..., compensation=...)`."""

    def __init__(self, forms: dict[str, KeyTransform]) -> None:
        self.forms = forms

    def __call__(self, path, before, after):
        keys = torch.stack(
            [allowed_map(self.forms[path], before.key.shape[1], seed) for seed in range(len(before.key))]
        )
        values = torch.stack([conditioned(before.value.shape[1], seed) for seed in range(len(before.value))])
        return change_value_basis(change_key_basis(before, keys, self.forms[path]), values)


def untouched(layers) -> list[AlignHeads]:
    return [
        AlignHeads(x.number, neighbours(x.layout.num_kv_heads, x.layout.num_kv_heads), stack=x.stack) for x in layers
    ]


@pytest.mark.parametrize("name", sorted(FORMS))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_every_allowed_map_leaves_the_model_as_it_is(name, dtype):
    family = FAMILIES[name]
    model, given = build(family, dtype=dtype), models.inputs(family, dtype)
    model.set_attn_implementation(polyhead.integrations.huggingface.register())  # eager rounds its weights to float32
    forms = find_key_transforms(model, given)
    assert set(forms.values()) == {FORMS[name]}
    layers = [layer for layer in find_layers(model) if not layer.refusals]
    whole = of(model, given)
    record = apply(model, untouched(layers), compensation=Turned(forms))
    for layer in layers:
        assert {f"{layer.output}.weight", *(f"{x.path}.weight" for x in layer.sources)} <= set(record.tensors)
    bound = 1e-8 if dtype == torch.float64 and name not in ROUNDED else 1e-5 * float(whole.abs().max())
    assert (of(model, given) - whole).abs().max() <= bound
    undo(model, record)
    assert torch.equal(of(model, given), whole)


@torch.no_grad()
def of(model: nn.Module, given: dict[str, Tensor]) -> Tensor:
    output = model(**given)
    return output.logits if "logits" in output else output.last_hidden_state


def test_channels_that_a_norm_weights_alike_may_be_turned_and_others_not():
    layer = MultiHeadAttention(42, 3, head_dim=10, positions=Rotary(10, rotary_dim=6), qk_norm="rms").double()
    with torch.no_grad():
        layer.q_norm.weight.copy_(torch.tensor([1, 2, 3, 1, 2, 4, 1, 1, 5, 5.0]))
        layer.k_norm.weight.copy_(torch.tensor([3, 2, 3, 3, 2, 3, 1, 1, 5, 5.0]))
    x = torch.randn(2, 11, 42, dtype=torch.float64)
    transform = find_key_transforms(layer, {"query": x})[""]
    assert transform.classes == (0, 1, 2, 0, 1, 3, 4, 4, 5, 5)
    whole = layer(x).output
    apply(layer, untouched(find_layers(layer)), compensation=Turned({"": transform}))
    torch.testing.assert_close(layer(x).output, whole, rtol=0, atol=1e-10)
    heads = read_heads(layer, find_layers(layer)[0])
    turn = torch.eye(10, dtype=torch.float64)
    turn[[2, 5], [2, 5]], turn[2, 5], turn[5, 2] = 0.6, -0.8, 0.8  # a pair with weights 3 and 4
    with pytest.raises(
        OptionError, match="orthogonal maps alone, of channels of equal norm weight; rotary pairs by rotations, got"
    ):
        change_key_basis(heads, turn.expand(3, 10, 10), transform)


@pytest.mark.parametrize(
    ("transform", "words"),
    [
        (KeyTransform("half", 4), "one rotation and one scale per rotary pair"),
        (KeyTransform("none", 0, "rms", (0,) * 4), "orthogonal maps alone, of channels of equal norm weight, got"),
        (KeyTransform("none", 0, "layer"), "the identity alone, since the norm is not an RMS norm"),
    ],
)
def test_a_map_that_would_change_logits_is_refused(transform, words):
    layer = MultiHeadAttention(12, 3)
    heads = read_heads(layer, find_layers(layer)[0])
    maps = torch.diag(torch.tensor([1.0, 2, 3, 4])).expand(3, 4, 4)
    with pytest.raises(OptionError, match=words):
        change_key_basis(heads, maps, transform)
    assert torch.equal(change_key_basis(heads, torch.eye(4).expand(3, 4, 4), transform).key, heads.key)


def test_maps_of_a_bad_condition_or_shape_are_refused():
    layer = MultiHeadAttention(12, 3)
    heads = read_heads(layer, find_layers(layer)[0])
    maps = torch.diag(torch.tensor([1.0, 2, 3, 1.01 * CONDITION])).expand(3, 4, 4)
    with pytest.raises(OptionError, match="a condition number of at most 100, got 101"):
        change_value_basis(heads, maps)
    with pytest.raises(OptionError, match="a condition number of at most 100, got inf"):
        change_key_basis(heads, torch.zeros(3, 4, 4), KeyTransform())
    with pytest.raises(ShapeError, match=r"maps must be \[3 KV heads, 4, 4\], got \[4, 4\]"):
        change_value_basis(heads, torch.eye(4))
