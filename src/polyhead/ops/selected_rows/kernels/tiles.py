"""Row lookup for the kernels of selected rows: the rows of a program and the keys visible to them.

All functions here are inlined into kernels. Rows of one (batch, head) pair are adjacent and ascending, so they are
found by a search; it reads WIDTH elements at once and rarely needs more than two steps.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from polyhead.ops.common.kernels.mask_tiles import key_spans

WIDTH = tl.constexpr(128)


class Rows(NamedTuple):
    """Selected rows as kernels read them.

    `first_key` and `last_key` are moved here from `MaskArguments`, where `key_spans` would read them for consecutive
    queries.
    """

    positions: Tensor  # int32 [total]: query index of a row
    offsets: Tensor  # int32 [pairs + 1]
    first_key: Tensor | None
    last_key: Tensor | None
    total: int
    pairs: int
    batch: int
    heads: int
    BY_HEAD: tl.constexpr  # pair i is head * batch + batch index instead of batch index * heads + head


@triton.jit
def find_rows(rows, i_program, BLOCK_M: tl.constexpr):
    """Return the pair of a program, its first row and the end of the pair's rows.

    Pair `pairs` is the padding.

    Pair i has the programs from offsets[i] // BLOCK_M + i on. These are never too few and at most one too many, and
    need no sum over the previous pairs. A surplus program has its first row at the end of the pair or after it.
    """
    low, high = i_program * 0, rows.pairs + i_program * 0
    while low < high:
        step = tl.cdiv(high - low, WIDTH)
        # [WIDTH]
        offs = low + step * (1 + tl.arange(0, WIDTH))
        mask_row = offs <= high
        begin = tl.load(rows.offsets + offs, mask=mask_row, other=0) // BLOCK_M + offs
        low += step * tl.sum((mask_row & (begin <= i_program)).to(tl.int32), 0)
        high = tl.minimum(low + step - 1, high)
    start = tl.load(rows.offsets + low)
    stop = tl.load(rows.offsets + low + 1, mask=low < rows.pairs, other=rows.total)
    return low, start + (i_program - (start // BLOCK_M + low)) * BLOCK_M, stop


@triton.jit
def sequence_and_head(rows, i_pair):
    """Return the batch index and the head of a pair."""
    if rows.BY_HEAD:
        i_batch, i_head = i_pair % rows.batch, i_pair // rows.batch
    else:
        i_batch, i_head = i_pair // rows.heads, i_pair % rows.heads
    return i_batch, i_head


@triton.jit
def pair_of(rows, i_batch, i_head):
    """Return the index of a pair."""
    if rows.BY_HEAD:
        i_pair = i_head * rows.batch + i_batch
    else:
        i_pair = i_batch * rows.heads + i_head
    return i_pair


@triton.jit
def first_from(rows, start, stop, query):
    """Return the first row in `start` to `stop` with a query index >= `query`; `stop` if none.

    The rows belong to one pair.
    """
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
def load_queries(rows, offs_row, stop, num_queries):
    """Load the query indices of rows, int32 [BLOCK_M].

    Rows from `stop` on get `num_queries`, for which no key is visible.
    """
    return tl.load(rows.positions + offs_row, mask=offs_row < stop, other=num_queries)


@triton.jit
def first_and_last(offs_m, num_queries):
    """Return the first and the last query of a tile; last < first if there is none."""
    return tl.min(offs_m, 0), tl.max(tl.where(offs_m < num_queries, offs_m, -1), 0)


@triton.jit
def visible_keys_span(mask, rows, i_batch, offs_m, first, last, num_queries, num_keys, BLOCK_N: tl.constexpr):
    """Return `mask_tiles.key_spans` for the queries `offs_m` from `first` to `last`."""
    sink_stop, start, stop = key_spans(mask, i_batch, first, num_queries, num_keys, last - first + 1, BLOCK_N)
    if rows.first_key is not None:
        mask_row = offs_m < num_queries
        ptr_first = rows.first_key + i_batch * mask.stride_query + offs_m
        ptr_last = rows.last_key + i_batch * mask.stride_query + offs_m
        first_key = tl.min(tl.load(ptr_first, mask=mask_row, other=2147483647), 0)
        last_key = tl.max(tl.load(ptr_last, mask=mask_row, other=-1), 0)
        start = tl.maximum(start, tl.minimum(first_key, num_keys) // BLOCK_N * BLOCK_N)
        stop = tl.minimum(stop, last_key + 1)
    is_empty = last < first
    sink_stop = tl.where(is_empty, 0, sink_stop)
    return sink_stop, start, tl.where(is_empty, start, tl.maximum(stop, start))
