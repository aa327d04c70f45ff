"""Attention of a few new tokens over a long cache: the keys are split over programs, a second kernel joins the parts.

Bound by bytes: every key and value is read once for all query heads that share it (the rows of a tile are the heads of
a group times the new tokens), straight from the cache's own memory, and everything else is small. Each program walks
its share of the keys with an online softmax and leaves, for each row, the maximum, the sum, the sums of the statistics
and the unnormalised output, which `decode_parts` joins. Where one program sees all keys there is nothing to join.

Most tiles hold keys that every row sees and that stand near no edge; they are loaded without a mask and give only what
every key gives. The tiles at an edge (the causal edge, a window's ends, the first keys, the last partial tile) decide
key by key, and they alone hold the masses at fixed places.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from polyhead.ops.common.kernels.mask_tiles import added_tile, key_ordinals, key_positions, visible_tile
from polyhead.ops.common.kernels.softmax_tiles import add_product, products, tanh
from polyhead.ops.decode.kernels.parts import exp, load_rows, store_rows, store_sums


class CachePointers(NamedTuple):
    """Where keys and values lie. A row is a sequence of the batch, or a page where there is a block table."""

    key: Tensor
    value: Tensor
    key_row: int  # strides, in elements; the last axis lies together
    key_head: int
    key_token: int
    value_row: int
    value_head: int
    value_token: int
    lengths: Tensor | None = None  # [batch]: tokens of each sequence, the new ones included; None: every slot
    new_lengths: Tensor | None = None  # [batch]: how many of the queries are real; None: all
    block_table: Tensor | None = None  # [batch, pages of the longest sequence], contiguous
    key_scale: Tensor | None = None  # float32, one number a token and head: keys and values are int8
    value_scale: Tensor | None = None
    key_scale_row: int = 0
    key_scale_head: int = 0
    key_scale_token: int = 0
    value_scale_row: int = 0
    value_scale_head: int = 0
    value_scale_token: int = 0


@triton.jit
def _load_scales(ptr_scale, row, head, token, i_row, i_head, offs_token, mask_n):
    """The scale of each token, [BLOCK_N]; `row`, `head` and `token` are strides."""
    ptr = ptr_scale + i_row * row + i_head.to(tl.int64) * head + offs_token * token
    if mask_n is None:
        scales = tl.load(ptr)
    else:
        scales = tl.load(ptr, mask=mask_n, other=0.0)
    return scales


@triton.jit(do_not_specialize=["num_slots", "splits", "num_rows", "sink_keys", "window"])
def decode_kernel(
    ptr_query,
    ptr_output,  # [batch, queries, heads, DIM_VALUE], written where one split sees all keys
    ptr_logsumexp,  # [batch, heads, queries], the rows
    ptr_statistics,  # [statistics, rows]
    ptr_sums,  # [2 + statistics, splits, rows]: maximum, sum, and the sum of each statistic that has one
    ptr_parts,  # [splits, rows, DIM_VALUE]
    ptr_head_scale,
    ptr_sinks,
    cache,
    mask,
    places,
    stride_query_batch,
    stride_query_head,
    stride_query_token,
    scale,
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

    # Lengths come from the device, so what they say is held to what can be read.
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

    # Tiles of keys, those that a window's left edge hides left out: `kept` tiles from key 0 on, then from `first` on.
    stop = tl.where(new_length > 0, length, 0)
    first, kept = 0, 0
    whole_from, whole_to = 0, 0  # every row sees these columns, and no asked mass stands among them
    if mask.key_position is None:
        whole_to = stop
        if mask.left is not None:
            first = tl.maximum(first_position - mask.left, 0) // BLOCK_N
            whole_from = tl.maximum(length - 1 - mask.left, 0)
            if mask.sinks is not None:
                kept = tl.minimum(tl.cdiv(mask.sinks, BLOCK_N), first)
        if mask.right is not None:
            whole_to = tl.minimum(whole_to, first_position + mask.right + 1)
        if places.sink_mass is not None:
            whole_from = tl.maximum(whole_from, sink_keys)
        if (places.self_mass is not None) or (places.previous_mass is not None) or (places.next_mass is not None):
            whole_to = tl.minimum(whole_to, first_position - 1)
        if places.window_mass is not None:
            whole_to = tl.minimum(whole_to, first_position - window)
    tiles = kept + tl.maximum(tl.cdiv(stop, BLOCK_N) - first, 0)
    tiles_each = tl.cdiv(tiles, splits)
    tile_from = tl.minimum(i_split * tiles_each, tiles)
    tile_to = tl.minimum(tile_from + tiles_each, tiles)
    inner_from = kept + tl.maximum(tl.cdiv(whole_from, BLOCK_N) - first, 0)
    inner_to = kept + tl.maximum(tl.maximum(whole_to, 0) // BLOCK_N - first, 0)
    inner_from = tl.minimum(tl.maximum(inner_from, tile_from), tile_to)
    inner_to = tl.maximum(tl.minimum(inner_to, tile_to), inner_from)

    # [BLOCK_M, BLOCK_KEY]
    ptr_rows = ptr_query + i_batch.to(tl.int64) * stride_query_batch
    ptr_rows += offs_head.to(tl.int64) * stride_query_head + offs_query.to(tl.int64) * stride_query_token
    tile_query = load_rows(ptr_rows, mask_real, DIM_KEY, BLOCK_KEY)
    row_scale = tl.zeros([BLOCK_M], tl.float32) + scale
    if ptr_head_scale is not None:
        row_scale *= tl.load(ptr_head_scale + offs_head, mask=mask_m, other=0.0).to(tl.float32)
    ptr_key = cache.key + i_kv_head.to(tl.int64) * cache.key_head
    ptr_value = cache.value + i_kv_head.to(tl.int64) * cache.value_head
    if cache.block_table is None:
        ptr_key += i_batch.to(tl.int64) * cache.key_row
        ptr_value += i_batch.to(tl.int64) * cache.value_row

    largest = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    largest_size = tl.zeros([BLOCK_M], tl.float32)
    spread = tl.zeros([BLOCK_M], tl.float32)
    mean_distance = tl.zeros([BLOCK_M], tl.float32)
    mean_offset = tl.zeros([BLOCK_M], tl.float32)
    mean_squared_distance = tl.zeros([BLOCK_M], tl.float32)
    sink_mass = tl.zeros([BLOCK_M], tl.float32)
    self_mass = tl.zeros([BLOCK_M], tl.float32)
    previous_mass = tl.zeros([BLOCK_M], tl.float32)
    next_mass = tl.zeros([BLOCK_M], tl.float32)
    window_mass = tl.zeros([BLOCK_M], tl.float32)
    visible_keys = tl.zeros([BLOCK_M], tl.int32)
    tile_output = tl.zeros([BLOCK_M, BLOCK_VALUE], tl.float32)

    # The edge before the whole tiles, the whole tiles, the edge behind them; stated positions may put an edge anywhere.
    WHOLE: tl.constexpr = 1
    ZONES: tl.constexpr = 3 if mask.key_position is None else 1
    for i_zone in tl.static_range(ZONES):
        if ZONES == 1:
            zone_from, zone_to = tile_from, tile_to
        elif i_zone == 0:
            zone_from, zone_to = tile_from, inner_from
        elif i_zone == WHOLE:
            zone_from, zone_to = inner_from, inner_to
        else:
            zone_from, zone_to = inner_to, tile_to
        for i_tile in tl.range(zone_from, zone_to, num_stages=STAGES if (i_zone == WHOLE) or (ZONES == 1) else 1):
            if i_zone == WHOLE:
                column = (i_tile + (first - kept)) * BLOCK_N
            else:
                column = (i_tile + tl.where(i_tile >= kept, first - kept, 0)) * BLOCK_N
            offs_n = column + tl.arange(0, BLOCK_N)
            key_position = key_positions(mask, i_batch, offs_n, stop)
            # [BLOCK_M, BLOCK_N]
            distance = key_position[None, :] - position[:, None]
            mask_n = None
            if i_zone != WHOLE:
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
                if i_zone == WHOLE:
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
                logits = products(tile_query, tile_key)
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
                    logits = products(tile_query, tile_key)
                else:
                    # The steps are exact in 16 bits, where their products with the scales would be rounded.
                    logits = tl.dot(tile_query, tl.trans(tile_key.to(tile_query.dtype))) * scales[None, :]
            logits *= row_scale[:, None]
            if softcap is not None:
                logits = softcap * tanh(logits / softcap, EXACT)
            if mask.table is not None:
                if i_zone == WHOLE:
                    seen = mask_m[:, None] & (offs_n >= 0)[None, :]
                    logits += added_tile(mask, i_batch, offs_head[:, None], offs_query, offs_n, distance, seen)
                else:
                    logits += added_tile(mask, i_batch, offs_head[:, None], offs_query, offs_n, distance, visible)
            if i_zone != WHOLE:
                if (QUERIES > 1) and (cache.value_scale is None):
                    # A value that one row sees and another does not: if it is broken, only the first may know.
                    broken = (tile_value - tile_value) != 0.0
                    tile_value = tl.where(broken, 0.0, tile_value)
                    poison = tl.where(tl.max(broken.to(tl.int32), 1) > 0, float("nan"), 0.0)
                    logits += poison[None, :]
                logits = tl.where(visible, logits, -float("inf"))

            new_largest = tl.maximum(largest, tl.max(logits, 1))
            shift = tl.where(new_largest == -float("inf"), 0.0, new_largest)
            below = logits - shift[:, None]
            exponential = exp(below, EXACT)
            shrink = exp(largest - shift, EXACT)
            if places.entropy is not None:
                # Never two numbers of the logits' size: when the maximum moves, the sum moves by the difference.
                moved = tl.where(largest == -float("inf"), 0.0, largest - shift)
                product = tl.where(exponential > 0.0, exponential * below, 0.0)
                spread = shrink * (spread + moved * total) + tl.sum(product, 1)
            total = total * shrink + tl.sum(exponential, 1)
            if places.max_abs_logit is not None:
                size = tl.where(logits == -float("inf"), 0.0, tl.abs(logits))
                largest_size = tl.maximum(largest_size, tl.max(size, 1))
            far = distance.to(tl.float32)
            if places.mean_distance is not None:
                mean_distance = mean_distance * shrink + tl.sum(exponential * tl.abs(far), 1)
            if places.mean_offset is not None:
                mean_offset = mean_offset * shrink + tl.sum(exponential * far, 1)
            if places.mean_squared_distance is not None:
                mean_squared_distance = mean_squared_distance * shrink + tl.sum(exponential * far * far, 1)
            if places.visible_keys is not None:
                if i_zone == WHOLE:
                    visible_keys += BLOCK_N
                else:
                    visible_keys += tl.sum(visible.to(tl.int32), 1)
            if places.sink_mass is not None:
                sink_mass *= shrink
                if i_zone != WHOLE:
                    early = key_ordinals(mask, i_batch, offs_n, stop) < sink_keys
                    sink_mass += tl.sum(tl.where(early[None, :], exponential, 0.0), 1)
            if places.self_mass is not None:
                self_mass *= shrink
                if i_zone != WHOLE:
                    self_mass += tl.sum(tl.where(distance == 0, exponential, 0.0), 1)
            if places.previous_mass is not None:
                previous_mass *= shrink
                if i_zone != WHOLE:
                    previous_mass += tl.sum(tl.where(distance == -1, exponential, 0.0), 1)
            if places.next_mass is not None:
                next_mass *= shrink
                if i_zone != WHOLE:
                    next_mass += tl.sum(tl.where(distance == 1, exponential, 0.0), 1)
            if places.window_mass is not None:
                window_mass *= shrink
                if i_zone != WHOLE:
                    window_mass += tl.sum(tl.where(tl.abs(distance) <= window, exponential, 0.0), 1)

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
                # Times 127, which makes it the token's largest value, so that float16 has room for small weights.
                exponential *= (127.0 * scales)[None, :]
                if i_zone != WHOLE:
                    exponential = tl.where(visible, exponential, 0.0)
            tile_value = tile_value.to(tile_query.dtype)
            weights = exponential.to(tile_query.dtype)
            tile_output = add_product(tile_output * shrink[:, None], weights, tile_value)
            largest = new_largest

    # Whole tiles ask nobody whether a row is real, so rows past the real ones are emptied here.
    largest = tl.where(mask_real, largest, -float("inf"))
    total = tl.where(mask_real, total, 0.0)
    largest_size = tl.where(mask_real, largest_size, 0.0)
    visible_keys = tl.where(mask_real, visible_keys, 0).to(tl.float32)
    if cache.value_scale is not None:
        tile_output *= 1.0 / 127.0
    # [BLOCK_M, BLOCK_VALUE]
    offs_value = tl.arange(0, BLOCK_VALUE)
    mask_output = mask_m[:, None] & (offs_value < DIM_VALUE)[None, :]
    if ONE_SPLIT:
        share = store_rows(
            ptr_logsumexp,
            ptr_statistics,
            ptr_sinks,
            places,
            num_rows,
            offs_row,
            mask_m,
            offs_head,
            largest,
            total,
            largest_size,
            spread,
            mean_distance,
            mean_offset,
            mean_squared_distance,
            sink_mass,
            self_mass,
            previous_mass,
            next_mass,
            window_mass,
            visible_keys,
            EXACT,
        )
        output = tl.where((total != 0.0)[:, None], tile_output * share[:, None], 0.0)
        offs_output = (i_batch.to(tl.int64) * QUERIES + offs_query) * (KV_HEADS * GROUP) + offs_head
        ptr = ptr_output + offs_output[:, None] * DIM_VALUE + offs_value[None, :]
        tl.store(ptr, output.to(ptr_output.dtype.element_ty), mask=mask_output)
    else:
        offs_part, mask_filled = store_sums(
            ptr_sums,
            places,
            i_split,
            splits,
            num_rows,
            offs_row,
            mask_m,
            largest,
            total,
            largest_size,
            spread,
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
        ptr = ptr_parts + offs_part[:, None] * DIM_VALUE + offs_value[None, :]
        tl.store(ptr, tile_output, mask=mask_output & mask_filled[:, None])
