"""The tensors of one attention: of a fused kernel, of tiles on a CPU, or of the formula that writes every weight."""

from __future__ import annotations

from polyhead.costs.memory.recorder import INDEX, Heads, Recorder
from polyhead.costs.memory.tape import Block
from polyhead.costs.memory.tiles import record_tiles
from polyhead.ops.attention.fused import LARGEST_DIM
from polyhead.ops.attention.mask_rule import is_bias_read_by_distance, is_mask_too_large, is_window_too_large

# Copies of the weights that the formula holds at once: logits, exponentials and weights in a forward; of these a
# backward finds the last two, and makes four more on the way to the gradient of the logits.
FORWARD_COPIES, KEPT_COPIES, BACKWARD_COPIES = 3, 2, 6
# Copies of an index by which PyTorch adds up the gradient of what was gathered: places and their order, each as it came
# and sorted, and what the sort takes besides.
SORTED_COPIES = 6


def record_attention(call: Recorder, query: Block, key: Block, value: Block, heads: Heads) -> Block:
    """Attention of these heads, laid out as their queries are."""
    requested, tape = call.requested, call.tape
    if requested.cached and requested.cache_dtype is not requested.dtype and not call.reads_cache:
        key, value = _sources(call, key, value, heads)  # what a cache holds in other numbers
    if not (call.on_gpu and call.is_guarded):
        return _attended(call, query, key, value, heads)
    # NaN and Inf are taken out of keys and values, and put back where a row sees them; our kernel does so as it writes.
    sources = _sources(call, key, value, heads)
    bare = _attended(call, query, *sources, heads)
    if call.form == "fused" and _is_ours(call, heads):
        tape.let_go(*sources)
        return bare
    output = tape.step(bare, gives=bare.size, is_passed_on=True)
    tape.let_go(bare, *sources)
    output.is_apart = bare.is_apart
    return output


def _sources(call: Recorder, key: Block, value: Block, heads: Heads) -> tuple[Block, Block]:
    """All keys and values in memory of their own."""
    seen = call.requested.work.batch * heads.keys * call.requested.work.keys
    return (
        call.tape.step(key, gives=call.size(seen * heads.head_dim), is_passed_on=True),
        call.tape.step(value, gives=call.size(seen * heads.value_dim), is_passed_on=True),
    )


def _attended(call: Recorder, query: Block, key: Block, value: Block, heads: Heads) -> Block:
    if call.form == "materialised":
        return _written_down(call, query, key, value, heads)
    mask_size = _mask_size(call, heads.queries)
    learned = call.bias == "learned" and call.tape.training
    if not call.on_gpu and (call.special or learned or is_mask_too_large(mask_size)):
        return record_tiles(call, query, key, value, heads)
    work, read = call.requested.work, (query, key, value)
    rows, seen = work.batch * heads.queries * work.queries, work.batch * heads.keys * work.keys
    is_ours = _is_ours(call, heads)
    has_mask = mask_size > 0 and not (call.special or is_mask_too_large(mask_size) or is_ours)
    mask = _mask_tensor(call, heads.queries) if has_mask else None
    table = _table(call, heads.queries) if is_ours and call.bias is not None else None
    gradient_work, width = 0, heads.value_dim
    is_opened = mask is not None and call.bias is not None and (call.requested.mask is not None or call.is_dense)
    if is_opened:  # rows that see nothing are opened, and selected away afterwards
        read = (call.copied(query, rows * heads.head_dim), key, value)
    if is_ours:
        # What all keys of a row share; and of a table, its gradient in float64 beside the one that is passed on.
        gradient_work = 4 * rows + (0 if table is None else 2 * table.gradient_size)
    elif call.on_gpu:
        # The gradient of the queries is added up in float32, those of shared keys are made for every head.
        if heads.queries != heads.keys:
            per_head = work.batch * heads.queries * work.keys
            gradient_work += call.size(per_head * (heads.head_dim + heads.value_dim))
        gradient_work += 4 * rows * heads.head_dim if call.is_narrow else 0
        if call.is_narrow and mask is None:
            # A number for each row; and where heads lie apart, the output or its gradient in the other's layout.
            gradient_work += 4 * rows + (call.size(rows * heads.value_dim) if query.is_apart else 0)
    elif heads.head_dim != heads.value_dim:
        # PyTorch's kernel for the CPU wants one width: what is narrower is padded.
        width = max(heads.head_dim, heads.value_dim)
        if heads.head_dim < width:
            read = (call.copied(read[0], rows * width), call.copied(key, seen * width), value)
        else:
            read = (read[0], key, call.copied(value, seen * width))
    tensors = (*read, *(() if mask is None else (_over_batch(call, mask),)), *(() if table is None else (table,)))
    options = {"keeps_result": True, "own": 4 * rows, "gradient_work": gradient_work}
    output = call.tape.step(*tensors, gives=call.size(rows * width), keeps=tensors, **options)  # type: ignore[arg-type]
    if is_opened:
        bare, output = output, call.copied(output, rows * width)
        call.tape.let_go(bare)
    call.tape.let_go(*(block.root for block in tensors if block not in (query, key, value, table)))
    # Heads lie as the queries do; what was padded lies head by head, or is a part of what the kernel gave.
    output.is_apart = query.is_apart or (not call.on_gpu and heads.head_dim != heads.value_dim)
    return output


