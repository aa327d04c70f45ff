"""The tensors of routed heads, for the most heads that a token may take, and heads that are taken equally often."""

from __future__ import annotations

from polyhead.costs.memory.attention import BACKWARD_COPIES, FORWARD_COPIES, KEPT_COPIES, record_attention
from polyhead.costs.memory.layers import record_layer
from polyhead.costs.memory.recorder import INDEX, Heads, Recorder
from polyhead.costs.memory.tape import Block
from polyhead.layers.positions.config import RotaryConfig
from polyhead.layers.variants.routed.config import RoutedConfig


@record_layer.register
def record_routed(config: RoutedConfig, call: Recorder) -> Block:
    layout, tape, tokens, new = config.layout, call.tape, call.tokens, call.requested.new_keys
    width, kv_heads, slots = layout.embed_dim, layout.num_kv_heads, config.most_heads
    per_head = kv_heads if config.shape == "shared" else 1  # queries of a chosen head
    rows = tokens * slots  # chosen heads of all tokens
    factors = _gate(config, call, rows)
    order = tape.step(gives=INDEX * rows)
    inside = per_head * layout.head_dim
    spread = tape.step(
        call.x,
        gives=call.size(rows * inside),
        keeps=(call.x, order),
        work=_one_head(config, call, rows, width + inside),
        gradient_work=max(_summed(config, call, rows, inside), _outer(config, call, rows, inside)),
    )
    query = spread
    if config.bias:
        query = tape.step(spread, gives=spread.size, work=spread.size, is_passed_on=True)
        tape.let_go(spread)
    if per_head > 1:  # the rows of a KV head together
        before, query = query, tape.step(query, gives=query.size, is_passed_on=True)
        query.is_apart = True
        tape.let_go(before)
    keys, values = kv_heads * layout.head_dim, kv_heads * layout.value_dim
    source = call.x if call.requested.work.source is None else tape.given(call.size(new * width))
    joined = call.linear(source, keys + values, width, rows=new, joined=True)
    key, value = tape.views(joined, call.size(new * keys), call.size(new * values))
    if config.qk_norm is not None:
        query = call.normed(query, rows * inside, layout.head_dim, kind=config.qk_norm, by_head=True)
        key = call.normed(key, new * keys, layout.head_dim, kind=config.qk_norm, by_head=True)
    if isinstance(config.positions, RotaryConfig):
        call.rotation(config.positions.rotary_dim or layout.head_dim)
        turned = call.turned(query, rows * inside), call.turned(key, new * keys)
        tape.let_go(query, key)
        query, key = turned
    if config.shape == "shared" and config.top_k is not None:
        heads = Heads(slots * kv_heads, kv_heads, layout.head_dim, layout.value_dim)
        outputs = record_attention(call, query, key, value, heads)
    else:
        # Rows over shared keys have an order of their own.
        sorting = order if config.shape == "full" else tape.step(gives=INDEX * rows * per_head)
        outputs = _chosen_rows(config, call, query, key, value, rows * per_head, sorting)
    width_of_rows = per_head * layout.value_dim
    weighed = outputs
    if tape.training or not call.on_gpu:  # else our kernel weighs them as it multiplies
        weighed = tape.step(outputs, factors, gives=call.size(rows * width_of_rows), keeps=(outputs, factors))
        weighed.is_apart = outputs.is_apart
    flat = call.flattened(weighed, weighed.size)
    if flat is not weighed and weighed is not outputs:
        tape.let_go(weighed)
    output = tape.step(
        flat,
        gives=call.size(tokens * width),
        keeps=(flat, order),
        work=_summed(config, call, rows, width_of_rows),
        gradient_work=_outer(config, call, rows, width_of_rows),
    )
    if not config.output_bias:
        return output
    bare, output = output, tape.step(output, gives=output.size, is_passed_on=True)
    tape.let_go(bare)
    return output


def _gate(config: RoutedConfig, call: Recorder, rows: int) -> Block:
    """The factors of the chosen heads, [rows]."""
    tape, routed = call.tape, config.num_heads - config.always_on
    logits = call.linear(call.x, routed, config.embed_dim)
    found = tape.step(logits, gives=call.wide(rows), own=INDEX * rows, keeps_result=True)
    softmax = tape.step(logits, gives=call.wide(call.tokens * routed), keeps_result=True)
    factors = tape.step(softmax, gives=call.wide(rows))
    tape.let_go(found, softmax)
    return factors


def _one_head(config: RoutedConfig, call: Recorder, rows: int, channels: int) -> int:
    """What one head's product reads and gives, which a CPU makes head by head; a kernel gathers rows as it goes."""
    of_head = call.tokens if config.always_on else rows // config.num_heads
    return 0 if call.on_gpu else call.size(of_head * channels)


def _outer(config: RoutedConfig, call: Recorder, rows: int, channels: int) -> int:
    """The gradients of all heads' matrices, and what one of them is made of."""
    width = config.embed_dim
    return call.size(config.num_heads * width * channels) + _one_head(config, call, rows, width + channels)


def _summed(config: RoutedConfig, call: Recorder, rows: int, channels: int) -> int:
    """What a token's sum over its rows takes: every row's product on a GPU; one head's and float32 sums on a CPU."""
    width = config.embed_dim
    if call.on_gpu:
        return call.size(rows * width)
    widened = call.wide(call.tokens * width) if call.is_narrow else 0
    return widened + _one_head(config, call, rows, width + channels)


def _chosen_rows(
    config: RoutedConfig, call: Recorder, query: Block, key: Block, value: Block, rows: int, order: Block
) -> Block:
    """Attention of rows that are sorted by head, and its output in the order of the tokens."""
    layout, work, tape = config.layout, call.requested.work, call.tape
    head_dim, dim, seen = layout.head_dim, layout.value_dim, work.batch * work.keys * layout.num_kv_heads
    by_head = tape.step(query, gives=call.size(rows * head_dim), keeps=(order,))
    out = call.size(rows * dim)
    own, extra = 4 * rows, 0
    read: tuple[Block, ...] = (by_head, key, value)
    copied = not call.on_gpu or (
        call.requested.mask is not None and not call.requested.finite
    )  # no decode kernel has chosen rows
    if copied:
        # On a CPU sequences are taken apart, on a GPU NaN and Inf are taken out.
        sources = [
            tape.step(block, gives=call.size(seen * size), is_passed_on=True)
            for block, size in ((key, head_dim), (value, dim))
        ]
        read = (by_head, *sources)
    kept = read
    if not call.on_gpu:
        # Head by head in tiles, which keep scaled queries; their outputs are then put together, twice.
        own, extra, kept = own + call.wide(rows * (head_dim + dim)), out, read[1:]
    gradient_work = 0
    if call.form == "materialised":
        weights = call.wide(rows * work.keys)
        call.written.append(weights)
        own, extra = own + KEPT_COPIES * weights, extra + (FORWARD_COPIES - KEPT_COPIES) * weights
        gradient_work = (BACKWARD_COPIES - KEPT_COPIES) * weights
    sorted_rows = tape.step(
        *read, gives=out, keeps=kept, keeps_result=call.on_gpu, own=own, work=extra, gradient_work=gradient_work
    )
    if copied:
        tape.let_go(*read[1:])
    outputs = tape.step(sorted_rows, gives=out, keeps=(order,))
    tape.let_go(by_head, sorted_rows)
    return outputs
