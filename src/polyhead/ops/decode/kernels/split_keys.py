"""Split-KV decoding kernel; `parts.join_kernel` reduces its partial results.

Memory-bound: every key and value is read once for all query heads that share it (the rows of a tile are the heads of
a group times the new tokens), directly from the cache's own memory. Each program processes its share of the keys with
an online softmax and stores, for each row, the row max, the sum, the accumulators of the statistics and the
unnormalised output. With a single split there is nothing to reduce.

Most tiles are full: every row sees all their keys and no edge is near. They are loaded without a mask. Only the partial
tiles (at the causal edge, at the ends of a window, at the first keys and at the end) are masked key by key, and only
they can contribute to the masses at fixed positions (sink, self, previous, next, window).
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from polyhead.ops.common.kernels.mask_tiles import added_tile, key_positions, visible_tile
from polyhead.ops.common.kernels.softmax_tiles import add_product, products, tanh
from polyhead.ops.decode.kernels.parts import load_rows, store_rows, store_sums
from polyhead.ops.decode.kernels.row_state import empty_state, reset_padding, update_state


class CachePointers(NamedTuple):
    """Pointers and strides of a KV cache; a row is a sequence of the batch, or a page."""

    key: Tensor
    value: Tensor
    key_row: int  # strides, in elements; the last axis is contiguous
    key_head: int
    key_token: int
    value_row: int
    value_head: int
    value_token: int
    lengths: Tensor | None = None  # [batch]: tokens of each sequence, the new ones included; None: every slot
    new_lengths: Tensor | None = None  # [batch]: non-padding queries; None: all
    block_table: Tensor | None = None  # [batch, pages of the longest sequence], contiguous
    key_scale: Tensor | None = None  # float32, one number per token and head: keys and values are int8
    value_scale: Tensor | None = None
    key_scale_row: int = 0
    key_scale_head: int = 0
    key_scale_token: int = 0
    value_scale_row: int = 0
    value_scale_head: int = 0
    value_scale_token: int = 0


@triton.jit
def _load_scales(ptr_scale, row, head, token, i_row, i_head, offs_token, mask_n):
    """Load the quantisation scale of each token, [BLOCK_N]; `row`, `head` and `token` are strides."""
    ptr = ptr_scale + i_row * row + i_head.to(tl.int64) * head + offs_token * token
    if mask_n is None:
        scales = tl.load(ptr)
    else:
        scales = tl.load(ptr, mask=mask_n, other=0.0)
    return scales


@triton.jit(do_not_specialize=["num_slots", "splits", "num_rows", "sink_keys", "window"])
def decode_kernel(
    ptr_query,
    ptr_output,  # [batch, queries, heads, DIM_VALUE], written if there is a single split
    ptr_logsumexp,  # [batch, heads, queries], the rows
    ptr_statistics,  # [statistics, rows]
    ptr_sums,  # [2 + statistics, splits, rows]: m_i, l_i and the accumulator of each statistic that has one
    ptr_parts,  # [splits, rows, DIM_VALUE]
    ptr_head_scale,
    ptr_sinks,
    cache,
    mask,
    stat_slots,
    stride_query_batch,
    stride_query_head,
    stride_query_token,
    sm_scale,
    softcap,
    sink_keys,
    window,
    num_slots,
    splits,
    num_rows,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    DIM_KEY: tl.constexpr,
    DIM_VALUE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ONE_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    STAGES: tl.constexpr,
):
    EXACT: tl.constexpr = ptr_query.dtype.element_ty == tl.float32
    ROWS: tl.constexpr = GROUP * QUERIES
    ROW_BLOCKS: tl.constexpr = (ROWS + BLOCK_M - 1) // BLOCK_M
    i_pair = tl.program_id(0) // ROW_BLOCKS  # batch * KV_HEADS + KV head
    i_batch, i_kv_head = i_pair // KV_HEADS, i_pair % KV_HEADS
    i_split = tl.program_id(1)
    # [BLOCK_M]: the rows of a KV head are its query heads times the new tokens
    offs_m = (tl.program_id(0) % ROW_BLOCKS) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < ROWS
    offs_query = offs_m % QUERIES
    offs_head = i_kv_head * GROUP + offs_m // QUERIES
    offs_row = i_pair.to(tl.int64) * ROWS + offs_m
    num_rows = num_rows.to(tl.int64)

    # Lengths are read on the device and cannot be checked by the host, so they are clamped to the slots.
    length, new_length = num_slots, QUERIES
    if cache.lengths is not None:
        length = tl.minimum(tl.load(cache.lengths + i_batch).to(tl.int32), num_slots)
    if cache.new_lengths is not None:
        new_length = tl.load(cache.new_lengths + i_batch).to(tl.int32)
    mask_real = mask_m & (offs_query < new_length)
    first_position = length - new_length
    if mask.query_position is None:
        position = first_position + offs_query
    else:
        ptr_position = mask.query_position + i_batch * mask.stride_query + offs_query
        position = tl.load(ptr_position, mask=mask_m, other=0)

    # Tiles of keys, without those masked by a window's left edge: `sink_tiles` tiles from key 0 on, then tiles from
    # `first_tile` on.
    stop = tl.where(new_length > 0, length, 0)
    first_tile, sink_tiles = 0, 0
    full_from, full_to = 0, 0  # columns that every row sees and that contribute to no requested mass
    if mask.key_position is None:
        full_to = stop
        if mask.left is not None:
            first_tile = tl.maximum(first_position - mask.left, 0) // BLOCK_N
            full_from = tl.maximum(length - 1 - mask.left, 0)
            if mask.sinks is not None:
                sink_tiles = tl.minimum(tl.cdiv(mask.sinks, BLOCK_N), first_tile)
        if mask.right is not None:
            full_to = tl.minimum(full_to, first_position + mask.right + 1)
        if stat_slots.sink_mass is not None:
            full_from = tl.maximum(full_from, sink_keys)
        if (
            (stat_slots.self_mass is not None)
            or (stat_slots.previous_mass is not None)
            or (stat_slots.next_mass is not None)
        ):
            full_to = tl.minimum(full_to, first_position - 1)
        if stat_slots.window_mass is not None:
            full_to = tl.minimum(full_to, first_position - window)
    tiles = sink_tiles + tl.maximum(tl.cdiv(stop, BLOCK_N) - first_tile, 0)
    tiles_each = tl.cdiv(tiles, splits)
    tile_from = tl.minimum(i_split * tiles_each, tiles)
    tile_to = tl.minimum(tile_from + tiles_each, tiles)
    inner_from = sink_tiles + tl.maximum(tl.cdiv(full_from, BLOCK_N) - first_tile, 0)
    inner_to = sink_tiles + tl.maximum(tl.maximum(full_to, 0) // BLOCK_N - first_tile, 0)
    inner_from = tl.minimum(tl.maximum(inner_from, tile_from), tile_to)
    inner_to = tl.maximum(tl.minimum(inner_to, tile_to), inner_from)

    # [BLOCK_M, BLOCK_KEY]
    ptr_rows = ptr_query + i_batch.to(tl.int64) * stride_query_batch
    ptr_rows += offs_head.to(tl.int64) * stride_query_head + offs_query.to(tl.int64) * stride_query_token
    tile_query = load_rows(ptr_rows, mask_real, DIM_KEY, BLOCK_KEY)
    head_sm_scale = tl.zeros([BLOCK_M], tl.float32) + sm_scale
    if ptr_head_scale is not None:
        head_sm_scale *= tl.load(ptr_head_scale + offs_head, mask=mask_m, other=0.0).to(tl.float32)
    ptr_key = cache.key + i_kv_head.to(tl.int64) * cache.key_head
    ptr_value = cache.value + i_kv_head.to(tl.int64) * cache.value_head
    if cache.block_table is None:
        ptr_key += i_batch.to(tl.int64) * cache.key_row
        ptr_value += i_batch.to(tl.int64) * cache.value_row

    state = empty_state(BLOCK_M)
    acc = tl.zeros([BLOCK_M, BLOCK_VALUE], tl.float32)

    # Partial tiles before the full ones, full tiles, partial tiles after them; explicit positions allow no full tiles.
    FULL: tl.constexpr = 1
    ZONES: tl.constexpr = 3 if mask.key_position is None else 1
    for i_zone in tl.static_range(ZONES):
        if ZONES == 1:
            zone_from, zone_to = tile_from, tile_to
        elif i_zone == 0:
            zone_from, zone_to = tile_from, inner_from
        elif i_zone == FULL:
            zone_from, zone_to = inner_from, inner_to
        else:
            zone_from, zone_to = inner_to, tile_to
        for i_tile in tl.range(zone_from, zone_to, num_stages=STAGES if (i_zone == FULL) or (ZONES == 1) else 1):
            if i_zone == FULL:
                column = (i_tile + (first_tile - sink_tiles)) * BLOCK_N
            else:
                column = (i_tile + tl.where(i_tile >= sink_tiles, first_tile - sink_tiles, 0)) * BLOCK_N
            offs_n = column + tl.arange(0, BLOCK_N)
            key_position = key_positions(mask, i_batch, offs_n, stop)
            # [BLOCK_M, BLOCK_N]
            distance = key_position[None, :] - position[:, None]
            mask_n, visible = None, None
            if i_zone != FULL:
                visible = visible_tile(mask, i_batch, offs_head, offs_query, offs_n, distance, new_length, stop)
                visible = visible & mask_m[:, None]
                if mask.key_position is not None:
                    visible = visible & (key_position >= 0)[None, :]
                mask_n = tl.max(visible.to(tl.int32), 0) > 0
            if cache.block_table is None:
                i_row = i_batch.to(tl.int64)
                offs_token = offs_n.to(tl.int64)
                ptr_keys = ptr_key + offs_token * cache.key_token
                ptr_values = ptr_value + offs_token * cache.value_token
            else:
                ptr_page = cache.block_table + i_batch.to(tl.int64) * (num_slots // PAGE_SIZE) + offs_n // PAGE_SIZE
                if i_zone == FULL:
                    i_row = tl.load(ptr_page).to(tl.int64)
                else:
                    i_row = tl.load(ptr_page, mask=mask_n, other=0).to(tl.int64)
                offs_token = (offs_n % PAGE_SIZE).to(tl.int64)
                ptr_keys = ptr_key + i_row * cache.key_row + offs_token * cache.key_token
                ptr_values = ptr_value + i_row * cache.value_row + offs_token * cache.value_token
            # [BLOCK_N, BLOCK_KEY] and [BLOCK_N, BLOCK_VALUE]
            tile_key = load_rows(ptr_keys, mask_n, DIM_KEY, BLOCK_KEY)
            tile_value = load_rows(ptr_values, mask_n, DIM_VALUE, BLOCK_VALUE)

            if cache.key_scale is None:
                qk = products(tile_query, tile_key)
            else:
                scales = _load_scales(
                    cache.key_scale,
                    cache.key_scale_row,
                    cache.key_scale_head,
                    cache.key_scale_token,
                    i_row,
                    i_kv_head,
                    offs_token,
                    mask_n,
                )
                if tile_query.dtype == tl.float32:
                    tile_key = tile_key.to(tl.float32) * scales[:, None]
                    qk = products(tile_query, tile_key)
                else:
                    # int8 values are exact in 16 bits; their products with the scales would be rounded.
                    qk = tl.dot(tile_query, tl.trans(tile_key.to(tile_query.dtype))) * scales[None, :]
            qk *= head_sm_scale[:, None]
            if softcap is not None:
                qk = softcap * tanh(qk / softcap, EXACT)
            if mask.table is not None:
                if i_zone == FULL:
                    in_bounds = mask_m[:, None] & (offs_n >= 0)[None, :]
                    qk += added_tile(mask, i_batch, offs_head[:, None], offs_query, offs_n, distance, in_bounds)
                else:
                    qk += added_tile(mask, i_batch, offs_head[:, None], offs_query, offs_n, distance, visible)
            if i_zone != FULL:
                if (QUERIES > 1) and (cache.value_scale is None):
                    # A non-finite value must reach only the rows that see its key: 0 * NaN would reach the others.
                    nonfinite = (tile_value - tile_value) != 0.0
                    tile_value = tl.where(nonfinite, 0.0, tile_value)
                    nan_bias = tl.where(tl.max(nonfinite.to(tl.int32), 1) > 0, float("nan"), 0.0)
                    qk += nan_bias[None, :]
                qk = tl.where(visible, qk, -float("inf"))

            state, p, alpha = update_state(
                state, stat_slots, qk, distance, visible, mask, i_batch, offs_n, stop, sink_keys, window,
                i_zone == FULL, BLOCK_N, EXACT,
            )  # fmt: skip

            if cache.value_scale is not None:
                scales = _load_scales(
                    cache.value_scale,
                    cache.value_scale_row,
                    cache.value_scale_head,
                    cache.value_scale_token,
                    i_row,
                    i_kv_head,
                    offs_token,
                    mask_n,
                )
                # Times 127, so that the factor is the token's largest value and small weights do not underflow float16.
                p *= (127.0 * scales)[None, :]
                if i_zone != FULL:
                    p = tl.where(visible, p, 0.0)
            tile_value = tile_value.to(tile_query.dtype)
            weights = p.to(tile_query.dtype)
            acc = add_product(acc * alpha[:, None], weights, tile_value)

    state = reset_padding(state, mask_real)
    if cache.value_scale is not None:
        acc *= 1.0 / 127.0
    # [BLOCK_M, BLOCK_VALUE]
    offs_value = tl.arange(0, BLOCK_VALUE)
    mask_output = mask_m[:, None] & (offs_value < DIM_VALUE)[None, :]
    if ONE_SPLIT:
        normalizer = store_rows(
            ptr_logsumexp, ptr_statistics, ptr_sinks, stat_slots, num_rows, offs_row, mask_m, offs_head, state, EXACT
        )
        output = tl.where((state.l_i != 0.0)[:, None], acc * normalizer[:, None], 0.0)
        offs_output = (i_batch.to(tl.int64) * QUERIES + offs_query) * (KV_HEADS * GROUP) + offs_head
        ptr = ptr_output + offs_output[:, None] * DIM_VALUE + offs_value[None, :]
        tl.store(ptr, output.to(ptr_output.dtype.element_ty), mask=mask_output)
    else:
        offs_part, mask_filled = store_sums(ptr_sums, stat_slots, i_split, splits, num_rows, offs_row, mask_m, state)
        ptr = ptr_parts + offs_part[:, None] * DIM_VALUE + offs_value[None, :]
        tl.store(ptr, acc, mask=mask_output & mask_filled[:, None])
