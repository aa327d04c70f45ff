"""Row-wise backward kernels of talking heads: delta, and gradients of queries and mixes.

The scores are J = Q K^T (the scale is omitted here), the mixed logits L = J A, the weights W = softmax(L), the mixed
weights U = W B and the output O = U V. The mixes A and B (`logits_mix` and `weights_mix`, [heads, heads]) multiply the
heads axis of J, L, W and U; all other products, and the softmax, are per head. With dX the gradient of X:

    dU = dO V^T    dW = dU B^T    delta = sum over keys of W dW    dL = W (dW - delta)    dJ = dL A^T
    dA = J^T dL    dB = W^T dU    dQ = dJ K                        dK = dJ^T Q            dV = U^T dO

Unlike in plain attention, `delta` is not the inner product of output and gradient, because O is computed from mixed
weights; it needs a pass of its own. With X[g, h] = sum over keys of W_g dU_h for each row, delta_g is the sum of
B[g, h] X[g, h] over h, and dB the sum of X over all rows. The gradients of the mixes are sums over all (query, key)
pairs: every program stores its part, and the parts are added in a fixed order.
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
    row_logsumexp,
    row_values,
    rows_by_head,
    softmax_backward,
    softmax_weights,
    store_by_head,
    store_row_values,
    to_heads,
    to_pairs,
    visible_pairs,
)


@triton.jit
def _head_products(pairs_a, pairs_b, PARTS: tl.constexpr):
    """Return pairs_a pairs_b^T over all pairs as PARTS partial sums: float32 [PARTS, HEADS, HEADS]."""
    SIZE: tl.constexpr = pairs_a.shape[1] // PARTS
    left = tl.permute(tl.reshape(pairs_a, [pairs_a.shape[0], PARTS, SIZE]), (1, 0, 2))
    return batched_dot(left, tl.permute(tl.reshape(pairs_b, [pairs_b.shape[0], PARTS, SIZE]), (1, 2, 0)))


@triton.jit
def _store_mix(ptr, grad_mix, HEADS: tl.constexpr):
    """Store this program's part of the gradient of a mix, to [programs, HEADS, HEADS]."""
    first, second = tl.arange(0, HEADS)[:, None], tl.arange(0, HEADS)[None, :]
    base = ptr + tl.program_id(0).to(tl.int64) * HEADS * HEADS
    tl.store(base + first * HEADS + second, grad_mix)


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
    """Store delta [batch, heads, queries] and this program's part of dB; a program has BLOCK_M rows of all heads."""
    DTYPE: tl.constexpr = ptr_query.dtype.element_ty
    blocks = tl.cdiv(shape.queries, BLOCK_M)
    i_batch = tl.program_id(0) // blocks
    # The last rows see the most keys under a causal mask, and start first.
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
    # X of each row is a product over the columns of a tile, of which there must be at least 16, the depth of a
    # tensor-core instruction. With fewer columns, delta is the sum of W dW, and X is summed over rows and columns.
    BY_ROW: tl.constexpr = BLOCK_N >= 16
    if BY_ROW:
        head_products = tl.zeros([BLOCK_M, HEADS, HEADS], tl.float32)
    else:
        weights_mix_t = mix_matrix(ptr_weights_mix, True, HEADS)
        head_products = tl.zeros([PARTS, HEADS, HEADS], tl.float32)
        delta_columns = tl.zeros([HEADS, BLOCK_M, BLOCK_N], tl.float32)  # delta, reduced at the end
    sink_stop, start, stop = key_spans(mask, i_batch, first_row, shape.queries, shape.keys, BLOCK_M, BLOCK_N)
    for step in tl.range(0, sink_stop + stop - start, BLOCK_N):
        offs_n = tl.where(step < sink_stop, step, step - sink_stop + start) + tl.arange(0, BLOCK_N)
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
        visible = visible_pairs(mask, i_batch, offs_m, offs_n, positions_m, positions_n, shape)
        nan_pairs = load_nan_pairs(poison, i_batch, offs_m, offs_n, shape)
        logits = mixed_logits(scores, logits_mix, visible, nan_pairs, DTYPE, False)
        weights = softmax_weights(logits, logsumexp[:, :, None], visible, poison)
        grad_mixed = batched_dot(tile_grad, tile_value)
        if BY_ROW:
            left = tl.permute(weights.to(DTYPE), (1, 0, 2))
            head_products += batched_dot(left, tl.permute(grad_mixed.to(DTYPE), (1, 2, 0)))
        else:
            pairs = to_pairs(grad_mixed, DTYPE)
            delta_columns += weights * to_heads(mix_heads(weights_mix_t, pairs), BLOCK_M, BLOCK_N)
            head_products += _head_products(to_pairs(weights, DTYPE), pairs, PARTS)
    if BY_ROW:
        # B[g, h] itself is the transpose of the left operand.
        weights_mix = mix_matrix(ptr_weights_mix, True, HEADS).to(tl.float32)
        delta = tl.trans(tl.sum(head_products * weights_mix[None, :, :], 2))
    else:
        delta = tl.sum(delta_columns, 2)
    store_row_values(ptr_delta, delta, i_batch, offs_m, shape, HEADS)
    _store_mix(ptr_grad_weights_mix, tl.sum(head_products, 0), HEADS)


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
    """Store dQ of BLOCK_M rows of all heads, and this program's part of dA."""
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
    logits_mix_t = mix_matrix(ptr_logits_mix, True, HEADS)
    weights_mix_t = mix_matrix(ptr_weights_mix, True, HEADS)
    positions_m = query_positions(mask, i_batch, offs_m, shape.queries)
    logsumexp = row_logsumexp(ptr_logsumexp, i_batch, offs_m, shape, HEADS)
    delta = row_values(ptr_delta, i_batch, offs_m, shape, 0.0, HEADS)
    # Transposed, so that both products read the same tile of keys: [HEADS, BLOCK_KEY, BLOCK_M].
    grad_query = tl.zeros([HEADS, BLOCK_KEY, BLOCK_M], tl.float32)
    grad_mix = tl.zeros([PARTS, HEADS, HEADS], tl.float32)
    sink_stop, start, stop = key_spans(mask, i_batch, first_row, shape.queries, shape.keys, BLOCK_M, BLOCK_N)
    for step in tl.range(0, sink_stop + stop - start, BLOCK_N):
        offs_n = tl.where(step < sink_stop, step, step - sink_stop + start) + tl.arange(0, BLOCK_N)
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
        visible = visible_pairs(mask, i_batch, offs_m, offs_n, positions_m, positions_n, shape)
        nan_pairs = load_nan_pairs(poison, i_batch, offs_m, offs_n, shape)
        logits = mixed_logits(scores, logits_mix, visible, nan_pairs, DTYPE, False)
        weights = softmax_weights(logits, logsumexp[:, :, None], visible, poison)
        grad_mixed = to_pairs(batched_dot(tile_grad, tile_value), DTYPE)
        grad_weights = to_heads(mix_heads(weights_mix_t, grad_mixed), BLOCK_M, BLOCK_N)
        grad_logits = softmax_backward(weights, grad_weights, delta[:, :, None], visible, poison)
        pairs = to_pairs(grad_logits, DTYPE)
        grad_mix += _head_products(to_pairs(scores, DTYPE), pairs, PARTS)
        grad_scores = to_heads((mix_heads(logits_mix_t, pairs) * scale).to(DTYPE), BLOCK_M, BLOCK_N)
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
    _store_mix(ptr_grad_logits_mix, tl.sum(grad_mix, 0) * LN2, HEADS)  # the scores include log2(e)
