"""The part of the backward kernels that knows one tile: what it reads, and the gradients that reach its logits.

All functions here are inlined into kernels. `problem` is a `Problem`; what it lacks compiles to nothing.
"""

from __future__ import annotations

from typing import NamedTuple

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


class Strided(NamedTuple):
    """A tensor [batch, heads, tokens, dim] whose last axis lies together in memory."""

    pointer: Tensor
    stride_batch: int
    stride_head: int
    stride_token: int
    WIDE: tl.constexpr  # offsets within a tile may pass 32 bits


class RowTerms(NamedTuple):
    """One float32 number a row [batch, heads, queries], contiguous, for each of these; None for what is absent."""

    logsumexp: Tensor | None = None
    entropy: Tensor | None = None
    confidence: Tensor | None = None
    learned_sink_mass: Tensor | None = None
    mean_distance: Tensor | None = None
    mean_offset: Tensor | None = None
    mean_squared_distance: Tensor | None = None
    sink_mass: Tensor | None = None
    self_mass: Tensor | None = None
    previous_mass: Tensor | None = None
    next_mass: Tensor | None = None
    window_mass: Tensor | None = None


class Problem(NamedTuple):
    """One call of `backward`, as the kernels read it; what is None or constexpr is compiled in."""

    query: Strided
    key: Strided
    value: Strided
    grad_output: Strided
    logsumexp: Tensor  # float32 [batch, heads, queries], contiguous
    constant: Tensor  # C, likewise
    gradients: RowTerms  # of what differs from key to key
    mask: MaskArguments
    num_queries: int
    num_keys: int
    kv_heads: int
    group: int  # query heads that share a KV head
    scale: float
    head_scale: Tensor | None  # [heads], multiplies the scale
    softcap: float | None
    seed: Tensor | None  # int64, one element; None: no dropout
    threshold: int  # see `mask_tiles.keep_tile`
    kept_scale: float  # 1 / (1 - rate)
    sink_keys: int
    window: int
    DIM_KEY: tl.constexpr
    DIM_VALUE: tl.constexpr
    BLOCK_KEY: tl.constexpr  # powers of two that hold them
    BLOCK_VALUE: tl.constexpr
    BASE_TWO: tl.constexpr  # logits may be taken to base 2 in one product, at the cost of one more rounding
    BAND: tl.constexpr  # the mask is a causal edge or a window, or hides nothing
    SINKS: tl.constexpr  # a learned sink takes part
    LINEAR_TERMS: tl.constexpr  # there is a gradient of a statistic linear in the weights


@triton.jit
def _pointers(tensor, i_batch, i_head, first, TOKENS: tl.constexpr, BLOCK: tl.constexpr):
    """[TOKENS, BLOCK] of one head, from token `first` on.

    One wide number leads to the tile, and narrow ones lead on inside it: wide ones for each element would cost the
    registers that the sums need.
    """
    base = tensor.pointer + i_batch.to(tl.int64) * tensor.stride_batch + i_head.to(tl.int64) * tensor.stride_head
    base += tl.cast(first, tl.int64) * tensor.stride_token
    offs_token = tl.arange(0, TOKENS)
    if tensor.WIDE:
        offs_token = offs_token.to(tl.int64)
    return base + (offs_token[:, None] * tensor.stride_token + tl.arange(0, BLOCK)[None, :])