def _is_ours(call: Recorder, heads: Heads) -> bool:
    """Whether our kernels take what PyTorch's would need a mask tensor for: a window, or a bias by distance."""
    work, mask = call.requested.work, call.requested.mask
    if call.reads_cache or max(heads.head_dim, heads.value_dim) > LARGEST_DIM:
        return False
    if call.bias is not None:
        return not call.is_dense and is_bias_read_by_distance(
            call.device,
            call.requested.dtype,
            training=call.tape.training,
            learned=call.bias == "learned",
            pairs=work.batch * heads.queries * work.queries * work.keys,
        )
    if mask is None or mask.left is None:
        return False
    sizes = (work.batch, heads.queries, work.queries, work.keys, heads.head_dim)
    return is_window_too_large(call.device, call.requested.dtype, *sizes)


def _mask_size(call: Recorder, heads: int) -> int:
    """Bytes of the mask tensor that PyTorch's kernels are handed; 0 where they need none."""
    work, mask = call.requested.work, call.requested.mask
    pairs = work.queries * work.keys
    if call.reads_cache:
        return 0
    if call.bias is not None:
        return call.size(heads * pairs)
    if mask is None or (mask.left is None and (work.queries == work.keys or work.queries == 1)):
        return 0
    return pairs


def _mask_tensor(call: Recorder, heads: int) -> Block:
    """A bias, with what an edge hides in it; or who sees whom, which the kernel turns to numbers."""
    tape, pairs, learned = call.tape, call.requested.work.queries * call.requested.work.keys, call.bias == "learned"
    if call.bias is not None:
        numbers, index = call.size(heads * pairs), 0 if call.is_dense else INDEX * pairs
        # A table that learns keeps which of its columns each pair took, and sorts the pairs by it in the backward.
        own, gradient_work = (index, SORTED_COPIES * index) if learned else (0, 0)
        made = tape.step(gives=numbers, own=own, work=index - own, gradient_work=gradient_work)
        if call.requested.mask is not None or call.is_dense:
            own = pairs if learned else 0
            bare, made = made, tape.step(made, gives=numbers, own=own, work=pairs - own, is_passed_on=not learned)
            tape.let_go(*(() if call.is_dense else (bare,)))
    else:
        tape.step(gives=pairs, work=(INDEX + 2) * pairs)
        made = tape.step(gives=call.size(pairs))
    if not learned:
        made.gradient_size = 0
    return made


def _table(call: Recorder, heads: int) -> Block:
    """A bias by distance as our kernels read it: a number for every head and distance, in float32."""
    work, learned = call.requested.work, call.bias == "learned"
    before, after = max(0, work.keys - 1), max(0, work.queries - 1)
    if call.farthest is not None:
        before, after = min(before, call.farthest), min(after, call.farthest)
    size = call.wide(heads * (before + 1 + after))
    # Distances from a centre that is learned, and their squares, are kept; what is fixed is kept for the next call.
    made = call.tape.step(gives=size, own=2 * size if learned else 0)
    if not learned:
        call.tape.last(size)
        made.gradient_size = 0
    return made


def _over_batch(call: Recorder, mask: Block) -> Block:
    """A mask as the kernel reads it: sequences share a bias, whose gradient comes for each of them and is summed."""
    batch = call.requested.work.batch
    if batch == 1 or not mask.gradient_size:
        return mask
    (expanded,) = call.tape.views(mask, batch * mask.gradient_size)
    return expanded


def _written_down(call: Recorder, query: Block, key: Block, value: Block, heads: Heads) -> Block:
    """The formula, which computes in float32 and writes every weight."""
    work, dims = call.requested.work, heads.head_dim + heads.value_dim
    rows, seen = work.batch * heads.queries * work.queries, work.batch * heads.keys * work.keys
    weights, out = call.wide(rows * work.keys), call.size(rows * heads.value_dim)
    call.written.append(weights)
    widened = 4 * (rows + seen) * dims if call.is_narrow else 0
    made = query.gradient_size + key.gradient_size + value.gradient_size
    # At the softmax the heads' outputs and their gradients are gone, and of the three only the values' has come.
    at_softmax = 4 * seen * heads.value_dim + (BACKWARD_COPIES - KEPT_COPIES) * weights - 2 * out - made
    output = call.tape.step(
        query,
        key,
        value,
        gives=out,
        keeps=(query, key, value),
        keeps_result=True,
        own=4 * rows + widened + KEPT_COPIES * weights,
        work=(FORWARD_COPIES - KEPT_COPIES) * weights,
        gradient_work=max(0, at_softmax),
    )
    output.is_apart = query.is_apart
    return output
