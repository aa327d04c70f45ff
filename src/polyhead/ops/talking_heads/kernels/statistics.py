"""Statistics kernel of talking heads: a pass that uses the log-sum-exp and never reads the values.

Computes the `RowStatistics` of every softmax map, and the sum and the maximum of the mixed weights.
"""

from __future__ import annotations

import triton
import triton.language as tl

from polyhead.ops.common.combined_weights import COMBINED
from polyhead.ops.common.kernels.mask_tiles import key_ordinals, key_positions, key_spans, query_positions
from polyhead.ops.common.kernels.softmax_tiles import LN2, LOG2E
from polyhead.ops.common.statistics import NAMES, row_tuple
from polyhead.ops.talking_heads.kernels.tiles import (
    batched_dot,
    columns_by_head,
    load_nan_pairs,
    mix_heads,
    mix_matrix,
    mixed_logits,
    row_logsumexp,
    rows_by_head,
    softmax_weights,
    store_row_values,
    to_heads,
    to_pairs,
    visible_pairs,
)

_OWN_NAMES = tuple(name for name in NAMES if name != "learned_sink_mass")
# Output tensor of each statistic, float32 [batch, heads, queries]; None: not computed.
Results = row_tuple("Results", (*_OWN_NAMES, *COMBINED), __name__)


@triton.jit
def _pair_sums(tile):
    """Sum pairs of neighbouring columns of [HEADS, BLOCK_M, BLOCK_N]."""
    return tl.sum(tl.reshape(tile, [tile.shape[0], tile.shape[1], tile.shape[2] // 2, 2]), 3)


@triton.jit
def _pair_maxima(tile):
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
    # One accumulator per pair of neighbouring columns, as for the log-sum-exp; reduced at the end.
    zeros = tl.zeros([HEADS, BLOCK_M, BLOCK_N // 2], tl.float32)
    max_logit_acc, max_abs_acc = zeros - float("inf"), zeros
    entropy, mean_distance, mean_offset, mean_squared_distance = zeros, zeros, zeros, zeros
    sink_mass, self_mass, previous_mass, next_mass, window_mass = zeros, zeros, zeros, zeros, zeros
    signed_mass, absolute_mass, largest_weight, visible_keys = zeros, zeros, zeros, zeros
    sink_stop, start, stop = key_spans(mask, i_batch, first_row, shape.queries, shape.keys, BLOCK_M, BLOCK_N)
    for step in tl.range(0, sink_stop + stop - start, BLOCK_N):
        offs_n = tl.where(step < sink_stop, step, step - sink_stop + start) + tl.arange(0, BLOCK_N)
        tile_key = columns_by_head(
            ptr_key, strides_key, i_batch, offs_n, shape.keys, shape.heads, shape.group, DIM_KEY, BLOCK_KEY, HEADS
        )
        scores = batched_dot(tile_query, tile_key) * (scale * LOG2E)
        positions_n = key_positions(mask, i_batch, offs_n, shape.keys)
        visible = visible_pairs(mask, i_batch, offs_m, offs_n, positions_m, positions_n, shape)
        visible_heads = visible[None, :, :]
        nan_pairs = load_nan_pairs(poison, i_batch, offs_m, offs_n, shape)
        logits = mixed_logits(scores, logits_mix, visible, nan_pairs, DTYPE, True)
        weights = softmax_weights(logits, logsumexp[:, :, None], visible, poison)
        distance = positions_n[None, :] - positions_m[:, None]
        offset = distance.to(tl.float32)[None, :, :]
        if (results.max_logit is not None) or (results.confidence is not None):
            max_logit_acc = tl.maximum(max_logit_acc, _pair_maxima(logits))
        if results.max_abs_logit is not None:
            max_abs_acc = tl.maximum(max_abs_acc, _pair_maxima(tl.where(visible_heads, tl.abs(logits), 0.0)))
        if results.entropy is not None:
            entropy += _pair_sums(tl.where(visible_heads, weights * (logsumexp[:, :, None] - logits), 0.0))
        if results.mean_distance is not None:
            mean_distance += _pair_sums(weights * tl.abs(offset))
        if results.mean_offset is not None:
            mean_offset += _pair_sums(weights * offset)
        if results.mean_squared_distance is not None:
            mean_squared_distance += _pair_sums(weights * offset * offset)
        if results.sink_mass is not None:
            is_sink = key_ordinals(mask, i_batch, offs_n, shape.keys) < sink_keys
            sink_mass += _pair_sums(tl.where(is_sink[None, None, :], weights, 0.0))
        if results.self_mass is not None:
            self_mass += _pair_sums(tl.where((distance == 0)[None, :, :], weights, 0.0))
        if results.previous_mass is not None:
            previous_mass += _pair_sums(tl.where((distance == -1)[None, :, :], weights, 0.0))
        if results.next_mass is not None:
            next_mass += _pair_sums(tl.where((distance == 1)[None, :, :], weights, 0.0))
        if results.window_mass is not None:
            window_mass += _pair_sums(tl.where((tl.abs(distance) <= window)[None, :, :], weights, 0.0))
        if results.visible_keys is not None:
            visible_keys += _pair_sums(tl.where(visible_heads, 1.0, tl.zeros_like(weights)))
        if results.absolute_mass is not None:
            # The residual of rounding the weights to 16 bits is mixed as well.
            high = to_pairs(weights, DTYPE)
            residual = to_pairs(weights - weights.to(DTYPE).to(tl.float32), DTYPE)
            mixed_tile = to_heads(mix_heads(weights_mix, high) + mix_heads(weights_mix, residual), BLOCK_M, BLOCK_N)
            signed_mass += _pair_sums(mixed_tile)
            absolute_mass += _pair_sums(tl.abs(mixed_tile))
            largest_weight = tl.maximum(largest_weight, _pair_maxima(tl.abs(mixed_tile)))
    max_logit_acc, max_abs_acc, largest_weight = (
        tl.max(max_logit_acc, 2),
        tl.max(max_abs_acc, 2),
        tl.max(largest_weight, 2),
    )
    nan_pairs = logsumexp - logsumexp  # NaN in rows that are NaN, which a maximum may have ignored
    if results.max_logit is not None:
        store_row_values(results.max_logit, max_logit_acc * LN2 + nan_pairs, i_batch, offs_m, shape, HEADS)
    if results.confidence is not None:
        confidence = tl.exp2(max_logit_acc - logsumexp)
        store_row_values(results.confidence, confidence + nan_pairs, i_batch, offs_m, shape, HEADS)
    if results.max_abs_logit is not None:
        store_row_values(results.max_abs_logit, max_abs_acc * LN2 + nan_pairs, i_batch, offs_m, shape, HEADS)
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
        store_row_values(results.largest_weight, largest_weight + nan_pairs, i_batch, offs_m, shape, HEADS)
