"""Tiles of talking heads: a program holds rows and columns of every head at once, so that mixing heads is a product.

A tile of logits or weights is [HEADS, BLOCK_M, BLOCK_N] for products with queries, keys and values, head by head, and
[HEADS, pairs] where heads are mixed, from the left; nothing moves between the two. HEADS is a power of two of at least
16; heads that are only there to fill it are zeros, in every tensor and in both mixes. Logits are in powers of two: they
carry a factor of log2(e), and an exponential is `exp2`.

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
    """The sizes of one call, as a kernel takes them."""

    heads: int
    group: int  # query heads that share one head of keys and values
    queries: int
    keys: int


class Poison(NamedTuple):
    """NaN for tokens whose NaN or Inf was taken out, 0 for others; None where all are known to be finite."""

    query: Tensor | None  # float32 [batch, queries]
    key: Tensor | None  # float32 [batch, keys]


@triton.jit
def rows_by_head(
    ptr, strides, i_batch, offs_m, limit, num_heads, group, DIM: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr
):
    """Some tokens of every head, [HEADS, tokens, BLOCK], zeros where there are none; `group` heads read the same."""
    offs_h = tl.arange(0, HEADS)[:, None, None]
    offs_d = tl.arange(0, BLOCK)[None, None, :]
    offs = i_batch.to(tl.int64) * strides[0] + (offs_h // group).to(tl.int64) * strides[1]
    offs = offs + offs_m.to(tl.int64)[None, :, None] * strides[2] + offs_d
    there = (offs_h < num_heads) & (offs_m < limit)[None, :, None] & (offs_d < DIM)
    return tl.load(ptr + offs, mask=there, other=0.0)


@triton.jit
def columns_by_head(
    ptr, strides, i_batch, offs_n, limit, num_heads, group, DIM: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr
):
    """The same turned, [HEADS, BLOCK, tokens]."""
    offs_h = tl.arange(0, HEADS)[:, None, None]
    offs_d = tl.arange(0, BLOCK)[None, :, None]
    offs = i_batch.to(tl.int64) * strides[0] + (offs_h // group).to(tl.int64) * strides[1]
    offs = offs + offs_n.to(tl.int64)[None, None, :] * strides[2] + offs_d
    there = (offs_h < num_heads) & (offs_n < limit)[None, None, :] & (offs_d < DIM)
    return tl.load(ptr + offs, mask=there, other=0.0)


@triton.jit
def store_by_head(
    ptr, strides, tile, i_batch, offs_m, limit, num_heads, DIM: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr
):
    """Write [HEADS, tokens, BLOCK] to [batch, heads, tokens, dim]."""
    offs_h = tl.arange(0, HEADS)[:, None, None]
    offs_d = tl.arange(0, BLOCK)[None, None, :]
    offs = i_batch.to(tl.int64) * strides[0] + offs_h.to(tl.int64) * strides[1]
    offs = offs + offs_m.to(tl.int64)[None, :, None] * strides[2] + offs_d
    there = (offs_h < num_heads) & (offs_m < limit)[None, :, None] & (offs_d < DIM)
    tl.store(ptr + offs, tile.to(ptr.dtype.element_ty), mask=there)


@triton.jit
def row_values(ptr, i_batch, offs_m, shape, other, HEADS: tl.constexpr):
    """Numbers of rows from [batch, heads, queries], as [HEADS, rows]."""
    offs_h = tl.arange(0, HEADS)[:, None]
    offs = (i_batch * shape.heads + offs_h).to(tl.int64) * shape.queries + offs_m[None, :]
    there = (offs_h < shape.heads) & (offs_m < shape.queries)[None, :]
    return tl.load(ptr + offs, mask=there, other=other)


@triton.jit
def row_logsumexp(ptr, i_batch, offs_m, shape, HEADS: tl.constexpr):
    """The log-sum-exp of rows in powers of two, 0 where a row sees nothing: [HEADS, rows]."""
    return in_powers_of_two(row_values(ptr, i_batch, offs_m, shape, 0.0, HEADS))


@triton.jit
def in_powers_of_two(logsumexp):
    """A log-sum-exp as weights are taken with it, 0 where a row sees nothing."""
    return tl.where(logsumexp == -float("inf"), 0.0, logsumexp * LOG2E)


@triton.jit
def whole_logsumexp(ptr_parts, parts, stride_part, i_batch, offs_m, shape, BLOCK_M: tl.constexpr, HEADS: tl.constexpr):
    """The log-sum-exp of rows over all parts of their keys, [HEADS, rows]; -inf where a row sees nothing."""
    # Two passes and no running sum: a single part comes back as it is.
    top = tl.full([HEADS, BLOCK_M], -float("inf"), tl.float32)
    for i_part in range(parts):
        ptr = ptr_parts + i_part * stride_part
        top = tl.maximum(top, row_values(ptr, i_batch, offs_m, shape, 0.0, HEADS))
    top = tl.where(top == -float("inf"), 0.0, top)
    total = tl.zeros([HEADS, BLOCK_M], tl.float32)
    for i_part in range(parts):
        ptr = ptr_parts + i_part * stride_part
        total += tl.exp(row_values(ptr, i_batch, offs_m, shape, 0.0, HEADS) - top)
    return top + tl.log(total)


@triton.jit
def store_row_values(ptr, tile, i_batch, offs_m, shape, HEADS: tl.constexpr):
    offs_h = tl.arange(0, HEADS)[:, None]
    offs = (i_batch * shape.heads + offs_h).to(tl.int64) * shape.queries + offs_m[None, :]
    tl.store(ptr + offs, tile, mask=(offs_h < shape.heads) & (offs_m < shape.queries)[None, :])


@triton.jit
def mix_matrix(ptr, BACK: tl.constexpr, HEADS: tl.constexpr):
    """What stands to the left of heads to mix them by [HEADS, HEADS] (from the first axis to the second), or BACK."""
    first, second = tl.arange(0, HEADS)[:, None], tl.arange(0, HEADS)[None, :]
    if BACK:
        offs = first * HEADS + second
    else:
        offs = second * HEADS + first
    return tl.load(ptr + offs)


@triton.jit
def batched_dot(tile_a, tile_b):
    """[HEADS, m, k] times [HEADS, k, n], each head by itself, float32."""
    return tl.dot(tile_a, tile_b, input_precision="ieee")


@triton.jit
def by_pair(tile, DTYPE: tl.constexpr):
    """[HEADS, BLOCK_M, BLOCK_N] as [HEADS, pairs], rounded to the dtype in which it is multiplied next."""
    return tl.reshape(tile.to(DTYPE), [tile.shape[0], tile.shape[1] * tile.shape[2]])


@triton.jit
def by_head(pairs, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The way back: [HEADS, pairs] as [HEADS, BLOCK_M, BLOCK_N]."""
    return tl.reshape(pairs, [pairs.shape[0], BLOCK_M, BLOCK_N])


