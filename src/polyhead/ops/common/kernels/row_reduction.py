"""Reduce the rows of a layer to four numbers per statistic and head, and merge them into a state.

Plain PyTorch needs about forty launches per layer, which take longer than reading the rows. Here a program reduces one
statistic of one head, or a chunk of its rows if there are many, in blocks that stay in registers: first the mean, then
the squared deviations from it, in float64, so that every row is read once and the values themselves are not squared.
Blocks, chunks and the earlier state are merged in a fixed order by the pairwise update of Chan, Golub and LeVeque
(1979), without atomics: the same rows give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from polyhead.ops.common.kernels.launching import launch, wide
from polyhead.ops.common.kernels.sizes import blocks_of

# Chunks depend on the number of rows alone, so that a head's result is bit-identical whichever heads are selected. Up
# to four blocks per program cost less than a second launch, which merges the chunks of a head one after another.
_MIN_BLOCKS = 4
_MAX_CHUNKS = 64


@triton.jit
def _merge(count, mean, squares, largest, other_count, other_mean, other_squares, other_largest):
    """Merge the totals of two sets of rows; an empty set changes no bit of the other."""
    total = count + other_count
    share = other_count / tl.where(total > 0, total, 1.0)
    delta = other_mean - mean
    squares = squares + other_squares + delta * delta * (count * share)
    # NaN propagates, as in torch.maximum.
    is_larger = (other_largest > largest) | (other_largest != other_largest)
    return total, mean + delta * share, squares, tl.where(is_larger, other_largest, largest)


@triton.jit
def _store(ptr, size, offs, mask, count, mean, squares, largest):
    tl.store(ptr + offs, count, mask=mask)
    tl.store(ptr + size + offs, mean, mask=mask)
    tl.store(ptr + 2 * size + offs, squares, mask=mask)
    tl.store(ptr + 3 * size + offs, largest, mask=mask)


@triton.jit(
    do_not_specialize=[
        "stride_batch", "stride_head", "stride_query", "stride_keys_batch", "stride_keys_head", "stride_keys_query",
        "stride_real_batch", "stride_real_query", "queries", "rows", "blocks_of_chunk", "chunks", "first_head",
        "step_head", "first_slot", "num_slots",
    ],
    do_not_specialize_on_alignment=[
        "ptr_keys", "ptr_real", "ptr_count", "ptr_mean", "ptr_squares", "ptr_largest", "ptr_totals",
    ],
)  # fmt: skip
def _reduce_kernel(
    statistics,  # pointers, one per column
    ptr_keys,
    ptr_real,
    ptr_count,
    ptr_mean,
    ptr_squares,
    ptr_largest,
    ptr_totals,
    stride_batch,
    stride_head,
    stride_query,
    stride_keys_batch,
    stride_keys_head,
    stride_keys_query,
    stride_real_batch,
    stride_real_query,
    queries,
    rows,
    blocks_of_chunk,
    chunks,
    first_head,
    step_head,
    first_slot,
    num_slots,
    COLUMNS: tl.constexpr,
    SHARE: tl.constexpr,
    EXTRA_TERMS: tl.constexpr,
    IN_CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT_STRIDES: tl.constexpr,
):
    if UNIT_STRIDES:
        stride_query = 1
        stride_keys_query = 1
        stride_real_query = 1
    # Columns of one chunk are adjacent programs: they read the same numbers of keys. A slot is a head's index among the
    # selected ones.
    i_column = tl.program_id(0) % COLUMNS
    i_chunk = (tl.program_id(0) // COLUMNS) % chunks
    i_slot = tl.program_id(0) // COLUMNS // chunks
    i_head = (first_head + step_head * i_slot).to(tl.int64)
    ptr_rows = statistics[0]
    for k in tl.static_range(1, COLUMNS):
        if i_column == k:
            ptr_rows = statistics[k]
    ptr_rows += i_head * stride_head
    ptr_keys += i_head * stride_keys_head

    count = tl.full((), 0.0, tl.float64)
    mean = tl.full((), 0.0, tl.float64)
    squares = tl.full((), 0.0, tl.float64)
    largest = tl.full((), float("-inf"), tl.float64)
    first_row = i_chunk.to(tl.int64) * blocks_of_chunk * BLOCK
    for i_block in range(blocks_of_chunk):
        # A row is a query of a sequence of the batch. [BLOCK]
        start = first_row + i_block * BLOCK
        offs_row = (start % queries).to(tl.int32) + tl.arange(0, BLOCK)
        mask_row = start + tl.arange(0, BLOCK) < rows
        i_batch = start // queries + offs_row // queries
        i_query = (offs_row % queries).to(tl.int64)
        offs_keys = i_batch * stride_keys_batch + i_query * stride_keys_query
        keys = tl.load(ptr_keys + offs_keys, mask=mask_row, other=0).to(tl.float64)
        tile = tl.load(ptr_rows + i_batch * stride_batch + i_query * stride_query, mask=mask_row, other=0.0)
        tile = tile.to(tl.float64)
        counted = keys > 0
        if ptr_real is not None:
            offs_real = i_batch * stride_real_batch + i_query * stride_real_query
            counted = counted & (tl.load(ptr_real + offs_real, mask=mask_row, other=0) != 0)
        if i_column == SHARE:
            num_terms = keys + EXTRA_TERMS
            counted = counted & (num_terms > 1)
            tile = tile / tl.log(tl.maximum(num_terms, 2.0))

        # Selected, not multiplied: rows that do not count may contain NaN.
        other_count = tl.sum(counted.to(tl.int32), 0).to(tl.float64)
        other_mean = tl.sum(tl.where(counted, tile, 0.0), 0) / tl.maximum(other_count, 1.0)
        deviation = tl.where(counted, tile - other_mean, 0.0)
        other_squares = tl.sum(deviation * deviation, 0)
        other_largest = tl.max(tl.where(counted, tile, float("-inf")), 0)
        num_nan = tl.sum((counted & (tile != tile)).to(tl.int32), 0)
        other_largest = tl.where(num_nan > 0, float("nan"), other_largest)
        count, mean, squares, largest = _merge(
            count, mean, squares, largest, other_count, other_mean, other_squares, other_largest
        )

    size = COLUMNS * num_slots.to(tl.int64)
    offs_total = i_column * num_slots + first_slot + i_slot
    if IN_CHUNKS:
        _store(ptr_totals + i_chunk * 4 * size, size, offs_total, None, count, mean, squares, largest)
    else:
        count, mean, squares, largest = _merge(
            tl.load(ptr_count + offs_total).to(tl.float64),
            tl.load(ptr_mean + offs_total).to(tl.float64),
            tl.load(ptr_squares + offs_total).to(tl.float64),
            tl.load(ptr_largest + offs_total).to(tl.float64),
            count,
            mean,
            squares,
            largest,
        )
        _store(ptr_totals, size, offs_total, None, count, mean, squares, largest)


@triton.jit(do_not_specialize=["chunks", "size"])
def _join_kernel(
    ptr_parts,  # [chunks, 4, size]
    ptr_count,
    ptr_mean,
    ptr_squares,
    ptr_largest,
    ptr_totals,
    chunks,
    size,
    BLOCK: tl.constexpr,
):
    # [BLOCK]
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < size
    count = tl.load(ptr_parts + offs, mask=mask, other=0.0)
    mean = tl.load(ptr_parts + size + offs, mask=mask, other=0.0)
    squares = tl.load(ptr_parts + 2 * size + offs, mask=mask, other=0.0)
    largest = tl.load(ptr_parts + 3 * size + offs, mask=mask, other=0.0)
    ptr = ptr_parts
    for _ in range(1, chunks):
        ptr += 4 * size
        count, mean, squares, largest = _merge(
            count,
            mean,
            squares,
            largest,
            tl.load(ptr + offs, mask=mask, other=0.0),
            tl.load(ptr + size + offs, mask=mask, other=0.0),
            tl.load(ptr + 2 * size + offs, mask=mask, other=0.0),
            tl.load(ptr + 3 * size + offs, mask=mask, other=0.0),
        )
    count, mean, squares, largest = _merge(
        tl.load(ptr_count + offs, mask=mask, other=0.0).to(tl.float64),
        tl.load(ptr_mean + offs, mask=mask, other=0.0).to(tl.float64),
        tl.load(ptr_squares + offs, mask=mask, other=0.0).to(tl.float64),
        tl.load(ptr_largest + offs, mask=mask, other=0.0).to(tl.float64),
        count,
        mean,
        squares,
        largest,
    )
    _store(ptr_totals, size, offs, mask, count, mean, squares, largest)


def reduce_rows(
    statistics: Sequence[Tensor],
    keys: Tensor,
    real: Tensor | None,
    state: Sequence[Tensor],
    *,
    heads: Sequence[int],
    share: int | None,
    learned_sinks: bool,
    chunks: int | None = None,
) -> Tensor:
    """Return the state after these rows, float64 [4, columns, selected heads].

    The four are count, mean, sum of squared deviations and maximum.

    Args:
        statistics: one per column, each [batch, heads, queries].
        keys: number of visible keys of each row, of the same shape; rows without visible keys do not count.
        real: [batch or 1, queries], False for rows that do not count, such as padding; None: all count.
        state: the same four before these rows, each [columns, selected heads]; not modified.
        heads: the selected heads.
        share: column to divide by the logarithm of the number of visible keys, if any.
        learned_sinks: True if a learned sink adds one to that number.
        chunks: number of programs per head; derived from the number of rows by default.
    """
    batch, _, queries = keys.shape
    columns, num_slots, rows = len(statistics), len(heads), batch * queries
    totals = keys.new_empty((4, columns, num_slots), dtype=torch.float64)
    statistics = _with_common_layout(statistics)
    count, mean, squares, largest = (x.contiguous() for x in state)
    block = 256 if rows <= 256 else 2048
    blocks = blocks_of(rows, block)
    blocks_of_chunk = max(_MIN_BLOCKS, blocks_of(blocks, _MAX_CHUNKS)) if chunks is None else blocks_of(blocks, chunks)
    chunks = blocks_of(blocks, blocks_of_chunk)
    partials = totals if chunks == 1 else keys.new_empty((chunks, 4, columns, num_slots), dtype=torch.float64)
    real_strides = (0, 1) if real is None else (real.stride(0) if real.shape[0] > 1 else 0, real.stride(1))
    strides = (*statistics[0].stride(), *keys.stride(), *real_strides)
    constants = (
        *(columns, -1 if share is None else share, int(learned_sinks), chunks > 1, block),
        strides[2] == strides[5] == strides[7] == 1,
    )
    aligned = [x is None or x.data_ptr() % 16 == 0 for x in (*statistics, keys, real)]
    dtypes = (statistics[0].dtype, keys.dtype, None if real is None else real.dtype, *(x.dtype for x in state))
    kinds = keys.get_device(), dtypes, tuple(aligned)  # the state is read number by number
    with torch.cuda.device_of(keys):
        for first_slot, first_head, step_head, length in _runs(heads):
            numbers = (*strides, queries, rows, blocks_of_chunk, chunks, first_head, step_head, first_slot, num_slots)
            arguments = (tuple(statistics), keys, real, count, mean, squares, largest, partials, *numbers)
            variant = kinds, wide(*numbers)
            num_warps = 8 if block == 2048 else 4
            launch(
                _reduce_kernel,
                columns * chunks * length,
                arguments,
                constants,
                variant=variant,
                num_warps=num_warps,
            )
        if chunks > 1:
            size = columns * num_slots
            _join_kernel[(blocks_of(size, 32),)](
                partials, count, mean, squares, largest, totals, chunks, size, BLOCK=32, num_warps=1
            )
    return totals


def _with_common_layout(statistics: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the tensors with one dtype and equal strides, copied only if they differ."""
    first = statistics[0]
    strides = first.stride()
    if all(x.dtype is first.dtype and x.stride() == strides for x in statistics):
        return statistics
    return torch.stack(tuple(statistics)).unbind(0)


def _runs(heads: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """Yield runs of equally spaced heads: index of the first, first head, step and length.

    Copying a list of heads to the device would synchronise.

    >>> list(_runs((0, 1, 2, 3))), list(_runs((1, 5, 6)))
    ([(0, 0, 1, 4)], [(0, 1, 4, 2), (2, 6, 1, 1)])
    """
    start = 0
    while start < len(heads):
        stop = start + 1
        step = heads[stop] - heads[start] if stop < len(heads) else 1
        while stop < len(heads) and heads[stop] - heads[stop - 1] == step:
            stop += 1
        yield start, heads[start], step, stop - start
        start = stop
