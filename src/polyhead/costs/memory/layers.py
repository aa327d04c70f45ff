"""Tensors of a layer from its config: the allocations of one call, in the order in which the layer makes them.

A new attention variant registers its own function with `record_layer`, next to its counts in `count_layer`. Tests
compare the record with every storage of a built layer on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import singledispatch

from polyhead.costs.memory.recorder import Heads, Recorder
from polyhead.costs.memory.tape import Block
from polyhead.costs.memory.uneven import record_heads
from polyhead.errors import OptionError
from polyhead.geometry import HeadLayout
from polyhead.layers.config import AttentionConfig
from polyhead.layers.multi_head.config import HeadsConfig, MultiHeadConfig
from polyhead.layers.positions.config import RotaryConfig


@singledispatch
def record_layer(config: AttentionConfig, call: Recorder) -> Block:
    """Record one forward pass of a layer of this kind on the tape and return its output."""
    raise OptionError(
        f"no memory estimate for {type(config).__name__}; register a function with "
        "polyhead.costs.memory.layers.record_layer.register"
    )


@record_layer.register
def record_multi_head(config: MultiHeadConfig, call: Recorder) -> Block:
    layout = config.layout
    query, key, value = before_heads(config, call)
    heads = record_heads(call, query, key, value, heads_of(layout), layout.key_heads)
    return after_heads(config, call, heads)


def heads_of(layout: HeadLayout) -> Heads:
    return Heads(layout.num_heads, layout.num_kv_heads, layout.head_dim, layout.value_dim)


def before_heads(
    config: HeadsConfig, call: Recorder, *, queries: int | None = None, keys: int | None = None
) -> tuple[Block, Block, Block]:
    """Record queries, keys and values; `queries` and `keys` override the projected widths."""
    layout, tape, new = config.layout, call.tape, call.requested.new_keys
    queries = layout.num_heads * layout.head_dim if queries is None else queries
    keys = layout.num_kv_heads * layout.head_dim if keys is None else keys
    values = layout.num_kv_heads * layout.value_dim
    sizes = [call.size(call.tokens * queries), call.size(new * keys), call.size(new * values)]
    if call.requested.work.source is None:
        joined = call.linear(call.x, queries + keys + values, layout.embed_dim, joined=True)
        query, key, value = tape.views(joined, *sizes)
    else:
        query = call.linear(call.x, queries, layout.embed_dim)
        source = tape.external(call.size(new * layout.key_input_dim))
        if layout.key_input_dim == layout.value_input_dim:
            joined = call.linear(source, keys + values, layout.key_input_dim, rows=new, joined=True)
            key, value = tape.views(joined, *sizes[1:])
        else:
            key = call.linear(source, keys, layout.key_input_dim, rows=new)
            value = call.linear(source, values, layout.value_input_dim, rows=new)
    if config.qk_norm is not None:
        query = call.normed(query, call.tokens * queries, layout.head_dim, kind=config.qk_norm, by_head=True)
        key = call.normed(key, new * keys, layout.head_dim, kind=config.qk_norm, by_head=True)
    if isinstance(config.positions, RotaryConfig):
        call.rotation(config.positions.rotary_dim or layout.head_dim)
        rotated = call.rotated(query, call.tokens * queries), call.rotated(key, new * keys)
        tape.release(query, key)
        query, key = rotated
    return query, key, value


def after_heads(
    config: HeadsConfig, call: Recorder, heads: Block, combine: Callable[[Block], Block] | None = None
) -> Block:
    """Record gates and the output projection, or what a variant's `combine` does with the heads."""
    layout, tape = config.layout, call.tape
    outputs = layout.num_heads * layout.value_dim
    if config.output_gate is not None:
        numbers = layout.num_heads if config.output_gate == "head" else outputs
        logits = call.linear(call.x, numbers, layout.embed_dim)
        gate = tape.step(logits, output_size=call.size(call.tokens * numbers), save_output=True)
        tape.release(logits)
        # The gradient of a per-head gate is first computed per channel.
        workspace = call.size(call.tokens * outputs) if config.output_gate == "head" else 0
        gated = tape.step(heads, gate, output_size=heads.size, saves=(heads, gate), backward_workspace=workspace)
        tape.release(gate)
        gated.is_strided = heads.is_strided
        heads = gated
    if combine is not None:
        return combine(heads)
    return call.linear(call.flattened(heads, call.size(call.tokens * outputs)), layout.embed_dim, outputs)
