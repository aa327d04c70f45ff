"""One tile of the second pass: recompute its weights and add them to column results.

All functions here are inlined into kernels. `problem` is a `prepare.Problem`, `columns` a `second_pass.ColumnResults`;
branches for fields that are None are removed at compile time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from polyhead.ops.common.kernels import mask_tiles
from polyhead.ops.common.kernels.softmax_tiles import LOG2E as LOG2_E
from polyhead.ops.profile.kernels.offsets import OFFSET_BINS, add_tile, add_tile_in_one_bin


@triton.jit
def load_rows(
    ptr, stride, first, stop, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr
):
    """Load rows from `first` on of one head, [BLOCK, BLOCK_DIM]. MASKED: rows past `stop` become zeros."""
    offs = tl.arange(0, BLOCK)
    offs_dim = tl.arange(0, BLOCK_DIM)
    # The first row is widened to 64 bits; within a tile 32 bits are enough, which `prepare.prepare` ensures.
    first_wide = tl.full([], 0, tl.int64) + first
    ptr_tile = ptr + first_wide * stride + (offs[:, None] * stride + offs_dim[None, :])
    if MASKED:
        mask_tile = (first + offs < stop)[:, None] & (offs_dim < DIM)[None, :]
        tile = tl.load(ptr_tile, mask=mask_tile, other=0.0)
    elif DIM != BLOCK_DIM:
        tile = tl.load(ptr_tile, mask=(offs_dim < DIM)[None, :], other=0.0)
    else:
        tile = tl.load(ptr_tile)
    return tile


@triton.jit
def head_sm_scale(problem, i_head):
    """Return the factor of a head's dot products."""
    if problem.head_sm_scales is not None:
        sm_scale = tl.load(problem.head_sm_scales + i_head)
    else:
        sm_scale = problem.sm_scale
    return sm_scale


