"""Tensors of heads in groups of uneven sizes: repeated, concatenated and reordered around `attention`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from polyhead.costs.recording.attention_tensors import record_attention
from polyhead.costs.recording.recorder import Heads, Recorder
from polyhead.costs.recording.tape import Block
from polyhead.ops.uneven_groups import calls_of, is_view_of


def record_heads(
    call: Recorder, query: Block, key: Block, value: Block, heads: Heads, key_heads: Sequence[int] | None
) -> Block:
    """Record attention in which head i reads KV head `key_heads[i]`; None for even groups."""
    if key_heads is None or call.reads_cache:
        return record_attention(call, query, key, value, heads)
    work, tape = call.work, call.tape
    row, key_row = call.size(work.batch * work.queries), call.size(work.batch * work.keys)
    outputs: list[Block] = []
    order: list[int] = []
    for group in calls_of(key_heads, work.queries, work.keys):
        selected = (
            _selected(call, query, group.heads, heads.queries, row * heads.head_dim),
            _selected(call, key, group.key_heads, heads.keys, key_row * heads.head_dim),
            _selected(call, value, group.key_heads, heads.keys, key_row * heads.value_dim),
        )
        group_heads = replace(heads, queries=len(group.heads), keys=len(group.key_heads))
        outputs.append(record_attention(call, *selected, group_heads))
        tape.release(*(block for block in selected if block not in (query, key, value)))
        order += group.heads
    together = outputs[0]
    if len(outputs) > 1:
        # The gradients of the groups are views of one tensor, which lives until the first group's is read.
        together = tape.step(*outputs, output_size=row * heads.queries * heads.value_dim, passes_gradient=True)
        together.is_strided = True
        tape.release(*outputs)
    places = [order.index(head) for head in range(heads.queries)]
    output = _selected(call, together, places, heads.queries, row * heads.value_dim)
    if output is not together:
        tape.release(together)
    return output


def _selected(call: Recorder, block: Block, heads: Sequence[int], count: int, size: int) -> Block:
    """Record a selection among `count` heads of `size` bytes each; gradients of repeated heads are summed."""
    if list(heads) == list(range(count)):
        return block
    if is_view_of(heads):
        (selection,) = call.tape.views(block, len(heads) * size)
    else:
        sums = sum(times > 1 for times in Counter(heads).values()) * size
        selection = call.tape.step(block, output_size=len(heads) * size, backward_workspace=sums)
    selection.is_strided = block.is_strided
    return selection
