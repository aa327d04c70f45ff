"""Talking heads, backward by rows: what each softmax subtracts, and the gradients of queries and of both mixes.

With scores J, mixed logits L, weights W = softmax(L), mixed weights U, and dX the gradient of X:

    dU = dO V^T    dW = dU B^T    delta = sum over keys of W dW    dL = W (dW - delta)    dJ = dL A^T
    dA = J^T dL    dB = W^T dU    dQ = dJ K                        dK = dJ^T Q            dV = U^T dO

Unlike in plain attention `delta` is no product of output and gradient, because O holds mixed weights; a pass finds it.
It takes X[g, h] = sum over keys of W_g dU_h for each row: delta_g is the sum of B[g, h] X[g, h] over h, and dB the sum
of X over all rows. The gradients of the mixes are sums over all pairs: every program leaves its own, which are then
added in one order.
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
    grad_logits_of,
    mix_matrix,
    mixed,
    mixed_logits,
    row_logsumexp,
    row_values,
    rows_by_head,
    seen,
    store_by_head,
    store_row_values,
    weights_of,
)


@triton.jit
def _crossed(pairs_a, pairs_b, PARTS: tl.constexpr):
    """pairs_a pairs_b^T over all pairs, in PARTS sums that are apart: float32 [PARTS, HEADS, HEADS]."""
    SIZE: tl.constexpr = pairs_a.shape[1] // PARTS
    left = tl.permute(tl.reshape(pairs_a, [pairs_a.shape[0], PARTS, SIZE]), (1, 0, 2))
    return batched_dot(left, tl.permute(tl.reshape(pairs_b, [pairs_b.shape[0], PARTS, SIZE]), (1, 2, 0)))


@triton.jit
def _store_mix(ptr, share, HEADS: tl.constexpr):
    """This program's share of the gradient of a mix, to [programs, HEADS, HEADS]."""
    first, second = tl.arange(0, HEADS)[:, None], tl.arange(0, HEADS)[None, :]
    base = ptr + tl.program_id(0).to(tl.int64) * HEADS * HEADS
    tl.store(base + first * HEADS + second, share)


