"""Mask functions for kernels: visible keys, positions, additive bias, loop bounds and dropout.

All functions here are inlined into kernels. `mask` is a `MaskArguments`; absent terms compile to nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def query_positions(mask, i_batch, offs_m, num_queries):
    """Return the positions of the rows, int32 [BLOCK_M]."""
    if mask.query_position is None:
        positions = offs_m + mask.offset
    else:
        positions = tl.load(
            mask.query_position + i_batch * mask.stride_query + offs_m, mask=offs_m < num_queries, other=0
        )
    return positions


@triton.jit
def key_positions(mask, i_batch, offs_n, num_keys):
    """Return the positions of the columns, int32 [BLOCK_N]."""
    if mask.key_position is None:
        positions = offs_n
    else:
        positions = tl.load(mask.key_position + i_batch * mask.stride_key + offs_n, mask=offs_n < num_keys, other=0)
    return positions


@triton.jit
def key_ordinals(mask, i_batch, offs_n, num_keys):
    """Return each column's index among the real keys of its sequence, int32 [BLOCK_N]."""
    if mask.key_ordinal is None:
        ordinals = offs_n
    else:
        ordinals = tl.load(mask.key_ordinal + i_batch * mask.stride_key + offs_n, mask=offs_n < num_keys, other=0)
    return ordinals


@triton.jit
def visible_tile(mask, i_batch, i_head, offs_m, offs_n, distance, num_queries, num_keys):
    """Return the visible pairs, boolean [BLOCK_M, BLOCK_N]; `distance` is key minus query position.

    Pairs past the end of queries or keys are not visible.
    """
    visible = (offs_m < num_queries)[:, None] & (offs_n < num_keys)[None, :]
    if mask.left is not None:
        near = distance >= -mask.left
        if mask.sinks is not None:
            near = near | (key_ordinals(mask, i_batch, offs_n, num_keys) < mask.sinks)[None, :]
        visible = visible & near
    if mask.right is not None:
        visible = visible & (distance <= mask.right)
    if mask.query_document is not None:
        ptr_query = mask.query_document + i_batch * mask.stride_query
        ptr_key = mask.key_document + i_batch * mask.stride_key
        query_document = tl.load(ptr_query + offs_m, mask=offs_m < num_queries, other=-1)
        key_document = tl.load(ptr_key + offs_n, mask=offs_n < num_keys, other=-2)
        visible = visible & (query_document[:, None] == key_document[None, :])
    if mask.allowed is not None:
        base = mask.allowed + i_batch.to(tl.int64) * mask.allowed_batch + i_head.to(tl.int64) * mask.allowed_head
        offs = offs_m.to(tl.int64)[:, None] * mask.allowed_query + offs_n.to(tl.int64)[None, :] * mask.allowed_key
        visible = visible & (tl.load(base + offs, mask=visible, other=0) != 0)
    if mask.bias is not None:
        visible = visible & (_load_bias(mask, i_batch, i_head, offs_m, offs_n, visible) != -float("inf"))
    return visible


@triton.jit
def added_tile(mask, i_batch, i_head, offs_m, offs_n, distance, visible):
    """Return the additive bias of visible pairs, float32 [BLOCK_M, BLOCK_N]."""
    bias = tl.zeros_like(distance).to(tl.float32)
    if mask.bias is not None:
        bias += _load_bias(mask, i_batch, i_head, offs_m, offs_n, visible)
    if mask.table is not None:
        column = tl.minimum(tl.maximum(distance + mask.table_zero, 0), mask.table_width - 1)
        base = mask.table + i_head.to(tl.int64) * mask.table_head
        bias += tl.load(base + column, mask=visible, other=0.0).to(tl.float32)
    return bias


@triton.jit
def _load_bias(mask, i_batch, i_head, offs_m, offs_n, visible):
    base = mask.bias + i_batch.to(tl.int64) * mask.bias_batch + i_head.to(tl.int64) * mask.bias_head
    offs = offs_m.to(tl.int64)[:, None] * mask.bias_query + offs_n.to(tl.int64)[None, :] * mask.bias_key
    return tl.load(base + offs, mask=visible, other=0.0).to(tl.float32)


