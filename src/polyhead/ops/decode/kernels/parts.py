"""Partial results of split-KV decoding, and the kernel that reduces them.

A partial result is the softmax state and the unnormalised output of a row over one part of the keys.

Each part is rescaled from its own row max to the common one, as in Flash-Decoding. With a single split there is nothing
to reduce, and rows are normalised and stored directly.
"""

from __future__ import annotations

import triton
import triton.language as tl

from polyhead.ops.common.kernels.softmax_tiles import LN2, log2
from polyhead.ops.common.statistics import NAMES, row_tuple
from polyhead.ops.decode.kernels.row_state import RowState, exp

# Index of each statistic in the tensor of statistics, [statistics, rows]; None: not requested.
StatisticSlots = row_tuple("StatisticSlots", NAMES, __name__)
# The sums of weights times a factor have the same indices among the slots and in the state.
FIRST_LINEAR = tl.constexpr(NAMES.index("mean_distance"))
LAST_LINEAR = tl.constexpr(NAMES.index("window_mass"))
assert NAMES[FIRST_LINEAR.value : LAST_LINEAR.value + 1] == RowState._fields[FIRST_LINEAR.value : LAST_LINEAR.value + 1]


@triton.jit
def load_rows(ptr_rows, mask_rows, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Load a tile [rows, BLOCK] from [rows] pointers, with zeros past DIM and where the mask is False."""
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
def store_rows(
    ptr_logsumexp,
    ptr_statistics,
    ptr_sinks,
    stat_slots,
    num_rows,
    offs_row,
    mask_row,
    i_head,
    state,
    EXACT: tl.constexpr,
):
    """Store log-sum-exp and statistics of rows; returns the normaliser of their output.

    `state.l_i` is 0 in a row without visible keys and NaN in one that sees a NaN, whatever its row max is.
    """
    m_i, l_i = state.m_i, state.l_i
    is_nonempty = l_i != 0.0
    m_all = m_i
    if ptr_sinks is not None:
        sink = tl.load(ptr_sinks + i_head, mask=mask_row, other=0.0).to(tl.float32)
        m_all = tl.maximum(m_i, sink)
    is_empty = (m_all == -float("inf")) & (l_i == 0.0)
    m_safe = tl.where(m_all == -float("inf"), 0.0, m_all)
    alpha = exp(m_i - m_safe, EXACT)
    denominator = l_i * alpha
    if ptr_sinks is not None:
        p_sink = exp(sink - m_safe, EXACT)
        denominator += p_sink
    denominator = tl.where(is_empty, 1.0, denominator)
    log_denominator = log2(denominator, EXACT) * LN2
    logsumexp = tl.where(is_empty, -float("inf"), m_safe + log_denominator)
    tl.store(ptr_logsumexp + offs_row, logsumexp, mask=mask_row)

    ptr = ptr_statistics + offs_row
    normalizer = alpha / denominator
    if stat_slots.max_logit is not None:
        tl.store(ptr + stat_slots.max_logit * num_rows, tl.where(l_i == l_i, m_i, l_i), mask=mask_row)
    if stat_slots.max_abs_logit is not None:
        tl.store(ptr + stat_slots.max_abs_logit * num_rows, tl.where(l_i == l_i, state.max_abs, l_i), mask=mask_row)
    if stat_slots.entropy is not None:
        sum_p_qk = alpha * (state.entropy + tl.where(m_i == -float("inf"), 0.0, m_i - m_safe) * l_i)
        if ptr_sinks is not None:
            sum_p_qk += tl.where(p_sink > 0.0, p_sink * (sink - m_safe), 0.0)
        entropy = log_denominator - sum_p_qk / denominator
        tl.store(ptr + stat_slots.entropy * num_rows, tl.where(is_nonempty, entropy, 0.0), mask=mask_row)
    if stat_slots.confidence is not None:
        tl.store(ptr + stat_slots.confidence * num_rows, tl.where(is_nonempty, normalizer, 0.0), mask=mask_row)
    for i in tl.static_range(FIRST_LINEAR, LAST_LINEAR + 1):
        if stat_slots[i] is not None:
            tl.store(ptr + stat_slots[i] * num_rows, state[i] * normalizer, mask=mask_row)
    if stat_slots.visible_keys is not None:
        tl.store(ptr + stat_slots.visible_keys * num_rows, state.visible_keys.to(tl.float32), mask=mask_row)
    if stat_slots.learned_sink_mass is not None:
        tl.store(ptr + stat_slots.learned_sink_mass * num_rows, p_sink / denominator, mask=mask_row)
    return normalizer


@triton.jit
def store_sums(
    ptr_sums,
    stat_slots,
    i_split,
    splits,
    num_rows,
    offs_row,
    mask_row,
    state,
):
    """Store the softmax state of rows over one part of the keys.

    Returns the row offsets in the part, and their mask: rows that have visible keys.
    """
    stride_slot = splits * num_rows
    offs_part = i_split * num_rows + offs_row
    ptr = ptr_sums + offs_part
    tl.store(ptr, state.m_i, mask=mask_row)
    tl.store(ptr + stride_slot, state.l_i, mask=mask_row)
    ptr += 2 * stride_slot
    # A part without visible keys has l_i = 0, and nothing else of it is read.
    mask_filled = mask_row & (state.l_i != 0.0)
    if stat_slots.max_abs_logit is not None:
        tl.store(ptr + stat_slots.max_abs_logit * stride_slot, state.max_abs, mask=mask_filled)
    if stat_slots.entropy is not None:
        tl.store(ptr + stat_slots.entropy * stride_slot, state.entropy, mask=mask_filled)
    for i in tl.static_range(FIRST_LINEAR, LAST_LINEAR + 1):
        if stat_slots[i] is not None:
            tl.store(ptr + stat_slots[i] * stride_slot, state[i], mask=mask_filled)
    if stat_slots.visible_keys is not None:
        tl.store(ptr + stat_slots.visible_keys * stride_slot, state.visible_keys.to(tl.float32), mask=mask_filled)
    return offs_part, mask_filled


@triton.jit
def _load_parts(ptr, mask_split, mask_part):
    """Load one number per part, 0 for parts without visible keys.

    All parts are loaded, so that the load does not wait for `mask_part`.
    """
    return tl.where(mask_part, tl.load(ptr, mask=mask_split, other=0.0), 0.0)


@triton.jit
def _sum_parts(ptr, slot, stride_slot, mask_split, mask_part, alpha):
    """Return the sum of a statistic over the parts, each times `alpha`; 0 if it is not requested."""
    total = 0.0
    if slot is not None:
        total = tl.sum(_load_parts(ptr + slot * stride_slot, mask_split, mask_part) * alpha, 0)
    return total


@triton.jit
def _load_outputs(
    ptr_parts, i_row, num_rows, first_part, splits, DIM: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Load unnormalised outputs [PARTS, BLOCK] from `first_part` on.

    Parts without visible keys are uninitialised.
    """
    offs_part = first_part + tl.arange(0, PARTS)
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
    stat_slots,
    splits,
    num_rows,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    DIM_VALUE: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
):
    """Reduce the parts of one row per program: rescale them to the common row max and add."""
    EXACT: tl.constexpr = ptr_output.dtype.element_ty == tl.float32
    i_row = tl.program_id(0).to(tl.int64)
    i_batch, i_head, i_query = i_row // (HEADS * QUERIES), (i_row // QUERIES) % HEADS, i_row % QUERIES
    num_rows = num_rows.to(tl.int64)
    stride_slot = splits * num_rows
    # [BLOCK_PARTS, BLOCK_VALUE], loaded while the row maxima are reduced
    tile_part = _load_outputs(ptr_parts, i_row, num_rows, 0, splits, DIM_VALUE, BLOCK_PARTS, BLOCK_VALUE)
    # [BLOCK_SPLITS]
    offs_split = tl.arange(0, BLOCK_SPLITS)
    mask_split = offs_split < splits
    ptr = ptr_sums + offs_split * num_rows + i_row
    m_parts = tl.load(ptr, mask=mask_split, other=-float("inf"))
    l_parts = tl.load(ptr + stride_slot, mask=mask_split, other=0.0)
    mask_part = l_parts != 0.0
    ptr += 2 * stride_slot
    max_abs, entropy, visible_keys = 0.0, 0.0, 0.0
    if stat_slots.entropy is not None:
        entropy_parts = _load_parts(ptr + stat_slots.entropy * stride_slot, mask_split, mask_part)
    m_i = tl.max(m_parts, 0)
    m_safe = tl.where(m_i == -float("inf"), 0.0, m_i)
    alpha = exp(m_parts - m_safe, EXACT)
    l_i = tl.sum(l_parts * alpha, 0)
    if stat_slots.max_abs_logit is not None:
        max_abs = tl.max(_load_parts(ptr + stat_slots.max_abs_logit * stride_slot, mask_split, mask_part), 0)
    if stat_slots.entropy is not None:
        correction = tl.where(m_parts == -float("inf"), 0.0, m_parts - m_safe) * l_parts
        entropy = tl.sum(alpha * (entropy_parts + correction), 0)
    if stat_slots.visible_keys is not None:
        visible_keys = tl.sum(_load_parts(ptr + stat_slots.visible_keys * stride_slot, mask_split, mask_part), 0)
    state = RowState(
        m_i=m_i,
        l_i=l_i,
        max_abs=max_abs,
        entropy=entropy,
        mean_distance=_sum_parts(ptr, stat_slots.mean_distance, stride_slot, mask_split, mask_part, alpha),
        mean_offset=_sum_parts(ptr, stat_slots.mean_offset, stride_slot, mask_split, mask_part, alpha),
        mean_squared_distance=_sum_parts(
            ptr, stat_slots.mean_squared_distance, stride_slot, mask_split, mask_part, alpha
        ),
        sink_mass=_sum_parts(ptr, stat_slots.sink_mass, stride_slot, mask_split, mask_part, alpha),
        self_mass=_sum_parts(ptr, stat_slots.self_mass, stride_slot, mask_split, mask_part, alpha),
        previous_mass=_sum_parts(ptr, stat_slots.previous_mass, stride_slot, mask_split, mask_part, alpha),
        next_mass=_sum_parts(ptr, stat_slots.next_mass, stride_slot, mask_split, mask_part, alpha),
        window_mass=_sum_parts(ptr, stat_slots.window_mass, stride_slot, mask_split, mask_part, alpha),
        visible_keys=visible_keys,
    )
    normalizer = store_rows(
        ptr_logsumexp, ptr_statistics, ptr_sinks, stat_slots, num_rows, i_row, i_row < num_rows, i_head, state, EXACT
    )
    acc = tl.zeros([BLOCK_VALUE], tl.float32)
    for first_part in tl.static_range(0, BLOCK_SPLITS, BLOCK_PARTS):
        if first_part > 0:
            tile_part = _load_outputs(
                ptr_parts, i_row, num_rows, first_part, splits, DIM_VALUE, BLOCK_PARTS, BLOCK_VALUE
            )
        # [BLOCK_PARTS]
        if BLOCK_PARTS != BLOCK_SPLITS:
            offs_part = first_part + tl.arange(0, BLOCK_PARTS)
            ptr = ptr_sums + offs_part * num_rows + i_row
            alpha = exp(tl.load(ptr, mask=offs_part < splits, other=-float("inf")) - m_safe, EXACT)
            mask_part = tl.load(ptr + stride_slot, mask=offs_part < splits, other=0.0) != 0.0
        acc += tl.sum(tl.where(mask_part[:, None], tile_part, 0.0) * alpha[:, None], 0)
    output = tl.where(l_i != 0.0, acc * normalizer, 0.0)
    offs_value = tl.arange(0, BLOCK_VALUE)
    ptr = ptr_output + ((i_batch * QUERIES + i_query) * HEADS + i_head) * DIM_VALUE + offs_value
    tl.store(ptr, output.to(ptr_output.dtype.element_ty), mask=offs_value < DIM_VALUE)
