"""Tensors of the attention variants: grouped, differential, collaborative, mixed and talking heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from polyhead.costs.memory.attention import record_attention
from polyhead.costs.memory.layers import after_heads, before_heads, heads_of, record_layer
from polyhead.costs.memory.recorder import Heads, Recorder
from polyhead.costs.memory.tape import Block
from polyhead.costs.memory.tiles import talking_tiles
from polyhead.costs.memory.uneven import record_heads
from polyhead.layers.variants import GroupedHeadsConfig, HeadMixConfig
from polyhead.layers.variants.collaborative.config import CollaborativeConfig
from polyhead.layers.variants.differential.config import DifferentialConfig
from polyhead.layers.variants.mixing import FEW_ROWS
from polyhead.layers.variants.talking import TalkingHeadsConfig


@record_layer.register
def record_grouped(config: GroupedHeadsConfig, call: Recorder) -> Block:
    layout, hidden, tape = config.layout, config.hidden_dim, call.tape
    assert hidden is not None
    joined = layout.num_heads * layout.value_dim

    def combine(heads: Block) -> Block:
        size = call.size(call.tokens * joined)
        heads = call.flattened(heads, size)
        weights = call.size(joined**2 // config.num_groups)
        mixed = tape.step(heads, output_size=size, saves=(heads,), backward_workspace=weights)
        together = tape.step(mixed, output_size=size, passes_gradient=True)  # groups of a token made contiguous
        up = call.linear(together, hidden, joined)
        tape.release(together)
        if config.activation == "gelu":
            hidden_before, up = up, tape.step(up, output_size=up.size, saves=(up,))
            tape.release(hidden_before)
        tape.release(mixed)
        return call.linear(up, layout.embed_dim, hidden)

    query, key, value = before_heads(config, call)
    heads = record_heads(call, query, key, value, heads_of(layout), layout.key_heads)
    return after_heads(config, call, heads, combine)


@record_layer.register
def record_differential(config: DifferentialConfig, call: Recorder) -> Block:
    """Record two attention calls over half the channels each, their difference and its norm."""
    layout, tape = config.layout, call.tape
    query, key, value = before_heads(config, call)
    halves = [tape.views(block, block.gradient_size // 2, block.gradient_size // 2) for block in (query, key)]
    maps = replace(heads_of(layout), head_dim=layout.head_dim // 2)
    first, second = (record_heads(call, q, k, value, maps, layout.key_heads) for q, k in zip(*halves, strict=True))
    numbers = call.tokens * layout.num_heads * layout.value_dim
    difference = tape.step(
        first, second, output_size=call.size(numbers), saves=(second,), backward_workspace=call.size(numbers)
    )
    # Rows in token order are normalised without a copy; a GPU copies others, and later their gradient.
    copies = 2 if first.is_strided else 0
    normed = call.normed(difference, numbers, layout.value_dim, has_weight=False, gradient_copies=copies)
    scaled = tape.step(normed, output_size=normed.size)
    tape.release(difference, normed)
    scaled.is_strided = first.is_strided and not call.on_gpu
    return after_heads(config, call, scaled)


@record_layer.register
def record_collaborative(config: CollaborativeConfig, call: Recorder) -> Block:
    """Record one set of keys of the shared width, and queries per head."""
    layout, shared, tape = config.layout, config.shared_dim, call.tape
    assert shared is not None
    heads, dim, work = layout.num_heads, layout.value_dim, call.requested.work
    query, key, value = before_heads(config, call, queries=shared, keys=shared)
    numbers = call.tokens * heads * shared
    mixed = tape.step(query, output_size=call.size(numbers), saves=(query,), backward_workspace=call.size(numbers))
    mixed.is_strided = True
    # Keys are expanded over the heads; their gradients are summed in the backward.
    (expanded,) = tape.views(key, call.size(work.batch * work.keys * heads * shared))
    return after_heads(config, call, record_attention(call, mixed, expanded, value, Heads(heads, heads, shared, dim)))


@record_layer.register
def record_head_mix(config: HeadMixConfig, call: Recorder) -> Block:
    layout, rows, tape = config.layout, config.num_rows, call.tape
    assert rows is not None
    heads, dim, tokens = layout.num_heads, layout.value_dim, call.tokens
    size, joined = call.size(tokens * rows * dim), call.size(tokens * heads * dim)

    def combine(outputs: Block) -> Block:
        if config.mix == "heads":
            by_head = tape.step(outputs, output_size=joined, passes_gradient=True)
            mixed = tape.step(by_head, output_size=size, saves=(by_head,))
            tape.release(by_head)
            mixed.is_strided = True
        else:
            mixed = call.linear(call.flattened(outputs, joined), rows * dim, heads * dim)
        attended = mixed if config.row_attention is None else attend_rows(mixed)
        flat = call.flattened(attended, size)
        tape.release(*(block for block in (mixed, attended) if block is not flat))
        return call.linear(flat, layout.embed_dim, rows * dim)

    def attend_rows(mixed: Block) -> Block:
        """Record attention among the rows of each token: one short sequence per token."""
        query = key = value = mixed
        if config.row_attention == "projected":
            query, key, value = (_of_rows(call, mixed, tokens * rows, dim) for _ in range(3))
        if call.on_gpu and call.form == "fused" and rows <= FEW_ROWS:
            weights = call.size(tokens * rows**2)
            scaled = tape.step(query, output_size=size)
            logits = tape.step(scaled, key, output_size=weights, saves=(scaled, key))
            softmax = tape.step(logits, output_size=weights, save_output=True)
            tape.release(scaled, logits)
            output = tape.step(softmax, value, output_size=size, saves=(softmax, value))
            tape.release(softmax)
        else:
            copies = call.wide(tokens * rows**2) if call.form == "materialised" else 0
            call.weight_sizes.append(copies)
            options: dict[str, Any] = {
                "saves": (query, key, value),
                "save_output": True,
                "workspace": copies,
                "backward_workspace": 4 * copies,
            }
            output = tape.step(
                query, key, value, output_size=size, saved_bytes=4 * tokens * rows + 2 * copies, **options
            )
        output.is_strided = query.is_strided
        if query is not mixed:
            tape.release(query, key, value)
        return output

    query, key, value = before_heads(config, call)
    outputs = record_heads(call, query, key, value, heads_of(layout), layout.key_heads)
    return after_heads(config, call, outputs, combine)


def _of_rows(call: Recorder, mixed: Block, rows: int, dim: int) -> Block:
    """Record a linear layer on every row; strided rows are made contiguous first."""
    tape = call.tape
    together = tape.step(mixed, output_size=mixed.size, passes_gradient=True) if mixed.is_strided else mixed
    output = call.linear(together, dim, dim, rows=rows)
    if together is not mixed:
        tape.release(together)
    return output


@record_layer.register
def record_talking(config: TalkingHeadsConfig, call: Recorder) -> Block:
    """Record our kernel on a GPU, or tiles of PyTorch operators on a CPU; neither stores the attention weights."""
    layout, work, tape = config.layout, call.requested.work, call.tape
    heads, dim = layout.num_heads, layout.value_dim
    query, key, value = before_heads(config, call)
    if call.form == "materialised":
        return after_heads(config, call, record_attention(call, query, key, value, heads_of(layout)))
    rows = work.batch * heads * work.queries
    out = call.size(rows * dim)
    read: tuple[Block, ...] = (query, key, value)
    if call.on_gpu and call.is_guarded:
        read = tuple(tape.step(block, output_size=block.gradient_size, passes_gradient=True) for block in read)
    saved_bytes, extra, backward_workspace = 4 * rows, 0, out
    if call.on_gpu and heads != layout.num_kv_heads:
        backward_workspace += 4 * work.batch * heads * work.keys * (layout.head_dim + dim)
    if not call.on_gpu:
        extra, of_gradients = talking_tiles(call, heads)
        saved_bytes, backward_workspace = 3 * saved_bytes, backward_workspace + of_gradients
        saved_bytes += sum(2 * block.gradient_size for block in read) if call.is_narrow else 0
    outputs = tape.step(
        *read,
        output_size=out,
        saves=read,
        saved_bytes=saved_bytes,
        workspace=extra,
        backward_workspace=backward_workspace,
    )
    tape.release(*(block for block in read if block not in (query, key, value)))
    outputs.is_strided = not call.on_gpu
    return after_heads(config, call, outputs)
