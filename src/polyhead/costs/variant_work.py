"""Work of the attention variants: grouped, mixed, latent, collaborative, differential, routed, talking."""

from __future__ import annotations

from collections.abc import Iterator

from polyhead.costs.layer_work import CallOptions, after_heads, before_heads, forward_pieces
from polyhead.costs.work import AttentionCore, Piece, Traffic
from polyhead.layers.latent.config import LatentConfig
from polyhead.layers.latent.forms import absorbing_is_cheaper
from polyhead.layers.variants import GroupedHeadsConfig, HeadMixConfig
from polyhead.layers.variants.collaborative.config import CollaborativeConfig
from polyhead.layers.variants.differential.config import DifferentialConfig
from polyhead.layers.variants.routed.config import RoutedConfig
from polyhead.layers.variants.talking import TalkingHeadsConfig


@forward_pieces.register
def grouped_pieces(config: GroupedHeadsConfig, requested: CallOptions) -> Iterator[Piece]:
    layout, groups, hidden = config.layout, config.num_groups, config.hidden_dim
    assert hidden is not None
    joined = layout.num_heads * layout.value_dim
    yield from before_heads(config, requested)
    yield from requested.core(
        layout.num_heads, layout.num_kv_heads, layout.head_dim, layout.value_dim, sinks=config.sinks
    )
    mixing = (
        requested.product("mixing", requested.tokens, joined // groups, joined // groups, groups),
        requested.product("output", requested.tokens, hidden, joined),
        requested.passes("output", requested.tokens * hidden),
    )
    yield from after_heads(config, requested, hidden, mixing)


@forward_pieces.register
def head_mix_pieces(config: HeadMixConfig, requested: CallOptions) -> Iterator[Piece]:
    layout, rows = config.layout, config.num_rows
    assert rows is not None
    heads, dim, tokens = layout.num_heads, layout.value_dim, requested.tokens
    mixing: list[Piece] = []
    if config.mix == "heads":
        mixing.append(requested.product("mixing", rows, dim, heads, tokens))
    else:
        mixing.append(requested.product("mixing", tokens, rows * dim, heads * dim))
    if config.row_attention == "projected":
        mixing += [requested.product("mixing", tokens * rows, dim, dim)] * 3
    if config.row_attention is not None:
        # The rows of a token attend to one another: one short sequence per token.
        mixing.append(AttentionCore("forward", tokens, 1, 1, rows, rows, dim, dim, requested.dtype, stage="mixing"))
    yield from before_heads(config, requested)
    yield from requested.core(heads, layout.num_kv_heads, layout.head_dim, dim, sinks=config.sinks)
    yield from after_heads(config, requested, rows * dim, mixing)


@forward_pieces.register
def latent_pieces(config: LatentConfig, requested: CallOptions) -> Iterator[Piece]:
    """Yield the pieces of latent attention (MLA), absorbed or expanded as the layer would choose."""
    layout, work = config.layout, requested.work
    width, heads, rank, latent_width = layout.embed_dim, layout.num_heads, layout.kv_lora_rank, layout.cache_width
    nope, rope, value, tokens = (
        layout.qk_nope_head_dim,
        layout.qk_rope_head_dim,
        layout.value_head_dim,
        requested.tokens,
    )
    if layout.q_lora_rank:
        yield requested.product("projection", tokens, layout.q_lora_rank, width)
        yield requested.passes("positions", tokens * layout.q_lora_rank)
    yield requested.product("projection", tokens, heads * layout.head_dim, layout.q_lora_rank or width)
    yield requested.product("projection", requested.new_keys, latent_width, width)
    yield from requested.rotations(config.positions, heads * rope)
    yield from requested.rotations(config.positions, rope)
    # The norm, and the concatenation of latent and rotary key.
    yield requested.passes("positions", requested.new_keys * (rank + latent_width), launches=2)
    yield from requested.cache_writes(latent_width)
    cheaper = absorbing_is_cheaper(layout, work.queries, work.keys)
    if cheaper if config.form == "auto" else config.form == "absorbed":
        yield requested.product("projection", tokens, rank, nope, heads)
        yield requested.passes("attention", tokens * heads * latent_width)
        yield from requested.core(heads, 1, latent_width, rank, shared=True, sinks=config.sinks)
        yield requested.product("output", tokens, value, rank, heads)
    else:
        keys = work.batch * work.keys
        yield requested.product("projection", keys, heads * (nope + value), rank)
        yield requested.passes("attention", (tokens + keys) * heads * layout.head_dim, launches=2)
        # The expanded form attends to freshly projected keys and values, not to a cache.
        yield from requested.uncached.core(heads, heads, layout.head_dim, value, sinks=config.sinks)
    yield requested.product("output", tokens, width, heads * value)


@forward_pieces.register
def collaborative_pieces(config: CollaborativeConfig, requested: CallOptions) -> Iterator[Piece]:
    """Yield the pieces of collaborative heads: keys of one shared width for all heads, and values per head."""
    layout, shared = config.layout, config.shared_dim
    assert shared is not None
    heads, dim = layout.num_heads, layout.value_dim
    yield from before_heads(config, requested, queries=shared, keys=shared)
    yield requested.passes("attention", requested.tokens * heads * shared)  # queries times each head's mixing vector
    yield from requested.core(heads, 1, shared, dim, sinks=config.sinks)
    others = requested.work.batch * requested.work.keys * (layout.num_kv_heads - 1) * dim
    yield Traffic("attention", others * requested.cache_dtype.itemsize, 0)
    yield from after_heads(config, requested, heads * dim)


@forward_pieces.register
def differential_pieces(config: DifferentialConfig, requested: CallOptions) -> Iterator[Piece]:
    """Yield the pieces of differential heads: two maps over half the channels each, with shared values."""
    layout = config.layout
    outputs = layout.num_heads * layout.value_dim
    yield from before_heads(config, requested)
    maps = (2 * layout.num_heads, 2 * layout.num_kv_heads, layout.head_dim // 2, layout.value_dim)
    yield from requested.core(*maps, sinks=config.sinks)
    # The difference of the two maps, then its norm.
    yield requested.passes("attention", requested.tokens * outputs, reads=3, writes=2, launches=3)
    yield from after_heads(config, requested, outputs)


@forward_pieces.register
def routed_pieces(config: RoutedConfig, requested: CallOptions) -> Iterator[Piece]:
    """Yield the pieces of routed heads at the maximum number of heads per token."""
    layout, width, tokens, taken = config.layout, config.embed_dim, requested.tokens, config.most_heads
    kv_heads = layout.num_kv_heads
    rows = taken * (kv_heads if config.shape == "shared" else 1)
    keys = kv_heads * layout.head_dim
    yield requested.product("projection", tokens, config.num_heads - config.always_on, width)
    yield requested.product("projection", tokens, rows * layout.head_dim, width)
    yield requested.product("projection", requested.new_keys, keys + kv_heads * layout.value_dim, width)
    if config.qk_norm is not None:
        yield requested.passes("positions", tokens * rows * layout.head_dim + requested.new_keys * keys, launches=2)
    yield from requested.rotations(config.positions, rows * layout.head_dim)
    yield from requested.rotations(config.positions, keys)
    yield from requested.cache_writes(keys + kv_heads * layout.value_dim)
    # A dense grid over the selected heads; rows of heads that only some tokens select are packed.
    yield from requested.core(rows, min(kv_heads, rows), layout.head_dim, layout.value_dim, sinks=config.sinks)
    yield requested.product("output", tokens, width, rows * layout.value_dim)


@forward_pieces.register
def talking_pieces(config: TalkingHeadsConfig, requested: CallOptions) -> Iterator[Piece]:
    layout = config.layout
    yield from before_heads(config, requested)
    yield from requested.core(layout.num_heads, layout.num_kv_heads, layout.head_dim, layout.value_dim, mixing=True)
    yield from after_heads(config, requested, layout.num_heads * layout.value_dim)
