"""Histogram over relative offsets (key minus query position), and the addition of tiles to it.

Each offset up to `NEAR` has its own bin; beyond, the bin edges are at `NEAR` times a power of two. All functions here
are inlined into kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl

NEAR = tl.constexpr(64)
FAR_BINS = tl.constexpr(25)
OFFSET_BINS = tl.constexpr(2 * (64 + 25) + 1)


@triton.jit
def _edges_below(offset):
    """Return the number of bin edges below |offset|.

    It is 0 up to `NEAR`, and k for `NEAR` << (k - 1) < |offset| <= `NEAR` << k.
    """
    beyond = (tl.maximum(tl.abs(offset), 1) - 1) // NEAR
    # The bit length, from a float's exponent; bits that could round it up to the next power of two are cleared first.
    rounded = (beyond & ~(beyond >> 1)).to(tl.float32)
    return tl.maximum((rounded.to(tl.int32, bitcast=True) >> 23) - 126, 0)


@triton.jit
def offset_bin(offset):
    """Return the index of the bin of an offset."""
    num_edges = _edges_below(offset)
    beyond = tl.where(offset > 0, NEAR + num_edges, -NEAR - num_edges)
    return tl.where(num_edges == 0, offset, beyond) + (NEAR + FAR_BINS)


@triton.jit
def bin_end(offset):
    """Return the largest offset in the bin of an offset."""
    num_edges = _edges_below(offset)
    end = tl.where(offset > 0, NEAR << num_edges, -(NEAR << tl.maximum(num_edges - 1, 0)) - 1)
    return tl.where(num_edges == 0, offset, end)


@triton.jit
def add_tile_in_one_bin(ptr_offsets, sums, first_offset, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Add a tile whose first row and column are `first_offset` apart if all its offsets are in one bin.

    `sums` are column sums over the tile's rows or over blocks of them.
    """
    first_bin, last_bin = offset_bin(first_offset - (BLOCK_M - 1)), offset_bin(first_offset + (BLOCK_N - 1))
    tl.atomic_add(ptr_offsets + first_bin, tl.sum(tl.sum(sums, 1), 0), mask=first_bin == last_bin, sem="relaxed")


@triton.jit
def add_tile(ptr_offsets, weights, first_offset, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Add a tile whose first row and column are `first_offset` apart; BLOCK_M <= BLOCK_N."""
    first_bin, last_bin = offset_bin(first_offset - (BLOCK_M - 1)), offset_bin(first_offset + (BLOCK_N - 1))
    if first_bin == last_bin:
        tl.atomic_add(ptr_offsets + first_bin, tl.sum(tl.sum(weights, 0), 0), sem="relaxed")
    else:
        # Each row is rotated by its index, so that diagonals become columns; elements that wrap around belong to the
        # diagonal BLOCK_N before.
        column = tl.arange(0, BLOCK_M)[:, None] + tl.arange(0, BLOCK_N)[None, :]
        rotated = tl.gather(weights, column % BLOCK_N, axis=1)
        offset = first_offset + tl.arange(0, BLOCK_N)
        ahead = tl.sum(tl.where(column < BLOCK_N, rotated, 0.0), 0)
        tl.atomic_add(ptr_offsets + offset_bin(offset), ahead, sem="relaxed")
        wrapped = tl.sum(tl.where(column < BLOCK_N, 0.0, rotated), 0)
        tl.atomic_add(ptr_offsets + offset_bin(offset - BLOCK_N), wrapped, sem="relaxed")