@triton.jit
def log2_weights(
    problem,
    mask,
    tile_q,
    tile_k,
    lse,
    sm_scale,
    i_batch,
    i_head,
    offs_m,
    offs_n,
    MASKED: tl.constexpr,
    BY_COLUMNS: tl.constexpr,
):
    """Return log2 of the weights, -inf where masked, [BLOCK_M, BLOCK_N]; `lse` [BLOCK_M] is in base 2."""
    if BY_COLUMNS:
        # In the transposed product, the queries are along the registers of a thread.
        tile = tl.trans(tl.dot(tile_k, tl.trans(tile_q), input_precision="ieee"))
    else:
        tile = tl.dot(tile_q, tl.trans(tile_k), input_precision="ieee")
    if problem.softcap_log2 is not None:
        # softcap * tanh(x): the scale includes 2 * log2(e), and an infinite exponential gives the limits 1 or -1.
        tile = problem.softcap_log2 * (1.0 - 2.0 / (tl.exp2(tile * sm_scale) + 1.0)) - lse[:, None]
    else:
        tile = tile * sm_scale - lse[:, None]
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
    """Return the number of sink tiles of a block of rows, and its range of other visible columns."""
    sink_stop, start, stop = mask_tiles.key_spans(
        mask, i_batch, first_row, problem.row_stop, problem.column_stop, BLOCK_M, BLOCK_N
    )
    left = problem.column_start
    start = left + tl.maximum(start - left, 0) // BLOCK_N * BLOCK_N
    stop = tl.maximum(tl.minimum(stop, problem.column_stop), start)
    sink_tiles = tl.minimum(tl.cdiv(tl.maximum(sink_stop - left, 0), BLOCK_N), (start - left) // BLOCK_N)
    return sink_tiles, start, stop


@triton.jit
def full_tiles(start, stop, first, last, BLOCK: tl.constexpr):
    """Return the range of whole blocks, counted from `start`, between `first` and `last`; empty at `start` if none."""
    full_start = start + tl.cdiv(tl.maximum(first - start, 0), BLOCK) * BLOCK
    full_stop = start + tl.maximum(tl.minimum(stop, last) - start, 0) // BLOCK * BLOCK
    is_empty = full_stop <= full_start
    return tl.where(is_empty, start, full_start), tl.where(is_empty, start, full_stop)


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
    """Pool [BLOCK_M, BLOCK_N] to [POOL_M, BLOCK_N]; returns the tile itself if POOL_M is 0."""
    if POOL_M == 0:
        result = tile
    elif POOL_M == 1:
        result = _pool(tile, 0, BY_MAX)[None, :]
    else:
        result = _pool(tl.reshape(tile, [POOL_M, tile.shape[0] // POOL_M, tile.shape[1]]), 1, BY_MAX)
    return result


@triton.jit
def _add_blocks(columns, ptr_map, tile, row_block, column_block, BY_MAX: tl.constexpr, EXCLUSIVE: tl.constexpr):
    ptr_tile = ptr_map + row_block.to(tl.int64)[:, None] * columns.map_columns + column_block[None, :]
    mask_tile = (row_block < columns.map_rows)[:, None] & (column_block < columns.map_columns)[None, :]
    if EXCLUSIVE:
        tl.store(ptr_tile, tile, mask=mask_tile)
    elif BY_MAX:
        tl.atomic_max(ptr_tile, tile, mask=mask_tile, sem="relaxed")
    else:
        tl.atomic_add(ptr_tile, tile, mask=mask_tile, sem="relaxed")


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
    EXCLUSIVE: tl.constexpr,
):
    """Add the tile at `row` and `column` of the window to the map; `pooled` is from `_pool_rows`."""
    if POOL_M == 0:
        row_block = (row + tl.arange(0, BLOCK_M)) // columns.block_height
    else:
        row_block = row // columns.block_height + tl.arange(0, POOL_M)
    first_block = column // columns.block_width
    if POOL_N == 0:
        column_block = (column + tl.arange(0, BLOCK_N)) // columns.block_width
        _add_blocks(columns, ptr_map, pooled, row_block, column_block, BY_MAX, EXCLUSIVE)
    elif POOL_N == -1:
        column_block = (column + tl.arange(0, BLOCK_N)) // columns.block_width
        for part in tl.static_range(2):
            pooled_part = tl.where((column_block == first_block + part)[None, :], pooled, 0.0)
            pooled_part = _pool(pooled_part, 1, BY_MAX)[:, None]
            _add_blocks(
                columns, ptr_map, pooled_part, row_block, first_block + part + tl.arange(0, 1), BY_MAX, EXCLUSIVE
            )
    elif POOL_N == 1:
        pooled = _pool(pooled, 1, BY_MAX)[:, None]
        _add_blocks(columns, ptr_map, pooled, row_block, first_block + tl.arange(0, 1), BY_MAX, EXCLUSIVE)
    else:
        pooled = _pool(tl.reshape(pooled, [pooled.shape[0], POOL_N, BLOCK_N // POOL_N]), 2, BY_MAX)
        _add_blocks(columns, ptr_map, pooled, row_block, first_block + tl.arange(0, POOL_N), BY_MAX, EXCLUSIVE)


@triton.jit
def accumulate_columns(
    problem,
    mask,
    columns,
    i_pair,
    log2_p,
    received,
    first_row,
    first_column,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    POOL_M: tl.constexpr,
    POOL_N: tl.constexpr,
    BY_MAX: tl.constexpr,
    EXCLUSIVE: tl.constexpr,
    ONE_BIN_ONLY: tl.constexpr,
):
    """Add a tile to map and offsets in memory; returns `received` [BLOCK_N] with its sums added.

    POOL_M and POOL_N are the numbers of blocks of the map that a tile covers: 1 or more if it covers them evenly, 0 if
    each element must compute its block, -1 (columns only) if there are at most two. EXCLUSIVE: no other tile adds to
    these blocks. ONE_BIN_ONLY: add to the offsets only tiles within one bin; `crossing` adds the others.
    """
    weights = tl.exp2(log2_p)
    pooled = weights
    if columns.map is not None:
        pooled = _pool_rows(weights, POOL_M, BY_MAX)
        ptr_map = columns.map + i_pair * columns.map_rows * columns.map_columns
        row, column = first_row - problem.row_start, first_column - problem.column_start
        _add_to_map(columns, ptr_map, pooled, row, column, BLOCK_M, BLOCK_N, POOL_M, POOL_N, BY_MAX, EXCLUSIVE)
    # Sums over blocks of rows are reused: only they remain to be added.
    sums = weights if BY_MAX else pooled
    if columns.received is not None:
        received += tl.sum(sums, 0)
    if columns.offsets is not None:
        ptr_offsets = columns.offsets + i_pair * OFFSET_BINS
        first_offset = first_column - first_row - mask.offset
        if ONE_BIN_ONLY:
            add_tile_in_one_bin(ptr_offsets, sums, first_offset, BLOCK_M, BLOCK_N)
        else:
            add_tile(ptr_offsets, weights, first_offset, BLOCK_M, BLOCK_N)
    return received
