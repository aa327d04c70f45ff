"""Every variant at one size, against its formula written with cuBLAS products and the fastest attention kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import polyhead
from benchmarks.measuring.calls import Call, check, drawn, layer_cases
from benchmarks.measuring.cases import Case, Pair, Run
from benchmarks.variant_speed.routed import check_routed
from polyhead import Mask
from polyhead.layers import AttentionConfig, LatentAttention, MultiHeadAttention, config_of
from polyhead.layers.positions import QuadraticRelative1D, Rotary
from polyhead.layers.steps import split_heads
from polyhead.layers.variants import (
    CollaborativeAttention,
    DifferentialAttention,
    GroupedHeads,
    HeadMix,
    RoutedHeads,
    TalkingHeads,
)
from polyhead.masks import RelativeBias

TOKENS, WIDTH, HEADS = 4096, 2048, 16
OURS, BOUND = "polyhead", 1.1
Core = Callable[..., Tensor]  # of query, key, value, and of a bias by distance where there is one
Floor = Callable[[Any, Tensor, Core], Tensor]
CORES = {
    "cuBLAS + cuDNN": SDPBackend.CUDNN_ATTENTION,
    "cuBLAS + flash": SDPBackend.FLASH_ATTENTION,
    "cuBLAS + our kernels": None,
}


@dataclass(frozen=True)
class Variant:
    """An attention variant: its layer, formula and use; `floor` is None if no other kernel computes its attention."""

    make: Callable[[], nn.Module]
    floor: Floor | None
    formula: str
    when: str

    @property
    def config(self) -> AttentionConfig:
        with torch.device("meta"):
            return config_of(self.make())


def layer(run: Run, name: str, *, quick: bool = False) -> Iterator[Case]:
    """Yield forward and training of two causal sequences in bfloat16.

    At this size the host may take longer than the kernels, and how long depends on its load, so the bound is on device
    time; the time of a call with its host overhead is reported as well.
    """
    variant = VARIANTS[name]
    module = drawn(variant.make(), run)
    x = run.inputs(2, TOKENS // (8 if quick else 1), WIDTH, salt=1)
    heads: int = module.layout.num_heads  # type: ignore[union-attr, assignment]
    calls: dict[str, Call] = {OURS: functools.partial(_ours, module, backend=None)}
    if variant.floor is not None:
        by_hand = functools.partial(_by_hand, variant.floor, module)
        calls |= {core: functools.partial(by_hand, _core(kernel)) for core, kernel in CORES.items()}
    yield from layer_cases(
        name,
        f"2 x {x.shape[1]} tokens of {WIDTH}, {heads} heads, causal",
        run,
        x,
        {who: (module, call) for who, call in calls.items()},
        functools.partial(_check, x),
        lambda mode, graphed: [Pair(OURS, tuple(CORES), BOUND if graphed else None)],
    )


def _ours(layer: nn.Module, x: Tensor, backend: str | None) -> Tensor:
    output: Tensor = layer(x, backend=backend).output
    return output


def _by_hand(floor: Floor, layer: nn.Module, core: Core, x: Tensor) -> Tensor:
    return floor(layer, x, core)


def _check(x: Tensor, who: str, layer: nn.Module, call: Call, _: Tensor) -> None:
    if isinstance(layer, RoutedHeads):
        check_routed(who, layer, x)  # a gate in another precision chooses other heads
    else:
        check(who, layer, _ours, call, x)


def _core(backend: SDPBackend | None) -> Core:
    def ours(q: Tensor, k: Tensor, v: Tensor, bias: RelativeBias | None = None) -> Tensor:
        mask = Mask.causal() if bias is None else Mask.causal() & Mask.relative(bias.table, bias.zero)
        return polyhead.attention(q, k, v, mask=mask, finite=True, backend="fused").output

    def theirs(q: Tensor, k: Tensor, v: Tensor, bias: RelativeBias | None = None) -> Tensor:
        assert backend is not None
        with sdpa_kernel(backend):
            if bias is not None:
                return F.scaled_dot_product_attention(q, k, v, _dense_bias(bias, q))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])

    return ours if backend is None else theirs


def _dense_bias(bias: RelativeBias, query: Tensor) -> Tensor:
    """Return a bias by distance as a tensor over all pairs, [1, heads, queries, keys], with later keys masked."""
    place = torch.arange(query.shape[2], device=query.device)
    distance = place - place[:, None]
    whole = bias.table.to(query.dtype)[:, distance + bias.zero]
    return whole.masked_fill(distance > 0, -torch.inf)[None]


# ---- the formula of each variant, on the weights of our layer


def _heads(layer: Any, x: Tensor, core: Core) -> Tensor:
    """Return the heads of multi-head attention, [batch, tokens, heads, dim]; Q, K and V are one product."""
    linears = (layer.q_proj, layer.k_proj, layer.v_proj)
    weight = torch.cat([linear.weight for linear in linears])
    sizes = [linear.out_features for linear in linears]
    dim = layer.layout.head_dim
    q, k, v = (split_heads(part, part.shape[-1] // dim) for part in F.linear(x, weight).split(sizes, -1))
    return core(q, k, v).transpose(1, 2)


def _plain(layer: Any, x: Tensor, core: Core) -> Tensor:
    return F.linear(_heads(layer, x, core).flatten(2), layer.out_proj.weight)


def _gated(layer: Any, x: Tensor, core: Core) -> Tensor:
    gate = torch.sigmoid(F.linear(x, layer.gate_proj.weight, layer.gate_proj.bias))
    return F.linear(_heads(layer, x, core).flatten(2) * gate, layer.out_proj.weight)


def _gated_by_head(layer: Any, x: Tensor, core: Core) -> Tensor:
    gate = torch.sigmoid(F.linear(x, layer.gate_proj.weight, layer.gate_proj.bias))
    return F.linear((_heads(layer, x, core) * gate[..., None]).flatten(2), layer.out_proj.weight)


def _uneven(layer: Any, x: Tensor, core: Core) -> Tensor:
    """Copy the keys and values that each head reads, as kernels for even groups need."""
    readers = _index(layer.layout.key_heads, x.device)
    return _plain(layer, x, lambda q, k, v: core(q, k[:, readers], v[:, readers]))


@functools.cache
def _index(key_heads: tuple[int, ...], device: torch.device) -> Tensor:
    """Return an index on the device, cached because nothing may be copied from the host during graph capture."""
    return torch.tensor(key_heads, device=device)


def _convolutional(layer: Any, x: Tensor, core: Core) -> Tensor:
    (bias,) = layer.positions(x.shape[1], x.shape[1], device=x.device, dtype=None).relative_biases
    return _plain(layer, x, lambda q, k, v: core(q, k, v, bias))


def _grouped(layer: Any, x: Tensor, core: Core) -> Tensor:
    made = layer.combine
    parts = _heads(layer, x, core).unflatten(2, (made.num_groups, -1)).flatten(3)  # [batch, tokens, groups, inside]
    joined = torch.einsum("bngi,gio->bngo", parts, made.group_weight).flatten(2)
    return F.linear(F.gelu(F.linear(joined, made.up.weight, made.up.bias)), layer.out_proj.weight)


def _mixed(layer: Any, x: Tensor, core: Core) -> Tensor:
    rows = torch.einsum("rh,bnhd->bnrd", layer.combine.mix_weight, _heads(layer, x, core))
    each = rows.flatten(0, 1)
    weights = torch.softmax(each @ each.transpose(-1, -2) * each.shape[-1] ** -0.5, -1)
    return F.linear((weights @ each).view(*x.shape[:2], -1), layer.out_proj.weight)


def _latent(layer: Any, x: Tensor, core: Core) -> Tensor:
    layout, rope = layer.layout, layer.layout.qk_rope_head_dim
    latent, k_rope = F.linear(x, layer.kv_a_proj.weight).split([layout.kv_lora_rank, rope], -1)
    q = split_heads(F.linear(x, layer.q_proj.weight), layout.num_heads)
    both = split_heads(F.linear(layer.kv_a_norm(latent), layer.kv_b_proj.weight), layout.num_heads)
    k, v = both.split([layout.qk_nope_head_dim, layout.value_head_dim], -1)
    if rope:
        q_nope, q_rope = q.split([layout.qk_nope_head_dim, rope], -1)
        q = torch.cat((q_nope, layer.positions(q_rope)), -1)
        k = torch.cat((k, layer.positions(k_rope[:, None]).expand(-1, layout.num_heads, -1, -1)), -1)
    return F.linear(core(q, k, v).transpose(1, 2).flatten(2), layer.out_proj.weight)


def _differential(layer: Any, x: Tensor, core: Core) -> Tensor:
    linears, layout = (layer.q_proj, layer.k_proj, layer.v_proj), layer.layout
    q, k, v = (split_heads(F.linear(x, linear.weight), layout.num_heads) for linear in linears)
    first, second = (core(a, b, v) for a, b in zip(q.chunk(2, -1), k.chunk(2, -1), strict=True))
    heads = first - layer.lambda_full.to(x.dtype) * second
    normed = F.rms_norm(heads, heads.shape[-1:], eps=layer.norm_eps) * (1 - layer.lambda_init)
    return F.linear(normed.transpose(1, 2).flatten(2), layer.out_proj.weight)


def _collaborative(layer: Any, x: Tensor, core: Core) -> Tensor:
    heads, dim = layer.layout.num_heads, layer.layout.head_dim
    # The scale is that of head_dim channels, and `core` takes that of the shared ones.
    mixing = layer.mixing * (layer.shared_dim / dim) ** 0.5
    q = F.linear(x, layer.q_proj.weight)[:, None] * mixing[:, None]
    k = F.linear(x, layer.k_proj.weight)[:, None].expand_as(q)
    v = split_heads(F.linear(x, layer.v_proj.weight), heads)
    return F.linear(core(q, k, v).transpose(1, 2).flatten(2), layer.out_proj.weight)


def _heads_of(**options: Any) -> Callable[[], nn.Module]:
    return lambda: MultiHeadAttention(WIDTH, HEADS, **_OPTIONS, **options)


def _readers() -> tuple[int, ...]:
    """Return the KV head of each head: four, read by a half, a quarter, an eighth and an eighth of the heads."""
    return tuple(
        0 if 2 * i < HEADS else 1 if 4 * i < 3 * HEADS else 2 if 8 * i < 7 * HEADS else 3 for i in range(HEADS)
    )


def _rotary() -> Rotary:
    return Rotary(WIDTH // HEADS // 2, interleaved=True)


_OPTIONS: dict[str, Any] = {"causal": True, "bias": False, "finite": True}
VARIANTS: dict[str, Variant] = {
    "multi-head": Variant(_heads_of(), _plain, "head_i = softmax(Q_i K_i^T) V_i; Concat, W_O", "the default"),
    "grouped-query": Variant(
        _heads_of(num_kv_heads=4), _plain, "K_i, V_i shared by 4 heads", "the cache is too large, decoding too slow"
    ),
    "multi-query": Variant(_heads_of(num_kv_heads=1), _plain, "K, V shared by all", "the cache must be minimal"),
    "gated": Variant(
        _heads_of(output_gate="channel"), _gated, "head_i * sigmoid(X Wg_i)", "heads should be able to output nothing"
    ),
    "gated by head": Variant(
        _heads_of(output_gate="head"), _gated_by_head, "head_i * sigmoid(X wg_i)", "the same, for next to no parameters"
    ),
    "uneven groups": Variant(
        lambda: MultiHeadAttention(WIDTH, HEADS, key_heads=_readers(), **_OPTIONS),
        _uneven,
        "K, V of 4 heads, read by 8, 4, 2 and 2",
        "heads were pruned or grouped by function",
    ),
    "convolutional": Variant(
        lambda: MultiHeadAttention(WIDTH, HEADS, positions=QuadraticRelative1D(HEADS), **_OPTIONS),
        _convolutional,
        "softmax(Q_i K_i^T - a_i (distance - c_i)^2) V_i",
        "attention should start as a convolution",
    ),
    "latent": Variant(
        lambda: LatentAttention(WIDTH, HEADS, kv_lora_rank=512, form="expanded", **_OPTIONS),
        _latent,
        "K_i = C Uk_i, V_i = C Uv_i, C = norm(X W_c)",
        "a small cache and many heads",
    ),
    "latent, turning": Variant(
        lambda: LatentAttention(WIDTH, HEADS, kv_lora_rank=512, form="expanded", positions=_rotary(), **_OPTIONS),
        _latent,
        "the same, with a rotary key of 64 more channels",
        "the same, with positions",
    ),
    "groups and MLP": Variant(
        lambda: GroupedHeads(WIDTH, HEADS, num_groups=4, **_OPTIONS),
        _grouped,
        "W_2 GELU(W_1 Concat(Concat(group_j) A_j))",
        "heads should be combined nonlinearly",
    ),
    "across heads": Variant(
        lambda: HeadMix(WIDTH, HEADS, **_OPTIONS),
        _mixed,
        "Z = M [head_1 .. head_h]; softmax(Z Z^T) Z; W_O",
        "the output of one head should gate another's",
    ),
    "talking": Variant(
        lambda: TalkingHeads(WIDTH, HEADS, **_OPTIONS),
        None,
        "softmax(sum_h A_hg Q_h K_h^T), mixed by B, times V_g",
        "heads should share attention patterns",
    ),
    "collaborative": Variant(
        lambda: CollaborativeAttention(WIDTH, HEADS, shared_dim=128, **_OPTIONS),
        _collaborative,
        "softmax((X W_Q diag(m_i)) (X W_K)^T) V_i",
        "keys of different heads are redundant",
    ),
    "differential": Variant(
        lambda: DifferentialAttention(WIDTH, HEADS // 2, layer_index=1, **_OPTIONS),
        _differential,
        "8 heads of norm((softmax(Q1 K1^T) - lambda softmax(Q2 K2^T)) V)",
        "attention should cancel noise",
    ),
    "routed, shared": Variant(
        lambda: RoutedHeads(WIDTH, 2 * HEADS, top_k=HEADS // 2, head_dim=WIDTH // HEADS, **_OPTIONS),
        None,
        "sum over 8 of 32 heads: w_i head_i Wo_i; K, V shared",
        "parameters should grow, compute should not",
    ),
    "routed, full": Variant(
        lambda: RoutedHeads(WIDTH, HEADS, shape="full", top_k=HEADS // 4, **_OPTIONS),
        None,
        "sum over 4 of 16 heads: w_i head_i Wo_i",
        "hard tokens should cost more than easy ones",
    ),
}
