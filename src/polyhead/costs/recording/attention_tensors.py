"""Tensors of one attention call: a fused kernel, tiles on a CPU, or the formula with materialised weights."""

from __future__ import annotations

from polyhead.costs.recording.recorder import INDEX, Heads, Recorder
from polyhead.costs.recording.tape import Block
from polyhead.costs.recording.tile_tensors import record_tiles
from polyhead.ops.attention.fused import LARGEST_DIM
from polyhead.ops.attention.mask_rule import is_bias_read_by_distance, is_mask_too_large, is_window_too_large

# Live copies of the weights in the formula: logits, exponentials and weights in the forward; the last two are saved for
# the backward, which allocates four more on the way to the gradient of the logits.
FORWARD_COPIES, KEPT_COPIES, BACKWARD_COPIES = 3, 2, 6
# Copies of an index in PyTorch's backward of a gather: indices and their order, each unsorted and sorted, and the
# workspace of the sort.
SORTED_COPIES = 6


def record_attention(call: Recorder, query: Block, key: Block, value: Block, heads: Heads) -> Block:
    """Record attention of these heads, with outputs in the memory layout of their queries."""
    tape = call.tape
    if call.cached and call.cache_dtype is not call.dtype and not call.reads_cache:
        key, value = _copied_sources(call, key, value, heads)  # converted from the dtype of the cache
    if not (call.on_gpu and call.is_guarded):
        return _attention(call, query, key, value, heads)
    # NaN and Inf are removed from keys and values, and restored in rows that see them; our kernel does so on store.
    sources = _copied_sources(call, key, value, heads)
    bare = _attention(call, query, *sources, heads)
    if call.form == "fused" and _is_ours(call, heads):
        tape.release(*sources)
        return bare
    output = tape.step(bare, output_size=bare.size, passes_gradient=True)
    tape.release(bare, *sources)
    output.is_strided = bare.is_strided
    return output


def _copied_sources(call: Recorder, key: Block, value: Block, heads: Heads) -> tuple[Block, Block]:
    """Record copies of all keys and values."""
    key_rows = call.work.batch * heads.keys * call.work.keys
    return (
        call.tape.step(key, output_size=call.size(key_rows * heads.head_dim), passes_gradient=True),
        call.tape.step(value, output_size=call.size(key_rows * heads.value_dim), passes_gradient=True),
    )


def _attention(call: Recorder, query: Block, key: Block, value: Block, heads: Heads) -> Block:
    if call.form == "materialised":
        return _materialised(call, query, key, value, heads)
    mask_size = _mask_size(call, heads.queries)
    learned = call.bias == "learned" and call.tape.training
    if not call.on_gpu and (call.special or learned or is_mask_too_large(mask_size)):
        return record_tiles(call, query, key, value, heads)
    work, read = call.work, (query, key, value)
    rows, key_rows = work.batch * heads.queries * work.queries, work.batch * heads.keys * work.keys
    is_ours = _is_ours(call, heads)
    has_mask = mask_size > 0 and not (call.special or is_mask_too_large(mask_size) or is_ours)
    mask = _mask_tensor(call, heads.queries) if has_mask else None
    table = _table(call, heads.queries) if is_ours and call.bias is not None else None
    backward_workspace, width = 0, heads.value_dim
    is_opened = mask is not None and call.bias is not None and (call.mask is not None or call.is_dense)
    if is_opened:  # rows without visible keys are unmasked for the kernel, and their outputs replaced afterwards
        read = (call.copied(query, rows * heads.head_dim), key, value)
    if is_ours:
        # The delta of each row; for a bias table, its float64 gradient and the converted one.
        backward_workspace = 4 * rows + (0 if table is None else 2 * table.gradient_size)
    elif call.on_gpu:
        # The query gradient is accumulated in float32; gradients of shared keys are computed per head.
        if heads.queries != heads.keys:
            per_head = work.batch * heads.queries * work.keys
            backward_workspace += call.size(per_head * (heads.head_dim + heads.value_dim))
        backward_workspace += 4 * rows * heads.head_dim if call.is_narrow else 0
        if call.is_narrow and mask is None:
            # The delta of each row; if heads are strided, also the output or its gradient in the other's layout.
            backward_workspace += 4 * rows + (call.size(rows * heads.value_dim) if query.is_strided else 0)
    elif heads.head_dim != heads.value_dim:
        # PyTorch's CPU kernel needs head_dim equal to value_dim: the smaller one is padded.
        width = max(heads.head_dim, heads.value_dim)
        if heads.head_dim < width:
            read = (call.copied(read[0], rows * width), call.copied(key, key_rows * width), value)
        else:
            read = (read[0], key, call.copied(value, key_rows * width))
    tensors = (*read, *(() if mask is None else (_over_batch(call, mask),)), *(() if table is None else (table,)))
    options = {"save_output": True, "saved_bytes": 4 * rows, "backward_workspace": backward_workspace}
    output = call.tape.step(*tensors, output_size=call.size(rows * width), saves=tensors, **options)  # type: ignore[arg-type]
    if is_opened:
        bare, output = output, call.copied(output, rows * width)
        call.tape.release(bare)
    call.tape.release(*(block.root for block in tensors if block not in (query, key, value, table)))
    # The layout of the queries; padded outputs are head by head, or a slice of the kernel's output.
    output.is_strided = query.is_strided or (not call.on_gpu and heads.head_dim != heads.value_dim)
    return output


