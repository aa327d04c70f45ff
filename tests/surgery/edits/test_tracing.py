"""`trace_layers`: heads of hand-written attention, found without names; edited models against independent slicing."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyhead import observe
from polyhead.errors import CheckpointError, OptionError
from polyhead.surgery import (
    EditRecord,
    MergeHeads,
    PruneHeads,
    apply,
    collect_moments,
    find_layers,
    fingerprint,
    head_origins,
    save,
    take_shape,
    trace_layers,
    undo,
)
from polyhead.training import QKClip

WIDTH, DIM = 24, 8


def attend(q: Tensor, k: Tensor, v: Tensor, *, by_hand: bool) -> Tensor:
    """Attend causally in [batch, heads, tokens, dim]."""
    if not by_hand:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
    logits = (q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
    return logits.masked_fill(hidden, -torch.inf).softmax(-1) @ v


def rotated(x: Tensor) -> Tensor:
    angle = torch.arange(x.shape[2], dtype=x.dtype)[:, None] / 3
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


class Grouped(nn.Module):
    """Separate projections, rotary positions and grouped keys, as in a hand-written Llama."""

    def __init__(self, by_hand: bool = False, heads: int = 6, kv_heads: int = 2) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.n_rep, self.head_dim = heads, kv_heads, heads // kv_heads, DIM
        self.window = heads * DIM  # the value of a width, but it is none
        self.by_hand = by_hand
        self.wq, self.wo = nn.Linear(WIDTH, heads * DIM, bias=False), nn.Linear(heads * DIM, WIDTH, bias=False)
        self.wk, self.wv = (nn.Linear(WIDTH, kv_heads * DIM, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q = self.wq(x).view(batch, tokens, self.n_heads, self.head_dim)
        k = self.wk(x).view(batch, tokens, self.n_kv_heads, self.head_dim).repeat_interleave(self.n_rep, 2)
        v = self.wv(x).view(batch, tokens, self.n_kv_heads, self.head_dim).repeat_interleave(self.n_rep, 2)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        y = attend(rotated(q), rotated(k), v, by_hand=self.by_hand)
        return self.wo(y.transpose(1, 2).reshape(batch, tokens, -1))


class Fused(nn.Module):
    """One projection with the parts one after the other, a norm of each query head, and biases, as in timm."""

    def __init__(self, by_hand: bool = False, heads: int = 4) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.attn_dim, self.by_hand = heads, DIM, heads * DIM, by_hand
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * heads * DIM), nn.Linear(heads * DIM, WIDTH)
        self.q_norm = nn.LayerNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        parts = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, self.head_dim)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        y = attend(self.q_norm(q), k, v, by_hand=self.by_hand)
        self.latest = y.detach()  # as some keep it to be looked at
        return self.proj(y.transpose(1, 2).reshape(batch, tokens, self.attn_dim))


class ByHead(nn.Module):
    """One projection with query, key and value of each head next to each other, as in GPT-NeoX and BLOOM."""

    def __init__(self, by_hand: bool = False, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.by_hand = heads, by_hand
        self.inp, self.dense = nn.Linear(WIDTH, 3 * heads * DIM), nn.Linear(heads * DIM, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = self.inp(x).view(batch, tokens, self.heads, -1).transpose(1, 2).chunk(3, -1)
        return self.dense(attend(q, k, v, by_hand=self.by_hand).transpose(1, 2).flatten(2))


class Inner(nn.Module):
    """Projections outside of the module that attends, as in BERT; a module around it has them."""

    def __init__(self, owner: nn.Module) -> None:
        super().__init__()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, by_hand: bool) -> Tensor:
        return attend(q, k, v, by_hand=by_hand)


class Outside(nn.Module):
    def __init__(self, by_hand: bool = False, heads: int = 4) -> None:
        super().__init__()
        self.by_hand = by_hand
        self.q, self.k, self.v = (nn.Linear(WIDTH, heads * DIM) for _ in range(3))
        self.inner, self.out = Inner(self), nn.Linear(heads * DIM, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (-1, DIM)).transpose(1, 2) for y in (self.q(x), self.k(x), self.v(x)))
        return self.out(self.inner(q, k, v, self.by_hand).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), attention
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


def stacked(make: Callable[[], nn.Module], layers: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(make()) for _ in range(layers))).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.4)
    return model


def batch(seed: int, tokens: int = 7) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"input": torch.randn(2, tokens, WIDTH, generator=generator, dtype=torch.float64)}


def traced(model: nn.Module) -> Any:
    return trace_layers(model, batch(1), batch(2))


EDITABLE = {"grouped": Grouped, "fused": Fused, "by head": ByHead, "outside": Outside}
OUTPUTS = {"grouped": "wo", "fused": "proj", "by head": "dense", "outside": "out"}
REMOVED = {"grouped": (0, 1, 2), "fused": (1, 2), "by head": (3,), "outside": (0, 2)}
SIZES = {
    "grouped": {"n_heads": "heads", "n_kv_heads": "kv_heads", "n_rep": "group_size"},
    "fused": {"num_heads": "heads", "attn_dim": "width"},
    "by head": {"heads": "heads"},
    "outside": {},
}


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("name", EDITABLE)
def test_a_pruned_model_equals_the_gated_one(name: str, by_hand: bool) -> None:
    model = stacked(lambda: EDITABLE[name](by_hand))
    before, unedited, reference = fingerprint(model), model(**batch(3)), copy.deepcopy(model)
    layers = traced(model)
    assert [layer.number for layer in layers] == [0, 1]
    assert all(not layer.refusals and layer.traced.sizes == SIZES[name] for layer in layers), layers[0].refusals
    assert fingerprint(model) == before
    edits = [PruneHeads(1, REMOVED[name])]
    record = apply(model, edits)
    out = reference.get_submodule(f"1.attention.{OUTPUTS[name]}")
    with torch.no_grad():  # the output of a head is its columns of the projection
        for head in REMOVED[name]:
            out.weight[:, head * DIM : (head + 1) * DIM] = 0
    for tokens in (7, 40):
        expected, actual = (x(**batch(3, tokens)) for x in (reference, model))
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    count = layers[1].layout.num_heads
    assert find_layers(model)[1].layout.num_heads == count - len(REMOVED[name])
    kept = [(x,) for x in range(count) if x not in REMOVED[name]]
    assert [*head_origins(model)[layers[1].path].heads] == kept
    with observe(model) as session:
        model(**batch(3))
    assert len(session.profile) == 2 * count - len(REMOVED[name])
    undo(model, record)
    assert fingerprint(model) == before
    assert torch.equal(model(**batch(3)), unedited)


def test_an_attribute_of_the_same_value_is_not_a_size() -> None:
    model = stacked(Grouped)
    traced(model)
    apply(model, [PruneHeads(0, (0, 1, 2)), PruneHeads(1, (0, 3))])
    first, second = model[0].attention, model[1].attention
    assert (first.n_heads, first.n_kv_heads, first.n_rep, first.window) == (3, 1, 3, 48)
    assert (second.n_heads, second.n_kv_heads, second.n_rep, second.window) == (4, 2, 2, 48)


def test_heads_as_many_as_channels_do_not_change_the_head_dim() -> None:
    model = stacked(lambda: Fused(heads=DIM))
    (layer, _) = traced(model)
    assert layer.traced.sizes == {"num_heads": "heads", "attn_dim": "width"}


def test_copies_and_another_process_are_edited_alike(tmp_path: Any) -> None:
    model = stacked(Fused)
    traced(model)
    twin = copy.deepcopy(model)
    record = apply(model, [PruneHeads(0, (2,))])
    apply(twin, [PruneHeads(0, (2,))])
    expected = model(**batch(3))
    assert torch.equal(twin(**batch(3)), expected)
    record.save(tmp_path / "record.safetensors")
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    other = stacked(Fused)
    loaded = EditRecord.load(tmp_path / "record.safetensors")
    with pytest.raises(CheckpointError, match="trace_layers"):
        take_shape(other, loaded)
    traced(other)
    take_shape(other, loaded)
    other.load_state_dict(torch.load(buffer))
    assert torch.equal(other(**batch(3)), expected)
    wrapped = nn.ModuleDict({"inner": other})
    assert [layer.path for layer in find_layers(wrapped)] == ["inner.0.attention", "inner.1.attention"]
    assert find_layers(wrapped)[0].output == "inner.0.attention.proj"


def test_moments_of_head_outputs_are_collected() -> None:
    model = stacked(Fused)
    traced(model)
    moments = collect_moments(model, [batch(seed, 20) for seed in range(3)])
    assert {path: len(x.total) for path, x in moments.items()} == {"0.attention": 32, "1.attention": 32}


# ---- what is refused


class WidthOfTheModel(Fused):
    """nanoGPT: heads are reshaped by the width of the model."""

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = (
            y.view(batch, tokens, self.num_heads, width // self.num_heads).transpose(1, 2)
            for y in self.qkv(x).split(width, 2)
        )
        return self.proj(attend(q, k, v, by_hand=False).transpose(1, 2).reshape(batch, tokens, width))


class Slopes(Fused):
    def __init__(self) -> None:
        super().__init__(by_hand=True)
        self.slopes = nn.Parameter(torch.zeros(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0 * self.slopes.sum()


class NormOfAllHeads(Fused):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)) for y in self.qkv(x).chunk(3, -1))
        q = F.layer_norm(q, q.shape[2:])
        y = attend(*(y.transpose(1, 2) for y in (q, k, v)), by_hand=False)
        return self.proj(y.transpose(1, 2).flatten(2))


class ScaledHeads(Fused):
    """Head outputs are multiplied by something before the projection."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = attend(q, k, v, by_hand=False) * torch.arange(1, self.num_heads + 1).view(-1, 1, 1)
        return self.proj(y.transpose(1, 2).flatten(2))


