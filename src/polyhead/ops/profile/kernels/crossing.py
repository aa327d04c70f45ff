"""The histogram over offsets, where it costs: the tiles that more than one bin has a part of.

A walk down the columns adds a tile that lies in one bin as a whole, which costs it next to nothing. The others lie
along the diagonal and along the far edges of bins, a few for each block of keys however many queries there are: of n
tokens O(n log n) pairs. They are computed once more here, in smaller pieces, so that the walk need not hold a tile
while its diagonals are added up.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from polyhead.ops.common.kernels import mask_tiles
from polyhead.ops.common.kernels.mask_arguments import MaskArguments
from polyhead.ops.common.kernels.resources import Blocks, launch_fitting
from polyhead.ops.common.kernels.sizes import blocks_of
from polyhead.ops.profile.kernels.offsets import NEAR, OFFSET_BINS, add_tile, bin_end, offset_bin
from polyhead.ops.profile.kernels.prepare import Problem, block_dim
from polyhead.ops.profile.kernels.tiles import head_factor, load_rows, log2_weights


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
    """A block of keys, past which those queries go that lie in a tile [TILE_M, TILE_N] of several bins."""
    row_start, row_stop = problem.row_start, problem.row_stop
    column_start, column_stop = problem.column_start, problem.column_stop
    blocks = tl.cdiv(column_stop - column_start, BLOCK_N)
    i_pair = (tl.program_id(0) // blocks).to(tl.int64)  # batch * heads + head
    i_batch, i_head = i_pair // problem.heads, i_pair % problem.heads
    first_column = column_start + (tl.program_id(0) % blocks) * BLOCK_N
    tile_column = column_start + (first_column - column_start) // TILE_N * TILE_N
    factor = head_factor(problem, i_head)
    ptr_query = problem.query + i_batch * problem.query_batch + i_head * problem.query_head
    ptr_key = problem.key + i_batch * problem.key_batch + i_head // problem.group * problem.key_head
    ptr_offsets += i_pair * OFFSET_BINS
    # [BLOCK_N, BLOCK_DIM]
    tile_k = load_rows(ptr_key, problem.key_token, first_column, column_stop, DIM, BLOCK_DIM, BLOCK_N, True)
    offs_n = first_column + tl.arange(0, BLOCK_N)
    start, stop = mask_tiles.query_span(mask, i_batch, first_column, row_stop, column_stop, BLOCK_N, BLOCK_M)
    start, stop = tl.maximum(start, row_start), tl.minimum(stop, row_stop)

    level = tile_column - mask.offset  # the row of which the tile's first key is no offset away
    for i_edge in tl.range(0, 2 * far_edges + 1):
        # The bins that end here: those around 0 at once, then a far one on the left or on the right.
        size = NEAR << ((i_edge + 1) // 2)
        edge = tl.where(i_edge % 2 == 1, -size - 1, size)
        least = tl.where(i_edge == 0, -NEAR - 1, edge)
        first = tl.maximum(level - (TILE_M - 1) - edge, start)
        last = tl.minimum(level + TILE_N - 2 - least, stop - 1)
        first_tile = (tl.maximum(first, row_start) - row_start) // TILE_M
        count = tl.where(last >= first, (last - row_start) // TILE_M - first_tile + 1, 0)
        for i_tile in tl.range(first_tile, first_tile + count):
            # A tile may meet several edges; the one that ends the bin of its smallest offset takes it.
            tile_row = row_start + i_tile * TILE_M
            smallest, largest = level - tile_row - (TILE_M - 1), level - tile_row + (TILE_N - 1)
            end = bin_end(smallest)
            is_mine = (end >= least) & (end <= edge) & (offset_bin(smallest) != offset_bin(largest))
            for i_piece in tl.range(0, tl.where(is_mine, TILE_M // BLOCK_M, 0)):
                first_row = tile_row + i_piece * BLOCK_M
                offs_m = first_row + tl.arange(0, BLOCK_M)
                # [BLOCK_M, BLOCK_DIM]
                tile_q = load_rows(ptr_query, problem.query_token, first_row, row_stop, DIM, BLOCK_DIM, BLOCK_M, True)
                shift = tl.load(problem.shift + i_pair * problem.shift_rows + (offs_m - row_start))
                # [BLOCK_M, BLOCK_N]
                logs = log2_weights(
                    problem, mask, tile_q, tile_k, shift, factor, i_batch, i_head, offs_m, offs_n, True, False
                )
                add_tile(ptr_offsets, tl.exp2(logs), first_column - first_row - mask.offset, BLOCK_M, BLOCK_N)


def add_crossing(problem: Problem, mask: MaskArguments, offsets: Tensor, tile: Blocks, piece: Blocks) -> None:
    """Add to `offsets` [batch, heads, OFFSET_BINS] what a walk down the columns in tiles of this size left out."""
    query = problem.query
    piece = piece._replace(rows=min(piece.rows, tile.rows), columns=min(piece.columns, tile.columns))
    # A tile counts with all its offsets, also those past the end of the window.
    furthest = max(tile.rows, tile.columns) + max(
        abs(problem.column_stop - 1 - problem.row_start - mask.offset),
        abs(problem.column_start - (problem.row_stop - 1) - mask.offset),
    )

    def launch(piece: Blocks) -> None:
        _crossing_kernel[(problem.batch * problem.heads * blocks_of(problem.columns, piece.columns),)](
            problem,
            mask,
            offsets,
            (furthest // NEAR.value).bit_length(),
            DIM=query.shape[3],
            BLOCK_DIM=block_dim(query),
            BLOCK_M=piece.rows,
            BLOCK_N=piece.columns,
            TILE_M=tile.rows,
            TILE_N=tile.columns,
            **piece.options,
        )

    with torch.cuda.device_of(query):
        # What fitted beside one tile may be larger than another, of which it would then be no piece.
        launch_fitting(launch, piece, Blocks.halved, lambda: ("crossing", *problem.kind(mask), tile, piece))
