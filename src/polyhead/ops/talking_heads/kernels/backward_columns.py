"""Column-wise backward kernel of talking heads: gradients of keys and values.

See `backward` for the formulas.

If TRANSPOSED, scores are [HEADS, BLOCK_N, BLOCK_M] and accumulators [HEADS, channels, BLOCK_N], so that both products
of a tile of queries, or of gradients, read it in the same layout. That needs at least 16 columns, the rows of a
tensor-core instruction; narrower tiles are not transposed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from polyhead.ops.common.kernels.mask_tiles import key_positions, query_positions, query_span
from polyhead.ops.common.kernels.softmax_tiles import LOG2E
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
    to_heads,
    to_pairs,
    visible_pairs,
)


@triton.jit
def _load_tile(
    ptr,
    strides,
    i_batch,
    offs,
    limit,
    num_heads,
    group,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Load tokens of every head, [HEADS, tokens, BLOCK], or [HEADS, BLOCK, tokens] if COLUMNS."""
    if COLUMNS:
        tile = columns_by_head(ptr, strides, i_batch, offs, limit, num_heads, group, DIM, BLOCK, HEADS)
    else:
        tile = rows_by_head(ptr, strides, i_batch, offs, limit, num_heads, group, DIM, BLOCK, HEADS)
    return tile


@triton.jit
def _product(tile_a, tile_b, TRANSPOSED: tl.constexpr):
    """Return a b, or b^T a^T for operands that are already transposed."""
    return batched_dot(tile_b, tile_a) if TRANSPOSED else batched_dot(tile_a, tile_b)


@triton.jit
def _transposed(tile, TRANSPOSED: tl.constexpr):
    return tl.trans(tile) if TRANSPOSED else tile


@triton.jit
def _broadcast_rows(rows, TRANSPOSED: tl.constexpr):
    """Broadcast one number per row, [HEADS, BLOCK_M], to the axes of scores."""
    return rows[:, None, :] if TRANSPOSED else rows[:, :, None]


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
    GRAD_KEY: tl.constexpr,
    GRAD_VALUE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """Store gradients of a block of keys, values or both: [batch, heads, keys, dim].

    They are per query head, before the sum over a group.
    """
    DTYPE: tl.constexpr = ptr_query.dtype.element_ty
    blocks = tl.cdiv(shape.keys, BLOCK_N)
    i_batch = tl.program_id(0) // blocks
    first_column = tl.program_id(0) % blocks * BLOCK_N
    offs_n = first_column + tl.arange(0, BLOCK_N)
    # The first and the second axis of scores.
    FIRST: tl.constexpr = BLOCK_N if TRANSPOSED else BLOCK_M
    SECOND: tl.constexpr = BLOCK_M if TRANSPOSED else BLOCK_N
    sizes_n = (shape.keys, shape.heads, shape.group)
    sizes_m = (shape.queries, shape.heads, 1)
    tile_key = _load_tile(ptr_key, strides_key, i_batch, offs_n, *sizes_n, DIM_KEY, BLOCK_KEY, HEADS, not TRANSPOSED)
    logits_mix = mix_matrix(ptr_logits_mix, False, HEADS)
    if GRAD_KEY:
        tile_value = _load_tile(
            ptr_value, strides_value, i_batch, offs_n, *sizes_n, DIM_VALUE, BLOCK_VALUE, HEADS, not TRANSPOSED
        )
        logits_mix_t = mix_matrix(ptr_logits_mix, True, HEADS)
        weights_mix_t = mix_matrix(ptr_weights_mix, True, HEADS)
        grad_key = tl.zeros([HEADS, BLOCK_KEY, BLOCK_N] if TRANSPOSED else [HEADS, BLOCK_N, BLOCK_KEY], tl.float32)
    if GRAD_VALUE:
        weights_mix = mix_matrix(ptr_weights_mix, False, HEADS)
        grad_value = tl.zeros(
            [HEADS, BLOCK_VALUE, BLOCK_N] if TRANSPOSED else [HEADS, BLOCK_N, BLOCK_VALUE], tl.float32
        )
    positions_n = key_positions(mask, i_batch, offs_n, shape.keys)
    start, stop = query_span(mask, i_batch, first_column, shape.queries, shape.keys, BLOCK_N, BLOCK_M)
    for first_row in tl.range(start, stop, BLOCK_M):
        offs_m = first_row + tl.arange(0, BLOCK_M)
        tile_query = _load_tile(
            ptr_query, strides_query, i_batch, offs_m, *sizes_m, DIM_KEY, BLOCK_KEY, HEADS, TRANSPOSED
        )
        tile_grad = _load_tile(
            ptr_grad, strides_grad, i_batch, offs_m, *sizes_m, DIM_VALUE, BLOCK_VALUE, HEADS, TRANSPOSED
        )
        logsumexp = row_logsumexp(ptr_logsumexp, i_batch, offs_m, shape, HEADS)
        positions_m = query_positions(mask, i_batch, offs_m, shape.queries)
        scores = _product(tile_query, tile_key, TRANSPOSED) * (scale * LOG2E)
        visible = _transposed(visible_pairs(mask, i_batch, offs_m, offs_n, positions_m, positions_n, shape), TRANSPOSED)
        nan_pairs = load_nan_pairs(poison, i_batch, offs_m, offs_n, shape)
        if nan_pairs is not None:
            nan_pairs = _transposed(nan_pairs, TRANSPOSED)
        logits = mixed_logits(scores, logits_mix, visible, nan_pairs, DTYPE, False)
        weights = softmax_weights(logits, _broadcast_rows(logsumexp, TRANSPOSED), visible, poison)
        if GRAD_VALUE:
            mixed_weights = to_heads(mix_heads(weights_mix, to_pairs(weights, DTYPE)).to(DTYPE), FIRST, SECOND)
            grad_value += _product(tl.permute(mixed_weights, (0, 2, 1)), tile_grad, TRANSPOSED)
        if GRAD_KEY:
            delta = row_values(ptr_delta, i_batch, offs_m, shape, 0.0, HEADS)
            grad_mixed = to_pairs(_product(tile_grad, tile_value, TRANSPOSED), DTYPE)
            grad_weights = to_heads(mix_heads(weights_mix_t, grad_mixed), FIRST, SECOND)
            grad_logits = softmax_backward(weights, grad_weights, _broadcast_rows(delta, TRANSPOSED), visible, poison)
            pairs = to_pairs(grad_logits, DTYPE)
            grad_scores = to_heads((mix_heads(logits_mix_t, pairs) * scale).to(DTYPE), FIRST, SECOND)
            grad_key += _product(tl.permute(grad_scores, (0, 2, 1)), tile_query, TRANSPOSED)
    if GRAD_KEY:
        if TRANSPOSED:
            grad_key = tl.permute(grad_key, (0, 2, 1))
        store_by_head(
            ptr_grad_key,
            strides_grad_key,
            grad_key,
            i_batch,
            offs_n,
            shape.keys,
            shape.heads,
            DIM_KEY,
            BLOCK_KEY,
            HEADS,
        )
    if GRAD_VALUE:
        if TRANSPOSED:
            grad_value = tl.permute(grad_value, (0, 2, 1))
        store_by_head(
            ptr_grad_value,
            strides_grad_value,
            grad_value,
            i_batch,
            offs_n,
            shape.keys,
            shape.heads,
            DIM_VALUE,
            BLOCK_VALUE,
            HEADS,
        )
