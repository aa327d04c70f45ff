"""The part of the kernels of chosen rows that knows where rows lie: which are a program's, and which keys they may see.

All functions here are inlined into kernels. Rows of one (batch, head) pair lie together and ascend, so they are found
by searches; a search reads WIDTH places at once and seldom needs more than two steps.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from polyhead.ops.common.kernels.mask_tiles import key_spans

WIDTH = tl.constexpr(128)


class Rows(NamedTuple):
    """Which rows there are; `first_key` and `last_key` are those of `MaskArguments`, which then has none."""

    positions: Tensor  # int32 [total]: which query a row is
    offsets: Tensor  # int32 [pairs + 1]
    first_key: Tensor | None
    last_key: Tensor | None
    total: int
    pairs: int
    batch: int
    heads: int
    BY_HEAD: tl.constexpr  # pair i is head * batch + batch index, and not batch index * heads + head


@triton.jit
def find_rows(rows, i_program, BLOCK_M: tl.constexpr):
    """The pair of a program, the first of its rows and the end of the pair's; pair `pairs` is the padding.

    Pair i has the programs from offsets[i] // BLOCK_M + i on. That is never too few, at most one too many, and known
    without a sum over the pairs before it. A program that is too many has its first row at the end or behind it.
    """
    low, high = i_program * 0, rows.pairs + i_program * 0
    while low < high:
        step = tl.cdiv(high - low, WIDTH)
        # [WIDTH]
        offs = low + step * (1 + tl.arange(0, WIDTH))
        there = offs <= high
        begin = tl.load(rows.offsets + offs, mask=there, other=0) // BLOCK_M + offs
        low += step * tl.sum((there & (begin <= i_program)).to(tl.int32), 0)
        high = tl.minimum(low + step - 1, high)
    start = tl.load(rows.offsets + low)
    stop = tl.load(rows.offsets + low + 1, mask=low < rows.pairs, other=rows.total)
    return low, start + (i_program - (start // BLOCK_M + low)) * BLOCK_M, stop


@triton.jit
def sequence_and_head(rows, i_pair):
    """Which sequence and which head a pair is."""
    if rows.BY_HEAD:
        i_batch, i_head = i_pair % rows.batch, i_pair // rows.batch
    else:
        i_batch, i_head = i_pair // rows.heads, i_pair % rows.heads
    return i_batch, i_head


@triton.jit
def pair_of(rows, i_batch, i_head):
    """The number of a pair."""
    if rows.BY_HEAD:
        i_pair = i_head * rows.batch + i_batch
    else:
        i_pair = i_batch * rows.heads + i_head
    return i_pair


@triton.jit
def first_from(rows, start, stop, query):
    """The first of the rows `start` to `stop`, all of one pair, that is that query or one behind it; `stop` if none."""
    low, high = start, stop
    while low < high:
        step = tl.cdiv(high - low, WIDTH)
        # [WIDTH]
        offs = low + step * (1 + tl.arange(0, WIDTH)) - 1
        before = tl.load(rows.positions + offs, mask=offs < high, other=2147483647) < query
        low += step * tl.sum(before.to(tl.int32), 0)
        high = tl.minimum(low + step - 1, high)
    return low


@triton.jit
def queries_of(rows, offs_row, stop, num_queries):
    """Which queries the rows are, int32 [BLOCK_M]; `num_queries`, which sees nothing, from `stop` on."""
    return tl.load(rows.positions + offs_row, mask=offs_row < stop, other=num_queries)


@triton.jit
def first_and_last(offs_m, num_queries):
    """The first and the last query of a tile; the last comes first where there is none."""
    return tl.min(offs_m, 0), tl.max(tl.where(offs_m < num_queries, offs_m, -1), 0)


@triton.jit
def spans_of_keys(mask, rows, i_batch, offs_m, first, last, num_queries, num_keys, BLOCK_N: tl.constexpr):
    """What `mask_tiles.key_spans` says of a block of rows, for the queries `offs_m` from `first` to `last`."""
    kept, start, stop = key_spans(mask, i_batch, first, num_queries, num_keys, last - first + 1, BLOCK_N)
    if rows.first_key is not None:
        there = offs_m < num_queries
        ptr_first = rows.first_key + i_batch * mask.stride_query + offs_m
        ptr_last = rows.last_key + i_batch * mask.stride_query + offs_m
        first_key = tl.min(tl.load(ptr_first, mask=there, other=2147483647), 0)
        last_key = tl.max(tl.load(ptr_last, mask=there, other=-1), 0)
        start = tl.maximum(start, tl.minimum(first_key, num_keys) // BLOCK_N * BLOCK_N)
        stop = tl.minimum(stop, last_key + 1)
    is_empty = last < first
    kept = tl.where(is_empty, 0, kept)
    return kept, start, tl.where(is_empty, start, tl.maximum(stop, start))