@triton.jit
def key_spans(mask, i_batch, first_row, num_queries, num_keys, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the columns that a block of rows may see: from 0 to `sink_stop`, and from `start` to `stop`.

    `sink_stop` is 0 unless a window has attention sinks. `sink_stop` and `start` are multiples of BLOCK_N, and
    sink_stop <= start <= stop (stop is not rounded).
    """
    start, stop, sink_stop = 0, num_keys, 0
    last_row = tl.minimum(first_row + BLOCK_M, num_queries) - 1
    if mask.query_position is None:
        if mask.right is not None:
            stop = tl.minimum(stop, last_row + mask.offset + mask.right + 1)
        if mask.left is not None:
            start = tl.maximum(start, first_row + mask.offset - mask.left)
            if mask.sinks is not None:
                if mask.key_ordinal is None:
                    sink_stop = tl.minimum(mask.sinks, stop)
                else:
                    start = 0
    if mask.first_key is not None:
        offs = first_row + tl.arange(0, BLOCK_M)
        ptr_first = mask.first_key + i_batch * mask.stride_query + offs
        ptr_last = mask.last_key + i_batch * mask.stride_query + offs
        first = tl.min(tl.load(ptr_first, mask=offs < num_queries, other=2147483647), 0)
        start = tl.maximum(start, tl.minimum(first, num_keys))
        stop = tl.minimum(stop, tl.max(tl.load(ptr_last, mask=offs < num_queries, other=-1), 0) + 1)
    start = tl.maximum(start // BLOCK_N, 0) * BLOCK_N
    sink_stop = tl.minimum(tl.cdiv(tl.maximum(sink_stop, 0), BLOCK_N) * BLOCK_N, start)
    return sink_stop, start, tl.maximum(stop, start)


@triton.jit
def full_key_span(mask, i_batch, first_row, num_queries, num_keys, BLOCK_M: tl.constexpr):
    """Return the columns that documents and dense terms show to every row of a block: from `start` to `stop`."""
    offs = first_row + tl.arange(0, BLOCK_M)
    ptr_full = mask.full_key + i_batch * mask.stride_query + offs
    ptr_last = mask.last_key + i_batch * mask.stride_query + offs
    start = tl.max(tl.load(ptr_full, mask=offs < num_queries, other=0), 0)
    stop = tl.min(tl.load(ptr_last, mask=offs < num_queries, other=num_keys - 1), 0) + 1
    return tl.minimum(start, num_keys), stop


@triton.jit
def full_query_span(mask, i_batch, first_column, num_queries, num_keys, BLOCK_N: tl.constexpr):
    """Return the rows that see every column of a block in documents and dense terms: from `start` to `stop`."""
    offs = first_column + tl.arange(0, BLOCK_N)
    ptr_full = mask.full_query + i_batch * mask.stride_key + offs
    ptr_last = mask.last_query + i_batch * mask.stride_key + offs
    start = tl.max(tl.load(ptr_full, mask=offs < num_keys, other=0), 0)
    stop = tl.min(tl.load(ptr_last, mask=offs < num_keys, other=num_queries - 1), 0) + 1
    return tl.minimum(start, num_queries), stop


@triton.jit
def query_span(mask, i_batch, first_column, num_queries, num_keys, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the rows that may see a block of columns: from `start`, a multiple of BLOCK_M, to `stop`."""
    start, stop = 0, num_queries
    last_column = tl.minimum(first_column + BLOCK_N, num_keys) - 1
    if mask.query_position is None:
        if mask.right is not None:
            start = tl.maximum(start, first_column - mask.right - mask.offset)
        if mask.left is not None:
            sees_all = False
            if mask.sinks is not None:
                if mask.key_ordinal is None:
                    sees_all = first_column < mask.sinks
                else:
                    sees_all = True
            stop = tl.where(sees_all, stop, tl.minimum(stop, last_column + mask.left - mask.offset + 1))
    if mask.first_query is not None:
        offs = first_column + tl.arange(0, BLOCK_N)
        ptr_first = mask.first_query + i_batch * mask.stride_key + offs
        ptr_last = mask.last_query + i_batch * mask.stride_key + offs
        first = tl.min(tl.load(ptr_first, mask=offs < num_keys, other=2147483647), 0)
        start = tl.maximum(start, tl.minimum(first, num_queries))
        stop = tl.minimum(stop, tl.max(tl.load(ptr_last, mask=offs < num_keys, other=-1), 0) + 1)
    start = start // BLOCK_M * BLOCK_M
    return start, tl.maximum(stop, start)


@triton.jit
def _scramble(x):
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def keep_tile(ptr_seed, threshold, i_pair, offs_m, offs_n):
    """Return the dropout mask (True: keep), boolean [BLOCK_M, BLOCK_N].

    Bit for bit that of `polyhead.ops.common.dropout.keep_tile`. `threshold` is round(rate * 2**24) and `i_pair` is
    batch * heads + head.
    """
    seed = tl.load(ptr_seed).to(tl.int64)
    low, high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    stream = _scramble(_scramble(low ^ i_pair.to(tl.uint32)) + high)
    golden = 0x9E3779B9
    row = _scramble(stream + (offs_m.to(tl.int64) * golden).to(tl.uint32))
    column = _scramble((offs_n.to(tl.int64) * golden + 1).to(tl.uint32))
    bits = _scramble(row[:, None] + column[None, :])
    return (bits >> 8).to(tl.int32) >= threshold
