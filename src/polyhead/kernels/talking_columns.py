"""Talking heads, backward by columns: the gradients of keys and values, formulas as in `talking_backward`.

All is turned: scores are [HEADS, BLOCK_N, BLOCK_M] and sums [HEADS, channels, BLOCK_N], so that both products of a tile
of queries, or of gradients, read it as it lies.
"""

from __future__ import annotations

import triton
import triton.language as tl

from polyhead.kernels.mask_tiles import key_positions, query_positions, query_span
from polyhead.kernels.softmax_tiles import LOG2E
from polyhead.kernels.talking_tiles import (
    batched_dot,
    broken_pairs,
    by_head,
    by_pair,
    columns_by_head,
    grad_logits_of,
    mix_matrix,
    mixed,
    mixed_logits,
    row_logsumexp,
    row_values,
    rows_by_head,
    seen,
    store_by_head,
    weights_of,
)


@triton.jit
def key_value_kernel(
    ptr_query,
    ptr_key,
    ptr_value,
    ptr_grad,
    ptr_logits_mix,
    ptr_weights_mix,
    ptr_logsumexp,
    ptr_delta,
    ptr_grad_key,
    ptr_grad_value,
    mask,
    poison,
    shape,
    strides_query,
    strides_key,
    strides_value,
    strides_grad,
    strides_grad_key,
    strides_grad_value,
    scale,
    HEADS: tl.constexpr,
    DIM_KEY: tl.constexpr,
    DIM_VALUE: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OF_KEY: tl.constexpr,
    OF_VALUE: tl.constexpr,
):
    """Gradients of a block of keys and values, each or both, for every query head: [batch, heads, keys, dim]."""
    DTYPE: tl.constexpr = ptr_query.dtype.element_ty
    blocks = tl.cdiv(shape.keys, BLOCK_N)
    i_batch = tl.program_id(0) // blocks
    first_column = tl.program_id(0) % blocks * BLOCK_N
    offs_n = first_column + tl.arange(0, BLOCK_N)
    # [HEADS, BLOCK_N, BLOCK_KEY]
    tile_key = rows_by_head(
        ptr_key, strides_key, i_batch, offs_n, shape.keys, shape.heads, shape.group, DIM_KEY, BLOCK_KEY, HEADS
    )
    logits_mix = mix_matrix(ptr_logits_mix, False, HEADS)
    if OF_KEY:
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
        logits_mix_back = mix_matrix(ptr_logits_mix, True, HEADS)
        weights_mix_back = mix_matrix(ptr_weights_mix, True, HEADS)
        grad_key = tl.zeros([HEADS, BLOCK_KEY, BLOCK_N], tl.float32)
    if OF_VALUE:
        weights_mix = mix_matrix(ptr_weights_mix, False, HEADS)
        grad_value = tl.zeros([HEADS, BLOCK_VALUE, BLOCK_N], tl.float32)
    positions_n = key_positions(mask, i_batch, offs_n, shape.keys)
    start, stop = query_span(mask, i_batch, first_column, shape.queries, shape.keys, BLOCK_N, BLOCK_M)
    for first_row in tl.range(start, stop, BLOCK_M):
        offs_m = first_row + tl.arange(0, BLOCK_M)
        # [HEADS, BLOCK_KEY, BLOCK_M] and [HEADS, BLOCK_VALUE, BLOCK_M]
        tile_query = columns_by_head(
            ptr_query, strides_query, i_batch, offs_m, shape.queries, shape.heads, 1, DIM_KEY, BLOCK_KEY, HEADS
        )
        tile_grad = columns_by_head(
            ptr_grad, strides_grad, i_batch, offs_m, shape.queries, shape.heads, 1, DIM_VALUE, BLOCK_VALUE, HEADS
        )
        logsumexp = row_logsumexp(ptr_logsumexp, i_batch, offs_m, shape, HEADS)
        positions_m = query_positions(mask, i_batch, offs_m, shape.queries)
        scores = batched_dot(tile_key, tile_query) * (scale * LOG2E)
        visible = tl.trans(seen(mask, i_batch, offs_m, offs_n, positions_m, positions_n, shape))
        broken = broken_pairs(poison, i_batch, offs_m, offs_n, shape)
        if broken is not None:
            broken = tl.trans(broken)
        logits = mixed_logits(scores, logits_mix, visible, broken, DTYPE, False)
        weights = weights_of(logits, logsumexp[:, None, :], visible, poison)
        if OF_VALUE:
            heads = by_head(mixed(weights_mix, by_pair(weights, DTYPE)).to(DTYPE), BLOCK_N, BLOCK_M)
            grad_value += batched_dot(tile_grad, tl.permute(heads, (0, 2, 1)))
        if OF_KEY:
            delta = row_values(ptr_delta, i_batch, offs_m, shape, 0.0, HEADS)
            grad_mixed = by_pair(batched_dot(tile_value, tile_grad), DTYPE)
            grad_weights = by_head(mixed(weights_mix_back, grad_mixed), BLOCK_N, BLOCK_M)
            grad_logits = grad_logits_of(weights, grad_weights, delta[:, None, :], visible, poison)
            pairs = by_pair(grad_logits, DTYPE)
            grad_scores = by_head((mixed(logits_mix_back, pairs) * scale).to(DTYPE), BLOCK_N, BLOCK_M)
            grad_key += batched_dot(tile_query, tl.permute(grad_scores, (0, 2, 1)))
    if OF_KEY:
        store_by_head(
            ptr_grad_key,
            strides_grad_key,
            tl.permute(grad_key, (0, 2, 1)),
            i_batch,
            offs_n,
            shape.keys,
            shape.heads,
            DIM_KEY,
            BLOCK_KEY,
            HEADS,
        )
    if OF_VALUE:
        store_by_head(
            ptr_grad_value,
            strides_grad_value,
            tl.permute(grad_value, (0, 2, 1)),
            i_batch,
            offs_n,
            shape.keys,
            shape.heads,
            DIM_VALUE,
            BLOCK_VALUE,
            HEADS,
        )
