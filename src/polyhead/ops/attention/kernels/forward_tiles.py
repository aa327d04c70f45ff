"""Tiles of the forward: the online softmax of one tile of keys, its row statistics, and their final reduction.

Shared by the forward of all rows and by that of selected rows.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from polyhead.ops.common.kernels.mask_tiles import (
    added_tile,
    full_key_span,
    keep_tile,
    key_ordinals,
    key_positions,
    visible_tile,
)
from polyhead.ops.common.kernels.softmax_tiles import LN2, LOG2E, exp2, log2, products, tanh
from polyhead.ops.common.statistics import NAMES, row_tuple

LOWEST = tl.constexpr(-3.4028234663852886e38)  # of float32
# A masked logit before scaling: below every real one, and still finite after a factor of up to 1e8.
MASKED = tl.constexpr(-1.0e30)


# Output pointers, each [batch, heads, queries]; None if not requested. The statistics are float32, the others int32:
# `argmax` is the key of the max logit, -1 without visible keys; `argmax_abs` is twice the key of the max |logit|, plus
# one if that logit is negative, -1 without visible keys.
RowPointers = row_tuple("RowPointers", (*NAMES, "argmax", "argmax_abs"), __name__)


class Sizes(NamedTuple):
    """Sizes of one call, and the parameters of its statistics."""

    heads: int
    group: int  # query heads that share a KV head
    queries: int
    keys: int
    sink_keys: int
    window: int


@triton.jit
def load_head_rows(
    source,
    strides,
    i_batch,
    i_head,
    first,
    limit,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    FULL: tl.constexpr,
):
    """Load rows of one head from `first` on, [ROWS, BLOCK_DIM], zeros past `limit` and DIM.

    FULL guarantees that all rows are before `limit`.
    """
    if DESCRIPTORS:
        tile = source.load([i_batch, i_head, first, 0]).reshape([ROWS, BLOCK_DIM])
    else:
        start = i_batch.to(tl.int64) * strides[0] + i_head.to(tl.int64) * strides[1] + first.to(tl.int64) * strides[2]
        # [ROWS], [BLOCK_DIM]
        offs_row = tl.arange(0, ROWS)
        offs_dim = tl.arange(0, BLOCK_DIM)
        ptr_tile = source + start + (offs_row.to(tl.int64) * strides[2])[:, None] + offs_dim[None, :]
        if FULL and DIM == BLOCK_DIM:
            tile = tl.load(ptr_tile)
        elif FULL:
            tile = tl.load(ptr_tile, mask=(offs_dim < DIM)[None, :], other=0.0)
        else:
            tile = tl.load(ptr_tile, mask=(first + offs_row < limit)[:, None] & (offs_dim < DIM)[None, :], other=0.0)
    return tile


@triton.jit
def full_tiles(
    mask, rows, sizes, i_batch, first_row, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, first_tile, last_tile
):
    """Return the tiles that need no mask, under a band and full spans of documents and dense terms.

    These are the tiles from `full_from` to `full_to`, except those from `near_from` to `near_to`. The
    latter contain a distance that a mass counts. All four are between `first_tile` and `last_tile`.
    """
    first = first_row + mask.offset
    last = tl.minimum(first_row + BLOCK_M, sizes.queries) - 1 + mask.offset
    full_from, full_to = first_tile, sizes.keys // BLOCK_N
    if mask.right is not None:
        full_to = tl.minimum(full_to, tl.maximum(first + mask.right + 1, 0) // BLOCK_N)
    if mask.left is not None:
        full_from = tl.maximum(full_from, tl.cdiv(tl.maximum(last - mask.left, 0), BLOCK_N))
    if mask.full_key is not None:
        start, stop = full_key_span(mask, i_batch, first_row, sizes.queries, sizes.keys, BLOCK_M)
        full_from = tl.maximum(full_from, tl.cdiv(start, BLOCK_N))
        full_to = tl.minimum(full_to, stop // BLOCK_N)
    if rows.sink_mass is not None:
        full_from = tl.maximum(full_from, tl.cdiv(tl.minimum(sizes.sink_keys, sizes.keys), BLOCK_N))
    full_from = tl.minimum(full_from, last_tile)
    full_to = tl.minimum(tl.maximum(full_to, full_from), last_tile)
    # Tiles with a distance from `low` to `high`, which a mass counts, are near. The initial empty range includes only
    # tiles with distances of both signs, which the mean distance needs pair by pair.
    low, high = 1, -1
    if rows.self_mass is not None:
        low, high = 0, 0
    if rows.previous_mass is not None:
        low = -1
    if rows.next_mass is not None:
        high = 1
    if rows.window_mass is not None:
        low, high = tl.minimum(low, -sizes.window), tl.maximum(high, sizes.window)
    near_from, near_to = full_from, full_from
    if (
        rows.mean_distance is not None
        or rows.self_mass is not None
        or rows.previous_mass is not None
        or rows.next_mass is not None
        or rows.window_mass is not None
    ):
        near_from = tl.minimum(tl.maximum(tl.maximum(first + low, 0) // BLOCK_N, full_from), full_to)
        near_to = tl.minimum(tl.maximum(tl.maximum(last + high + BLOCK_N, 0) // BLOCK_N, near_from), full_to)
    return full_from, full_to, near_from, near_to


@triton.jit
def update_softmax_state(
    state,
    tile_q,
    source_key,
    source_value,
    strides_key,
    strides_value,
    mask,
    rows,
    sizes,
    ptr_seed,
    threshold,
    sm_scale,
    softcap_scale,
    i_batch,
    i_head,
    offs_m,
    positions,
    i_tile,
    FULL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DIM_KEY: tl.constexpr,
    DIM_VALUE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """Update the online-softmax state and the statistics of the rows with one tile of keys."""
    (
        acc,
        m_i,
        l_i,
        poison_sum,
        max_s,
        max_abs_s,
        argmax,
        argmax_abs,
        entropy_sum,
        mean_distance,
        mean_offset,
        mean_squared_distance,
        sink_mass,
        self_mass,
        previous_mass,
        next_mass,
        window_mass,
        visible_keys,
    ) = state
    EXACT: tl.constexpr = tile_q.dtype == tl.float32
    # Without explicit positions, distances in a full tile follow from its indices, and no key in it counts to a mass.
    REGULAR: tl.constexpr = FULL and mask.key_position is None and mask.key_ordinal is None
    i_kv_head = i_head // sizes.group
    first_key = i_tile * BLOCK_N
    # [BLOCK_N]
    offs_column = tl.arange(0, BLOCK_N)
    offs_n = first_key + offs_column

    # [BLOCK_N, BLOCK_KEY]
    tile_k = load_head_rows(
        source_key, strides_key, i_batch, i_kv_head, first_key, sizes.keys, BLOCK_N, DIM_KEY, BLOCK_KEY, DESCRIPTORS,
        FULL,
    )  # fmt: skip
    # [BLOCK_M, BLOCK_N], all that follows
    tile_s = products(tile_q, tile_k)
    if SOFTCAP:
        tile_s = tanh(tile_s * softcap_scale, EXACT)
    if not REGULAR or mask.table is not None:
        distance = key_positions(mask, i_batch, offs_n, sizes.keys)[None, :] - positions[:, None]
    if not FULL:
        visible = visible_tile(mask, i_batch, i_head, offs_m, offs_n, distance, sizes.queries, sizes.keys)
    if HAS_BIAS:
        if FULL:
            tile_s = tile_s * sm_scale + added_tile(
                mask, i_batch, i_head, offs_m, offs_n, distance, distance == distance
            )
        else:
            tile_s = tile_s * sm_scale + added_tile(mask, i_batch, i_head, offs_m, offs_n, distance, visible)
    if mask.poison is not None:
        i_kv_pair = (i_batch * (sizes.heads // sizes.group) + i_kv_head).to(tl.int64)
        ptr_poison = mask.poison + i_kv_pair * sizes.keys + offs_n
        if FULL:
            # Every row sees all of these keys, so their poison is added to all rows at the end.
            poison_sum += tl.load(ptr_poison).to(tl.float32)
        else:
            tile_s += tl.load(ptr_poison, mask=offs_n < sizes.keys, other=0.0).to(tl.float32)[None, :]
    if not FULL:
        if HAS_BIAS:
            tile_s = tl.where(visible, tile_s, -float("inf"))
        else:
            tile_s = tl.where(visible, tile_s, MASKED)

    # [BLOCK_M]
    if rows.argmax is not None:
        tile_max, tile_argmax = tl.max(tile_s, 1, return_indices=True)
        tile_argmax += first_key
        is_larger = (tile_max > max_s) | ((tile_max == max_s) & (tile_argmax < argmax))
        argmax = tl.where(is_larger, tile_argmax, argmax)
    else:
        tile_max = tl.max(tile_s, 1)
    if rows.max_logit is not None or rows.confidence is not None or rows.argmax is not None:
        max_s = tl.maximum(max_s, tile_max)
    if rows.max_abs_logit is not None or rows.argmax_abs is not None:
        tile_abs = tl.abs(tile_s)
        if not FULL:
            tile_abs = tl.where(visible, tile_abs, -1.0)
        if rows.argmax_abs is not None:
            tile_max_abs, column = tl.max(tile_abs, 1, return_indices=True)
            s_at_max = tl.sum(tl.where(offs_column[None, :] == column[:, None], tile_s, 0.0), 1)
            signed_index = 2 * (first_key + column) + (s_at_max < 0).to(tl.int32)
            is_larger = (tile_max_abs > max_abs_s) | ((tile_max_abs == max_abs_s) & (signed_index < argmax_abs))
            argmax_abs = tl.where(is_larger, signed_index, argmax_abs)
        else:
            tile_max_abs = tl.max(tile_abs, 1)
        max_abs_s = tl.maximum(max_abs_s, tile_max_abs)

    # `log_alpha` is the change of the row max and `exponent` the logits minus the new row max, both in base 2.
    if HAS_BIAS:
        m_new = tl.maximum(m_i, tile_max)
        # The differences may overflow to -inf; the clamp keeps 0 * inf out of the sums.
        log_alpha = tl.maximum((m_i - m_new) * LOG2E, MASKED)
        exponent = tl.maximum((tile_s - m_new[:, None]) * LOG2E, MASKED)
    elif EXACT:
        # The scale is not multiplied by log2(e) first: that rounding would affect large logits.
        m_new = tl.maximum(m_i, tile_max * sm_scale)
        log_alpha = tl.maximum((m_i - m_new) * LOG2E, MASKED)
        exponent = (tile_s * sm_scale - m_new[:, None]) * LOG2E
    else:
        m_new = tl.maximum(m_i, tile_max * sm_scale)
        log_alpha = m_i - m_new
        exponent = tile_s * sm_scale - m_new[:, None]
    alpha = exp2(log_alpha, EXACT)
    tile_p = exp2(exponent, EXACT)
    if not FULL:
        tile_p = tl.where(visible, tile_p, 0.0)
    tile_sum = tl.sum(tile_p, 1)

    if rows.entropy is not None:
        if not FULL:
            exponent = tl.where(visible, exponent, 0.0)
        entropy_sum = alpha * (entropy_sum + log_alpha * l_i) + tl.sum(tile_p * exponent, 1)
    if rows.mean_distance is not None or rows.mean_offset is not None or rows.mean_squared_distance is not None:
        if REGULAR:
            # A distance is that of the tile's first key, one per row, plus the column index, a constant.
            from_first = (first_key - positions).to(tl.float32)
            column_index = offs_column.to(tl.float32)
            column_sum = tl.sum(tile_p * column_index[None, :], 1)
            tile_distance_sum = from_first * tile_sum + column_sum
            if rows.mean_distance is not None:
                mean_distance = mean_distance * alpha + tl.abs(tile_distance_sum)  # all distances have one sign
            if rows.mean_offset is not None:
                mean_offset = mean_offset * alpha + tile_distance_sum
            if rows.mean_squared_distance is not None:
                column_square_sum = tl.sum(tile_p * (column_index * column_index)[None, :], 1)
                tile_square_sum = from_first * (from_first * tile_sum + 2.0 * column_sum) + column_square_sum
                mean_squared_distance = mean_squared_distance * alpha + tile_square_sum
        else:
            weighted = tile_p * distance.to(tl.float32)
            if rows.mean_distance is not None:
                mean_distance = mean_distance * alpha + tl.sum(tl.abs(weighted), 1)
            if rows.mean_offset is not None:
                mean_offset = mean_offset * alpha + tl.sum(weighted, 1)
            if rows.mean_squared_distance is not None:
                mean_squared_distance = mean_squared_distance * alpha + tl.sum(weighted * distance.to(tl.float32), 1)
    if rows.sink_mass is not None:
        sink_mass = sink_mass * alpha
        if not REGULAR:
            is_first = key_ordinals(mask, i_batch, offs_n, sizes.keys) < sizes.sink_keys
            sink_mass += tl.sum(tl.where(is_first[None, :], tile_p, 0.0), 1)
    if rows.self_mass is not None:
        self_mass = self_mass * alpha
        if not REGULAR:
            self_mass += tl.sum(tl.where(distance == 0, tile_p, 0.0), 1)
    if rows.previous_mass is not None:
        previous_mass = previous_mass * alpha
        if not REGULAR:
            previous_mass += tl.sum(tl.where(distance == -1, tile_p, 0.0), 1)
    if rows.next_mass is not None:
        next_mass = next_mass * alpha
        if not REGULAR:
            next_mass += tl.sum(tl.where(distance == 1, tile_p, 0.0), 1)
    if rows.window_mass is not None:
        window_mass = window_mass * alpha
        if not REGULAR:
            is_near = (distance <= sizes.window) & (distance >= -sizes.window)
            window_mass += tl.sum(tl.where(is_near, tile_p, 0.0), 1)
    if rows.visible_keys is not None:
        if FULL:
            visible_keys += BLOCK_N
        else:
            visible_keys += tl.sum(visible.to(tl.int32), 1)
    l_i = l_i * alpha + tile_sum

    if ptr_seed is not None:
        keep = keep_tile(ptr_seed, threshold, i_batch * sizes.heads + i_head, offs_m, offs_n)
        tile_p = tl.where(keep, tile_p, 0.0)
    # [BLOCK_N, BLOCK_VALUE]
    tile_v = load_head_rows(
        source_value, strides_value, i_batch, i_kv_head, first_key, sizes.keys, BLOCK_N, DIM_VALUE, BLOCK_VALUE,
        DESCRIPTORS, FULL,
    )  # fmt: skip
    # One chain of additions over all tiles: in float32 a separate chain per tile would not fit into the registers.
    acc = tl.dot(tile_p.to(tile_v.dtype), tile_v, acc * alpha[:, None], input_precision="ieee")
    return (
        acc,
        m_new,
        l_i,
        poison_sum,
        max_s,
        max_abs_s,
        argmax,
        argmax_abs,
        entropy_sum,
        mean_distance,
        mean_offset,
        mean_squared_distance,
        sink_mass,
        self_mass,
        previous_mass,
        next_mass,
        window_mass,
        visible_keys,
    )


@triton.jit
def first_state(
    sink,
    HAS_BIAS: tl.constexpr,
    BASE_TWO: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
):
    """Return the state of rows before their first tile; a sink is a first key without a value."""
    # [BLOCK_M]
    zeros = tl.zeros([BLOCK_M], tl.float32)
    m_i = zeros + LOWEST
    l_i = zeros
    if sink is not None:
        if BASE_TWO:
            m_i = tl.maximum(m_i, sink * LOG2E)
        else:
            m_i = tl.maximum(m_i, sink)
        l_i = tl.where(sink == -float("inf"), 0.0, zeros + 1.0)
    max_s = zeros + MASKED
    if HAS_BIAS:
        max_s = zeros - float("inf")
    no_index = tl.zeros([BLOCK_M], tl.int32) - 1
    return (
        tl.zeros([BLOCK_M, BLOCK_VALUE], tl.float32),
        m_i,
        l_i,
        tl.zeros([BLOCK_N], tl.float32),
        max_s,
        zeros - 1.0,
        no_index,
        no_index,
        zeros,
        zeros,
        zeros,
        zeros,
        zeros,
        zeros,
        zeros,
        zeros,
        zeros,
        tl.zeros([BLOCK_M], tl.int32),
    )


@triton.jit
def store_rows(
    state,
    sink,
    POISONED: tl.constexpr,
    rows,
    ptr_logsumexp,
    offs_row,
    mask_m,
    sm_scale,
    HAS_BIAS: tl.constexpr,
    BASE_TWO: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Store log-sum-exp and statistics of rows after their last tile; return their output."""
    (
        acc,
        m_i,
        l_i,
        poison_sum,
        max_s,
        max_abs_s,
        argmax,
        argmax_abs,
        entropy_sum,
        mean_distance,
        mean_offset,
        mean_squared_distance,
        sink_mass,
        self_mass,
        previous_mass,
        next_mass,
        window_mass,
        visible_keys,
    ) = state
    if POISONED:
        l_i += tl.sum(poison_sum, 0)

    is_empty = l_i == 0.0
    is_nan = l_i != l_i
    l_i = tl.where(is_empty, 1.0, l_i)
    log2_l = log2(l_i, EXACT)
    if BASE_TWO:
        logsumexp = (m_i + log2_l) * LN2
    else:
        logsumexp = m_i + log2_l * LN2
    tl.store(ptr_logsumexp + offs_row, tl.where(is_empty, -float("inf"), logsumexp), mask=mask_m)

    # [BLOCK_M]
    nan = float("nan")
    if HAS_BIAS:
        sees_keys = max_s > -float("inf")
        max_logit, max_abs_logit = max_s, tl.maximum(max_abs_s, 0.0)
        max_exponent = (max_s - m_i) * LOG2E
    elif BASE_TWO:
        sees_keys = max_s > MASKED
        max_logit, max_abs_logit = max_s * (sm_scale * LN2), tl.maximum(max_abs_s, 0.0) * (sm_scale * LN2)
        max_exponent = max_s * sm_scale - m_i
    else:
        sees_keys = max_s > MASKED
        max_logit, max_abs_logit = max_s * sm_scale, tl.maximum(max_abs_s, 0.0) * sm_scale
        max_exponent = (max_s * sm_scale - m_i) * LOG2E
    if rows.max_logit is not None:
        value = tl.where(sees_keys, max_logit, -float("inf"))
        tl.store(rows.max_logit + offs_row, tl.where(is_nan, nan, value), mask=mask_m)
    if rows.max_abs_logit is not None:
        tl.store(rows.max_abs_logit + offs_row, tl.where(is_nan, nan, max_abs_logit), mask=mask_m)
    if rows.confidence is not None:
        value = tl.where(sees_keys, exp2(max_exponent, EXACT) / l_i, 0.0)
        tl.store(rows.confidence + offs_row, tl.where(is_nan, nan, value), mask=mask_m)
    if rows.entropy is not None:
        tl.store(rows.entropy + offs_row, (log2_l - entropy_sum / l_i) * LN2, mask=mask_m)
    if rows.mean_distance is not None:
        tl.store(rows.mean_distance + offs_row, mean_distance / l_i, mask=mask_m)
    if rows.mean_offset is not None:
        tl.store(rows.mean_offset + offs_row, mean_offset / l_i, mask=mask_m)
    if rows.mean_squared_distance is not None:
        tl.store(rows.mean_squared_distance + offs_row, mean_squared_distance / l_i, mask=mask_m)
    if rows.sink_mass is not None:
        tl.store(rows.sink_mass + offs_row, sink_mass / l_i, mask=mask_m)
    if rows.self_mass is not None:
        tl.store(rows.self_mass + offs_row, self_mass / l_i, mask=mask_m)
    if rows.previous_mass is not None:
        tl.store(rows.previous_mass + offs_row, previous_mass / l_i, mask=mask_m)
    if rows.next_mass is not None:
        tl.store(rows.next_mass + offs_row, next_mass / l_i, mask=mask_m)
    if rows.window_mass is not None:
        tl.store(rows.window_mass + offs_row, window_mass / l_i, mask=mask_m)
    if rows.visible_keys is not None:
        tl.store(rows.visible_keys + offs_row, visible_keys.to(tl.float32), mask=mask_m)
    if rows.learned_sink_mass is not None:
        if BASE_TWO:
            value = exp2(sink * LOG2E - m_i, EXACT) / l_i
        else:
            value = exp2((sink - m_i) * LOG2E, EXACT) / l_i
        tl.store(rows.learned_sink_mass + offs_row, value, mask=mask_m)
    if rows.argmax is not None:
        tl.store(rows.argmax + offs_row, argmax, mask=mask_m)
    if rows.argmax_abs is not None:
        tl.store(rows.argmax_abs + offs_row, argmax_abs, mask=mask_m)
    # [BLOCK_M, BLOCK_VALUE]
    return acc / l_i[:, None]