@triton.jit
def _inside(first, stop, TOKENS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Which elements of a tile are there, [TOKENS, BLOCK]."""
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
    """Tokens `first` on of one head, zeros from `stop` on; ALL is the caller's word that all come before it."""
    pointers = _pointers(tensor, i_batch, i_head, first, TOKENS, BLOCK)
    if not ALL:
        tile = tl.load(pointers, mask=_inside(first, stop, TOKENS, DIM, BLOCK), other=0.0)
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
    tl.store(pointers, tile.to(tensor.pointer.dtype.element_ty), mask=_inside(first, stop, TOKENS, DIM, BLOCK))


@triton.jit
def load_row(pointer, problem, i_pair, first_row, BLOCK_M: tl.constexpr):
    """One number a row, [BLOCK_M]; 0 past the end."""
    offs = tl.arange(0, BLOCK_M)
    base = pointer + i_pair * problem.num_queries + first_row
    return tl.load(base + offs, mask=offs < problem.num_queries - first_row, other=0.0)


@triton.jit
def load_logsumexp(problem, i_pair, first_row, BLOCK_M: tl.constexpr):
    """The log-sum-exp of each row, +inf in place of -inf: a row without any weight then has weights of 0."""
    logsumexp = load_row(problem.logsumexp, problem, i_pair, first_row, BLOCK_M)
    return tl.where(logsumexp == -float("inf"), float("inf"), logsumexp)


@triton.jit
def head_scales(problem, i_head):
    """What multiplies the dot products of a head, and the head's own part of it."""
    if problem.head_scale is None:
        own = 1.0
    else:
        own = tl.load(problem.head_scale + i_head).to(tl.float32)
    return problem.scale * own, own


@triton.jit
def _turned(tile, TURNED: tl.constexpr):
    """A tile [rows, columns] as the caller keeps its own: as it is, or [columns, rows]."""
    if TURNED:
        tile = tl.trans(tile)
    return tile


@triton.jit
def _beside(row, TURNED: tl.constexpr):
    """One number a row, to stand beside a tile."""
    if TURNED:
        beside = row[None, :]
    else:
        beside = row[:, None]
    return beside


@triton.jit
def _times(tile, pointer, problem, i_pair, first_row, BLOCK_M: tl.constexpr, TURNED: tl.constexpr):
    """A tile times one number a row."""
    return tile * _beside(load_row(pointer, problem, i_pair, first_row, BLOCK_M), TURNED)


@triton.jit
def _linear_terms(problem, i_batch, i_pair, first_row, offs_n, BLOCK_M: tl.constexpr, TURNED: tl.constexpr):
    """sum_F g_F * f_j over the statistics that are linear in the weights, float32."""
    gradients, mask = problem.gradients, problem.mask
    row_position = query_positions(mask, i_batch, first_row + tl.arange(0, BLOCK_M), problem.num_queries)
    column_position = key_positions(mask, i_batch, offs_n, problem.num_keys)
    distance = _beside(column_position, not TURNED) - _beside(row_position, TURNED)
    steps = distance.to(tl.float32)
    terms = tl.zeros_like(steps)
    if gradients.mean_distance is not None:
        terms += _times(tl.abs(steps), gradients.mean_distance, problem, i_pair, first_row, BLOCK_M, TURNED)
    if gradients.mean_offset is not None:
        terms += _times(steps, gradients.mean_offset, problem, i_pair, first_row, BLOCK_M, TURNED)
    if gradients.mean_squared_distance is not None:
        terms += _times(steps * steps, gradients.mean_squared_distance, problem, i_pair, first_row, BLOCK_M, TURNED)
    if gradients.self_mass is not None:
        terms += _times(
            (distance == 0).to(tl.float32), gradients.self_mass, problem, i_pair, first_row, BLOCK_M, TURNED
        )
    if gradients.previous_mass is not None:
        terms += _times(
            (distance == -1).to(tl.float32), gradients.previous_mass, problem, i_pair, first_row, BLOCK_M, TURNED
        )
    if gradients.next_mass is not None:
        terms += _times(
            (distance == 1).to(tl.float32), gradients.next_mass, problem, i_pair, first_row, BLOCK_M, TURNED
        )
    if gradients.window_mass is not None:
        near = (tl.abs(distance) <= problem.window).to(tl.float32)
        terms += _times(near, gradients.window_mass, problem, i_pair, first_row, BLOCK_M, TURNED)
    if gradients.sink_mass is not None:
        first = (key_ordinals(mask, i_batch, offs_n, problem.num_keys) < problem.sink_keys).to(tl.float32)
        terms += _times(_beside(first, not TURNED), gradients.sink_mass, problem, i_pair, first_row, BLOCK_M, TURNED)
    return terms


@triton.jit
def distance_tile(problem, i_batch, offs_m, offs_n):
    """Key minus query position, int32 [rows, columns]."""
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
    TURNED: tl.constexpr,
):
    """The weights that dropout leaves (not yet scaled up), and the gradients of the logits after and before softcap.

    `tile_s` (q . k), `tile_dp` (dO . v) and what is returned are [rows, columns], or [columns, rows] if TURNED;
    `visible` is [rows, columns], `logsumexp` and `constant` [rows]. Only where EDGE can a pair of the tile be hidden.
    """
    mask = problem.mask
    i_pair = i_batch * (problem.kv_heads * problem.group) + i_head
    offs_m = first_row + tl.arange(0, BLOCK_M)
    scale, _ = head_scales(problem, i_head)
    EXACT: tl.constexpr = problem.query.pointer.dtype.element_ty == tl.float32
    tile_slope = 1.0
    # log2 p
    if problem.BASE_TWO:
        tile_log = tile_s * (scale * LOG2E) - _beside(logsumexp * LOG2E, TURNED)
    else:
        if problem.softcap is None:
            tile_logit = tile_s * scale
        else:
            tile_share = tile_s * (scale / problem.softcap)  # as the forward has it, rounded alike
            tile_bent = tanh(tile_share, EXACT)
            tile_slope = tanh_slope(tile_share, tile_bent, EXACT)
            tile_logit = tile_bent * problem.softcap
        if mask.bias is not None or mask.table is not None:
            distance = distance_tile(problem, i_batch, offs_m, offs_n)
            tile_logit += _turned(added_tile(mask, i_batch, i_head, offs_m, offs_n, distance, visible), TURNED)
        tile_log = (tile_logit - _beside(logsumexp, TURNED)) * LOG2E
    # A row that sees a poisoned key has NaN for its log-sum-exp, so the poison need not be added here again.
    tile_p = exp2(tile_log, EXACT)
    if EDGE:
        seen = _turned(visible, TURNED)
        tile_p = tl.where(seen, tile_p, 0.0)
    tile_kept = tile_p
    if problem.seed is not None:
        keep = _turned(keep_tile(problem.seed, problem.threshold, i_pair, offs_m, offs_n), TURNED)
        tile_kept = tl.where(keep, tile_p, 0.0)
        tile_dp = tl.where(keep, tile_dp * problem.kept_scale, 0.0)
    tile_inner = tile_dp + _beside(constant, TURNED)
    if problem.gradients.entropy is not None:
        gradient = problem.gradients.entropy
        tile_inner -= _times(tile_log * LN2, gradient, problem, i_pair, first_row, BLOCK_M, TURNED)
    if problem.LINEAR_TERMS:
        tile_inner += _linear_terms(problem, i_batch, i_pair, first_row, offs_n, BLOCK_M, TURNED)
    tile_ds = tile_p * tile_inner
    tile_raw = tile_ds * tile_slope
    if EDGE:
        # Zero times what a hidden pair made of Inf and NaN would not be zero.
        tile_ds = tl.where(seen, tile_ds, 0.0)
        tile_raw = tl.where(seen, tile_raw, 0.0)
    return tile_kept, tile_ds, tile_raw