class Adapter(Fused):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, 3 * 4 * DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = (self.qkv(x) + self.b(self.a(x))).chunk(3, -1)
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in parts)
        return self.proj(attend(q, k, v, by_hand=False).transpose(1, 2).flatten(2))


class LearnedQueries(Fused):
    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(1, 4, 7, DIM))

    def forward(self, x: Tensor) -> Tensor:
        _, k, v = (y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        q = self.queries.expand(len(x), -1, -1, -1)
        return self.proj(attend(q, k, v, by_hand=False).transpose(1, 2).flatten(2))


class Latent(Fused):
    """Queries are the projection of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.latent, self.q = nn.Parameter(torch.randn(1, 1, WIDTH)), nn.Linear(WIDTH, 4 * DIM)

    def forward(self, x: Tensor) -> Tensor:
        _, k, v = (y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        q = self.q(self.latent.expand(len(x), -1, -1)).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class OtherOrder(Fused):
    """Channels of a head are strided: the order of its heads in the projection is no known one."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (-1, self.num_heads)).permute(0, 3, 1, 2) for y in self.qkv(x).chunk(3, -1))
        return self.proj(attend(q, k, v, by_hand=False).transpose(1, 2).flatten(2))


class ByMagnitude(Fused):
    """The heads depend on each other after the sizes: all are divided by their number."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.num_heads


class WithoutEffect(Fused):
    """Its outputs are next to nothing, as those of new layers behind a learned gate."""

    def forward(self, x: Tensor) -> Tensor:
        return 1e-6 * super().forward(x)


class LocalAndGlobal(Fused):
    """The first half of its heads is scaled; without the first head alone the others would stay what they are."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        q = torch.cat([3 * q[:, : self.num_heads // 2], q[:, self.num_heads // 2 :]], 1)
        return self.proj(attend(q, k, v, by_hand=False).transpose(1, 2).flatten(2))


class OneHeadIsAnother(Fused):
    """Computes something else with a single head, silently."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if self.num_heads == 1 else 1)


class Twice(Fused):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + super().forward(2 * x)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (lambda: WidthOfTheModel(heads=3), r"without heads \(0,\) its code raises"),
        (Slopes, r"it has slopes of shape \[4, 1, 1\], which may be per head"),
        (NormOfAllHeads, "its heads share channels of their queries|have different numbers of channels"),
        (ScaledHeads, "its head outputs reach 0.attention.proj in another order, or changed"),
        (Adapter, "come from 0.attention.qkv, 0.attention.b"),
        (LearnedQueries, "its queries, keys and values are not the outputs of linear modules nearby"),
        (Latent, "the channels of its heads are in an unknown order in 0.attention.qkv"),
        (OtherOrder, "the channels of its heads are in an unknown order in 0.attention.qkv"),
        (ByMagnitude, r"without heads \(0,\) its outputs differ by .* from those with these heads gated"),
        (WithoutEffect, r"edits cannot be checked, as the outputs depend on heads \(0,\) by .* only"),
        (LocalAndGlobal, r"without heads \(3,\) its outputs differ"),
        (OneHeadIsAnother, r"without heads \(1, 2, 3\) its outputs differ"),
        (lambda: Fused(heads=1), "it has a single head"),
    ],
)
def test_what_cannot_be_pruned_is_refused(kind: Callable[[], nn.Module], words: str) -> None:
    model = stacked(kind, layers=1)
    before, attributes = fingerprint(model), dict(vars(model[0].attention))
    (layer,) = traced(model)
    with pytest.raises(OptionError, match=words):
        apply(model, [PruneHeads(0, (0,))])
    assert len(layer.refusals) == 1
    assert fingerprint(model) == before
    now = vars(model[0].attention)
    assert {name: x for name, x in now.items() if name not in ("polyhead_traced", "latest")} == attributes


def test_a_module_that_attends_twice_is_refused() -> None:
    (layer,) = traced(stacked(Twice, layers=1))
    assert layer.refusals == ("it attends more than once in a forward",)


def test_only_pruning_is_known_to_be_right() -> None:
    model = stacked(Grouped)
    traced(model)
    with pytest.raises(OptionError, match="which checks that they can be pruned, got MergeHeads"):
        apply(model, [MergeHeads(0, (0, 1))])
    with pytest.raises(OptionError, match="supports only groups of one size"):
        apply(model, [PruneHeads(0, (0,))])
    with pytest.raises(OptionError, match="found by trace_layers"):
        QKClip(model, torch.optim.SGD(model.parameters(), lr=0.1), 100.0)
    with pytest.raises(OptionError, match="only transformers models can be saved"):
        save(model, "folder")


def test_half_precision_is_refused() -> None:
    with pytest.raises(OptionError, match=r"float32 or float64, .* got torch\.bfloat16"):
        trace_layers(stacked(Fused).bfloat16(), batch(1), batch(2))


def test_an_interrupted_trace_leaves_no_layer_that_was_not_checked() -> None:
    model = stacked(Fused)
    before = {name: dict(vars(x)) for name, x in model.named_modules()}
    calls = 0

    def interrupt(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt

    handle = model.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        traced(model)
    handle.remove()
    assert all(layer.traced.sizes == SIZES["fused"] for layer in find_layers(model))
    for name, module in model.named_modules():
        ours = {"polyhead_traced", "_forward_pre_hooks", "latest"}
        assert {k for k in vars(module) if k not in ours} == {k for k in before[name] if k not in ours}, name
        assert not module._forward_hooks
    assert model(**batch(3)).requires_grad
