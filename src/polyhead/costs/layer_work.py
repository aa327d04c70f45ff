"""From a config to the work of a layer: the very products, attention calls and passes that the library makes of it.

A new arrangement of heads registers a function of its own with `forward_pieces`, beside its counts in `count_layer`;
tests hold the FLOPs and exponentials of the two together, to the integer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import singledispatch
from typing import Any

import torch

from polyhead.costs.work import AttentionCore, Phase, Piece, Product, Traffic, Work, with_gradients
from polyhead.costs.workload import Workload
from polyhead.errors import MaskError, OptionError
from polyhead.layers.config import AttentionConfig, HeadsConfig, MultiHeadConfig
from polyhead.layers.positions.config import RotaryConfig
from polyhead.masks import Mask
from polyhead.ops.decode.fused import MOST_QUERIES


@dataclass(frozen=True, slots=True)
class CallOptions:
    """One call of a layer: how many tokens, which of them meet, in which numbers, and whether there is a cache."""

    work: Workload
    mask: Mask | None
    dtype: torch.dtype
    cache_dtype: torch.dtype
    cached: bool
    finite: bool

    @property
    def tokens(self) -> int:
        return self.work.batch * self.work.queries

    @property
    def new_keys(self) -> int:
        return self.work.batch * self.work.new_keys

    @property
    def uncached(self) -> CallOptions:
        return replace(self, cached=False)

    @property
    def decodes(self) -> bool:
        """Whether the decode kernels take it: a few new tokens behind others in a cache."""
        return self.cached and self.work.past > 0 and self.work.queries <= MOST_QUERIES

    def product(self, stage: str, rows: int, columns: int, inner: int, count: int = 1) -> Product:
        return Product(stage, rows, columns, inner, self.dtype, count)  # type: ignore[arg-type]

    def passes(self, stage: str, numbers: int, *, reads: int = 1, writes: int = 1, launches: int = 1) -> Traffic:
        """So many numbers read and written so many times, in the dtype of the layer."""
        size = numbers * self.dtype.itemsize
        return Traffic(stage, (reads + writes) * size, launches, size)  # type: ignore[arg-type]

    def core(self, heads: int, kv_heads: int, head_dim: int, value_dim: int, **options: Any) -> Iterator[Piece]:
        """Attention of these heads, and what stands around it to keep NaN and Inf where they are."""
        work, decodes = self.work, self.decodes
        left, right = (None, None) if self.mask is None else (self.mask.left, self.mask.right)
        if not (decodes or self.finite or self.mask is None):
            source = work.batch * work.keys * kv_heads * (head_dim + value_dim)
            yield replace(self.passes("attention", source), gradient_bytes=0)  # a gradient is handed on as it is
        yield AttentionCore(
            "decode" if decodes else "forward",
            work.batch,
            heads,
            kv_heads,
            work.queries,
            work.keys,
            head_dim,
            value_dim,
            self.dtype,
            left,
            right,
            self.cache_dtype if self.cached else None,
            **options,
        )
        if not (decodes or self.finite or self.mask is None):
            yield replace(self.passes("attention", self.tokens * heads * value_dim, launches=2), gradient_bytes=0)

    def kept(self, numbers: int) -> Iterator[Piece]:
        """Numbers a token that go into a cache, keys and values each in a pass."""
        if self.cached:
            sizes = self.dtype.itemsize + self.cache_dtype.itemsize
            yield Traffic("cache", self.new_keys * numbers * sizes, 2)

    def turned(self, positions: object, channels: int) -> Iterator[Piece]:
        """Channels a token that rotary positions turn: rolled, multiplied, added in float32 and rounded."""
        if isinstance(positions, RotaryConfig) and channels:
            size, wide = self.dtype.itemsize, max(4, self.dtype.itemsize)
            passes = [2 * size, size + wide, wide + size + wide] + ([wide + size] if wide > size else [])
            numbers = self.tokens * channels
            yield Traffic("positions", numbers * sum(passes), len(passes), numbers * size)


def layer_work(
    config: AttentionConfig,
    work: Workload,
    *,
    mask: Mask | None = None,
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
    cached: bool | None = None,
    layers: int = 1,
) -> Work:
    """What a layer made with `config` does for `work`, with fused attention.

    Args:
        mask: a causal edge or a window given to the call, besides the layer's own.
        cache_dtype: of the cache, as `dtype` unless given.
        cached: whether the call writes a cache and reads it; where there is a past, unless given.
        layers: how many such layers there are in a row.

    >>> work = layer_work(MultiHeadConfig(512, 8, causal=True), Workload.decode(past=1000, batch=4))
    >>> work.phase, work.flops, work.bytes
    ('decode', 16588800, 10346496)
    >>> [type(piece).__name__ for piece in work.pieces]
    ['Product', 'Traffic', 'AttentionCore', 'Product']
    """
    requested = requested_of(config, work, mask=mask, dtype=dtype, cache_dtype=cache_dtype, cached=cached)
    pieces = tuple(piece for piece in forward_pieces(config, requested) if piece.bytes)
    return Work(phase_of(work), with_gradients(pieces) if work.training else pieces, layers)


def requested_of(
    config: AttentionConfig,
    work: Workload,
    *,
    mask: Mask | None,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None,
    cached: bool | None,
) -> CallOptions:
    """A call of a layer made with `config`, checked; arguments are those of `layer_work`."""
    mask = _band(config.mask if mask is None else mask if config.mask is None else config.mask & mask)
    cached = work.past > 0 if cached is None else cached
    if cached and (work.training or work.source is not None):
        raise OptionError("a cache holds a layer's own tokens, got cached=True for a training step or a source")
    if work.past and not cached:
        raise OptionError(f"earlier tokens lie in a cache, got cached=False with past {work.past}")
    return CallOptions(work, mask, dtype, cache_dtype or dtype, cached, getattr(config, "finite", False))


def _band(mask: Mask | None) -> Mask | None:
    if mask is not None and (not mask.is_band or mask.sinks):
        raise MaskError(f"work is known for a causal edge or a window, got {mask!r}")
    return mask


def phase_of(work: Workload) -> Phase:
    if work.training:
        return "training"
    return "decode" if work.past and work.queries <= MOST_QUERIES else "prefill"


@singledispatch
def forward_pieces(config: AttentionConfig, requested: CallOptions) -> Iterator[Piece]:
    """The pieces of one forward of a layer of this kind, in the order in which they run."""
    raise OptionError(
        f"no work is known for {type(config).__name__}; register a function with "
        "polyhead.costs.layer_work.forward_pieces.register"
    )


@forward_pieces.register
def multi_head_pieces(config: MultiHeadConfig, requested: CallOptions) -> Iterator[Piece]:
    layout = config.layout
    yield from before_heads(config, requested)
    yield from requested.core(
        layout.num_heads, layout.num_kv_heads, layout.head_dim, layout.value_dim, sinks=config.sinks
    )
    yield from after_heads(config, requested, layout.num_heads * layout.value_dim)


def before_heads(
    config: HeadsConfig, requested: CallOptions, *, queries: int | None = None, keys: int | None = None
) -> Iterator[Piece]:
    """Projections, norms, positions and the cache; `queries` and `keys` are channels of all heads, where not usual."""
    layout, work = config.layout, requested.work
    queries = layout.num_heads * layout.head_dim if queries is None else queries
    keys = layout.num_kv_heads * layout.head_dim if keys is None else keys
    values = layout.num_kv_heads * layout.value_dim
    if work.source is None:
        columns, size = queries + keys + values, requested.dtype.itemsize
        if work.training:
            # Three matrices are laid side by side for one product, and so are the gradients of what it gave.
            copied, gradients = columns * layout.embed_dim * size, requested.tokens * columns * size
            yield Traffic("projection", 2 * copied, gradient_bytes=2 * gradients)
        yield requested.product("projection", requested.tokens, columns, layout.embed_dim)
    else:
        yield requested.product("projection", requested.tokens, queries, layout.embed_dim)
        if layout.key_input_dim == layout.value_input_dim:
            yield requested.product("projection", requested.new_keys, keys + values, layout.key_input_dim)
        else:
            yield requested.product("projection", requested.new_keys, keys, layout.key_input_dim)
            yield requested.product("projection", requested.new_keys, values, layout.value_input_dim)
    if config.qk_norm is not None:
        yield requested.passes("positions", requested.tokens * queries + requested.new_keys * keys, launches=2)
    yield from requested.turned(config.positions, queries)
    yield from requested.turned(config.positions, 0 if work.remembered else keys)
    yield from requested.kept(keys + values)


def after_heads(
    config: HeadsConfig, requested: CallOptions, combined: int, mixing: Iterable[Piece] = ()
) -> Iterator[Piece]:
    """Gates, what an arrangement does with the heads, and the output projection, which reads `combined` channels."""
    layout = config.layout
    outputs = layout.num_heads * layout.value_dim
    if config.output_gate is not None:
        gates = layout.num_heads if config.output_gate == "head" else outputs
        yield requested.product("projection", requested.tokens, gates, layout.embed_dim)
        yield requested.passes("output", requested.tokens * outputs, reads=2, launches=2)
    yield from mixing
    yield requested.product("output", requested.tokens, layout.embed_dim, combined)
