"""Talking heads, backward by columns: the gradients of keys and values, formulas as in `talking_backward`.

TURNED, scores are [HEADS, BLOCK_N, BLOCK_M] and sums [HEADS, channels, BLOCK_N], so that both products of a tile of
queries, or of gradients, read it as it lies. That takes 16 columns at least, the rows of a matrix unit; narrower tiles
are not turned.
"""

from __future__ import annotations

import triton
import triton.language as tl

from polyhead.ops.common.kernels.mask_tiles import key_positions, query_positions, query_span
from polyhead.ops.common.kernels.softmax_tiles import LOG2E
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
    weights_of,
)


@triton.jit
def _tile(
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
    """Some tokens of every head, [HEADS, tokens, BLOCK], or as COLUMNS [HEADS, BLOCK, tokens]."""
    if COLUMNS:
        tile = columns_by_head(ptr, strides, i_batch, offs, limit, num_heads, group, DIM, BLOCK, HEADS)
    else:
        tile = rows_by_head(ptr, strides, i_batch, offs, limit, num_heads, group, DIM, BLOCK, HEADS)
    return tile


@triton.jit
def _product(tile_a, tile_b, TURNED: tl.constexpr):
    """a b, or b^T a^T of what is already transposed."""
    return batched_dot(tile_b, tile_a) if TURNED else batched_dot(tile_a, tile_b)


@triton.jit
def _transposed(tile, TURNED: tl.constexpr):
    return tl.trans(tile) if TURNED else tile


@triton.jit
def _over_columns(rows, TURNED: tl.constexpr):
    """A number of each row, [HEADS, BLOCK_M], beside scores."""
    return rows[:, None, :] if TURNED else rows[:, :, None]


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
    TURNED: tl.constexpr,
):
    """Gradients of a block of keys and values, each or both, for every query head: [batch, heads, keys, dim]."""
    DTYPE: tl.constexpr = ptr_query.dtype.element_ty
    blocks = tl.cdiv(shape.keys, BLOCK_N)
    i_batch = tl.program_id(0) // blocks
    first_column = tl.program_id(0) % blocks * BLOCK_N
    offs_n = first_column + tl.arange(0, BLOCK_N)
    # The first and the second axis of scores.
    FIRST: tl.constexpr = BLOCK_N if TURNED else BLOCK_M
    SECOND: tl.constexpr = BLOCK_M if TURNED else BLOCK_N
    sizes_n = (shape.keys, shape.heads, shape.group)
    sizes_m = (shape.queries, shape.heads, 1)
    tile_key = _tile(ptr_key, strides_key, i_batch, offs_n, *sizes_n, DIM_KEY, BLOCK_KEY, HEADS, not TURNED)
    logits_mix = mix_matrix(ptr_logits_mix, False, HEADS)
    if OF_KEY:
        tile_value = _tile(
            ptr_value, strides_value, i_batch, offs_n, *sizes_n, DIM_VALUE, BLOCK_VALUE, HEADS, not TURNED
        )
        logits_mix_back = mix_matrix(ptr_logits_mix, True, HEADS)
        weights_mix_back = mix_matrix(ptr_weights_mix, True, HEADS)
        grad_key = tl.zeros([HEADS, BLOCK_KEY, BLOCK_N] if TURNED else [HEADS, BLOCK_N, BLOCK_KEY], tl.float32)
    if OF_VALUE:
        weights_mix = mix_matrix(ptr_weights_mix, False, HEADS)
        grad_value = tl.zeros([HEADS, BLOCK_VALUE, BLOCK_N] if TURNED else [HEADS, BLOCK_N, BLOCK_VALUE], tl.float32)
    positions_n = key_positions(mask, i_batch, offs_n, shape.keys)
    start, stop = query_span(mask, i_batch, first_column, shape.queries, shape.keys, BLOCK_N, BLOCK_M)
    for first_row in tl.range(start, stop, BLOCK_M):
        offs_m = first_row + tl.arange(0, BLOCK_M)
        tile_query = _tile(ptr_query, strides_query, i_batch, offs_m, *sizes_m, DIM_KEY, BLOCK_KEY, HEADS, TURNED)
        tile_grad = _tile(ptr_grad, strides_grad, i_batch, offs_m, *sizes_m, DIM_VALUE, BLOCK_VALUE, HEADS, TURNED)
        logsumexp = row_logsumexp(ptr_logsumexp, i_batch, offs_m, shape, HEADS)
        positions_m = query_positions(mask, i_batch, offs_m, shape.queries)
        scores = _product(tile_query, tile_key, TURNED) * (scale * LOG2E)
        visible = _transposed(seen(mask, i_batch, offs_m, offs_n, positions_m, positions_n, shape), TURNED)
        broken = broken_pairs(poison, i_batch, offs_m, offs_n, shape)
        if broken is not None:
            broken = _transposed(broken, TURNED)
        logits = mixed_logits(scores, logits_mix, visible, broken, DTYPE, False)
        weights = weights_of(logits, _over_columns(logsumexp, TURNED), visible, poison)
        if OF_VALUE:
            heads = by_head(mixed(weights_mix, by_pair(weights, DTYPE)).to(DTYPE), FIRST, SECOND)
            grad_value += _product(tl.permute(heads, (0, 2, 1)), tile_grad, TURNED)
        if OF_KEY:
            delta = row_values(ptr_delta, i_batch, offs_m, shape, 0.0, HEADS)
            grad_mixed = by_pair(_product(tile_grad, tile_value, TURNED), DTYPE)
            grad_weights = by_head(mixed(weights_mix_back, grad_mixed), FIRST, SECOND)
            grad_logits = grad_logits_of(weights, grad_weights, _over_columns(delta, TURNED), visible, poison)
            pairs = by_pair(grad_logits, DTYPE)
            grad_scores = by_head((mixed(logits_mix_back, pairs) * scale).to(DTYPE), FIRST, SECOND)
            grad_key += _product(tl.permute(grad_scores, (0, 2, 1)), tile_query, TURNED)
    if OF_KEY:
        if TURNED:
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
    if OF_VALUE:
        if TURNED:
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
