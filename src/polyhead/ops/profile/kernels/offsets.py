"""The histogram over relative offset (key less query position): its bins, and what a tile of weights adds to them.

Each offset up to `NEAR` has a bin of its own; beyond, the edges of bins lie at `NEAR` times a power of two. All
functions here are inlined into kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl

NEAR = tl.constexpr(64)
FAR_BINS = tl.constexpr(25)
OFFSET_BINS = tl.constexpr(2 * (64 + 25) + 1)


@triton.jit
def _edges_below(offset):
    """How many edges lie below an offset's size: 0 up to `NEAR`, k for `NEAR` << (k - 1) < size <= `NEAR` << k."""
    beyond = (tl.maximum(tl.abs(offset), 1) - 1) // NEAR
    # How many bits it has, from a float's exponent; the bits that could round it up to the next power go first.
    rounded = (beyond & ~(beyond >> 1)).to(tl.float32)
    return tl.maximum((rounded.to(tl.int32, bitcast=True) >> 23) - 126, 0)


@triton.jit
def offset_bin(offset):
    """The number of the bin of an offset, from 0."""
    far = _edges_below(offset)
    beyond = tl.where(offset > 0, NEAR + far, -NEAR - far)
    return tl.where(far == 0, offset, beyond) + (NEAR + FAR_BINS)


@triton.jit
def bin_end(offset):
    """The largest offset of the bin of an offset."""
    far = _edges_below(offset)
    end = tl.where(offset > 0, NEAR << far, -(NEAR << tl.maximum(far - 1, 0)) - 1)
    return tl.where(far == 0, offset, end)


@triton.jit
def add_whole_tile(ptr_offsets, sums, first_offset, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Add a tile whose first row and column are `first_offset` apart if one bin has it all.

    `sums` are those of the tile's rows or blocks of rows, column by column.
    """
    one, other = offset_bin(first_offset - (BLOCK_M - 1)), offset_bin(first_offset + (BLOCK_N - 1))
    tl.atomic_add(ptr_offsets + one, tl.sum(tl.sum(sums, 1), 0), mask=one == other, sem="relaxed")


@triton.jit
def add_tile(ptr_offsets, weights, first_offset, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Add a tile whose first row and column are `first_offset` apart; BLOCK_M <= BLOCK_N."""
    one, other = offset_bin(first_offset - (BLOCK_M - 1)), offset_bin(first_offset + (BLOCK_N - 1))
    if one == other:
        tl.atomic_add(ptr_offsets + one, tl.sum(tl.sum(weights, 0), 0), sem="relaxed")
    else:
        # Each row is turned round by its number, so that a diagonal becomes a column; what came round at the end of a
        # row is of the diagonal BLOCK_N places before.
        place = tl.arange(0, BLOCK_M)[:, None] + tl.arange(0, BLOCK_N)[None, :]
        turned = tl.gather(weights, place % BLOCK_N, axis=1)
        offset = first_offset + tl.arange(0, BLOCK_N)
        ahead = tl.sum(tl.where(place < BLOCK_N, turned, 0.0), 0)
        tl.atomic_add(ptr_offsets + offset_bin(offset), ahead, sem="relaxed")
        round_the_end = tl.sum(tl.where(place < BLOCK_N, 0.0, turned), 0)
        tl.atomic_add(ptr_offsets + offset_bin(offset - BLOCK_N), round_the_end, sem="relaxed")
