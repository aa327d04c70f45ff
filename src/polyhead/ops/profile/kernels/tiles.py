"""One tile of the second pass: the weights again from Q K^T and the log-sum-exp, and what a tile adds to its columns.

All functions here are inlined into kernels. `problem` is a `Problem`, `columns` a `ColumnResults` (both in
`profile_prepare`); what they lack compiles to nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from polyhead.ops.common.kernels import mask_tiles
from polyhead.ops.profile.kernels.offsets import OFFSET_BINS, add_tile, add_whole_tile

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_rows(
    ptr, stride, first, stop, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK: tl.constexpr, CUT: tl.constexpr
):
    """Rows `first` and on of one head, [BLOCK, BLOCK_DIM]. CUT: some may lie past `stop`; they are zeros."""
    offs = tl.arange(0, BLOCK)
    offs_dim = tl.arange(0, BLOCK_DIM)
    # The first row is widened by itself; within a tile 32 bits are enough (`profile_prepare.prepare` sees to it).
    wide = tl.full([], 0, tl.int64) + first
    pointers = ptr + wide * stride + (offs[:, None] * stride + offs_dim[None, :])
    if CUT:
        there = (first + offs < stop)[:, None] & (offs_dim < DIM)[None, :]
        tile = tl.load(pointers, mask=there, other=0.0)
    elif DIM != BLOCK_DIM:
        tile = tl.load(pointers, mask=(offs_dim < DIM)[None, :], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def head_factor(problem, i_head):
    """What the products of a head are multiplied by."""
    if problem.factors is not None:
        factor = tl.load(problem.factors + i_head)
    else:
        factor = problem.factor
    return factor


@triton.jit
def log2_weights(
    problem,
    mask,
    tile_q,
    tile_k,
    shift,
    factor,
    i_batch,
    i_head,
    offs_m,
    offs_n,
    MASKED: tl.constexpr,
    BY_COLUMNS: tl.constexpr,
):
    """log2 of the weights, -inf where hidden, [BLOCK_M, BLOCK_N]; `shift` [BLOCK_M] is the log-sum-exp in base 2."""
    if BY_COLUMNS:
        # Multiplied the other way round, the queries lie along the registers of a thread.
        tile = tl.trans(tl.dot(tile_k, tl.trans(tile_q), input_precision="ieee"))
    else:
        tile = tl.dot(tile_q, tl.trans(tile_k), input_precision="ieee")
    if problem.cap is not None:
        # cap * tanh(x): the factor brings 2 x log2(e), and an infinite exponential ends at 1 or -1 as it should.
        tile = problem.cap * (1.0 - 2.0 / (tl.exp2(tile * factor) + 1.0)) - shift[:, None]
    else:
        tile = tile * factor - shift[:, None]
    if MASKED:
        queries, keys = problem.row_stop, problem.column_stop
        query_position = mask_tiles.query_positions(mask, i_batch, offs_m, queries)
        key_position = mask_tiles.key_positions(mask, i_batch, offs_n, keys)
        distance = key_position[None, :] - query_position[:, None]
        visible = mask_tiles.visible_tile(mask, i_batch, i_head, offs_m, offs_n, distance, queries, keys)
        if mask.bias is not None or mask.table is not None:
            tile += mask_tiles.added_tile(mask, i_batch, i_head, offs_m, offs_n, distance, visible) * LOG2_E
        tile = tl.where(visible, tile, -float("inf"))
    return tile


@triton.jit
def column_span(problem, mask, i_batch, first_row, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The columns of the window that a block of rows may see: how many tiles of kept keys, then from start to stop."""
    kept, start, stop = mask_tiles.key_spans(
        mask, i_batch, first_row, problem.row_stop, problem.column_stop, BLOCK_M, BLOCK_N
    )
    left = problem.column_start
    start = left + tl.maximum(start - left, 0) // BLOCK_N * BLOCK_N
    stop = tl.maximum(tl.minimum(stop, problem.column_stop), start)
    count_kept = tl.minimum(tl.cdiv(tl.maximum(kept - left, 0), BLOCK_N), (start - left) // BLOCK_N)
    return count_kept, start, stop


@triton.jit
def whole_span(start, stop, first, last, BLOCK: tl.constexpr):
    """The blocks from `start` that lie between `first` and `last`; `start` twice where none does."""
    whole_start = start + tl.cdiv(tl.maximum(first - start, 0), BLOCK) * BLOCK
    whole_stop = start + tl.maximum(tl.minimum(stop, last) - start, 0) // BLOCK * BLOCK
    none = whole_stop <= whole_start
    return tl.where(none, start, whole_start), tl.where(none, start, whole_stop)


# ---- the block map


@triton.jit
def _pool(tile, axis: tl.constexpr, BY_MAX: tl.constexpr):
    if BY_MAX:
        result = tl.max(tile, axis)
    else:
        result = tl.sum(tile, axis)
    return result


@triton.jit
def _pool_rows(tile, POOL_M: tl.constexpr, BY_MAX: tl.constexpr):
    """[BLOCK_M, BLOCK_N] to [POOL_M, BLOCK_N]; the tile itself where POOL_M is 0."""
    if POOL_M == 0:
        result = tile
    elif POOL_M == 1:
        result = _pool(tile, 0, BY_MAX)[None, :]
    else:
        result = _pool(tl.reshape(tile, [POOL_M, tile.shape[0] // POOL_M, tile.shape[1]]), 1, BY_MAX)
    return result


@triton.jit
def _add_blocks(columns, ptr_map, tile, row_block, column_block, BY_MAX: tl.constexpr, ALONE: tl.constexpr):
    pointers = ptr_map + row_block.to(tl.int64)[:, None] * columns.map_columns + column_block[None, :]
    there = (row_block < columns.map_rows)[:, None] & (column_block < columns.map_columns)[None, :]
    if ALONE:
        tl.store(pointers, tile, mask=there)
    elif BY_MAX:
        tl.atomic_max(pointers, tile, mask=there, sem="relaxed")
    else:
        tl.atomic_add(pointers, tile, mask=there, sem="relaxed")


@triton.jit
def _add_to_map(
    columns,
    ptr_map,
    pooled,
    row,
    column,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    POOL_M: tl.constexpr,
    POOL_N: tl.constexpr,
    BY_MAX: tl.constexpr,
    ALONE: tl.constexpr,
):
    """Add a tile that stands at `row` and `column` of the window; `pooled` comes from `_pool_rows`."""
    if POOL_M == 0:
        row_block = (row + tl.arange(0, BLOCK_M)) // columns.block_height
    else:
        row_block = row // columns.block_height + tl.arange(0, POOL_M)
    first_block = column // columns.block_width
    if POOL_N == 0:
        column_block = (column + tl.arange(0, BLOCK_N)) // columns.block_width
        _add_blocks(columns, ptr_map, pooled, row_block, column_block, BY_MAX, ALONE)
    elif POOL_N == -1:
        column_block = (column + tl.arange(0, BLOCK_N)) // columns.block_width
        for part in tl.static_range(2):
            mine = tl.where((column_block == first_block + part)[None, :], pooled, 0.0)
            mine = _pool(mine, 1, BY_MAX)[:, None]
            _add_blocks(columns, ptr_map, mine, row_block, first_block + part + tl.arange(0, 1), BY_MAX, ALONE)
    elif POOL_N == 1:
        pooled = _pool(pooled, 1, BY_MAX)[:, None]
        _add_blocks(columns, ptr_map, pooled, row_block, first_block + tl.arange(0, 1), BY_MAX, ALONE)
    else:
        pooled = _pool(tl.reshape(pooled, [pooled.shape[0], POOL_N, BLOCK_N // POOL_N]), 2, BY_MAX)
        _add_blocks(columns, ptr_map, pooled, row_block, first_block + tl.arange(0, POOL_N), BY_MAX, ALONE)


@triton.jit
def take_columns(
    problem,
    mask,
    columns,
    i_pair,
    logs,
    received,
    first_row,
    first_column,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    POOL_M: tl.constexpr,
    POOL_N: tl.constexpr,
    BY_MAX: tl.constexpr,
    ALONE: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Add a tile to the map and the offsets in memory; returns `received` [BLOCK_N] with the tile's sums added.

    POOL_M and POOL_N say into how many blocks of the map a tile falls: 1 or more, evenly; 0, anyhow, and each element
    finds its own; -1 (of the columns alone), into two at most. ALONE: no other tile adds to them. WHOLE: to the offsets
    a tile adds only if it lies in one bin; `profile_crossing` takes the others.
    """
    weights = tl.exp2(logs)
    pooled = weights
    if columns.map is not None:
        pooled = _pool_rows(weights, POOL_M, BY_MAX)
        ptr_map = columns.map + i_pair * columns.map_rows * columns.map_columns
        row, column = first_row - problem.row_start, first_column - problem.column_start
        _add_to_map(columns, ptr_map, pooled, row, column, BLOCK_M, BLOCK_N, POOL_M, POOL_N, BY_MAX, ALONE)
    # Sums over blocks of rows need only be added once more.
    sums = weights if BY_MAX else pooled
    if columns.received is not None:
        received += tl.sum(sums, 0)
    if columns.offsets is not None:
        ptr_offsets = columns.offsets + i_pair * OFFSET_BINS
        first_offset = first_column - first_row - mask.offset
        if WHOLE:
            add_whole_tile(ptr_offsets, sums, first_offset, BLOCK_M, BLOCK_N)
        else:
            add_tile(ptr_offsets, weights, first_offset, BLOCK_M, BLOCK_N)
    return received
