"""Tile functions of the backward kernels: loads, stores and the gradients of a tile's logits.

All functions here are inlined into kernels. `problem` is a `Problem`; absent terms compile to nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from polyhead.ops.common.kernels.mask_arguments import MaskArguments
from polyhead.ops.common.kernels.mask_tiles import (
    added_tile,
    keep_tile,
    key_ordinals,
    key_positions,
    query_positions,
)
from polyhead.ops.common.kernels.softmax_tiles import LN2, LOG2E, exp2, tanh, tanh_slope
from polyhead.ops.common.statistics import LINEAR, NAMES, row_tuple


class Strided(NamedTuple):
    """A tensor [batch, heads, tokens, dim] whose last axis is contiguous."""

    pointer: Tensor
    stride_batch: int
    stride_head: int
    stride_token: int
    WIDE: tl.constexpr  # offsets within a tile may exceed 32 bits


def fresh_like(tensor: Tensor) -> Tensor:
    """Return an uninitialised tensor like this one, whose last axis is contiguous."""
    result = torch.empty_like(tensor)
    # A tensor that overlaps itself has no well-defined order of axes.
    return result if result.stride(-1) == 1 else torch.empty_like(tensor, memory_format=torch.contiguous_format)


def strided(tensor: Tensor) -> Strided:
    """Return a tensor with its strides, as kernels take it."""
    batch, head, token, _ = tensor.stride()
    # A tile has fewer than 256 tokens.
    return Strided(tensor, batch, head, token, tl.constexpr(token * 256 >= 1 << 31))


_LINEAR = (name for name in NAMES if name in LINEAR)
# One float32 number per row for each of these, contiguous [batch, heads, queries]; None if absent.
RowTerms = row_tuple("RowTerms", ("logsumexp", "entropy", "confidence", "learned_sink_mass", *_LINEAR), __name__)


class Problem(NamedTuple):
    """One call of `backward` as the kernels read it; None and constexpr fields are compiled in."""

    query: Strided
    key: Strided
    value: Strided
    grad_output: Strided
    logsumexp: Tensor  # float32 [batch, heads, queries], contiguous
    constant: Tensor  # C, the same shape
    gradients: Any  # `RowTerms` of the statistics whose terms differ between keys
    mask: MaskArguments
    num_queries: int
    num_keys: int
    kv_heads: int
    group: int  # query heads that share a KV head
    scale: float
    head_scale: Tensor | None  # [heads], multiplied by `scale`
    softcap: float | None
    seed: Tensor | None  # int64, one element; None: no dropout
    threshold: int  # see `mask_tiles.keep_tile`
    kept_scale: float  # 1 / (1 - rate)
    sink_keys: int
    window: int
    DIM_KEY: tl.constexpr
    DIM_VALUE: tl.constexpr
    BLOCK_KEY: tl.constexpr  # dims padded to powers of two
    BLOCK_VALUE: tl.constexpr
    BASE_TWO: tl.constexpr  # logits may be scaled to base 2 in one product, at the cost of one more rounding
    HAS_FULL: tl.constexpr  # there may be tiles that need no mask: under a band, or full spans of other terms
    SINKS: tl.constexpr  # there is a learned sink
    LINEAR_TERMS: tl.constexpr  # there is a gradient of a statistic that is linear in the weights


@triton.jit
def _pointers(tensor, i_batch, i_head, first, TOKENS: tl.constexpr, BLOCK: tl.constexpr):
    """Return pointers [TOKENS, BLOCK] of one head, from token `first` on.

    One 64-bit offset leads to the tile and 32-bit offsets lead on inside it: 64-bit offsets for each element would take
    the registers that the accumulators need.
    """
    base = tensor.pointer + i_batch.to(tl.int64) * tensor.stride_batch + i_head.to(tl.int64) * tensor.stride_head
    base += tl.cast(first, tl.int64) * tensor.stride_token
    offs_token = tl.arange(0, TOKENS)
    if tensor.WIDE:
        offs_token = offs_token.to(tl.int64)
    return base + (offs_token[:, None] * tensor.stride_token + tl.arange(0, BLOCK)[None, :])


@triton.jit
def _tile_mask(first, stop, TOKENS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Return the valid elements of a tile, boolean [TOKENS, BLOCK]."""
    mask_tile = (tl.arange(0, TOKENS) < stop - first)[:, None]
    if DIM != BLOCK:
        mask_tile = mask_tile & (tl.arange(0, BLOCK) < DIM)[None, :]
    return mask_tile


