"""Attention in one pass over the keys, with the statistics of every row as by-products of its online softmax.

Bound by the matrix units at head dims of 128 and more, by exponentials at 64 and less: a logit costs 4 * head_dim
operations of theirs, one exponential, and about four instructions for maximum, shift and sums. Each statistic adds one
or two multiply-adds a logit (entropy, reach) or a few instructions in the tiles near the diagonal alone (masses).

One program takes BLOCK_M rows of one head through the tiles of keys they may see. Tiles that need no mask, and hold no
distance that a statistic singles out, are taken first and without any comparison ("full"); all others after them
("edge"). Logits are kept as they leave the matrix unit, and `gain` brings them to base 2 inside the multiply-add that
subtracts the maximum. Only where a bias is added are they turned into natural logits first: a bias may be as large as a
float, and has no room for a factor.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from polyhead.ops.attention.kernels.outputs import output_like
from polyhead.ops.common.kernels.availability import capability
from polyhead.ops.common.kernels.mask_arguments import MaskArguments
from polyhead.ops.common.kernels.mask_tiles import (
    added_tile,
    keep_tile,
    key_ordinals,
    key_positions,
    key_spans,
    query_positions,
    visible_tile,
)
from polyhead.ops.common.kernels.resources import Blocks, launch_fitting, shared_memory
from polyhead.ops.common.kernels.sizes import blocks_of, power_of_two
from polyhead.ops.common.kernels.softmax_tiles import LN2, LOG2E, exp2, log2, products, tanh

LOWEST = tl.constexpr(-3.4028234663852886e38)  # of float32
# A hidden logit before its factor: below every real one, and still finite after a factor of up to 1e8.
HIDDEN = tl.constexpr(-1.0e30)


class RowPointers(NamedTuple):
    """Where the statistics of the rows go, each float32 [batch, heads, queries]; None for what was not asked."""

    max_logit: Any = None
    max_abs_logit: Any = None
    entropy: Any = None
    confidence: Any = None
    mean_distance: Any = None
    mean_offset: Any = None
    mean_squared_distance: Any = None
    sink_mass: Any = None
    self_mass: Any = None
    previous_mass: Any = None
    next_mass: Any = None
    window_mass: Any = None
    visible_keys: Any = None
    learned_sink_mass: Any = None
    argmax: Any = None  # int32: the key of the largest logit, -1 where no key is seen
    argmax_abs: Any = None  # int32: twice the key of the largest |logit|, one more if that logit is negative; -1: none


class Sizes(NamedTuple):
    heads: int
    group: int  # query heads that share a KV head
    queries: int
    keys: int
    sink_keys: int
    window: int


@triton.jit
def _rows(
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
    """Rows of one head from `first` on, [ROWS, BLOCK_DIM], zeros past `limit` and DIM; FULL: all rows are there."""
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
def _full_tiles(mask, rows, sizes, first_row, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, first_tile, last_tile):
    """Which tiles of a band need no mask: from `full_from` to `full_to`, less those from `near_from` to `near_to`.

    The latter hold a distance that a statistic singles out. All four lie between `first_tile` and `last_tile`.
    """
    first = first_row + mask.offset
    last = tl.minimum(first_row + BLOCK_M, sizes.queries) - 1 + mask.offset
    full_from, full_to = first_tile, sizes.keys // BLOCK_N
    if mask.right is not None:
        full_to = tl.minimum(full_to, tl.maximum(first + mask.right + 1, 0) // BLOCK_N)
    if mask.left is not None:
        full_from = tl.maximum(full_from, tl.cdiv(tl.maximum(last - mask.left, 0), BLOCK_N))
    if rows.sink_mass is not None:
        full_from = tl.maximum(full_from, tl.cdiv(tl.minimum(sizes.sink_keys, sizes.keys), BLOCK_N))
    full_from = tl.minimum(full_from, last_tile)
    full_to = tl.minimum(tl.maximum(full_to, full_from), last_tile)
    # Distances from `low` to `high` are singled out; as it stands, a tile that holds both signs.
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
def _absorb(
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
    gain,
    bend,
    i_batch,
    i_head,
    offs_m,
    positions,
    i_tile,
    FULL: tl.constexpr,
    ADDED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DIM_KEY: tl.constexpr,
    DIM_VALUE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """Take one tile of keys into the running state of the rows."""
    (
        acc,
        shift,
        total,
        broken,
        largest,
        largest_abs,
        argmax,
        argmax_abs,
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
    ) = state
    EXACT: tl.constexpr = tile_q.dtype == tl.float32
    i_kv_head = i_head // sizes.group
    first_key = i_tile * BLOCK_N
    # [BLOCK_N]
    offs_column = tl.arange(0, BLOCK_N)
    offs_n = first_key + offs_column

    # [BLOCK_N, BLOCK_KEY]
    tile_k = _rows(
        source_key, strides_key, i_batch, i_kv_head, first_key, sizes.keys, BLOCK_N, DIM_KEY, BLOCK_KEY, DESCRIPTORS,
        FULL,
    )  # fmt: skip
    # [BLOCK_M, BLOCK_N], all that follows
    tile_s = products(tile_q, tile_k)
    if SOFTCAP:
        tile_s = tanh(tile_s * bend, EXACT)
    if not FULL or mask.table is not None:
        distance = key_positions(mask, i_batch, offs_n, sizes.keys)[None, :] - positions[:, None]
    if not FULL:
        visible = visible_tile(mask, i_batch, i_head, offs_m, offs_n, distance, sizes.queries, sizes.keys)
    if ADDED:
        if FULL:
            tile_s = tile_s * gain + added_tile(mask, i_batch, i_head, offs_m, offs_n, distance, distance == distance)
        else:
            tile_s = tile_s * gain + added_tile(mask, i_batch, i_head, offs_m, offs_n, distance, visible)
    if mask.poison is not None:
        i_kv_pair = (i_batch * (sizes.heads // sizes.group) + i_kv_head).to(tl.int64)
        ptr_poison = mask.poison + i_kv_pair * sizes.keys + offs_n
        if FULL:
            # Every row sees all of these keys: one sum of them, at the end, tells all rows.
            broken += tl.load(ptr_poison).to(tl.float32)
        else:
            tile_s += tl.load(ptr_poison, mask=offs_n < sizes.keys, other=0.0).to(tl.float32)[None, :]
    if not FULL:
        if ADDED:
            tile_s = tl.where(visible, tile_s, -float("inf"))
        else:
            tile_s = tl.where(visible, tile_s, HIDDEN)

    # [BLOCK_M]
    if rows.argmax is not None:
        top, place = tl.max(tile_s, 1, return_indices=True)
        place += first_key
        better = (top > largest) | ((top == largest) & (place < argmax))
        argmax = tl.where(better, place, argmax)
    else:
        top = tl.max(tile_s, 1)
    if rows.max_logit is not None or rows.confidence is not None or rows.argmax is not None:
        largest = tl.maximum(largest, top)
    if rows.max_abs_logit is not None or rows.argmax_abs is not None:
        tile_size = tl.abs(tile_s)
        if not FULL:
            tile_size = tl.where(visible, tile_size, -1.0)
        if rows.argmax_abs is not None:
            top_abs, column = tl.max(tile_size, 1, return_indices=True)
            there = tl.sum(tl.where(offs_column[None, :] == column[:, None], tile_s, 0.0), 1)
            code = 2 * (first_key + column) + (there < 0).to(tl.int32)
            better = (top_abs > largest_abs) | ((top_abs == largest_abs) & (code < argmax_abs))
            argmax_abs = tl.where(better, code, argmax_abs)
        else:
            top_abs = tl.max(tile_size, 1)
        largest_abs = tl.maximum(largest_abs, top_abs)

    # `move` is how far the shift goes and `exponent` what is left of the logits, both in base 2.
    if ADDED:
        next_shift = tl.maximum(shift, top)
        # Differences of numbers of a float's size; a clamp keeps 0 * inf out of the sums.
        move = tl.maximum((shift - next_shift) * LOG2E, HIDDEN)
        exponent = tl.maximum((tile_s - next_shift[:, None]) * LOG2E, HIDDEN)
    elif EXACT:
        # The scale as it was given: times log2(e) it would be rounded, and large logits with it.
        next_shift = tl.maximum(shift, top * gain)
        move = tl.maximum((shift - next_shift) * LOG2E, HIDDEN)
        exponent = (tile_s * gain - next_shift[:, None]) * LOG2E
    else:
        next_shift = tl.maximum(shift, top * gain)
        move = shift - next_shift
        exponent = tile_s * gain - next_shift[:, None]
    decay = exp2(move, EXACT)
    tile_p = exp2(exponent, EXACT)
    if not FULL:
        tile_p = tl.where(visible, tile_p, 0.0)
    added_total = tl.sum(tile_p, 1)

    if rows.entropy is not None:
        if not FULL:
            exponent = tl.where(visible, exponent, 0.0)
        spread = decay * (spread + move * total) + tl.sum(tile_p * exponent, 1)
    if rows.mean_distance is not None or rows.mean_offset is not None or rows.mean_squared_distance is not None:
        if FULL:
            # A distance is that of the tile's first key and a column: the first is the row's, the second a constant.
            from_first = (first_key - positions).to(tl.float32)
            column_place = offs_column.to(tl.float32)
            columns = tl.sum(tile_p * column_place[None, :], 1)
            added_distance = from_first * added_total + columns
            if rows.mean_distance is not None:
                mean_distance = mean_distance * decay + tl.abs(added_distance)  # all distances have one sign
            if rows.mean_offset is not None:
                mean_offset = mean_offset * decay + added_distance
            if rows.mean_squared_distance is not None:
                squares = tl.sum(tile_p * (column_place * column_place)[None, :], 1)
                added_square = from_first * (from_first * added_total + 2.0 * columns) + squares
                mean_squared_distance = mean_squared_distance * decay + added_square
        else:
            weighted = tile_p * distance.to(tl.float32)
            if rows.mean_distance is not None:
                mean_distance = mean_distance * decay + tl.sum(tl.abs(weighted), 1)
            if rows.mean_offset is not None:
                mean_offset = mean_offset * decay + tl.sum(weighted, 1)
            if rows.mean_squared_distance is not None:
                mean_squared_distance = mean_squared_distance * decay + tl.sum(weighted * distance.to(tl.float32), 1)
    if rows.sink_mass is not None:
        sink_mass = sink_mass * decay
        if not FULL:
            is_first = key_ordinals(mask, i_batch, offs_n, sizes.keys) < sizes.sink_keys
            sink_mass += tl.sum(tl.where(is_first[None, :], tile_p, 0.0), 1)
    if rows.self_mass is not None:
        self_mass = self_mass * decay
        if not FULL:
            self_mass += tl.sum(tl.where(distance == 0, tile_p, 0.0), 1)
    if rows.previous_mass is not None:
        previous_mass = previous_mass * decay
        if not FULL:
            previous_mass += tl.sum(tl.where(distance == -1, tile_p, 0.0), 1)
    if rows.next_mass is not None:
        next_mass = next_mass * decay
        if not FULL:
            next_mass += tl.sum(tl.where(distance == 1, tile_p, 0.0), 1)
    if rows.window_mass is not None:
        window_mass = window_mass * decay
        if not FULL:
            is_near = (distance <= sizes.window) & (distance >= -sizes.window)
            window_mass += tl.sum(tl.where(is_near, tile_p, 0.0), 1)
    if rows.visible_keys is not None:
        if FULL:
            visible_keys += BLOCK_N
        else:
            visible_keys += tl.sum(visible.to(tl.int32), 1)
    total = total * decay + added_total

    if ptr_seed is not None:
        kept = keep_tile(ptr_seed, threshold, i_batch * sizes.heads + i_head, offs_m, offs_n)
        tile_p = tl.where(kept, tile_p, 0.0)
    # [BLOCK_N, BLOCK_VALUE]
    tile_v = _rows(
        source_value, strides_value, i_batch, i_kv_head, first_key, sizes.keys, BLOCK_N, DIM_VALUE, BLOCK_VALUE,
        DESCRIPTORS, FULL,
    )  # fmt: skip
    # One chain of additions over all tiles: in float32 a chain for each would not fit into the registers.
    acc = tl.dot(tile_p.to(tile_v.dtype), tile_v, acc * decay[:, None], input_precision="ieee")
    return (
        acc,
        next_shift,
        total,
        broken,
        largest,
        largest_abs,
        argmax,
        argmax_abs,
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


@triton.jit
def _first_state(
    sink,
    ADDED: tl.constexpr,
    BASE_TWO: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
):
    """What is known of rows before their first tile; the sink is a first key without a value."""
    # [BLOCK_M]
    zeros = tl.zeros([BLOCK_M], tl.float32)
    shift = zeros + LOWEST
    total = zeros
    if sink is not None:
        if BASE_TWO:
            shift = tl.maximum(shift, sink * LOG2E)
        else:
            shift = tl.maximum(shift, sink)
        total = tl.where(sink == -float("inf"), 0.0, zeros + 1.0)
    largest = zeros + HIDDEN
    if ADDED:
        largest = zeros - float("inf")
    nowhere = tl.zeros([BLOCK_M], tl.int32) - 1
    return (
        tl.zeros([BLOCK_M, BLOCK_VALUE], tl.float32),
        shift,
        total,
        tl.zeros([BLOCK_N], tl.float32),
        largest,
        zeros - 1.0,
        nowhere,
        nowhere,
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
def _store_rows(
    state,
    sink,
    POISONED: tl.constexpr,
    rows,
    ptr_logsumexp,
    offs_row,
    mask_m,
    gain,
    ADDED: tl.constexpr,
    BASE_TWO: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Store log-sum-exp and statistics of rows that have seen all their tiles; their output is returned."""
    (
        acc,
        shift,
        total,
        broken,
        largest,
        largest_abs,
        argmax,
        argmax_abs,
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
    ) = state
    if POISONED:
        total += tl.sum(broken, 0)

    is_empty = total == 0.0
    is_broken = total != total
    total = tl.where(is_empty, 1.0, total)
    log_total = log2(total, EXACT)
    if BASE_TWO:
        logsumexp = (shift + log_total) * LN2
    else:
        logsumexp = shift + log_total * LN2
    tl.store(ptr_logsumexp + offs_row, tl.where(is_empty, -float("inf"), logsumexp), mask=mask_m)

    # [BLOCK_M]
    nan = float("nan")
    if ADDED:
        sees_keys = largest > -float("inf")
        largest_logit, largest_size = largest, tl.maximum(largest_abs, 0.0)
        over_shift = (largest - shift) * LOG2E
    elif BASE_TWO:
        sees_keys = largest > HIDDEN
        largest_logit, largest_size = largest * (gain * LN2), tl.maximum(largest_abs, 0.0) * (gain * LN2)
        over_shift = largest * gain - shift
    else:
        sees_keys = largest > HIDDEN
        largest_logit, largest_size = largest * gain, tl.maximum(largest_abs, 0.0) * gain
        over_shift = (largest * gain - shift) * LOG2E
    if rows.max_logit is not None:
        value = tl.where(sees_keys, largest_logit, -float("inf"))
        tl.store(rows.max_logit + offs_row, tl.where(is_broken, nan, value), mask=mask_m)
    if rows.max_abs_logit is not None:
        tl.store(rows.max_abs_logit + offs_row, tl.where(is_broken, nan, largest_size), mask=mask_m)
    if rows.confidence is not None:
        value = tl.where(sees_keys, exp2(over_shift, EXACT) / total, 0.0)
        tl.store(rows.confidence + offs_row, tl.where(is_broken, nan, value), mask=mask_m)
    if rows.entropy is not None:
        tl.store(rows.entropy + offs_row, (log_total - spread / total) * LN2, mask=mask_m)
    if rows.mean_distance is not None:
        tl.store(rows.mean_distance + offs_row, mean_distance / total, mask=mask_m)
    if rows.mean_offset is not None:
        tl.store(rows.mean_offset + offs_row, mean_offset / total, mask=mask_m)
    if rows.mean_squared_distance is not None:
        tl.store(rows.mean_squared_distance + offs_row, mean_squared_distance / total, mask=mask_m)
    if rows.sink_mass is not None:
        tl.store(rows.sink_mass + offs_row, sink_mass / total, mask=mask_m)
    if rows.self_mass is not None:
        tl.store(rows.self_mass + offs_row, self_mass / total, mask=mask_m)
    if rows.previous_mass is not None:
        tl.store(rows.previous_mass + offs_row, previous_mass / total, mask=mask_m)
    if rows.next_mass is not None:
        tl.store(rows.next_mass + offs_row, next_mass / total, mask=mask_m)
    if rows.window_mass is not None:
        tl.store(rows.window_mass + offs_row, window_mass / total, mask=mask_m)
    if rows.visible_keys is not None:
        tl.store(rows.visible_keys + offs_row, visible_keys.to(tl.float32), mask=mask_m)
    if rows.learned_sink_mass is not None:
        if BASE_TWO:
            value = exp2(sink * LOG2E - shift, EXACT) / total
        else:
            value = exp2((sink - shift) * LOG2E, EXACT) / total
        tl.store(rows.learned_sink_mass + offs_row, value, mask=mask_m)
    if rows.argmax is not None:
        tl.store(rows.argmax + offs_row, argmax, mask=mask_m)
    if rows.argmax_abs is not None:
        tl.store(rows.argmax_abs + offs_row, argmax_abs, mask=mask_m)
    # [BLOCK_M, BLOCK_VALUE]
    return acc / total[:, None]