@triton.jit
def mixed(mix, pairs):
    """[HEADS, HEADS] times [HEADS, pairs], float32."""
    return tl.dot(mix, pairs, input_precision="ieee")


@triton.jit
def mixed_logits(tile_scores, mix, visible, broken, DTYPE: tl.constexpr, SPLIT: tl.constexpr):
    """The logits of every softmax, float32 of the scores' shape, -inf where hidden, `broken` (if not None) added.

    SPLIT mixes what rounding the scores to 16 bits leaves as well, for who reads the logits themselves.
    """
    logits = mixed(mix, by_pair(tile_scores, DTYPE))
    if SPLIT:
        logits += mixed(mix, by_pair(tile_scores - tile_scores.to(DTYPE).to(tl.float32), DTYPE))
    logits = by_head(logits, tile_scores.shape[1], tile_scores.shape[2])
    if broken is not None:
        logits += broken[None, :, :]
    return tl.where(visible[None, :, :], logits, -float("inf"))


@triton.jit
def broken_pairs(poison, i_batch, offs_m, offs_n, shape):
    """NaN where a row or a column had NaN or Inf, else 0: [BLOCK_M, BLOCK_N], the same for all heads. Or None."""
    broken = None
    if poison.key is not None:
        ptr = poison.key + i_batch.to(tl.int64) * shape.keys + offs_n
        broken = tl.load(ptr, mask=offs_n < shape.keys, other=0.0)[None, :]
    if poison.query is not None:
        ptr = poison.query + i_batch.to(tl.int64) * shape.queries + offs_m
        of_rows = tl.load(ptr, mask=offs_m < shape.queries, other=0.0)[:, None]
        broken = of_rows if broken is None else broken + of_rows
    return broken


@triton.jit
def weights_of(logits, logsumexp, visible, poison):
    """The weights of every softmax, float32, 0 where hidden; the log-sum-exp has an axis of 1 for the columns."""
    weights = tl.exp2(logits - logsumexp)
    if (poison.key is not None) or (poison.query is not None):
        weights = tl.where(visible[None, :, :], weights, 0.0)  # a row that is NaN hides nothing from itself
    return weights


@triton.jit
def grad_logits_of(weights, grad_weights, delta, visible, poison):
    """W (dW - delta), and 0 where hidden; `delta` as the log-sum-exp."""
    grad = weights * (grad_weights - delta)
    if (poison.key is not None) or (poison.query is not None):
        grad = tl.where(visible[None, :, :], grad, 0.0)
    return grad


@triton.jit
def seen(mask, i_batch, offs_m, offs_n, positions_m, positions_n, shape):
    """Which of the columns each row sees, boolean [BLOCK_M, BLOCK_N]; all heads see the same."""
    distance = positions_n[None, :] - positions_m[:, None]
    return visible_tile(mask, i_batch, i_batch, offs_m, offs_n, distance, shape.queries, shape.keys)
