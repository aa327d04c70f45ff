"""The tensors of heads that are grouped, mixed, subtracted or shared."""

from __future__ import annotations

from dataclasses import replace

from polyhead.costs.memory.attention import record_attention
from polyhead.costs.memory.layers import after_heads, before_heads, heads_of, record_layer
from polyhead.costs.memory.recorder import Heads, Recorder
from polyhead.costs.memory.tape import Block
from polyhead.costs.memory.tiles import talking_tiles
from polyhead.costs.memory.uneven import record_heads
from polyhead.layers.variants import GroupedHeadsConfig, HeadMixConfig
from polyhead.layers.variants.collaborative.config import CollaborativeConfig
from polyhead.layers.variants.differential.config import DifferentialConfig
from polyhead.layers.variants.mixing.layer import FEW_ROWS
from polyhead.layers.variants.talking.config import TalkingHeadsConfig


@record_layer.register
def record_grouped(config: GroupedHeadsConfig, call: Recorder) -> Block:
    layout, hidden, tape = config.layout, config.hidden_dim, call.tape
    assert hidden is not None
    joined = layout.num_heads * layout.value_dim

    def combine(heads: Block) -> Block:
        size = call.size(call.tokens * joined)
        heads = call.flattened(heads, size)
        weights = call.size(joined**2 // config.num_groups)
        mixed = tape.step(heads, gives=size, keeps=(heads,), gradient_work=weights)
        together = tape.step(mixed, gives=size, is_passed_on=True)  # the groups of a token side by side
        up = call.linear(together, hidden, joined)
        tape.let_go(together)
        if config.activation == "gelu":
            hidden_before, up = up, tape.step(up, gives=up.size, keeps=(up,))
            tape.let_go(hidden_before)
        tape.let_go(mixed)
        return call.linear(up, layout.embed_dim, hidden)

    query, key, value = before_heads(config, call)
    heads = record_heads(call, query, key, value, heads_of(layout), layout.key_heads)
    return after_heads(config, call, heads, combine)


@record_layer.register
def record_differential(config: DifferentialConfig, call: Recorder) -> Block:
    """Two calls over halves of the channels, their difference, its norm."""
    layout, tape = config.layout, call.tape
    query, key, value = before_heads(config, call)
    halves = [tape.views(block, block.gradient_size // 2, block.gradient_size // 2) for block in (query, key)]
    maps = replace(heads_of(layout), head_dim=layout.head_dim // 2)
    first, second = (record_heads(call, q, k, value, maps, layout.key_heads) for q, k in zip(*halves, strict=True))
    numbers = call.tokens * layout.num_heads * layout.value_dim
    difference = tape.step(first, second, gives=call.size(numbers), keeps=(second,), gradient_work=call.size(numbers))
    # Rows that lie token by token are normed without a copy; a GPU copies others, and later their gradient.
    copies = 2 if first.is_apart else 0
    normed = call.normed(difference, numbers, layout.value_dim, has_weight=False, gradient_copies=copies)
    scaled = tape.step(normed, gives=normed.size)
    tape.let_go(difference, normed)
    scaled.is_apart = first.is_apart and not call.on_gpu
    return after_heads(config, call, scaled)


@record_layer.register
def record_collaborative(config: CollaborativeConfig, call: Recorder) -> Block:
    """One set of keys of the shared width, which every head's own queries meet."""
    layout, shared, tape = config.layout, config.shared_dim, call.tape
    assert shared is not None
    heads, dim, work = layout.num_heads, layout.value_dim, call.requested.work
    query, key, value = before_heads(config, call, queries=shared, keys=shared)
    numbers = call.tokens * heads * shared
    mixed = tape.step(query, gives=call.size(numbers), keeps=(query,), gradient_work=call.size(numbers))
    mixed.is_apart = True
    (seen,) = tape.views(key, call.size(work.batch * work.keys * heads * shared))  # expanded, and summed in a backward
    return after_heads(config, call, record_attention(call, mixed, seen, value, Heads(heads, heads, shared, dim)))


@record_layer.register
def record_head_mix(config: HeadMixConfig, call: Recorder) -> Block:
    layout, rows, tape = config.layout, config.num_rows, call.tape
    assert rows is not None
    heads, dim, tokens = layout.num_heads, layout.value_dim, call.tokens
    size, joined = call.size(tokens * rows * dim), call.size(tokens * heads * dim)

    def combine(outputs: Block) -> Block:
        if config.mix == "heads":
            by_head = tape.step(outputs, gives=joined, is_passed_on=True)
            mixed = tape.step(by_head, gives=size, keeps=(by_head,))
            tape.let_go(by_head)
            mixed.is_apart = True
        else:
            mixed = call.linear(call.flattened(outputs, joined), rows * dim, heads * dim)
        found = mixed if config.row_attention is None else attended(mixed)
        flat = call.flattened(found, size)
        tape.let_go(*(block for block in (mixed, found) if block is not flat))
        return call.linear(flat, layout.embed_dim, rows * dim)

    def attended(mixed: Block) -> Block:
        """The rows of a token attend to one another: as many short sequences as there are tokens."""
        query = key = value = mixed
        if config.row_attention == "projected":
            query, key, value = (_of_rows(call, mixed, tokens * rows, dim) for _ in range(3))
        if call.on_gpu and call.form == "fused" and rows <= FEW_ROWS:
            weights = call.size(tokens * rows**2)
            scaled = tape.step(query, gives=size)
            logits = tape.step(scaled, key, gives=weights, keeps=(scaled, key))
            softmax = tape.step(logits, gives=weights, keeps_result=True)
            tape.let_go(scaled, logits)
            found = tape.step(softmax, value, gives=size, keeps=(softmax, value))
            tape.let_go(softmax)
        else:
            copies = call.wide(tokens * rows**2) if call.form == "materialised" else 0
            call.written.append(copies)
            options = {"keeps": (query, key, value), "keeps_result": True, "work": copies, "gradient_work": 4 * copies}
            found = tape.step(query, key, value, gives=size, own=4 * tokens * rows + 2 * copies, **options)  # type: ignore[arg-type]
        found.is_apart = query.is_apart
        if query is not mixed:
            tape.let_go(query, key, value)
        return found

    query, key, value = before_heads(config, call)
    outputs = record_heads(call, query, key, value, heads_of(layout), layout.key_heads)
    return after_heads(config, call, outputs, combine)


def _of_rows(call: Recorder, mixed: Block, rows: int, dim: int) -> Block:
    """A linear map of every row; rows that lie apart are put together first."""
    tape = call.tape
    together = tape.step(mixed, gives=mixed.size, is_passed_on=True) if mixed.is_apart else mixed
    found = call.linear(together, dim, dim, rows=rows)
    if together is not mixed:
        tape.let_go(together)
    return found


@record_layer.register
def record_talking(config: TalkingHeadsConfig, call: Recorder) -> Block:
    """Our kernel on a GPU, tiles of plain operators on a CPU; neither holds a weight matrix."""
    layout, work, tape = config.layout, call.requested.work, call.tape
    heads, dim = layout.num_heads, layout.value_dim
    query, key, value = before_heads(config, call)
    if call.form == "materialised":
        return after_heads(config, call, record_attention(call, query, key, value, heads_of(layout)))
    rows = work.batch * heads * work.queries
    out = call.size(rows * dim)
    read: tuple[Block, ...] = (query, key, value)
    if call.on_gpu and call.is_guarded:
        read = tuple(tape.step(block, gives=block.gradient_size, is_passed_on=True) for block in read)
    own, extra, gradient_work = 4 * rows, 0, out
    if call.on_gpu and heads != layout.num_kv_heads:
        gradient_work += 4 * work.batch * heads * work.keys * (layout.head_dim + dim)
    if not call.on_gpu:
        extra, of_gradients = talking_tiles(call, heads)
        own, gradient_work = 3 * own, gradient_work + of_gradients
        own += sum(2 * block.gradient_size for block in read) if call.is_narrow else 0
    outputs = tape.step(*read, gives=out, keeps=read, own=own, work=extra, gradient_work=gradient_work)
    tape.let_go(*(block for block in read if block not in (query, key, value)))
    outputs.is_apart = not call.on_gpu
    return after_heads(config, call, outputs)