@triton.jit
def delta_kernel(
    ptr_query,
    ptr_key,
    ptr_value,
    ptr_grad,
    ptr_logits_mix,
    ptr_weights_mix,
    ptr_logsumexp,
    ptr_delta,
    ptr_grad_weights_mix,
    mask,
    poison,
    shape,
    strides_query,
    strides_key,
    strides_value,
    strides_grad,
    scale,
    HEADS: tl.constexpr,
    DIM_KEY: tl.constexpr,
    DIM_VALUE: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
):
    DTYPE: tl.constexpr = ptr_query.dtype.element_ty
    blocks = tl.cdiv(shape.queries, BLOCK_M)
    i_batch = tl.program_id(0) // blocks
    first_row = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_M
    offs_m = first_row + tl.arange(0, BLOCK_M)
    tile_query = rows_by_head(
        ptr_query, strides_query, i_batch, offs_m, shape.queries, shape.heads, 1, DIM_KEY, BLOCK_KEY, HEADS
    )
    tile_grad = rows_by_head(
        ptr_grad, strides_grad, i_batch, offs_m, shape.queries, shape.heads, 1, DIM_VALUE, BLOCK_VALUE, HEADS
    )
    logits_mix = mix_matrix(ptr_logits_mix, False, HEADS)
    positions_m = query_positions(mask, i_batch, offs_m, shape.queries)
    logsumexp = row_logsumexp(ptr_logsumexp, i_batch, offs_m, shape, HEADS)
    # Crossing the heads of each row takes 16 columns at least, the depth of a matrix unit; with fewer the gradient is
    # mixed back, and heads are crossed over all pairs.
    BY_ROW: tl.constexpr = BLOCK_N >= 16
    if BY_ROW:
        crossed = tl.zeros([BLOCK_M, HEADS, HEADS], tl.float32)
    else:
        weights_mix_back = mix_matrix(ptr_weights_mix, True, HEADS)
        crossed = tl.zeros([PARTS, HEADS, HEADS], tl.float32)
        by_column = tl.zeros([HEADS, BLOCK_M, BLOCK_N], tl.float32)  # delta, apart until the end
    kept, start, stop = key_spans(mask, i_batch, first_row, shape.queries, shape.keys, BLOCK_M, BLOCK_N)
    for step in tl.range(0, kept + stop - start, BLOCK_N):
        offs_n = tl.where(step < kept, step, step - kept + start) + tl.arange(0, BLOCK_N)
        tile_key = columns_by_head(
            ptr_key, strides_key, i_batch, offs_n, shape.keys, shape.heads, shape.group, DIM_KEY, BLOCK_KEY, HEADS
        )
        tile_value = columns_by_head(
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
        logits = mixed_logits(scores, logits_mix, visible, broken, DTYPE, False)
        weights = weights_of(logits, logsumexp[:, :, None], visible, poison)
        grad_mixed = batched_dot(tile_grad, tile_value)
        if BY_ROW:
            left = tl.permute(weights.to(DTYPE), (1, 0, 2))
            crossed += batched_dot(left, tl.permute(grad_mixed.to(DTYPE), (1, 2, 0)))
        else:
            pairs = by_pair(grad_mixed, DTYPE)
            by_column += weights * by_head(mixed(weights_mix_back, pairs), BLOCK_M, BLOCK_N)
            crossed += _crossed(by_pair(weights, DTYPE), pairs, PARTS)
    if BY_ROW:
        weights_mix = mix_matrix(ptr_weights_mix, True, HEADS).to(tl.float32)
        delta = tl.trans(tl.sum(crossed * weights_mix[None, :, :], 2))
    else:
        delta = tl.sum(by_column, 2)
    store_row_values(ptr_delta, delta, i_batch, offs_m, shape, HEADS)
    _store_mix(ptr_grad_weights_mix, tl.sum(crossed, 0), HEADS)


@triton.jit
def query_kernel(
    ptr_query,
    ptr_key,
    ptr_value,
    ptr_grad,
    ptr_logits_mix,
    ptr_weights_mix,
    ptr_logsumexp,
    ptr_delta,
    ptr_grad_query,
    ptr_grad_logits_mix,
    mask,
    poison,
    shape,
    strides_query,
    strides_key,
    strides_value,
    strides_grad,
    strides_grad_query,
    scale,
    HEADS: tl.constexpr,
    DIM_KEY: tl.constexpr,
    DIM_VALUE: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
):
    DTYPE: tl.constexpr = ptr_query.dtype.element_ty
    blocks = tl.cdiv(shape.queries, BLOCK_M)
    i_batch = tl.program_id(0) // blocks
    first_row = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_M
    offs_m = first_row + tl.arange(0, BLOCK_M)
    tile_query = rows_by_head(
        ptr_query, strides_query, i_batch, offs_m, shape.queries, shape.heads, 1, DIM_KEY, BLOCK_KEY, HEADS
    )
    tile_grad = rows_by_head(
        ptr_grad, strides_grad, i_batch, offs_m, shape.queries, shape.heads, 1, DIM_VALUE, BLOCK_VALUE, HEADS
    )
    logits_mix = mix_matrix(ptr_logits_mix, False, HEADS)
    logits_mix_back = mix_matrix(ptr_logits_mix, True, HEADS)
    weights_mix_back = mix_matrix(ptr_weights_mix, True, HEADS)
    positions_m = query_positions(mask, i_batch, offs_m, shape.queries)
    logsumexp = row_logsumexp(ptr_logsumexp, i_batch, offs_m, shape, HEADS)
    delta = row_values(ptr_delta, i_batch, offs_m, shape, 0.0, HEADS)
    # Turned, so that both products read one and the same tile of keys: [HEADS, BLOCK_KEY, BLOCK_M].
    grad_query = tl.zeros([HEADS, BLOCK_KEY, BLOCK_M], tl.float32)
    grad_mix = tl.zeros([PARTS, HEADS, HEADS], tl.float32)
    kept, start, stop = key_spans(mask, i_batch, first_row, shape.queries, shape.keys, BLOCK_M, BLOCK_N)
    for step in tl.range(0, kept + stop - start, BLOCK_N):
        offs_n = tl.where(step < kept, step, step - kept + start) + tl.arange(0, BLOCK_N)
        tile_key = columns_by_head(
            ptr_key, strides_key, i_batch, offs_n, shape.keys, shape.heads, shape.group, DIM_KEY, BLOCK_KEY, HEADS
        )
        tile_value = columns_by_head(
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
        logits = mixed_logits(scores, logits_mix, visible, broken, DTYPE, False)
        weights = weights_of(logits, logsumexp[:, :, None], visible, poison)
        grad_mixed = by_pair(batched_dot(tile_grad, tile_value), DTYPE)
        grad_weights = by_head(mixed(weights_mix_back, grad_mixed), BLOCK_M, BLOCK_N)
        grad_logits = grad_logits_of(weights, grad_weights, delta[:, :, None], visible, poison)
        pairs = by_pair(grad_logits, DTYPE)
        grad_mix += _crossed(by_pair(scores, DTYPE), pairs, PARTS)
        grad_scores = by_head((mixed(logits_mix_back, pairs) * scale).to(DTYPE), BLOCK_M, BLOCK_N)
        grad_query += batched_dot(tile_key, tl.permute(grad_scores, (0, 2, 1)))
    store_by_head(
        ptr_grad_query,
        strides_grad_query,
        tl.permute(grad_query, (0, 2, 1)),
        i_batch,
        offs_m,
        shape.queries,
        shape.heads,
        DIM_KEY,
        BLOCK_KEY,
        HEADS,
    )
    _store_mix(ptr_grad_logits_mix, tl.sum(grad_mix, 0) * LN2, HEADS)  # the scores are in powers of two
