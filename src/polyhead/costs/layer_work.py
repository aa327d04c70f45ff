"""Work of a layer from its config: the matrix products, attention calls and elementwise passes that the library runs.

A new attention variant registers its own function with `forward_pieces`, next to its counts in `count_layer`; tests
require that FLOPs and exponentials of the two are equal.
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
from polyhead.layers.config import AttentionConfig
from polyhead.layers.multi_head.config import HeadsConfig, MultiHeadConfig
from polyhead.layers.positions.config import RotaryConfig
from polyhead.masks import Mask
from polyhead.ops.decode.fused import MOST_QUERIES


@dataclass(frozen=True, slots=True)
class CallOptions:
    """One call of a layer: its tokens, mask, dtypes, and whether it uses a cache."""

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
        """True if the decode kernels serve the call: a few new tokens over a non-empty cache."""
        return self.cached and self.work.past > 0 and self.work.queries <= MOST_QUERIES

    def product(self, stage: str, rows: int, columns: int, inner: int, count: int = 1) -> Product:
        return Product(stage, rows, columns, inner, self.dtype, count)  # type: ignore[arg-type]

    def passes(self, stage: str, numbers: int, *, reads: int = 1, writes: int = 1, launches: int = 1) -> Traffic:
        """Return elementwise passes over `numbers` elements of the layer's dtype."""
        size = numbers * self.dtype.itemsize
        return Traffic(stage, (reads + writes) * size, launches, size)  # type: ignore[arg-type]

    def core(self, heads: int, kv_heads: int, head_dim: int, value_dim: int, **options: Any) -> Iterator[Piece]:
        """Yield the attention of these heads, and the passes around it that keep NaN and Inf from spreading."""
        work, decodes = self.work, self.decodes
        left, right = (None, None) if self.mask is None else (self.mask.left, self.mask.right)
        if not (decodes or self.finite or self.mask is None):
            source = work.batch * work.keys * kv_heads * (head_dim + value_dim)
            yield replace(self.passes("attention", source), gradient_bytes=0)  # the gradient passes through unchanged
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

    def cache_writes(self, numbers: int) -> Iterator[Piece]:
        """Yield the writes of `numbers` elements per token to the cache: one pass for keys, one for values."""
        if self.cached:
            sizes = self.dtype.itemsize + self.cache_dtype.itemsize
            yield Traffic("cache", self.new_keys * numbers * sizes, 2)

    def rotations(self, positions: object, channels: int) -> Iterator[Piece]:
        """Yield the passes of RoPE over `channels` per token: roll, multiply, add in float32, round."""
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
    """Return the work of a layer with this config, using fused attention.

    Args:
        mask: a causal mask or sliding window passed to the call, in addition to the layer's own.
        cache_dtype: dtype of the cache, default `dtype`.
        cached: whether the call writes and reads a cache; by default if there are past tokens.
        layers: number of such layers in a row.

    >>> work = layer_work(MultiHeadConfig(512, 8, causal=True), Workload.decode(past=1000, batch=4))
    >>> work.phase, work.flops, work.bytes
    ('decode', 16588800, 10346496)
    >>> [type(piece).__name__ for piece in work.pieces]
    ['Product', 'Traffic', 'AttentionCore', 'Product']
    """
    requested = call_options(config, work, mask=mask, dtype=dtype, cache_dtype=cache_dtype, cached=cached)
    pieces = tuple(piece for piece in forward_pieces(config, requested) if piece.bytes)
    return Work(phase_of(work), with_gradients(pieces) if work.training else pieces, layers)


def call_options(
    config: AttentionConfig,
    work: Workload,
    *,
    mask: Mask | None,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None,
    cached: bool | None,
) -> CallOptions:
    """Validate the arguments of `layer_work` and return them as `CallOptions`."""
    mask = _band(config.mask if mask is None else mask if config.mask is None else config.mask & mask)
    cached = work.past > 0 if cached is None else cached
    if cached and (work.training or work.source is not None):
        raise OptionError("a cache needs self-attention without gradients, got cached=True for training or a source")
    if work.past and not cached:
        raise OptionError(f"past tokens need a cache, got cached=False with past {work.past}")
    return CallOptions(work, mask, dtype, cache_dtype or dtype, cached, getattr(config, "finite", False))


def _band(mask: Mask | None) -> Mask | None:
    if mask is not None and (not mask.is_band or mask.sinks):
        raise MaskError(f"mask must be a causal mask or a sliding window, got {mask!r}")
    return mask


def phase_of(work: Workload) -> Phase:
    if work.training:
        return "training"
    return "decode" if work.past and work.queries <= MOST_QUERIES else "prefill"


@singledispatch
def forward_pieces(config: AttentionConfig, requested: CallOptions) -> Iterator[Piece]:
    """Yield the pieces of one forward pass of a layer of this kind, in execution order."""
    raise OptionError(
        f"no work for {type(config).__name__}; register a function with "
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
    """Yield projections, norms, positions and cache writes; `queries` and `keys` override the projected widths."""
    layout, work = config.layout, requested.work
    queries = layout.num_heads * layout.head_dim if queries is None else queries
    keys = layout.num_kv_heads * layout.head_dim if keys is None else keys
    values = layout.num_kv_heads * layout.value_dim
    if work.source is None:
        columns, size = queries + keys + values, requested.dtype.itemsize
        if work.training:
            # Q, K and V matrices are concatenated for one product, and so are the gradients of its outputs.
            weights, gradients = columns * layout.embed_dim * size, requested.tokens * columns * size
            yield Traffic("projection", 2 * weights, gradient_bytes=2 * gradients)
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
    yield from requested.rotations(config.positions, queries)
    yield from requested.rotations(config.positions, 0 if work.remembered else keys)
    yield from requested.cache_writes(keys + values)


def after_heads(
    config: HeadsConfig, requested: CallOptions, combined: int, mixing: Iterable[Piece] = ()
) -> Iterator[Piece]:
    """Yield gates, the variant's `mixing`, and the output projection of `combined` input channels."""
    layout = config.layout
    outputs = layout.num_heads * layout.value_dim
    if config.output_gate is not None:
        gates = layout.num_heads if config.output_gate == "head" else outputs
        yield requested.product("projection", requested.tokens, gates, layout.embed_dim)
        yield requested.passes("output", requested.tokens * outputs, reads=2, launches=2)
    yield from mixing
    yield requested.product("output", requested.tokens, layout.embed_dim, combined)