@triton.jit
def _forward_kernel(
    source_query,
    source_key,
    source_value,
    ptr_output,
    ptr_logsumexp,
    rows,
    ptr_head_scale,
    ptr_sinks,
    ptr_seed,
    mask,
    sizes,
    strides_query,
    strides_key,
    strides_value,
    strides_output,
    scale,
    softcap,
    threshold,
    survival,
    SOFTCAP: tl.constexpr,
    ADDED: tl.constexpr,
    BAND: tl.constexpr,
    SIGNED: tl.constexpr,
    HEAVY_LAST: tl.constexpr,
    DIM_KEY: tl.constexpr,
    DIM_VALUE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    blocks = tl.cdiv(sizes.queries, BLOCK_M)
    i_pair = tl.program_id(0) // blocks  # batch * heads + head
    i_block = tl.program_id(0) % blocks
    if HEAVY_LAST:
        # Under a causal edge the last rows have the most to do; begun first, they do not keep everybody waiting.
        i_block = blocks - 1 - i_block
    i_batch, i_head = i_pair // sizes.heads, i_pair % sizes.heads
    first_row = i_block * BLOCK_M
    # [BLOCK_M]
    offs_m = first_row + tl.arange(0, BLOCK_M)
    positions = query_positions(mask, i_batch, offs_m, sizes.queries)

    # [BLOCK_M, BLOCK_KEY]
    tile_q = _rows(
        source_query, strides_query, i_batch, i_head, first_row, sizes.queries, BLOCK_M, DIM_KEY, BLOCK_KEY,
        DESCRIPTORS, False,
    )  # fmt: skip
    factor = scale
    if ptr_head_scale is not None:
        factor = factor * tl.load(ptr_head_scale + i_head).to(tl.float32)
    if SIGNED:
        # The largest product gives the largest logit only under a positive factor: the sign goes to the queries.
        sign = tl.where(factor > 0, 1.0, tl.where(factor < 0, -1.0, 0.0))
        tile_q = (tile_q * sign).to(tile_q.dtype)
        factor = tl.abs(factor)
    bend, gain = factor, factor
    if SOFTCAP:
        bend, gain = factor / softcap, softcap
    EXACT: tl.constexpr = tile_q.dtype == tl.float32
    BASE_TWO: tl.constexpr = not (ADDED or EXACT)  # shift, sink and gain are those of logits in base 2
    if BASE_TWO:
        gain = gain * LOG2E

    sink = None
    if ptr_sinks is not None:
        sink = tl.load(ptr_sinks + i_head).to(tl.float32)
    state = _first_state(sink, ADDED, BASE_TWO, BLOCK_M, BLOCK_N, BLOCK_VALUE)

    kept, start, stop = key_spans(mask, i_batch, first_row, sizes.queries, sizes.keys, BLOCK_M, BLOCK_N)
    kept_tiles, first_tile, last_tile = kept // BLOCK_N, start // BLOCK_N, tl.cdiv(stop, BLOCK_N)
    full_from, full_to, near_from, near_to = first_tile, first_tile, first_tile, first_tile
    if BAND:
        full_from, full_to, near_from, near_to = _full_tiles(
            mask, rows, sizes, first_row, BLOCK_M, BLOCK_N, first_tile, last_tile
        )
        for i in tl.range(0, full_to - full_from - (near_to - near_from)):
            i_tile = full_from + i
            i_tile = tl.where(i_tile >= near_from, i_tile + (near_to - near_from), i_tile)
            state = _absorb(
                state, tile_q, source_key, source_value, strides_key, strides_value, mask, rows, sizes, ptr_seed,
                threshold, gain, bend, i_batch, i_head, offs_m, positions, i_tile, True, ADDED, SOFTCAP, DIM_KEY,
                DIM_VALUE, BLOCK_N, BLOCK_KEY, BLOCK_VALUE, DESCRIPTORS,
            )  # fmt: skip
    edges = kept_tiles + (full_from - first_tile) + (near_to - near_from) + (last_tile - full_to)
    for i in tl.range(0, edges):
        # The edge tiles in their order: kept ones, those before the full ones, those near, those behind.
        i_tile = tl.where(i >= kept_tiles, i + (first_tile - kept_tiles), i)
        i_tile = tl.where(i_tile >= full_from, i_tile + (near_from - full_from), i_tile)
        i_tile = tl.where(i_tile >= near_to, i_tile + (full_to - near_to), i_tile)
        state = _absorb(
            state, tile_q, source_key, source_value, strides_key, strides_value, mask, rows, sizes, ptr_seed,
            threshold, gain, bend, i_batch, i_head, offs_m, positions, i_tile, False, ADDED, SOFTCAP, DIM_KEY,
            DIM_VALUE, BLOCK_N, BLOCK_KEY, BLOCK_VALUE, DESCRIPTORS,
        )  # fmt: skip
    mask_m = offs_m < sizes.queries
    offs_row = i_pair.to(tl.int64) * sizes.queries + offs_m
    # [BLOCK_M, BLOCK_VALUE]
    tile_o = _store_rows(
        state, sink, mask.poison is not None, rows, ptr_logsumexp, offs_row, mask_m, gain, ADDED, BASE_TWO, EXACT
    )
    offs_dim = tl.arange(0, BLOCK_VALUE)
    if ptr_seed is not None:
        tile_o = tile_o * survival
    start_output = i_batch.to(tl.int64) * strides_output[0] + i_head.to(tl.int64) * strides_output[1]
    offs_output = (offs_m.to(tl.int64) * strides_output[2])[:, None] + offs_dim[None, :]
    mask_output = mask_m[:, None] & (offs_dim < DIM_VALUE)[None, :]
    tl.store(ptr_output + start_output + offs_output, tile_o.to(ptr_output.dtype.element_ty), mask=mask_output)


def choose_blocks(width: int, element_size: int, queries: int, requested: int, capability: tuple[int, int]) -> Blocks:
    """The tile of one program.

    `width` is the wider of the padded head dims, `element_size` the bytes of an input, `requested` how many statistics
    there are: each keeps a sum or two in registers, and a narrower tile makes room for them.
    """
    if element_size == 4:
        # Products of float32 do not go through the matrix units; what counts is that the tiles stay in registers.
        blocks = Blocks(64, 32, 8, 2) if width <= 64 else Blocks(32, 32, 8, 2) if width <= 128 else Blocks(32, 16, 8, 2)
    elif capability < (9, 0):
        # Shared memory of 100 to 163 KiB.
        blocks = (
            Blocks(128, 64, 8, 3) if width <= 64 else Blocks(128, 64, 8, 2) if width <= 128 else Blocks(64, 32, 8, 2)
        )
    elif width <= 64:
        blocks = Blocks(128, 64, 4, 3) if requested <= 4 else Blocks(128, 64, 8, 3)
    elif width <= 128:
        blocks = Blocks(128, 128, 8, 3) if requested <= 4 else Blocks(128, 64, 8, 3)
    else:
        blocks = Blocks(128, 64, 8, 2) if requested <= 4 else Blocks(128, 32, 8, 2)
    if queries <= 16:
        return blocks._replace(rows=16, warps=4)
    if queries <= 64:
        return blocks._replace(rows=min(blocks.rows, 64), warps=4 if element_size < 4 else blocks.warps)
    return blocks


def fit_blocks(
    blocks: Blocks,
    widths: tuple[int, int],
    element_size: int,
    mask: MaskArguments,
    capability: tuple[int, int],
    shared: int,
) -> Blocks:
    """The blocks, or smaller ones if a program with these would not fit into `shared` bytes.

    `widths` are the padded dims of keys and values. What is loaded for each logit waits in the same queue as the tiles
    of keys and values. Queries lie in shared memory where the matrix units read them from there.
    """
    held = widths[0] * element_size if (9, 0) <= capability < (12, 0) else 0
    per_logit = sum(x.element_size() for x in (mask.bias, mask.table) if x is not None)
    once = 0 if mask.allowed is None else 1
    by_token = (mask.query_position, mask.query_document, mask.allowed, mask.bias, mask.table)
    # For barriers, sums over several warps, and what is loaded for each token.
    rest = 2048 if all(x is None for x in by_token) else 6144
    while True:
        rows, columns, _, stages, _ = blocks
        queue = stages * columns * (sum(widths) * element_size + rows * per_logit)
        less = blocks.smaller()
        if rows * held + queue + rows * columns * once + rest <= shared or less is None:
            return blocks
        blocks = less


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    head_scale: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
    mask: MaskArguments,
    dropout: float,
    seed: Tensor | None,
    names: tuple[str, ...],
    sink_keys: int,
    window: int,
    argmax: bool,
    descriptors: bool | None = None,
) -> tuple[Tensor, Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Output [batch, heads, queries, value_dim], log-sum-exp [batch, heads, queries], the statistics that `names` asks
    for and, with `argmax`, the keys of their maxima (see `RowPointers.argmax` and `.argmax_abs`).

    query is [batch, heads, queries, head_dim], key and value [batch, kv_heads, keys, head_dim or value_dim]; the last
    axis of each must lie together in memory. `descriptors` says whether tiles are fetched through tensor descriptors
    (TMA); None takes them where the machine has them and the tensors allow it.
    """
    batch, heads, queries, dim_key = query.shape
    kv_heads, keys, dim_value = value.shape[1:]
    # In memory [batch, queries, heads, value_dim], as the layer that joins the heads wants it.
    output = output_like(query, dim_value)
    shape = (batch, heads, queries)
    logsumexp = query.new_empty(shape, dtype=torch.float32)
    statistics = {name: torch.empty_like(logsumexp) for name in names}
    indices = {}
    if argmax and ("max_logit" in names or "confidence" in names):
        indices["argmax"] = query.new_empty(shape, dtype=torch.int32)
    if argmax and "max_abs_logit" in names:
        indices["argmax_abs"] = query.new_empty(shape, dtype=torch.int32)
    if not logsumexp.numel():
        return output, logsumexp, statistics, indices

    block_key, block_value = (max(16, power_of_two(dim)) for dim in (dim_key, dim_value))
    device = query.get_device() if query.is_cuda else None
    machine = (9, 0) if device is None else capability(device)
    size, requested = query.element_size(), len(statistics) + len(indices)
    blocks = choose_blocks(max(block_key, block_value), size, queries, requested, machine)
    blocks = fit_blocks(blocks, (block_key, block_value), size, mask, machine, shared_memory(device))
    if descriptors is None:
        tensors = (query, key, value)
        descriptors = query.is_cuda and machine >= (9, 0) and all(_fits_descriptor(x) for x in tensors)
    by_token = (mask.query_position, mask.query_document, mask.allowed, mask.bias, mask.key_ordinal)
    rows = RowPointers(**statistics, **indices)

    def launch(blocks: Blocks) -> None:
        sources: list[Any] = [query, key, value]
        if descriptors:
            sources = [
                _descriptor(query, blocks.rows, block_key),
                _descriptor(key, blocks.columns, block_key),
                _descriptor(value, blocks.columns, block_value),
            ]
        _forward_kernel[(batch * heads * blocks_of(queries, blocks.rows),)](
            *sources,
            output,
            logsumexp,
            rows,
            head_scale,
            sinks,
            seed if dropout else None,
            mask,
            Sizes(heads, heads // kv_heads, queries, keys, sink_keys, window),
            query.stride()[:3],
            key.stride()[:3],
            value.stride()[:3],
            output.stride()[:3],
            scale,
            softcap or 0.0,
            round(dropout * (1 << 24)),
            1.0 / (1.0 - dropout),
            SOFTCAP=softcap is not None,
            ADDED=mask.bias is not None or mask.table is not None,
            BAND=all(x is None for x in by_token),
            SIGNED=head_scale is not None or scale <= 0,
            HEAVY_LAST=mask.right is not None and mask.left is None,
            DIM_KEY=dim_key,
            DIM_VALUE=dim_value,
            BLOCK_M=blocks.rows,
            BLOCK_N=blocks.columns,
            BLOCK_KEY=block_key,
            BLOCK_VALUE=block_value,
            DESCRIPTORS=descriptors,
            **blocks.options,
        )

    def kind() -> Hashable:
        there = tuple(x is not None for x in (*rows, *mask, head_scale, sinks, softcap))
        return "forward", device, query.dtype, dim_key, dim_value, blocks, there, bool(dropout), descriptors

    with torch.cuda.device_of(query):
        launch_fitting(launch, blocks, Blocks.smaller, kind)
    return output, logsumexp, statistics, indices


def _fits_descriptor(x: Tensor) -> bool:
    """Whether rows of a tensor can be fetched by TMA: every step a positive multiple of 16 bytes."""
    steps = [stride * x.element_size() for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True) if size > 1]
    return x.numel() > 0 and x.data_ptr() % 16 == 0 and all(step > 0 and step % 16 == 0 for step in steps)


def _descriptor(x: Tensor, rows: int, width: int) -> TensorDescriptor:
    # The stride of an axis of one element is never stepped, and may be anything that the rules allow.
    aligned = blocks_of(x.shape[3], 16) * 16
    strides = [stride if size > 1 else aligned for size, stride in zip(x.shape, x.stride(), strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides[:3], 1], [1, 1, rows, width])
