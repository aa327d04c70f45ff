"""Reduces the rows of a layer to four numbers for each statistic and head, and joins them to what was there before.

In plain PyTorch this takes some forty launches a layer, and launching them takes longer than reading the rows. Here a
program takes one statistic of one head, or a chunk of its rows where there are many, in blocks that stay in registers:
their mean first, then the squared distances from it, in float64, so that every row is read once and nothing of the size
of the values is squared. Blocks, chunks and the earlier state are joined in one order by Chan's rule, without atomics:
the same rows give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from polyhead.ops.common.kernels.sizes import blocks_of

# Chunks depend on the number of rows alone: a head has the same bits whichever others are chosen beside it. Up to four
# blocks a program cost less than a second launch, which joins the chunks of a head one after another.
_FEWEST_BLOCKS = 4
_MOST_CHUNKS = 64


@triton.jit
def _joined(count, mean, squares, largest, more, more_mean, more_squares, more_largest):
    """What two lots of rows are together; one without rows changes no bit of the other."""
    total = count + more
    share = more / tl.where(total > 0, total, 1.0)
    apart = more_mean - mean
    squares = squares + more_squares + apart * apart * (count * share)
    # A NaN stays, as in PyTorch's maximum.
    is_larger = (more_largest > largest) | (more_largest != more_largest)
    return total, mean + apart * share, squares, tl.where(is_larger, more_largest, largest)


@triton.jit
def _store(ptr, size, offs, mask, count, mean, squares, largest):
    tl.store(ptr + offs, count, mask=mask)
    tl.store(ptr + size + offs, mean, mask=mask)
    tl.store(ptr + 2 * size + offs, squares, mask=mask)
    tl.store(ptr + 3 * size + offs, largest, mask=mask)


@triton.jit(
    do_not_specialize=[
        "stride_batch", "stride_head", "stride_keys_batch", "stride_keys_head", "stride_real_batch",
        "queries", "rows", "blocks_of_chunk", "chunks", "first_head", "step_head", "first_place", "places",
    ],
    do_not_specialize_on_alignment=[
        "ptr_keys", "ptr_real", "ptr_count", "ptr_mean", "ptr_squares", "ptr_largest", "ptr_found",
    ],
)  # fmt: skip
def _reduce_kernel(
    statistics,  # pointers, one a column
    ptr_keys,
    ptr_real,
    ptr_count,
    ptr_mean,
    ptr_squares,
    ptr_largest,
    ptr_found,
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
    first_place,
    places,
    COLUMNS: tl.constexpr,
    SHARE: tl.constexpr,
    MORE_KEYS: tl.constexpr,
    IN_CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Columns of one chunk beside each other: they read the same numbers of keys.
    i_column = tl.program_id(0) % COLUMNS
    i_chunk = (tl.program_id(0) // COLUMNS) % chunks
    i_place = tl.program_id(0) // COLUMNS // chunks
    i_head = (first_head + step_head * i_place).to(tl.int64)
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
            most = keys + MORE_KEYS
            counted = counted & (most > 1)
            tile = tile / tl.log(tl.maximum(most, 2.0))

        # Selected and not multiplied: whatever stands in a row that does not count is not seen.
        more = tl.sum(counted.to(tl.int32), 0).to(tl.float64)
        more_mean = tl.sum(tl.where(counted, tile, 0.0), 0) / tl.maximum(more, 1.0)
        distance = tl.where(counted, tile - more_mean, 0.0)
        more_squares = tl.sum(distance * distance, 0)
        more_largest = tl.max(tl.where(counted, tile, float("-inf")), 0)
        broken = tl.sum((counted & (tile != tile)).to(tl.int32), 0)
        more_largest = tl.where(broken > 0, float("nan"), more_largest)
        count, mean, squares, largest = _joined(
            count, mean, squares, largest, more, more_mean, more_squares, more_largest
        )

    size = COLUMNS * places.to(tl.int64)
    offs_found = i_column * places + first_place + i_place
    if IN_CHUNKS:
        _store(ptr_found + i_chunk * 4 * size, size, offs_found, None, count, mean, squares, largest)
    else:
        count, mean, squares, largest = _joined(
            tl.load(ptr_count + offs_found).to(tl.float64),
            tl.load(ptr_mean + offs_found).to(tl.float64),
            tl.load(ptr_squares + offs_found).to(tl.float64),
            tl.load(ptr_largest + offs_found).to(tl.float64),
            count,
            mean,
            squares,
            largest,
        )
        _store(ptr_found, size, offs_found, None, count, mean, squares, largest)


@triton.jit(do_not_specialize=["chunks", "size"])
def _join_kernel(
    ptr_parts,  # [chunks, 4, size]
    ptr_count,
    ptr_mean,
    ptr_squares,
    ptr_largest,
    ptr_found,
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
        count, mean, squares, largest = _joined(
            count,
            mean,
            squares,
            largest,
            tl.load(ptr + offs, mask=mask, other=0.0),
            tl.load(ptr + size + offs, mask=mask, other=0.0),
            tl.load(ptr + 2 * size + offs, mask=mask, other=0.0),
            tl.load(ptr + 3 * size + offs, mask=mask, other=0.0),
        )
    count, mean, squares, largest = _joined(
        tl.load(ptr_count + offs, mask=mask, other=0.0).to(tl.float64),
        tl.load(ptr_mean + offs, mask=mask, other=0.0).to(tl.float64),
        tl.load(ptr_squares + offs, mask=mask, other=0.0).to(tl.float64),
        tl.load(ptr_largest + offs, mask=mask, other=0.0).to(tl.float64),
        count,
        mean,
        squares,
        largest,
    )
    _store(ptr_found, size, offs, mask, count, mean, squares, largest)


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
    """The state after these rows, float64 [4, columns, chosen heads]: count, mean, squared distances from it, largest.

    Args:
        statistics: one a column, each [batch, heads, queries].
        keys: how many keys each row sees, of the same shape; a row that sees none does not count.
        real: [batch or 1, queries], False for rows that do not count either; None: all do.
        state: the same four before these rows, each [columns, chosen heads]. It is left as it is.
        heads: which heads were chosen.
        share: the column that is to be divided by the logarithm of how many keys a row sees, if there is one.
        learned_sinks: whether that number is one more.
        chunks: over how many programs the rows of a head are spread; chosen from their number by default.
    """
    batch, _, queries = keys.shape
    columns, places, rows = len(statistics), len(heads), batch * queries
    found = keys.new_empty((4, columns, places), dtype=torch.float64)
    statistics = _alike(statistics)
    count, mean, squares, largest = (x.contiguous() for x in state)
    block = 256 if rows <= 256 else 2048
    blocks = blocks_of(rows, block)
    blocks_of_chunk = (
        max(_FEWEST_BLOCKS, blocks_of(blocks, _MOST_CHUNKS)) if chunks is None else blocks_of(blocks, chunks)
    )
    chunks = blocks_of(blocks, blocks_of_chunk)
    into = found if chunks == 1 else keys.new_empty((chunks, 4, columns, places), dtype=torch.float64)
    real_batch, real_query = (0, 0) if real is None else (real.stride(0) if real.shape[0] > 1 else 0, real.stride(1))
    with torch.cuda.device_of(keys):
        for first_place, first_head, step_head, length in _runs(heads):
            _reduce_kernel[(columns * chunks * length,)](
                tuple(statistics),
                keys,
                real,
                count,
                mean,
                squares,
                largest,
                into,
                *statistics[0].stride(),
                *keys.stride(),
                real_batch,
                real_query,
                queries,
                rows,
                blocks_of_chunk,
                chunks,
                first_head,
                step_head,
                first_place,
                places,
                COLUMNS=columns,
                SHARE=-1 if share is None else share,
                MORE_KEYS=int(learned_sinks),
                IN_CHUNKS=chunks > 1,
                BLOCK=block,
                num_warps=8 if block == 2048 else 4,
            )
        if chunks > 1:
            size = columns * places
            _join_kernel[(blocks_of(size, 32),)](
                into, count, mean, squares, largest, found, chunks, size, BLOCK=32, num_warps=1
            )
    return found


def _alike(statistics: Sequence[Tensor]) -> Sequence[Tensor]:
    """Tensors of one dtype that lie alike in memory; most do."""
    first = statistics[0]
    strides = first.stride()
    if all(x.dtype is first.dtype and x.stride() == strides for x in statistics):
        return statistics
    return torch.stack(tuple(statistics)).unbind(0)


def _runs(heads: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """Chosen heads that are evenly apart: the place of the first, the first, the step, and how many.

    A list of heads on the device would have to be copied there, and the copy would be waited for.

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
