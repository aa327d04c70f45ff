"""Offset histogram of the tiles that cross a bin edge.

The column kernel of `second_pass` adds the tiles whose offsets are all in one bin, which costs almost nothing. The
other tiles are along the diagonal and along the far bin edges: for each block of keys a few per edge, of which n tokens
have O(log n), so O(n log n) pairs in all. They are recomputed here in smaller pieces, so that the column kernel need
not keep a tile in registers while its diagonals are summed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from polyhead.ops.common.kernels import mask_tiles
from polyhead.ops.common.kernels.mask_arguments import MaskArguments
from polyhead.ops.common.kernels.resources import Blocks, launch_fitting
from polyhead.ops.common.kernels.sizes import blocks_of, padded_dim
from polyhead.ops.profile.kernels.offsets import NEAR, OFFSET_BINS, add_tile, bin_end, offset_bin
from polyhead.ops.profile.kernels.prepare import Problem
from polyhead.ops.profile.kernels.tiles import head_sm_scale, load_rows, log2_weights


@triton.jit
def _crossing_kernel(
    problem,
    mask,
    ptr_offsets,
    far_edges,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """Process a block of keys with the queries of those tiles [TILE_M, TILE_N] whose offsets are in several bins."""
    row_start, row_stop = problem.row_start, problem.row_stop
    column_start, column_stop = problem.column_start, problem.column_stop
    blocks = tl.cdiv(column_stop - column_start, BLOCK_N)
    i_pair = (tl.program_id(0) // blocks).to(tl.int64)  # batch * heads + head
    i_batch, i_head = i_pair // problem.heads, i_pair % problem.heads
    first_column = column_start + (tl.program_id(0) % blocks) * BLOCK_N
    tile_column = column_start + (first_column - column_start) // TILE_N * TILE_N
    sm_scale = head_sm_scale(problem, i_head)
    ptr_query = problem.query + i_batch * problem.query_batch + i_head * problem.query_head
    ptr_key = problem.key + i_batch * problem.key_batch + i_head // problem.group * problem.key_head
    ptr_offsets += i_pair * OFFSET_BINS
    # [BLOCK_N, BLOCK_DIM]
    tile_k = load_rows(ptr_key, problem.key_token, first_column, column_stop, DIM, BLOCK_DIM, BLOCK_N, True)
    offs_n = first_column + tl.arange(0, BLOCK_N)
    start, stop = mask_tiles.query_span(mask, i_batch, first_column, row_stop, column_stop, BLOCK_N, BLOCK_M)
    start, stop = tl.maximum(start, row_start), tl.minimum(stop, row_stop)

    zero_row = tile_column - mask.offset  # the row at offset 0 from the tile's first key
    for i_edge in tl.range(0, 2 * far_edges + 1):
        # The bins whose last offset is in [min_end, max_end]: first all near ones and the first far one on the left,
        # then one far bin, on the left and on the right in turn.
        size = NEAR << ((i_edge + 1) // 2)
        max_end = tl.where(i_edge % 2 == 1, -size - 1, size)
        min_end = tl.where(i_edge == 0, -NEAR - 1, max_end)
        first = tl.maximum(zero_row - (TILE_M - 1) - max_end, start)
        last = tl.minimum(zero_row + TILE_N - 2 - min_end, stop - 1)
        first_tile = (tl.maximum(first, row_start) - row_start) // TILE_M
        count = tl.where(last >= first, (last - row_start) // TILE_M - first_tile + 1, 0)
        for i_tile in tl.range(first_tile, first_tile + count):
            # A tile may cross several edges; it is processed once, with the bin of its smallest offset.
            tile_row = row_start + i_tile * TILE_M
            min_offset, max_offset = zero_row - tile_row - (TILE_M - 1), zero_row - tile_row + (TILE_N - 1)
            end = bin_end(min_offset)
            is_owner = (end >= min_end) & (end <= max_end) & (offset_bin(min_offset) != offset_bin(max_offset))
            for i_piece in tl.range(0, tl.where(is_owner, TILE_M // BLOCK_M, 0)):
                first_row = tile_row + i_piece * BLOCK_M
                offs_m = first_row + tl.arange(0, BLOCK_M)
                # [BLOCK_M, BLOCK_DIM]
                tile_q = load_rows(ptr_query, problem.query_token, first_row, row_stop, DIM, BLOCK_DIM, BLOCK_M, True)
                lse = tl.load(problem.lse + i_pair * problem.lse_rows + (offs_m - row_start))
                # [BLOCK_M, BLOCK_N]
                log2_p = log2_weights(
                    problem, mask, tile_q, tile_k, lse, sm_scale, i_batch, i_head, offs_m, offs_n, True, False
                )
                add_tile(ptr_offsets, tl.exp2(log2_p), first_column - first_row - mask.offset, BLOCK_M, BLOCK_N)


def add_crossing(problem: Problem, mask: MaskArguments, offsets: Tensor, tile: Blocks, piece: Blocks) -> None:
    """Add the tiles that the column kernel left out to `offsets` [batch, heads, OFFSET_BINS]."""
    query = problem.query
    piece = piece._replace(rows=min(piece.rows, tile.rows), columns=min(piece.columns, tile.columns))
    # All offsets of a tile count, also those past the end of the window.
    max_distance = max(tile.rows, tile.columns) + max(
        abs(problem.column_stop - 1 - problem.row_start - mask.offset),
        abs(problem.column_start - (problem.row_stop - 1) - mask.offset),
    )

    def launch(piece: Blocks) -> None:
        _crossing_kernel[(problem.batch * problem.heads * blocks_of(problem.columns, piece.columns),)](
            problem,
            mask,
            offsets,
            (max_distance // NEAR.value).bit_length(),
            DIM=query.shape[3],
            BLOCK_DIM=padded_dim(query.shape[3]),
            BLOCK_M=piece.rows,
            BLOCK_N=piece.columns,
            TILE_M=tile.rows,
            TILE_N=tile.columns,
            **piece.options,
        )

    with torch.cuda.device_of(query):
        # The tile is part of the key: a piece that fitted for one tile size may be larger than another tile.
        launch_fitting(launch, piece, Blocks.halved, lambda: ("crossing", *problem.compile_key(mask), tile, piece))
