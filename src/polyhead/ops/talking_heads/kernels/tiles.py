"""Tiles of talking heads: a program processes all heads at once, so that mixing is a product.

A tile of logits or weights is [HEADS, BLOCK_M, BLOCK_N] for products with queries, keys and values, head by head, and
[HEADS, pairs] where heads are mixed, from the left; the reshape between the two moves no data. HEADS is a power of two
of at least 16; padding heads are zeros, in every tensor and in both mixes. Logits are in base 2: they include a factor
of log2(e), and an exponential is `exp2`.

Functions here are inlined into kernels.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from polyhead.ops.common.kernels.mask_tiles import visible_tile
from polyhead.ops.common.kernels.softmax_tiles import LOG2E


class Shape(NamedTuple):
    """Sizes of one call."""

    heads: int
    group: int  # query heads that share one head of keys and values
    queries: int
    keys: int


class Poison(NamedTuple):
    """NaN for tokens whose NaN or Inf was removed, 0 for others; None if all are known to be finite."""

    query: Tensor | None  # float32 [batch, queries]
    key: Tensor | None  # float32 [batch, keys]


@triton.jit
def rows_by_head(
    ptr, strides, i_batch, offs_m, limit, num_heads, group, DIM: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr
):
    """Load tokens of every head, [HEADS, tokens, BLOCK]; `group` heads share a KV head.

    Elements out of bounds are zeros.
    """
    offs_h = tl.arange(0, HEADS)[:, None, None]
    offs_d = tl.arange(0, BLOCK)[None, None, :]
    offs = i_batch.to(tl.int64) * strides[0] + (offs_h // group).to(tl.int64) * strides[1]
    offs = offs + offs_m.to(tl.int64)[None, :, None] * strides[2] + offs_d
    mask_tile = (offs_h < num_heads) & (offs_m < limit)[None, :, None] & (offs_d < DIM)
    return tl.load(ptr + offs, mask=mask_tile, other=0.0)


@triton.jit
def columns_by_head(
    ptr, strides, i_batch, offs_n, limit, num_heads, group, DIM: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr
):
    """Load the transpose of `rows_by_head`, [HEADS, BLOCK, tokens]."""
    offs_h = tl.arange(0, HEADS)[:, None, None]
    offs_d = tl.arange(0, BLOCK)[None, :, None]
    offs = i_batch.to(tl.int64) * strides[0] + (offs_h // group).to(tl.int64) * strides[1]
    offs = offs + offs_n.to(tl.int64)[None, None, :] * strides[2] + offs_d
    mask_tile = (offs_h < num_heads) & (offs_n < limit)[None, None, :] & (offs_d < DIM)
    return tl.load(ptr + offs, mask=mask_tile, other=0.0)


@triton.jit
def store_by_head(
    ptr, strides, tile, i_batch, offs_m, limit, num_heads, DIM: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr
):
    """Write [HEADS, tokens, BLOCK] to [batch, heads, tokens, dim]."""
    offs_h = tl.arange(0, HEADS)[:, None, None]
    offs_d = tl.arange(0, BLOCK)[None, None, :]
    offs = i_batch.to(tl.int64) * strides[0] + offs_h.to(tl.int64) * strides[1]
    offs = offs + offs_m.to(tl.int64)[None, :, None] * strides[2] + offs_d
    mask_tile = (offs_h < num_heads) & (offs_m < limit)[None, :, None] & (offs_d < DIM)
    tl.store(ptr + offs, tile.to(ptr.dtype.element_ty), mask=mask_tile)


@triton.jit
def row_values(ptr, i_batch, offs_m, shape, other, HEADS: tl.constexpr):
    """Load one number per row from [batch, heads, queries], as [HEADS, rows]."""
    offs_h = tl.arange(0, HEADS)[:, None]
    offs = (i_batch * shape.heads + offs_h).to(tl.int64) * shape.queries + offs_m[None, :]
    mask_tile = (offs_h < shape.heads) & (offs_m < shape.queries)[None, :]
    return tl.load(ptr + offs, mask=mask_tile, other=other)


@triton.jit
def row_logsumexp(ptr, i_batch, offs_m, shape, HEADS: tl.constexpr):
    """Load the log-sum-exp of rows in base 2, 0 for rows without visible keys: [HEADS, rows]."""
    return to_base_two(row_values(ptr, i_batch, offs_m, shape, 0.0, HEADS))


@triton.jit
def to_base_two(logsumexp):
    """Convert a log-sum-exp to base 2, with 0 for rows without visible keys."""
    return tl.where(logsumexp == -float("inf"), 0.0, logsumexp * LOG2E)


@triton.jit
def reduce_logsumexp(ptr_parts, parts, stride_part, i_batch, offs_m, shape, BLOCK_M: tl.constexpr, HEADS: tl.constexpr):
    """Reduce the log-sum-exps of parts of the keys, [HEADS, rows]; -inf for rows without visible keys."""
    # Two passes instead of a running sum: a single part is returned unchanged.
    m_i = tl.full([HEADS, BLOCK_M], -float("inf"), tl.float32)
    for i_part in range(parts):
        ptr = ptr_parts + i_part * stride_part
        m_i = tl.maximum(m_i, row_values(ptr, i_batch, offs_m, shape, 0.0, HEADS))
    m_i = tl.where(m_i == -float("inf"), 0.0, m_i)
    l_i = tl.zeros([HEADS, BLOCK_M], tl.float32)
    for i_part in range(parts):
        ptr = ptr_parts + i_part * stride_part
        l_i += tl.exp(row_values(ptr, i_batch, offs_m, shape, 0.0, HEADS) - m_i)
    return m_i + tl.log(l_i)


@triton.jit
def store_row_values(ptr, tile, i_batch, offs_m, shape, HEADS: tl.constexpr):
    offs_h = tl.arange(0, HEADS)[:, None]
    offs = (i_batch * shape.heads + offs_h).to(tl.int64) * shape.queries + offs_m[None, :]
    tl.store(ptr + offs, tile, mask=(offs_h < shape.heads) & (offs_m < shape.queries)[None, :])


@triton.jit
def mix_matrix(ptr, TRANSPOSED: tl.constexpr, HEADS: tl.constexpr):
    """Load the left operand that mixes heads by [HEADS, HEADS] (first axis to second), or its transpose."""
    first, second = tl.arange(0, HEADS)[:, None], tl.arange(0, HEADS)[None, :]
    if TRANSPOSED:
        offs = first * HEADS + second
    else:
        offs = second * HEADS + first
    return tl.load(ptr + offs)


@triton.jit
def batched_dot(tile_a, tile_b):
    """Return [HEADS, m, k] @ [HEADS, k, n], batched over heads, float32."""
    return tl.dot(tile_a, tile_b, input_precision="ieee")


@triton.jit
def to_pairs(tile, DTYPE: tl.constexpr):
    """Reshape [HEADS, BLOCK_M, BLOCK_N] to [HEADS, pairs], rounded to the dtype of the next product."""
    return tl.reshape(tile.to(DTYPE), [tile.shape[0], tile.shape[1] * tile.shape[2]])


@triton.jit
def to_heads(pairs, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Reshape [HEADS, pairs] back to [HEADS, BLOCK_M, BLOCK_N]."""
    return tl.reshape(pairs, [pairs.shape[0], BLOCK_M, BLOCK_N])