@triton.jit
def load_tile(
    tensor,
    i_batch,
    i_head,
    first,
    stop,
    TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ALL: tl.constexpr,
):
    """Load tokens of one head from `first` on, zeros from `stop` on; ALL guarantees that none are."""
    pointers = _pointers(tensor, i_batch, i_head, first, TOKENS, BLOCK)
    if not ALL:
        tile = tl.load(pointers, mask=_tile_mask(first, stop, TOKENS, DIM, BLOCK), other=0.0)
    elif DIM != BLOCK:
        tile = tl.load(pointers, mask=(tl.arange(0, BLOCK) < DIM)[None, :], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def store_tile(
    tensor, tile, i_batch, i_head, first, stop, TOKENS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr
):
    pointers = _pointers(tensor, i_batch, i_head, first, TOKENS, BLOCK)
    tl.store(pointers, tile.to(tensor.pointer.dtype.element_ty), mask=_tile_mask(first, stop, TOKENS, DIM, BLOCK))


@triton.jit
def load_row(pointer, problem, i_pair, first_row, BLOCK_M: tl.constexpr):
    """Load one number per row, [BLOCK_M]; 0 past the end."""
    offs = tl.arange(0, BLOCK_M)
    base = pointer + i_pair * problem.num_queries + first_row
    return tl.load(base + offs, mask=offs < problem.num_queries - first_row, other=0.0)


@triton.jit
def load_logsumexp(problem, i_pair, first_row, BLOCK_M: tl.constexpr):
    """Load the log-sum-exp of each row, with +inf for -inf: the weights of an empty row are then 0."""
    logsumexp = load_row(problem.logsumexp, problem, i_pair, first_row, BLOCK_M)
    return tl.where(logsumexp == -float("inf"), float("inf"), logsumexp)


@triton.jit
def head_scales(problem, i_head):
    """Return the scale of a head's dot products, and the per-head factor in it."""
    if problem.head_scale is None:
        head_scale = 1.0
    else:
        head_scale = tl.load(problem.head_scale + i_head).to(tl.float32)
    return problem.scale * head_scale, head_scale


@triton.jit
def _maybe_transpose(tile, TRANSPOSED: tl.constexpr):
    """Return a tile [rows, columns] unchanged, or as [columns, rows] if TRANSPOSED."""
    if TRANSPOSED:
        tile = tl.trans(tile)
    return tile


@triton.jit
def _expand_rows(row, TRANSPOSED: tl.constexpr):
    """Expand one number per row for broadcasting against a tile."""
    if TRANSPOSED:
        expanded = row[None, :]
    else:
        expanded = row[:, None]
    return expanded


@triton.jit
def _scale_rows(tile, pointer, problem, i_pair, first_row, BLOCK_M: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Multiply a tile by one number per row."""
    return tile * _expand_rows(load_row(pointer, problem, i_pair, first_row, BLOCK_M), TRANSPOSED)


@triton.jit
def _linear_terms(problem, i_batch, i_pair, first_row, offs_n, BLOCK_M: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Return sum_F g_F * f_j over the statistics that are linear in the weights, float32."""
    gradients, mask = problem.gradients, problem.mask
    row_position = query_positions(mask, i_batch, first_row + tl.arange(0, BLOCK_M), problem.num_queries)
    column_position = key_positions(mask, i_batch, offs_n, problem.num_keys)
    distance = _expand_rows(column_position, not TRANSPOSED) - _expand_rows(row_position, TRANSPOSED)
    float_distance = distance.to(tl.float32)
    terms = tl.zeros_like(float_distance)
    if gradients.mean_distance is not None:
        terms += _scale_rows(
            tl.abs(float_distance), gradients.mean_distance, problem, i_pair, first_row, BLOCK_M, TRANSPOSED
        )
    if gradients.mean_offset is not None:
        terms += _scale_rows(float_distance, gradients.mean_offset, problem, i_pair, first_row, BLOCK_M, TRANSPOSED)
    if gradients.mean_squared_distance is not None:
        terms += _scale_rows(
            float_distance * float_distance,
            gradients.mean_squared_distance,
            problem,
            i_pair,
            first_row,
            BLOCK_M,
            TRANSPOSED,
        )
    if gradients.self_mass is not None:
        terms += _scale_rows(
            (distance == 0).to(tl.float32), gradients.self_mass, problem, i_pair, first_row, BLOCK_M, TRANSPOSED
        )
    if gradients.previous_mass is not None:
        terms += _scale_rows(
            (distance == -1).to(tl.float32), gradients.previous_mass, problem, i_pair, first_row, BLOCK_M, TRANSPOSED
        )
    if gradients.next_mass is not None:
        terms += _scale_rows(
            (distance == 1).to(tl.float32), gradients.next_mass, problem, i_pair, first_row, BLOCK_M, TRANSPOSED
        )
    if gradients.window_mass is not None:
        is_near = (tl.abs(distance) <= problem.window).to(tl.float32)
        terms += _scale_rows(is_near, gradients.window_mass, problem, i_pair, first_row, BLOCK_M, TRANSPOSED)
    if gradients.sink_mass is not None:
        first = (key_ordinals(mask, i_batch, offs_n, problem.num_keys) < problem.sink_keys).to(tl.float32)
        terms += _scale_rows(
            _expand_rows(first, not TRANSPOSED), gradients.sink_mass, problem, i_pair, first_row, BLOCK_M, TRANSPOSED
        )
    return terms


@triton.jit
def distance_tile(problem, i_batch, offs_m, offs_n):
    """Return key minus query position, int32 [rows, columns]."""
    row_position = query_positions(problem.mask, i_batch, offs_m, problem.num_queries)
    return key_positions(problem.mask, i_batch, offs_n, problem.num_keys)[None, :] - row_position[:, None]


@triton.jit
def tile_gradients(
    problem,
    tile_s,
    tile_dp,
    visible,
    logsumexp,
    constant,
    i_batch,
    i_head,
    first_row,
    offs_n,
    BLOCK_M: tl.constexpr,
    EDGE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """Return the weights after dropout, and the gradients of the logits after and before softcap.

    The weights are not rescaled by 1 / (1 - rate). `tile_s` (q . k), `tile_dp` (dO . v) and the results are [rows,
    columns], or [columns, rows] if TRANSPOSED; `visible` is [rows, columns], `logsumexp` and `constant` are [rows].
    Pairs of the tile can be masked only if EDGE is set.
    """
    mask = problem.mask
    i_pair = i_batch * (problem.kv_heads * problem.group) + i_head
    offs_m = first_row + tl.arange(0, BLOCK_M)
    scale, _ = head_scales(problem, i_head)
    EXACT: tl.constexpr = problem.query.pointer.dtype.element_ty == tl.float32
    tile_tanh_grad = 1.0
    # log2 p
    if problem.BASE_TWO:
        tile_log = tile_s * (scale * LOG2E) - _expand_rows(logsumexp * LOG2E, TRANSPOSED)
    else:
        if problem.softcap is None:
            tile_logit = tile_s * scale
        else:
            tile_scaled = tile_s * (scale / problem.softcap)  # rounded as in the forward
            tile_tanh = tanh(tile_scaled, EXACT)
            tile_tanh_grad = tanh_slope(tile_scaled, tile_tanh, EXACT)
            tile_logit = tile_tanh * problem.softcap
        if mask.bias is not None or mask.table is not None:
            distance = distance_tile(problem, i_batch, offs_m, offs_n)
            tile_logit += _maybe_transpose(
                added_tile(mask, i_batch, i_head, offs_m, offs_n, distance, visible), TRANSPOSED
            )
        tile_log = (tile_logit - _expand_rows(logsumexp, TRANSPOSED)) * LOG2E
    # The log-sum-exp of a row that sees a poisoned key is NaN, so the poison need not be added again.
    tile_p = exp2(tile_log, EXACT)
    if EDGE:
        tile_visible = _maybe_transpose(visible, TRANSPOSED)
        tile_p = tl.where(tile_visible, tile_p, 0.0)
    tile_dropped = tile_p
    if problem.seed is not None:
        keep = _maybe_transpose(keep_tile(problem.seed, problem.threshold, i_pair, offs_m, offs_n), TRANSPOSED)
        tile_dropped = tl.where(keep, tile_p, 0.0)
        tile_dp = tl.where(keep, tile_dp * problem.kept_scale, 0.0)
    tile_inner = tile_dp + _expand_rows(constant, TRANSPOSED)
    if problem.gradients.entropy is not None:
        gradient = problem.gradients.entropy
        tile_inner -= _scale_rows(tile_log * LN2, gradient, problem, i_pair, first_row, BLOCK_M, TRANSPOSED)
    if problem.LINEAR_TERMS:
        tile_inner += _linear_terms(problem, i_batch, i_pair, first_row, offs_n, BLOCK_M, TRANSPOSED)
    tile_ds = tile_p * tile_inner
    tile_dqk = tile_ds * tile_tanh_grad
    if EDGE:
        # The terms of masked pairs may be Inf or NaN, and zero times those is not zero.
        tile_ds = tl.where(tile_visible, tile_ds, 0.0)
        tile_dqk = tl.where(tile_visible, tile_dqk, 0.0)
    return tile_dropped, tile_ds, tile_dqk
