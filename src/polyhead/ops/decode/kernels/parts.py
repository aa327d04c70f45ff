"""What rows leave of their share of the keys, sums and unnormalised outputs, and the kernel that joins the parts.

The parts' maxima give the common one, and every sum moves to it. Where one program sees all keys there is nothing to
join, and rows are stored from their sums at once.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from polyhead.ops.common.kernels.softmax_tiles import LN2, LOG2E, exp2, log2


class Places(NamedTuple):
    """Where each statistic stands in the tensor of statistics, [statistics, rows]; None: not asked for."""

    max_logit: int | None = None
    max_abs_logit: int | None = None
    entropy: int | None = None
    confidence: int | None = None
    mean_distance: int | None = None
    mean_offset: int | None = None
    mean_squared_distance: int | None = None
    sink_mass: int | None = None
    self_mass: int | None = None
    previous_mass: int | None = None
    next_mass: int | None = None
    window_mass: int | None = None
    visible_keys: int | None = None
    learned_sink_mass: int | None = None


@triton.jit
def load_rows(ptr_rows, mask_rows, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """The vectors that [rows] pointers point at, [rows, BLOCK], with zeros past DIM and where the mask is False."""
    offs = tl.arange(0, BLOCK)
    ptr = ptr_rows[:, None] + offs[None, :]
    if mask_rows is None:
        if BLOCK == DIM:
            tile = tl.load(ptr)
        else:
            tile = tl.load(ptr, mask=(offs < DIM)[None, :], other=0)
    elif BLOCK == DIM:
        tile = tl.load(ptr, mask=mask_rows[:, None], other=0)
    else:
        tile = tl.load(ptr, mask=mask_rows[:, None] & (offs < DIM)[None, :], other=0)
    return tile


@triton.jit
def exp(x, EXACT: tl.constexpr):
    return exp2(x * LOG2E, EXACT)


@triton.jit
def store_rows(
    ptr_logsumexp,
    ptr_statistics,
    ptr_sinks,
    places,
    num_rows,
    offs_row,
    mask_row,
    i_head,
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
    EXACT: tl.constexpr,
):
    """Write log-sum-exp and statistics of rows from their sums; returns what the unnormalised output is multiplied by.

    `total` is 0 in a row that sees nothing and NaN in one that sees a NaN, whatever its maximum says.
    """
    filled = total != 0.0
    top = largest
    if ptr_sinks is not None:
        sink = tl.load(ptr_sinks + i_head, mask=mask_row, other=0.0).to(tl.float32)
        top = tl.maximum(largest, sink)
    nothing = (top == -float("inf")) & (total == 0.0)
    shift = tl.where(top == -float("inf"), 0.0, top)
    shrink = exp(largest - shift, EXACT)
    everything = total * shrink
    if ptr_sinks is not None:
        learned = exp(sink - shift, EXACT)
        everything += learned
    everything = tl.where(nothing, 1.0, everything)
    log_everything = log2(everything, EXACT) * LN2
    logsumexp = tl.where(nothing, -float("inf"), shift + log_everything)
    tl.store(ptr_logsumexp + offs_row, logsumexp, mask=mask_row)

    ptr = ptr_statistics + offs_row
    share = shrink / everything
    if places.max_logit is not None:
        tl.store(ptr + places.max_logit * num_rows, tl.where(total == total, largest, total), mask=mask_row)
    if places.max_abs_logit is not None:
        tl.store(ptr + places.max_abs_logit * num_rows, tl.where(total == total, largest_size, total), mask=mask_row)
    if places.entropy is not None:
        moved = shrink * (spread + tl.where(largest == -float("inf"), 0.0, largest - shift) * total)
        if ptr_sinks is not None:
            moved += tl.where(learned > 0.0, learned * (sink - shift), 0.0)
        entropy = log_everything - moved / everything
        tl.store(ptr + places.entropy * num_rows, tl.where(filled, entropy, 0.0), mask=mask_row)
    if places.confidence is not None:
        tl.store(ptr + places.confidence * num_rows, tl.where(filled, share, 0.0), mask=mask_row)
    if places.mean_distance is not None:
        tl.store(ptr + places.mean_distance * num_rows, mean_distance * share, mask=mask_row)
    if places.mean_offset is not None:
        tl.store(ptr + places.mean_offset * num_rows, mean_offset * share, mask=mask_row)
    if places.mean_squared_distance is not None:
        tl.store(ptr + places.mean_squared_distance * num_rows, mean_squared_distance * share, mask=mask_row)
    if places.sink_mass is not None:
        tl.store(ptr + places.sink_mass * num_rows, sink_mass * share, mask=mask_row)
    if places.self_mass is not None:
        tl.store(ptr + places.self_mass * num_rows, self_mass * share, mask=mask_row)
    if places.previous_mass is not None:
        tl.store(ptr + places.previous_mass * num_rows, previous_mass * share, mask=mask_row)
    if places.next_mass is not None:
        tl.store(ptr + places.next_mass * num_rows, next_mass * share, mask=mask_row)
    if places.window_mass is not None:
        tl.store(ptr + places.window_mass * num_rows, window_mass * share, mask=mask_row)
    if places.visible_keys is not None:
        tl.store(ptr + places.visible_keys * num_rows, visible_keys, mask=mask_row)
    if places.learned_sink_mass is not None:
        tl.store(ptr + places.learned_sink_mass * num_rows, learned / everything, mask=mask_row)
    return share


@triton.jit
def store_sums(
    ptr_sums,
    places,
    i_split,
    splits,
    num_rows,
    offs_row,
    mask_row,
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
):
    """Leave the sums of rows over one part of the keys; returns where the part's outputs go, and which have any."""
    plane = splits * num_rows
    offs_part = i_split * num_rows + offs_row
    ptr = ptr_sums + offs_part
    tl.store(ptr, largest, mask=mask_row)
    tl.store(ptr + plane, total, mask=mask_row)
    ptr += 2 * plane
    # A part without keys is known by its sum, and nothing else of it is read.
    mask_filled = mask_row & (total != 0.0)
    if places.max_abs_logit is not None:
        tl.store(ptr + places.max_abs_logit * plane, largest_size, mask=mask_filled)
    if places.entropy is not None:
        tl.store(ptr + places.entropy * plane, spread, mask=mask_filled)
    if places.mean_distance is not None:
        tl.store(ptr + places.mean_distance * plane, mean_distance, mask=mask_filled)
    if places.mean_offset is not None:
        tl.store(ptr + places.mean_offset * plane, mean_offset, mask=mask_filled)
    if places.mean_squared_distance is not None:
        tl.store(ptr + places.mean_squared_distance * plane, mean_squared_distance, mask=mask_filled)
    if places.sink_mass is not None:
        tl.store(ptr + places.sink_mass * plane, sink_mass, mask=mask_filled)
    if places.self_mass is not None:
        tl.store(ptr + places.self_mass * plane, self_mass, mask=mask_filled)
    if places.previous_mass is not None:
        tl.store(ptr + places.previous_mass * plane, previous_mass, mask=mask_filled)
    if places.next_mass is not None:
        tl.store(ptr + places.next_mass * plane, next_mass, mask=mask_filled)
    if places.window_mass is not None:
        tl.store(ptr + places.window_mass * plane, window_mass, mask=mask_filled)
    if places.visible_keys is not None:
        tl.store(ptr + places.visible_keys * plane, visible_keys, mask=mask_filled)
    return offs_part, mask_filled


