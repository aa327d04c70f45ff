"""The tensors of heads in groups of any sizes: what is repeated, put together and put in order around `attention`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from polyhead.costs.memory.attention import record_attention
from polyhead.costs.memory.recorder import Heads, Recorder
from polyhead.costs.memory.tape import Block
from polyhead.ops.uneven_groups import calls_of, is_view_of


def record_heads(
    call: Recorder, query: Block, key: Block, value: Block, heads: Heads, key_heads: Sequence[int] | None
) -> Block:
    """Attention of heads of which head i reads KV head `key_heads[i]`; None for even groups."""
    if key_heads is None or call.reads_cache:
        return record_attention(call, query, key, value, heads)
    work, tape = call.requested.work, call.tape
    row, seen = call.size(work.batch * work.queries), call.size(work.batch * work.keys)
    outputs: list[Block] = []
    order: list[int] = []
    for group in calls_of(key_heads, work.queries, work.keys):
        taken = (
            _selected(call, query, group.heads, heads.queries, row * heads.head_dim),
            _selected(call, key, group.key_heads, heads.keys, seen * heads.head_dim),
            _selected(call, value, group.key_heads, heads.keys, seen * heads.value_dim),
        )
        own = replace(heads, queries=len(group.heads), keys=len(group.key_heads))
        outputs.append(record_attention(call, *taken, own))
        tape.let_go(*(block for block in taken if block not in (query, key, value)))
        order += group.heads
    together = outputs[0]
    if len(outputs) > 1:
        # The gradients of the groups are views of one, which lives until that of the first is read.
        together = tape.step(*outputs, gives=row * heads.queries * heads.value_dim, is_passed_on=True)
        together.is_apart = True
        tape.let_go(*outputs)
    places = [order.index(head) for head in range(heads.queries)]
    found = _selected(call, together, places, heads.queries, row * heads.value_dim)
    if found is not together:
        tape.let_go(together)
    return found


def _selected(call: Recorder, block: Block, heads: Sequence[int], count: int, size: int) -> Block:
    """Some of the `count` heads of a tensor, each of so many bytes; what is repeated is summed before it is joined."""
    if list(heads) == list(range(count)):
        return block
    if is_view_of(heads):
        (found,) = call.tape.views(block, len(heads) * size)
    else:
        sums = sum(times > 1 for times in Counter(heads).values()) * size
        found = call.tape.step(block, gives=len(heads) * size, gradient_work=sums)
    found.is_apart = block.is_apart
    return found