@triton.jit
def mix_heads(mix, pairs):
    """Return [HEADS, HEADS] @ [HEADS, pairs], float32."""
    return tl.dot(mix, pairs, input_precision="ieee")


@triton.jit
def mixed_logits(tile_scores, mix, visible, nan_pairs, DTYPE: tl.constexpr, SPLIT: tl.constexpr):
    """Return the logits of every softmax, float32 in the shape of the scores.

    They are -inf where masked; `nan_pairs` is added if not None.

    SPLIT also mixes the residual of rounding the scores to 16 bits, for accurate logits.
    """
    logits = mix_heads(mix, to_pairs(tile_scores, DTYPE))
    if SPLIT:
        logits += mix_heads(mix, to_pairs(tile_scores - tile_scores.to(DTYPE).to(tl.float32), DTYPE))
    logits = to_heads(logits, tile_scores.shape[1], tile_scores.shape[2])
    if nan_pairs is not None:
        logits += nan_pairs[None, :, :]
    return tl.where(visible[None, :, :], logits, -float("inf"))


@triton.jit
def load_nan_pairs(poison, i_batch, offs_m, offs_n, shape):
    """Load the NaN flags of pairs, [BLOCK_M, BLOCK_N] for all heads, or None.

    NaN for rows and columns that had NaN or Inf, else 0.
    """
    nan_pairs = None
    if poison.key is not None:
        ptr = poison.key + i_batch.to(tl.int64) * shape.keys + offs_n
        nan_pairs = tl.load(ptr, mask=offs_n < shape.keys, other=0.0)[None, :]
    if poison.query is not None:
        ptr = poison.query + i_batch.to(tl.int64) * shape.queries + offs_m
        nan_rows = tl.load(ptr, mask=offs_m < shape.queries, other=0.0)[:, None]
        nan_pairs = nan_rows if nan_pairs is None else nan_pairs + nan_rows
    return nan_pairs


@triton.jit
def softmax_weights(logits, logsumexp, visible, poison):
    """Return the weights of every softmax, float32, 0 where masked.

    The log-sum-exp has an axis of 1 for columns.
    """
    weights = tl.exp2(logits - logsumexp)
    if (poison.key is not None) or (poison.query is not None):
        weights = tl.where(visible[None, :, :], weights, 0.0)  # in a NaN row, masked weights would be NaN as well
    return weights


@triton.jit
def softmax_backward(weights, grad_weights, delta, visible, poison):
    """Return W (dW - delta), 0 where masked; `delta` has the shape of the log-sum-exp."""
    grad = weights * (grad_weights - delta)
    if (poison.key is not None) or (poison.query is not None):
        grad = tl.where(visible[None, :, :], grad, 0.0)
    return grad


@triton.jit
def visible_pairs(mask, i_batch, offs_m, offs_n, positions_m, positions_n, shape):
    """Return the visibility of columns per row, boolean [BLOCK_M, BLOCK_N], shared by all heads."""
    distance = positions_n[None, :] - positions_m[:, None]
    return visible_tile(mask, i_batch, i_batch, offs_m, offs_n, distance, shape.queries, shape.keys)