def _is_ours(call: Recorder, heads: Heads) -> bool:
    """Return True if our kernels serve what PyTorch's need a mask tensor for: a window, or a bias by distance."""
    work, mask = call.work, call.mask
    if call.reads_cache or max(heads.head_dim, heads.value_dim) > LARGEST_DIM:
        return False
    if call.bias is not None:
        return not call.is_dense and is_bias_read_by_distance(
            call.device,
            call.dtype,
            training=call.tape.training,
            learned=call.bias == "learned",
            pairs=work.batch * heads.queries * work.queries * work.keys,
        )
    if mask is None or mask.left is None:
        return False
    sizes = (work.batch, heads.queries, work.queries, work.keys, heads.head_dim)
    return is_window_too_large(call.device, call.dtype, *sizes)


def _mask_size(call: Recorder, heads: int) -> int:
    """Return the bytes of the mask tensor for PyTorch's kernels; 0 if they need none."""
    work, mask = call.work, call.mask
    pairs = work.queries * work.keys
    if call.reads_cache:
        return 0
    if call.bias is not None:
        return call.size(heads * pairs)
    if mask is None or (mask.left is None and (work.queries == work.keys or work.queries == 1)):
        return 0
    return pairs


def _mask_tensor(call: Recorder, heads: int) -> Block:
    """Record the mask tensor: a bias with masked pairs at -inf, or a boolean mask that the kernel converts."""
    tape, pairs, learned = call.tape, call.work.queries * call.work.keys, call.bias == "learned"
    if call.bias is not None:
        numbers, index = call.size(heads * pairs), 0 if call.is_dense else INDEX * pairs
        # A learned table saves the column index of each pair, and sorts the pairs by it in the backward.
        saved_bytes, backward_workspace = (index, SORTED_COPIES * index) if learned else (0, 0)
        mask = tape.step(
            output_size=numbers,
            saved_bytes=saved_bytes,
            workspace=index - saved_bytes,
            backward_workspace=backward_workspace,
        )
        if call.mask is not None or call.is_dense:
            saved_bytes = pairs if learned else 0
            bare, mask = (
                mask,
                tape.step(
                    mask,
                    output_size=numbers,
                    saved_bytes=saved_bytes,
                    workspace=pairs - saved_bytes,
                    passes_gradient=not learned,
                ),
            )
            tape.release(*(() if call.is_dense else (bare,)))
    else:
        tape.step(output_size=pairs, workspace=(INDEX + 2) * pairs)
        mask = tape.step(output_size=call.size(pairs))
    if not learned:
        mask.gradient_size = 0
    return mask


def _table(call: Recorder, heads: int) -> Block:
    """Record the bias table that our kernels read: one float32 per head and distance."""
    work, learned = call.work, call.bias == "learned"
    before, after = max(0, work.keys - 1), max(0, work.queries - 1)
    if call.max_distance is not None:
        before, after = min(before, call.max_distance), min(after, call.max_distance)
    size = call.wide(heads * (before + 1 + after))
    # A learned bias saves distances from the learned centre and their squares; a fixed table is cached for later calls.
    table = call.tape.step(output_size=size, saved_bytes=2 * size if learned else 0)
    if not learned:
        call.tape.last(size)
        table.gradient_size = 0
    return table


def _over_batch(call: Recorder, mask: Block) -> Block:
    """Record the mask expanded over the batch; the gradient of a bias is computed per sequence and summed."""
    batch = call.work.batch
    if batch == 1 or not mask.gradient_size:
        return mask
    (expanded,) = call.tape.views(mask, batch * mask.gradient_size)
    return expanded


def _materialised(call: Recorder, query: Block, key: Block, value: Block, heads: Heads) -> Block:
    """Record the formula, which computes in float32 and stores all attention weights."""
    work, dims = call.work, heads.head_dim + heads.value_dim
    rows, key_rows = work.batch * heads.queries * work.queries, work.batch * heads.keys * work.keys
    weights, out = call.wide(rows * work.keys), call.size(rows * heads.value_dim)
    call.weight_sizes.append(weights)
    widened = 4 * (rows + key_rows) * dims if call.is_narrow else 0
    gradients = query.gradient_size + key.gradient_size + value.gradient_size
    # At the backward of the softmax the outputs and their gradients are freed, and only the value gradient exists yet.
    at_softmax = 4 * key_rows * heads.value_dim + (BACKWARD_COPIES - KEPT_COPIES) * weights - 2 * out - gradients
    output = call.tape.step(
        query,
        key,
        value,
        output_size=out,
        saves=(query, key, value),
        save_output=True,
        saved_bytes=4 * rows + widened + KEPT_COPIES * weights,
        workspace=(FORWARD_COPIES - KEPT_COPIES) * weights,
        backward_workspace=max(0, at_softmax),
    )
    output.is_strided = query.is_strided
    return output
