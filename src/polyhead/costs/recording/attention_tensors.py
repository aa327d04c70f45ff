"""Tensors of one attention call: a fused kernel, tiles on a CPU, or the formula with materialised weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from polyhead.costs.recording.recorder import INDEX, Heads, Recorder
from polyhead.costs.recording.tape import Block
from polyhead.ops.attention.fused import LARGEST_DIM
from polyhead.ops.attention.mask_rule import is_bias_read_by_distance, is_mask_too_large, is_window_too_large
from polyhead.ops.common.tiles import TILE_COLUMNS, TILE_ELEMENTS, tile_sizes
from polyhead.ops.uneven_groups import calls_of, is_view_of

# Live copies of the weights in the formula: logits, exponentials and weights in the forward; the last two are saved for
# the backward, which allocates four more on the way to the gradient of the logits.
FORWARD_COPIES, KEPT_COPIES, BACKWARD_COPIES = 3, 2, 6
# Copies of an index in PyTorch's backward of a gather: indices and their order, each unsorted and sorted, and the
# workspace of the sort.
SORTED_COPIES = 6
_TRANSPOSED_ROWS = 64  # from which on tiles copy keys and values to transpose them


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
        size = row * heads.queries * heads.value_dim
        together = tape.step(*outputs, output_size=size, passes_gradient=True, frees=outputs, is_strided=True)
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


def record_attention(call: Recorder, query: Block, key: Block, value: Block, heads: Heads) -> Block:
    """Record attention of these heads, with outputs in the memory layout of their queries."""
    tape = call.tape
    if call.cached and call.cache_dtype is not call.dtype and not call.reads_cache:
        key, value = _copied_sources(call, key, value, heads)  # converted from the dtype of the cache
    if not (call.on_gpu and call.is_guarded) or call.recomputes_rows(heads):
        return _attention(call, query, key, value, heads)
    # NaN and Inf are removed from keys and values, and restored in rows that see them; our kernel does so on store.
    call.kernel_choices.append("guarded")
    sources = _copied_sources(call, key, value, heads)
    bare = _attention(call, query, *sources, heads)
    if call.form == "fused" and _is_ours(call, heads):
        tape.release(*sources)
        return bare
    frees = (bare, *sources)
    return tape.step(bare, output_size=bare.size, passes_gradient=True, frees=frees, is_strided=bare.is_strided)


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
        return _tiled(call, query, key, value, heads)
    work, tape, read = call.work, call.tape, (query, key, value)
    rows, key_rows = work.batch * heads.queries * work.queries, work.batch * heads.keys * work.keys
    is_ours = _is_ours(call, heads)
    has_mask = mask_size > 0 and not (call.special or is_mask_too_large(mask_size) or is_ours)
    mask = _mask_tensor(call, heads.queries) if has_mask else None
    table = _table(call, heads.queries) if is_ours and call.bias is not None else None
    backward_workspace, width = 0, heads.value_dim
    call.kernel_choices.append((is_ours, has_mask))
    is_opened = mask is not None and call.bias is not None and (call.mask is not None or call.is_dense)
    if is_opened:  # rows without visible keys are unmasked for the kernel, and their outputs replaced afterwards
        read = (call.copied(query, rows * heads.head_dim), key, value)
    if is_ours:
        # The delta of each row; for a bias table, its float64 gradient and the converted one. The Hopper kernel
        # sums the gradients of queries in float32.
        backward_workspace = 4 * rows + (0 if table is None else 2 * table.gradient_size)
        if table is None and not call.special and call.is_narrow and _has_hopper_dims(heads):
            backward_workspace += 4 * rows * heads.head_dim
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
    output = tape.step(
        *tensors,
        output_size=call.size(rows * width),
        saves=tensors,
        save_output=True,
        saved_bytes=4 * rows,
        backward_workspace=backward_workspace,
    )
    if is_opened:
        output = call.copied(output, rows * width, frees=(output,))
    tape.release(*(block.root for block in tensors if block not in (query, key, value, table)))
    # The layout of the queries; padded outputs are head by head, or a slice of the kernel's output.
    output.is_strided = query.is_strided or (not call.on_gpu and heads.head_dim != heads.value_dim)
    return output


def _has_hopper_dims(heads: Heads) -> bool:
    return all(32 < dim <= 128 and dim % 8 == 0 for dim in (heads.head_dim, heads.value_dim))


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
        # A dense bias is made in float32, with two copies while masked pairs are set, and then converted.
        copies = 2 * call.wide(heads * pairs) if call.is_dense and call.is_narrow and not call.on_gpu else 0
        # A learned table saves the column index of each pair, and sorts the pairs by it in the backward.
        saved_bytes, backward_workspace = (index, SORTED_COPIES * index) if learned else (0, 0)
        mask = tape.step(
            output_size=copies // 2 or numbers,
            saved_bytes=saved_bytes,
            workspace=index - saved_bytes,
            backward_workspace=backward_workspace,
        )
        if call.mask is not None or call.is_dense:
            saved_bytes = pairs if learned else 0
            mask = tape.step(
                mask,
                output_size=numbers,
                saved_bytes=saved_bytes,
                workspace=max(pairs, copies - numbers + 2 * heads * pairs if copies else 0) - saved_bytes,
                passes_gradient=not learned,
                frees=() if call.is_dense else (mask,),
            )
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
    # A learned bias saves distances from the learned centre and their squares; a fixed one copies a shared table.
    table = call.tape.step(output_size=size, saved_bytes=2 * size if learned else 0)
    if not learned:
        call.tables[f"{call.positions!r} of {heads} heads"] = size
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
    return call.tape.step(
        query,
        key,
        value,
        output_size=out,
        saves=(query, key, value),
        save_output=True,
        saved_bytes=4 * rows + widened + KEPT_COPIES * weights,
        workspace=(FORWARD_COPIES - KEPT_COPIES) * weights,
        backward_workspace=max(0, at_softmax),
        is_strided=query.is_strided,
    )


def _tiled(call: Recorder, query: Block, key: Block, value: Block, heads: Heads) -> Block:
    """Record blockwise attention in PyTorch operators, which serves a CPU where PyTorch's kernels do not apply.

    It computes in float32, one part of the heads at a time and one block of rows within a part.
    """
    work, wide = call.work, call.wide
    rows, key_rows = work.batch * heads.queries * work.queries, work.batch * heads.keys * work.keys
    queries, keys = wide(rows * heads.head_dim), wide(key_rows * heads.head_dim)
    values, out = wide(key_rows * heads.value_dim), wide(rows * heads.value_dim)
    group, all_pairs = heads.queries // heads.keys, max(1, work.batch * heads.keys)
    height, columns, pairs = tile_sizes(all_pairs, group, work.queries, work.keys)
    sequences = min(
        work.batch, max(1, pairs // heads.keys)
    )  # of a part, which has whole sequences or some of its heads
    pairs = sequences * min(pairs, heads.keys)
    call.kernel_choices.append((height, columns, pairs, height >= work.queries, columns >= work.keys))
    height = min(work.queries, height)

    def part(size: int, *, of_rows: bool = False) -> int:
        """Return the bytes of a tensor of `size` bytes that one part has, or one block of rows of the part."""
        share = size * pairs // all_pairs
        return share * height // max(1, work.queries) if of_rows else share

    area = height * columns
    tile, band = wide(pairs * group * area), 0 if call.mask is None else (INDEX + 1) * area
    in_parts, is_copied = pairs < all_pairs, sequences > 1  # the heads of one sequence are a view
    is_transposed = group * work.queries >= _TRANSPOSED_ROWS
    copies = part(queries) + part(values) if is_copied else 0
    # With several parts, each has its own output in addition to the full one.
    forward = copies + (part(keys) if is_transposed or is_copied else 0)
    forward += part(out) + 2 * part(out, of_rows=True) if in_parts else out
    # Sums of the gradients of keys and values, transposed copies of both, and the product of one tile.
    backward = 2 * out + (1 + is_transposed) * (part(keys) + part(values)) + part(queries, of_rows=True)
    backward += part(keys) * min(columns, work.keys) // work.keys
    backward += (0 if in_parts else out) + (part(queries) + part(keys) if is_copied else 0)
    of_bias = gradient_of_bias = dense = 0
    table = None if call.bias is None or call.is_dense else _table(call, heads.queries)
    if call.bias is not None:
        by_head = wide(min(pairs * group, heads.queries) * area)
        # The gradient of a tile is accumulated by distance in float64.
        of_bias = by_head + max(tile * is_copied, INDEX * area)
        gradient_of_bias = INDEX * area + 3 * by_head
    if call.is_dense:
        dense = wide(heads.queries * work.queries * work.keys)
        gradient_of_bias = tile + 2 * dense + dense // 4
    logits = band + of_bias
    if not in_parts and height == work.queries and columns >= work.keys:
        # The outputs of a single tile are allocated after its logits.
        forward, logits = forward - out, max(logits, out)
    reads = (query, key, value, *(() if table is None else (table,)))
    saves = (*(() if call.is_narrow else (key, value)), *(() if table is None else (table,)))
    if call.is_narrow:  # tensors are converted to float32, and so are their gradients
        backward += sum(block.gradient_size for block in (query, key, value))
    return call.tape.step(
        *reads,
        output_size=out,
        saves=saves,
        save_output=True,
        saved_bytes=queries + 3 * 4 * rows + dense + (keys + values if call.is_narrow else 0),
        workspace=forward + tile + logits,
        backward_workspace=backward + 2 * tile + band + gradient_of_bias,
        is_strided=True,
    )


def talking_tiles(call: Recorder, heads: int) -> tuple[int, int]:
    """Return the bytes of the live tiles of talking heads, in the forward and in the backward.

    Python still references the tensors of a tile while the next one is allocated: four of the tile before it in the
    first pass, two of the last tile of the rows before, seven in the backward.
    """
    work, mask = call.work, call.mask
    columns = max(1, min(TILE_COLUMNS, work.keys))
    rows = max(16, min(1024, TILE_ELEMENTS // max(1, work.batch * heads * columns)))
    row_blocks, column_blocks = -(-work.queries // rows), -(-work.keys // columns)
    call.kernel_choices.append((rows, min(row_blocks, 4), min(column_blocks, 4)))
    # A product with a mix that requires a gradient, also where none is recorded, copies the tiles of several sequences.
    # In 16 bits the mixes are converted, and the results require none.
    requires_grad = call.tape.training or not call.is_narrow
    copies = int(requires_grad and work.batch > 1)
    new, new_in_backward = (3 if requires_grad or mask is not None else 2) + copies, 3 + copies
    forward = backward = last = 0  # elements of one head of one sequence
    for block in range(max(0, row_blocks - 3), row_blocks):  # earlier rows see fewer keys
        start, stop = block * rows, min((block + 1) * rows, work.queries)
        widths = _tile_widths(call, start, stop, columns)
        before, in_first_pass, in_backward = 0, 2 * last, 7 * last
        for width in widths:
            tile = (stop - start) * width
            forward = max(forward, in_first_pass + 4 * before + new * tile, 2 * last + 4 * tile, (4 + copies) * tile)
            backward = max(backward, in_backward + new_in_backward * tile, (8 + copies) * tile + last)
            before, in_first_pass, in_backward = tile, 2 * last, 7 * tile
        # The last tile is narrower where the keys are no multiple of the columns; between many tiles it varies.
        last = (stop - start) * columns if min(row_blocks, column_blocks) > 3 else before
    tiles = work.batch * heads
    return call.wide(tiles * forward), call.wide(tiles * backward)


def _tile_widths(call: Recorder, start: int, stop: int, columns: int) -> list[int]:
    """Return the widths of the first two tiles and of the last one of some rows of queries."""
    mask, keys, offset = call.mask, call.work.keys, call.work.keys - call.work.queries
    first, end = 0, keys
    if mask is not None and mask.left is not None and not mask.sinks:
        first = min(keys, max(0, start + offset - mask.left))
    if mask is not None and mask.right is not None:
        end = min(keys, stop + offset + mask.right)
    whole, rest = divmod(max(0, end - first), columns)
    return [columns] * min(whole, 2) + [rest] * (rest > 0)
