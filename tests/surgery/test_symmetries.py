"""What stands between projections and logits, found by numbers; and the maps of heads that change nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import polyhead.huggingface
from polyhead.errors import OptionError, ShapeError
from polyhead.layers import MultiHeadAttention
from polyhead.layers.positions import ALiBi, Rotary
from polyhead.surgery import (
    AlignHeads,
    KeyForm,
    aligned,
    apply,
    edits_from_json,
    edits_to_json,
    find_key_forms,
    find_layers,
    fingerprint,
    read_heads,
    turn_keys,
    turn_values,
    undo,
)
from polyhead.surgery.grouping import neighbours
from polyhead.surgery.symmetries import CONDITION, blocks
from tests.huggingface import models
from tests.surgery.gated import FAMILIES, build, result_of

HALF, INTERLEAVED, PARTIAL, NONE = KeyForm("half", 8), KeyForm("interleaved", 8), KeyForm("half", 2), KeyForm()
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


# Their own code rounds queries and keys to float32 where it turns them, whatever the model's dtype.
ROUNDED = ("cohere", "modernbert")


class Turned:
    """Heads mapped at random by what their form allows, keys and values; for `apply(..., repair=...)`."""

    def __init__(self, forms: dict[str, KeyForm]) -> None:
        self.forms = forms

    def __call__(self, path, before, after):
        keys = torch.stack(
            [allowed_map(self.forms[path], before.key.shape[1], seed) for seed in range(len(before.key))]
        )
        values = torch.stack([conditioned(before.value.shape[1], seed) for seed in range(len(before.value))])
        return turn_values(turn_keys(before, keys, self.forms[path]), values)


def conditioned(dim: int, seed: int, condition: float = 30.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64))[0] for _ in "ab")
    return left @ torch.diag(torch.logspace(0, 1, dim, base=condition, dtype=torch.float64)) @ right


def allowed_map(form: KeyForm, dim: int, seed: int) -> Tensor:
    """A map with every freedom that a form has."""
    found, drawn = torch.zeros(dim, dim, dtype=torch.float64), conditioned(dim, seed, 5.0)
    for channels, is_pair in blocks(form, dim):
        at = torch.tensor(channels)
        block = conditioned(len(channels), seed + channels[0], 5.0)
        if is_pair or (channels[0] < form.rotary_dim):
            along, across = drawn[channels[0], :2]
            block = torch.stack((torch.stack((along, -across)), torch.stack((across, along)))) if is_pair else None
            block = along.sign() * torch.eye(2, dtype=torch.float64) if block is None else block
        if form.norm == "rms":
            left, _, right = torch.linalg.svd(block)
            block = left @ right
        found[at[:, None], at] = block
    return found


def untouched(layers) -> list[AlignHeads]:
    return [
        AlignHeads(x.number, neighbours(x.layout.num_kv_heads, x.layout.num_kv_heads), stack=x.stack) for x in layers
    ]


@pytest.mark.parametrize("name", sorted(FORMS))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_every_allowed_map_leaves_the_model_as_it_is(name, dtype):
    family = FAMILIES[name]
    model, given = build(family, dtype=dtype), models.inputs(family, dtype)
    model.set_attn_implementation(polyhead.huggingface.register())  # eager rounds its weights to float32
    forms = find_key_forms(model, given)
    assert set(forms.values()) == {FORMS[name]}
    layers = [layer for layer in find_layers(model) if not layer.refusals]
    whole = of(model, given)
    record = apply(model, untouched(layers), repair=Turned(forms))
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


@pytest.mark.parametrize("name", ["llama", "qwen3", "bert", "whisper", "cohere", "gpt_neox"])
def test_aligning_heads_changes_nothing_but_their_distance(name):
    family = FAMILIES[name]
    model = build(family)
    model.set_attn_implementation(polyhead.huggingface.register())
    forms = find_key_forms(model, models.inputs(family))
    layers = [layer for layer in find_layers(model) if not layer.refusals]
    whole = result_of(model, family)
    edits = [AlignHeads(x.number, neighbours(x.layout.num_kv_heads, 1), forms[x.path], stack=x.stack) for x in layers]
    assert edits_from_json(edits_to_json(edits)) == tuple(edits)
    before = {layer.path: read_heads(model, layer) for layer in layers}
    record = apply(model, edits)
    assert (result_of(model, family) - whole).abs().max() <= (1e-5 if name in ROUNDED else 1e-8)
    for layer in layers:
        now, was = read_heads(model, layer), before[layer.path]
        assert spread(now.value) < spread(was.value)
        assert spread(now.key) < spread(was.key)
        assert torch.equal(now.key[0], was.key[0])
    undo(model, record)
    assert fingerprint(model) == record.before
    assert torch.equal(result_of(model, family), whole)


def spread(held: Tensor) -> float:
    return float((held - held[:1]).norm())


def test_heads_that_are_images_of_one_another_become_the_same():
    layer = MultiHeadAttention(33, 3, num_kv_heads=3, head_dim=10, positions=Rotary(10, rotary_dim=6)).double()
    heads = read_heads(layer, find_layers(layer)[0])
    form = KeyForm("half", 6)
    first = replace(
        heads,
        key=heads.key[:1].repeat(3, 1, 1),
        key_bias=torch.randn(1, 10).double().repeat(3, 1),
        value=heads.value[:1].repeat(3, 1, 1),
    )
    maps = torch.stack([allowed_map(form, 10, seed) for seed in range(3)])
    values = torch.stack([conditioned(10, seed, 5.0) for seed in range(3)])  # from one to another at most 25
    planted = turn_values(turn_keys(first, maps, form), values)
    assert spread(planted.key) > 1
    found = aligned(planted, ((0, 1, 2),), form)
    assert spread(found.key) < 1e-9
    assert spread(found.value) < 1e-9
    assert spread(found.key_bias) < 1e-9
    assert found.origins == (0, None, None)


@pytest.mark.parametrize(
    ("positions", "norm", "form"),
    [
        (Rotary(10), None, KeyForm("half", 10)),
        (Rotary(10, interleaved=True), None, KeyForm("interleaved", 10)),
        (Rotary(10, rotary_dim=6), "rms", KeyForm("half", 6, "rms", (0,) * 10)),
        (Rotary(10, rotary_dim=6, interleaved=True), None, KeyForm("interleaved", 6)),
        (None, "layer", KeyForm("none", 0, "layer")),
        (None, None, KeyForm()),
    ],
)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_the_form_of_our_layers_is_seen_in_their_numbers(positions, norm, form, kv_heads):
    layer = MultiHeadAttention(42, 2, num_kv_heads=kv_heads, head_dim=10, positions=positions, qk_norm=norm)
    assert find_key_forms(layer, {"query": torch.randn(2, 11, 42)}) == {"": form}
    assert not layer._forward_hooks
    assert not layer.q_proj._forward_hooks


def test_channels_that_a_norm_weights_alike_may_be_turned_and_others_not():
    layer = MultiHeadAttention(42, 3, head_dim=10, positions=Rotary(10, rotary_dim=6), qk_norm="rms").double()
    with torch.no_grad():
        layer.q_norm.weight.copy_(torch.tensor([1, 2, 3, 1, 2, 4, 1, 1, 5, 5.0]))
        layer.k_norm.weight.copy_(torch.tensor([3, 2, 3, 3, 2, 3, 1, 1, 5, 5.0]))
    x = torch.randn(2, 11, 42, dtype=torch.float64)
    form = find_key_forms(layer, {"query": x})[""]
    assert form.classes == (0, 1, 2, 0, 1, 3, 4, 4, 5, 5)
    whole = layer(x).output
    apply(layer, untouched(find_layers(layer)), repair=Turned({"": form}))
    torch.testing.assert_close(layer(x).output, whole, rtol=0, atol=1e-10)
    heads = read_heads(layer, find_layers(layer)[0])
    turn = torch.eye(10, dtype=torch.float64)
    turn[[2, 5], [2, 5]], turn[2, 5], turn[5, 2] = 0.6, -0.8, 0.8  # a pair with weights 3 and 4
    with pytest.raises(OptionError, match="turns alone, of channels that the norm weights alike"):
        turn_keys(heads, turn.expand(3, 10, 10), form)


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (KeyForm("half", 4), "one turn and one scale for each pair"),
        (KeyForm("none", 0, "rms", (0,) * 4), "turns alone"),
        (KeyForm("none", 0, "layer"), "nothing at all"),
    ],
)
def test_a_map_that_would_change_logits_is_refused(form, words):
    layer = MultiHeadAttention(12, 3)
    heads = read_heads(layer, find_layers(layer)[0])
    maps = torch.diag(torch.tensor([1.0, 2, 3, 4])).expand(3, 4, 4)
    with pytest.raises(OptionError, match=words):
        turn_keys(heads, maps, form)
    assert torch.equal(turn_keys(heads, torch.eye(4).expand(3, 4, 4), form).key, heads.key)


def test_maps_of_a_bad_condition_or_shape_are_refused():
    layer = MultiHeadAttention(12, 3)
    heads = read_heads(layer, find_layers(layer)[0])
    maps = torch.diag(torch.tensor([1.0, 2, 3, 1.01 * CONDITION])).expand(3, 4, 4)
    with pytest.raises(OptionError, match="a condition of at most 100, got 101"):
        turn_values(heads, maps)
    with pytest.raises(OptionError, match="a condition of at most 100, got inf"):
        turn_keys(heads, torch.zeros(3, 4, 4), KeyForm())
    with pytest.raises(ShapeError, match=r"maps must be \[3 key heads, 4, 4\], got \[4, 4\]"):
        turn_values(heads, torch.eye(4))


def test_what_is_neither_turned_nor_the_same_is_refused():
    model = build(FAMILIES["llama"])
    attention = model.model.layers[0].self_attn
    attention.register_forward_pre_hook(_swap_turn, with_kwargs=True)
    with pytest.raises(OptionError, match=r"'model.layers.0.self_attn' .* changed in another way"):
        find_key_forms(model, models.inputs(FAMILIES["llama"]))


def _swap_turn(module: nn.Module, given: tuple, named: dict) -> tuple:
    """Angles of which no two channels share one."""
    cos, sin = named["position_embeddings"]
    return given, {**named, "position_embeddings": (cos + torch.rand_like(cos), sin)}


def test_one_token_shows_no_turn_and_alibi_no_layer():
    layer = MultiHeadAttention(12, 3)
    with pytest.raises(OptionError, match="from the second token on, got 1 token"):
        find_key_forms(layer, {"query": torch.randn(2, 1, 12)})
    assert (
        find_key_forms(
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
        KeyForm(**wrong)


def test_a_form_of_other_heads_is_refused():
    layer = MultiHeadAttention(12, 3)
    with pytest.raises(OptionError, match="rotary_dim 8 and 0 classes for heads of 4 channels"):
        apply(layer, [AlignHeads(0, ((0, 1, 2),), KeyForm("half", 8))])
    with pytest.raises(OptionError, match=r"every one of the 3 key heads stands in a group, got none with \[2\]"):
        apply(layer, [AlignHeads(0, ((0, 1),))])