@triton.jit
def _load_parts(ptr, mask_split, mask_part):
    """One number of each part, 0 where it saw no key. Loaded from all, so that no load waits for another."""
    return tl.where(mask_part, tl.load(ptr, mask=mask_split, other=0.0), 0.0)


@triton.jit
def _load_outputs(
    ptr_parts, i_row, num_rows, first, splits, DIM: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    """The unnormalised outputs of parts `first` on, [PARTS, BLOCK]; anything may stand in a part that saw no key."""
    offs_part = first + tl.arange(0, PARTS)
    offs_value = tl.arange(0, BLOCK)
    offs = (offs_part * num_rows + i_row)[:, None] * DIM + offs_value[None, :]
    return tl.load(ptr_parts + offs, mask=(offs_part < splits)[:, None] & (offs_value < DIM)[None, :], other=0.0)


@triton.jit(do_not_specialize=["splits", "num_rows"])
def join_kernel(
    ptr_output,  # [batch, queries, heads, DIM_VALUE]
    ptr_logsumexp,
    ptr_statistics,
    ptr_sums,
    ptr_parts,
    ptr_sinks,
    places,
    splits,
    num_rows,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    DIM_VALUE: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
):
    """One program a row: the parts' maxima give the common one, and every sum moves to it."""
    EXACT: tl.constexpr = ptr_output.dtype.element_ty == tl.float32
    i_row = tl.program_id(0).to(tl.int64)
    i_batch, i_head, i_query = i_row // (HEADS * QUERIES), (i_row // QUERIES) % HEADS, i_row % QUERIES
    num_rows = num_rows.to(tl.int64)
    plane = splits * num_rows
    # [BLOCK_PARTS, BLOCK_VALUE], on its way while the maxima are compared
    tile_part = _load_outputs(ptr_parts, i_row, num_rows, 0, splits, DIM_VALUE, BLOCK_PARTS, BLOCK_VALUE)
    # [BLOCK_SPLITS]
    offs_split = tl.arange(0, BLOCK_SPLITS)
    mask_split = offs_split < splits
    ptr = ptr_sums + offs_split * num_rows + i_row
    maxima = tl.load(ptr, mask=mask_split, other=-float("inf"))
    totals = tl.load(ptr + plane, mask=mask_split, other=0.0)
    mask_part = totals != 0.0
    ptr += 2 * plane
    largest_size, spread, mean_distance, mean_offset, mean_squared_distance = 0.0, 0.0, 0.0, 0.0, 0.0
    sink_mass, self_mass, previous_mass, next_mass, window_mass, visible_keys = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    if places.entropy is not None:
        spreads = _load_parts(ptr + places.entropy * plane, mask_split, mask_part)
    largest = tl.max(maxima, 0)
    shift = tl.where(largest == -float("inf"), 0.0, largest)
    factor = exp(maxima - shift, EXACT)
    total = tl.sum(totals * factor, 0)
    if places.max_abs_logit is not None:
        largest_size = tl.max(_load_parts(ptr + places.max_abs_logit * plane, mask_split, mask_part), 0)
    if places.entropy is not None:
        moved = tl.where(maxima == -float("inf"), 0.0, maxima - shift) * totals
        spread = tl.sum(factor * (spreads + moved), 0)
    if places.mean_distance is not None:
        mean_distance = tl.sum(_load_parts(ptr + places.mean_distance * plane, mask_split, mask_part) * factor, 0)
    if places.mean_offset is not None:
        mean_offset = tl.sum(_load_parts(ptr + places.mean_offset * plane, mask_split, mask_part) * factor, 0)
    if places.mean_squared_distance is not None:
        mean_squared_distance = tl.sum(
            _load_parts(ptr + places.mean_squared_distance * plane, mask_split, mask_part) * factor, 0
        )
    if places.sink_mass is not None:
        sink_mass = tl.sum(_load_parts(ptr + places.sink_mass * plane, mask_split, mask_part) * factor, 0)
    if places.self_mass is not None:
        self_mass = tl.sum(_load_parts(ptr + places.self_mass * plane, mask_split, mask_part) * factor, 0)
    if places.previous_mass is not None:
        previous_mass = tl.sum(_load_parts(ptr + places.previous_mass * plane, mask_split, mask_part) * factor, 0)
    if places.next_mass is not None:
        next_mass = tl.sum(_load_parts(ptr + places.next_mass * plane, mask_split, mask_part) * factor, 0)
    if places.window_mass is not None:
        window_mass = tl.sum(_load_parts(ptr + places.window_mass * plane, mask_split, mask_part) * factor, 0)
    if places.visible_keys is not None:
        visible_keys = tl.sum(_load_parts(ptr + places.visible_keys * plane, mask_split, mask_part), 0)
    share = store_rows(
        ptr_logsumexp,
        ptr_statistics,
        ptr_sinks,
        places,
        num_rows,
        i_row,
        i_row < num_rows,
        i_head,
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
    tile_output = tl.zeros([BLOCK_VALUE], tl.float32)
    for first in tl.static_range(0, BLOCK_SPLITS, BLOCK_PARTS):
        if first > 0:
            tile_part = _load_outputs(ptr_parts, i_row, num_rows, first, splits, DIM_VALUE, BLOCK_PARTS, BLOCK_VALUE)
        # [BLOCK_PARTS]
        if BLOCK_PARTS != BLOCK_SPLITS:
            offs_part = first + tl.arange(0, BLOCK_PARTS)
            ptr = ptr_sums + offs_part * num_rows + i_row
            factor = exp(tl.load(ptr, mask=offs_part < splits, other=-float("inf")) - shift, EXACT)
            mask_part = tl.load(ptr + plane, mask=offs_part < splits, other=0.0) != 0.0
        tile_output += tl.sum(tl.where(mask_part[:, None], tile_part, 0.0) * factor[:, None], 0)
    output = tl.where(total != 0.0, tile_output * share, 0.0)
    offs_value = tl.arange(0, BLOCK_VALUE)
    ptr = ptr_output + ((i_batch * QUERIES + i_query) * HEADS + i_head) * DIM_VALUE + offs_value
    tl.store(ptr, output.to(ptr_output.dtype.element_ty), mask=offs_value < DIM_VALUE)
