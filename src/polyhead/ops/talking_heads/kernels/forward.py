"""Forward kernels of talking heads: one for the log-sum-exps, one for the output.

A program of the first kernel has so many rows that there may be fewer programs than multiprocessors, and under a causal
mask the longest would determine the time. So the keys of a block of rows are split into parts, one program each; the
second kernel reduces their log-sum-exps.
"""

from __future__ import annotations

import triton
import triton.language as tl

from polyhead.ops.common.kernels.mask_tiles import key_positions, key_spans, query_positions
from polyhead.ops.common.kernels.softmax_tiles import LN2, LOG2E
from polyhead.ops.talking_heads.kernels.tiles import (
    batched_dot,
    columns_by_head,
    load_nan_pairs,
    mix_heads,
    mix_matrix,
    mixed_logits,
    reduce_logsumexp,
    rows_by_head,
    softmax_weights,
    store_by_head,
    store_row_values,
    to_base_two,
    to_heads,
    to_pairs,
    visible_pairs,
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
    """Store the log-sum-exp of rows over one part of their visible keys.

    It is float32 [parts, batch, heads, queries].
    """
    DTYPE: tl.constexpr = ptr_query.dtype.element_ty
    blocks = tl.cdiv(shape.queries, BLOCK_M)
    i_part = tl.program_id(0) % parts
    i_rows = tl.program_id(0) // parts
    i_batch = i_rows // blocks
    # The last rows see the most keys under a causal mask, and start first.
    first_row = (blocks - 1 - i_rows % blocks) * BLOCK_M
    offs_m = first_row + tl.arange(0, BLOCK_M)
    # [HEADS, BLOCK_M, BLOCK_KEY]
    tile_query = rows_by_head(
        ptr_query, strides_query, i_batch, offs_m, shape.queries, shape.heads, 1, DIM_KEY, BLOCK_KEY, HEADS
    )
    mix = mix_matrix(ptr_logits_mix, False, HEADS)
    positions_m = query_positions(mask, i_batch, offs_m, shape.queries)
    # One row max and one sum per pair of neighbouring columns, reduced at the end: both columns are in one thread, so
    # no data is exchanged between threads for every tile.
    m_i = tl.full([HEADS, BLOCK_M, BLOCK_N // 2], -1e30, tl.float32)
    l_i = tl.zeros([HEADS, BLOCK_M, BLOCK_N // 2], tl.float32)
    sink_stop, start, stop = key_spans(mask, i_batch, first_row, shape.queries, shape.keys, BLOCK_M, BLOCK_N)
    steps = sink_stop + stop - start
    length = tl.cdiv(tl.cdiv(steps, BLOCK_N), parts) * BLOCK_N
    for step in tl.range(i_part * length, tl.minimum(i_part * length + length, steps), BLOCK_N):
        offs_n = tl.where(step < sink_stop, step, step - sink_stop + start) + tl.arange(0, BLOCK_N)
        # [HEADS, BLOCK_KEY, BLOCK_N]
        tile_key = columns_by_head(
            ptr_key, strides_key, i_batch, offs_n, shape.keys, shape.heads, shape.group, DIM_KEY, BLOCK_KEY, HEADS
        )
        scores = batched_dot(tile_query, tile_key) * (scale * LOG2E)
        positions_n = key_positions(mask, i_batch, offs_n, shape.keys)
        visible = visible_pairs(mask, i_batch, offs_m, offs_n, positions_m, positions_n, shape)
        nan_pairs = load_nan_pairs(poison, i_batch, offs_m, offs_n, shape)
        logits = mixed_logits(scores, mix, visible, nan_pairs, DTYPE, SPLIT)
        logits = tl.reshape(logits, [HEADS, BLOCK_M, BLOCK_N // 2, 2])
        m_new = tl.maximum(m_i, tl.max(logits, 3))
        l_i = l_i * tl.exp2(m_i - m_new) + tl.sum(tl.exp2(logits - m_new[:, :, :, None]), 3)
        m_i = m_new
    m_row = tl.max(m_i, 2)
    l_row = tl.sum(l_i * tl.exp2(m_i - m_row[:, :, None]), 2)
    result = (m_row + tl.log2(tl.where(l_row == 0.0, 1.0, l_row))) * LN2
    result = tl.where(l_row == 0.0, -float("inf"), result)
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
    """Store the output of rows, and their log-sum-exp over all parts."""
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
    lse = reduce_logsumexp(ptr_parts, parts, stride_part, i_batch, offs_m, shape, BLOCK_M, HEADS)
    store_row_values(ptr_logsumexp, lse, i_batch, offs_m, shape, HEADS)
    logsumexp = to_base_two(lse)
    # [HEADS, BLOCK_M, BLOCK_VALUE]
    acc = tl.zeros([HEADS, BLOCK_M, BLOCK_VALUE], tl.float32)
    sink_stop, start, stop = key_spans(mask, i_batch, first_row, shape.queries, shape.keys, BLOCK_M, BLOCK_N)
    for step in tl.range(0, sink_stop + stop - start, BLOCK_N):
        offs_n = tl.where(step < sink_stop, step, step - sink_stop + start) + tl.arange(0, BLOCK_N)
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
        visible = visible_pairs(mask, i_batch, offs_m, offs_n, positions_m, positions_n, shape)
        nan_pairs = load_nan_pairs(poison, i_batch, offs_m, offs_n, shape)
        logits = mixed_logits(scores, logits_mix, visible, nan_pairs, DTYPE, SPLIT)
        weights = softmax_weights(logits, logsumexp[:, :, None], visible, poison)
        mixed_weights = to_heads(mix_heads(weights_mix, to_pairs(weights, DTYPE)).to(DTYPE), BLOCK_M, BLOCK_N)
        acc += batched_dot(mixed_weights, tile_value)
    store_by_head(
        ptr_output, strides_output, acc, i_batch, offs_m, shape.queries, shape.heads, DIM_VALUE, BLOCK_VALUE, HEADS
    )
