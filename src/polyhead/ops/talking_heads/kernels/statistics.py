"""Statistics of talking heads: a pass that knows the log-sum-exp and never touches the values.

Computes the `RowStatistics` of every softmax map, and the sum and the maximum of the mixed weights.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from polyhead.ops.common.kernels.mask_tiles import key_ordinals, key_positions, key_spans, query_positions
from polyhead.ops.common.kernels.softmax_tiles import LN2, LOG2E
from polyhead.ops.talking_heads.kernels.tiles import (
    batched_dot,
    broken_pairs,
    by_head,
    by_pair,
    columns_by_head,
    mix_matrix,
    mixed,
    mixed_logits,
    row_logsumexp,
    rows_by_head,
    seen,
    store_row_values,
    weights_of,
)


class Results(NamedTuple):
    """Where each statistic goes, float32 [batch, heads, queries]; None is not computed."""

    max_logit: Tensor | None = None
    max_abs_logit: Tensor | None = None
    entropy: Tensor | None = None
    confidence: Tensor | None = None
    mean_distance: Tensor | None = None
    mean_offset: Tensor | None = None
    mean_squared_distance: Tensor | None = None
    sink_mass: Tensor | None = None
    self_mass: Tensor | None = None
    previous_mass: Tensor | None = None
    next_mass: Tensor | None = None
    window_mass: Tensor | None = None
    visible_keys: Tensor | None = None
    signed_mass: Tensor | None = None
    absolute_mass: Tensor | None = None
    largest_weight: Tensor | None = None


@triton.jit
def _sums(tile):
    """[HEADS, BLOCK_M, BLOCK_N] added up two columns at a time."""
    return tl.sum(tl.reshape(tile, [tile.shape[0], tile.shape[1], tile.shape[2] // 2, 2]), 3)


@triton.jit
def _maxima(tile):
    return tl.max(tl.reshape(tile, [tile.shape[0], tile.shape[1], tile.shape[2] // 2, 2]), 3)


@triton.jit
def statistics_kernel(
    ptr_query,
    ptr_key,
    ptr_logits_mix,
    ptr_weights_mix,
    ptr_logsumexp,
    results,
    mask,
    poison,
    shape,
    strides_query,
    strides_key,
    scale,
    sink_keys,
    window,
    HEADS: tl.constexpr,
    DIM_KEY: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
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
    logsumexp = row_logsumexp(ptr_logsumexp, i_batch, offs_m, shape, HEADS)
    # Apart by two neighbouring columns, as the log-sum-exp is found, until all is added up in the end.
    nothing = tl.zeros([HEADS, BLOCK_M, BLOCK_N // 2], tl.float32)
    largest, size = nothing - float("inf"), nothing
    entropy, mean_distance, mean_offset, mean_squared_distance = nothing, nothing, nothing, nothing
    sink_mass, self_mass, previous_mass, next_mass, window_mass = nothing, nothing, nothing, nothing, nothing
    signed_mass, absolute_mass, largest_weight, visible_keys = nothing, nothing, nothing, nothing
    kept, start, stop = key_spans(mask, i_batch, first_row, shape.queries, shape.keys, BLOCK_M, BLOCK_N)
    for step in tl.range(0, kept + stop - start, BLOCK_N):
        offs_n = tl.where(step < kept, step, step - kept + start) + tl.arange(0, BLOCK_N)
        tile_key = columns_by_head(
            ptr_key, strides_key, i_batch, offs_n, shape.keys, shape.heads, shape.group, DIM_KEY, BLOCK_KEY, HEADS
        )
        scores = batched_dot(tile_query, tile_key) * (scale * LOG2E)
        positions_n = key_positions(mask, i_batch, offs_n, shape.keys)
        visible = seen(mask, i_batch, offs_m, offs_n, positions_m, positions_n, shape)
        there = visible[None, :, :]
        broken = broken_pairs(poison, i_batch, offs_m, offs_n, shape)
        logits = mixed_logits(scores, logits_mix, visible, broken, DTYPE, True)
        weights = weights_of(logits, logsumexp[:, :, None], visible, poison)
        distance = positions_n[None, :] - positions_m[:, None]
        away = distance.to(tl.float32)[None, :, :]
        if (results.max_logit is not None) or (results.confidence is not None):
            largest = tl.maximum(largest, _maxima(logits))
        if results.max_abs_logit is not None:
            size = tl.maximum(size, _maxima(tl.where(there, tl.abs(logits), 0.0)))
        if results.entropy is not None:
            entropy += _sums(tl.where(there, weights * (logsumexp[:, :, None] - logits), 0.0))
        if results.mean_distance is not None:
            mean_distance += _sums(weights * tl.abs(away))
        if results.mean_offset is not None:
            mean_offset += _sums(weights * away)
        if results.mean_squared_distance is not None:
            mean_squared_distance += _sums(weights * away * away)
        if results.sink_mass is not None:
            first = key_ordinals(mask, i_batch, offs_n, shape.keys) < sink_keys
            sink_mass += _sums(tl.where(first[None, None, :], weights, 0.0))
        if results.self_mass is not None:
            self_mass += _sums(tl.where((distance == 0)[None, :, :], weights, 0.0))
        if results.previous_mass is not None:
            previous_mass += _sums(tl.where((distance == -1)[None, :, :], weights, 0.0))
        if results.next_mass is not None:
            next_mass += _sums(tl.where((distance == 1)[None, :, :], weights, 0.0))
        if results.window_mass is not None:
            window_mass += _sums(tl.where((tl.abs(distance) <= window)[None, :, :], weights, 0.0))
        if results.visible_keys is not None:
            visible_keys += _sums(tl.where(there, 1.0, tl.zeros_like(weights)))
        if results.absolute_mass is not None:
            # What rounding the weights to 16 bits leaves is mixed as well.
            high = by_pair(weights, DTYPE)
            rest = by_pair(weights - weights.to(DTYPE).to(tl.float32), DTYPE)
            heads = by_head(mixed(weights_mix, high) + mixed(weights_mix, rest), BLOCK_M, BLOCK_N)
            signed_mass += _sums(heads)
            absolute_mass += _sums(tl.abs(heads))
            largest_weight = tl.maximum(largest_weight, _maxima(tl.abs(heads)))
    largest, size, largest_weight = tl.max(largest, 2), tl.max(size, 2), tl.max(largest_weight, 2)
    broken = logsumexp - logsumexp  # NaN in rows that are, which a maximum may have passed over
    if results.max_logit is not None:
        store_row_values(results.max_logit, largest * LN2 + broken, i_batch, offs_m, shape, HEADS)
    if results.confidence is not None:
        confidence = tl.exp2(largest - logsumexp)
        store_row_values(results.confidence, confidence + broken, i_batch, offs_m, shape, HEADS)
    if results.max_abs_logit is not None:
        store_row_values(results.max_abs_logit, size * LN2 + broken, i_batch, offs_m, shape, HEADS)
    if results.entropy is not None:
        store_row_values(results.entropy, tl.sum(entropy, 2) * LN2, i_batch, offs_m, shape, HEADS)
    if results.mean_distance is not None:
        store_row_values(results.mean_distance, tl.sum(mean_distance, 2), i_batch, offs_m, shape, HEADS)
    if results.mean_offset is not None:
        store_row_values(results.mean_offset, tl.sum(mean_offset, 2), i_batch, offs_m, shape, HEADS)
    if results.mean_squared_distance is not None:
        store_row_values(results.mean_squared_distance, tl.sum(mean_squared_distance, 2), i_batch, offs_m, shape, HEADS)
    if results.sink_mass is not None:
        store_row_values(results.sink_mass, tl.sum(sink_mass, 2), i_batch, offs_m, shape, HEADS)
    if results.self_mass is not None:
        store_row_values(results.self_mass, tl.sum(self_mass, 2), i_batch, offs_m, shape, HEADS)
    if results.previous_mass is not None:
        store_row_values(results.previous_mass, tl.sum(previous_mass, 2), i_batch, offs_m, shape, HEADS)
    if results.next_mass is not None:
        store_row_values(results.next_mass, tl.sum(next_mass, 2), i_batch, offs_m, shape, HEADS)
    if results.window_mass is not None:
        store_row_values(results.window_mass, tl.sum(window_mass, 2), i_batch, offs_m, shape, HEADS)
    if results.visible_keys is not None:
        store_row_values(results.visible_keys, tl.sum(visible_keys, 2), i_batch, offs_m, shape, HEADS)
    if results.absolute_mass is not None:
        store_row_values(results.signed_mass, tl.sum(signed_mass, 2), i_batch, offs_m, shape, HEADS)
        store_row_values(results.absolute_mass, tl.sum(absolute_mass, 2), i_batch, offs_m, shape, HEADS)
        store_row_values(results.largest_weight, largest_weight + broken, i_batch, offs_m, shape, HEADS)
