"""Talking heads, forward: one kernel for the log-sum-exp of every mixed map, one for the output; nothing of size n².

A program of the first has so many rows that there may be fewer programs than multiprocessors, and under a causal edge
the longest would be the time of all. So the keys of a block of rows are cut into parts, each a program of its own; the
second kernel puts their log-sum-exps together.
"""

from __future__ import annotations

import triton
import triton.language as tl

from polyhead.ops.common.kernels.mask_tiles import key_positions, key_spans, query_positions
from polyhead.ops.common.kernels.softmax_tiles import LN2, LOG2E
from polyhead.ops.talking_heads.kernels.tiles import (
    batched_dot,
    broken_pairs,
    by_head,
    by_pair,
    columns_by_head,
    in_powers_of_two,
    mix_matrix,
    mixed,
    mixed_logits,
    rows_by_head,
    seen,
    store_by_head,
    store_row_values,
    weights_of,
    whole_logsumexp,
)


@triton.jit
def logsumexp_kernel(
    ptr_query,
    ptr_key,
    ptr_logits_mix,
    ptr_parts,
    parts,
    stride_part,
    mask,
    poison,
    shape,
    strides_query,
    strides_key,
    scale,
    HEADS: tl.constexpr,
    DIM_KEY: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """The log-sum-exp of some rows over one part of the keys they see, float32 [parts, batch, heads, queries]."""
    DTYPE: tl.constexpr = ptr_query.dtype.element_ty
    blocks = tl.cdiv(shape.queries, BLOCK_M)
    i_part = tl.program_id(0) % parts
    i_rows = tl.program_id(0) // parts
    i_batch = i_rows // blocks
    # The last rows see the most under a causal edge, and start first.
    first_row = (blocks - 1 - i_rows % blocks) * BLOCK_M
    offs_m = first_row + tl.arange(0, BLOCK_M)
    # [HEADS, BLOCK_M, BLOCK_KEY]
    tile_query = rows_by_head(
        ptr_query, strides_query, i_batch, offs_m, shape.queries, shape.heads, 1, DIM_KEY, BLOCK_KEY, HEADS
    )
    mix = mix_matrix(ptr_logits_mix, False, HEADS)
    positions_m = query_positions(mask, i_batch, offs_m, shape.queries)
    # Two neighbouring columns share a place of their own, in the maximum as in the sum, until all is added up in the
    # end: who holds them is one thread, and nothing passes between threads for every tile.
    largest = tl.full([HEADS, BLOCK_M, BLOCK_N // 2], -1e30, tl.float32)
    total = tl.zeros([HEADS, BLOCK_M, BLOCK_N // 2], tl.float32)
    kept, start, stop = key_spans(mask, i_batch, first_row, shape.queries, shape.keys, BLOCK_M, BLOCK_N)
    steps = kept + stop - start
    length = tl.cdiv(tl.cdiv(steps, BLOCK_N), parts) * BLOCK_N
    for step in tl.range(i_part * length, tl.minimum(i_part * length + length, steps), BLOCK_N):
        offs_n = tl.where(step < kept, step, step - kept + start) + tl.arange(0, BLOCK_N)
        # [HEADS, BLOCK_KEY, BLOCK_N]
        tile_key = columns_by_head(
            ptr_key, strides_key, i_batch, offs_n, shape.keys, shape.heads, shape.group, DIM_KEY, BLOCK_KEY, HEADS
        )
        scores = batched_dot(tile_query, tile_key) * (scale * LOG2E)
        positions_n = key_positions(mask, i_batch, offs_n, shape.keys)
        visible = seen(mask, i_batch, offs_m, offs_n, positions_m, positions_n, shape)
        broken = broken_pairs(poison, i_batch, offs_m, offs_n, shape)
        logits = mixed_logits(scores, mix, visible, broken, DTYPE, SPLIT)
        logits = tl.reshape(logits, [HEADS, BLOCK_M, BLOCK_N // 2, 2])
        higher = tl.maximum(largest, tl.max(logits, 3))
        total = total * tl.exp2(largest - higher) + tl.sum(tl.exp2(logits - higher[:, :, :, None]), 3)
        largest = higher
    top = tl.max(largest, 2)
    whole = tl.sum(total * tl.exp2(largest - top[:, :, None]), 2)
    result = (top + tl.log2(tl.where(whole == 0.0, 1.0, whole))) * LN2
    result = tl.where(whole == 0.0, -float("inf"), result)
    store_row_values(ptr_parts + i_part.to(tl.int64) * stride_part, result, i_batch, offs_m, shape, HEADS)


@triton.jit
def output_kernel(
    ptr_query,
    ptr_key,
    ptr_value,
    ptr_logits_mix,
    ptr_weights_mix,
    ptr_parts,
    parts,
    stride_part,
    ptr_logsumexp,
    ptr_output,
    mask,
    poison,
    shape,
    strides_query,
    strides_key,
    strides_value,
    strides_output,
    scale,
    HEADS: tl.constexpr,
    DIM_KEY: tl.constexpr,
    DIM_VALUE: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """The output of some rows, and their log-sum-exp of all parts."""
    DTYPE: tl.constexpr = ptr_query.dtype.element_ty
    blocks = tl.cdiv(shape.queries, BLOCK_M)
    i_batch = tl.program_id(0) // blocks
    first_row = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_M
    offs_m = first_row + tl.arange(0, BLOCK_M)
    tile_query = rows_by_head(
        ptr_query, strides_query, i_batch, offs_m, shape.queries, shape.heads, 1, DIM_KEY, BLOCK_KEY, HEADS
    )
    logits_mix = mix_matrix(ptr_logits_mix, False, HEADS)
    weights_mix = mix_matrix(ptr_weights_mix, False, HEADS)
    positions_m = query_positions(mask, i_batch, offs_m, shape.queries)
    whole = whole_logsumexp(ptr_parts, parts, stride_part, i_batch, offs_m, shape, BLOCK_M, HEADS)
    store_row_values(ptr_logsumexp, whole, i_batch, offs_m, shape, HEADS)
    logsumexp = in_powers_of_two(whole)
    # [HEADS, BLOCK_M, BLOCK_VALUE]
    output = tl.zeros([HEADS, BLOCK_M, BLOCK_VALUE], tl.float32)
    kept, start, stop = key_spans(mask, i_batch, first_row, shape.queries, shape.keys, BLOCK_M, BLOCK_N)
    for step in tl.range(0, kept + stop - start, BLOCK_N):
        offs_n = tl.where(step < kept, step, step - kept + start) + tl.arange(0, BLOCK_N)
        tile_key = columns_by_head(
            ptr_key, strides_key, i_batch, offs_n, shape.keys, shape.heads, shape.group, DIM_KEY, BLOCK_KEY, HEADS
        )
        # [HEADS, BLOCK_N, BLOCK_VALUE]
        tile_value = rows_by_head(
            ptr_value,
            strides_value,
            i_batch,
            offs_n,
            shape.keys,
            shape.heads,
            shape.group,
            DIM_VALUE,
            BLOCK_VALUE,
            HEADS,
        )
        scores = batched_dot(tile_query, tile_key) * (scale * LOG2E)
        positions_n = key_positions(mask, i_batch, offs_n, shape.keys)
        visible = seen(mask, i_batch, offs_m, offs_n, positions_m, positions_n, shape)
        broken = broken_pairs(poison, i_batch, offs_m, offs_n, shape)
        logits = mixed_logits(scores, logits_mix, visible, broken, DTYPE, SPLIT)
        weights = weights_of(logits, logsumexp[:, :, None], visible, poison)
        heads = by_head(mixed(weights_mix, by_pair(weights, DTYPE)).to(DTYPE), BLOCK_M, BLOCK_N)
        output += batched_dot(heads, tile_value)
    store_by_head(
        ptr_output, strides_output, output, i_batch, offs_m, shape.queries, shape.heads, DIM_VALUE, BLOCK_VALUE, HEADS
    )
