"""Softmax state and statistics of rows over some keys, and their update by one tile of logits.

Shared by the kernels of caches of keys and values and of latents.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from polyhead.ops.common.kernels.mask_tiles import key_ordinals
from polyhead.ops.common.kernels.softmax_tiles import LOG2E, exp2


class RowState(NamedTuple):
    """Running values of rows [BLOCK_M]; sums of weights are relative to the row max, and not normalised."""

    m_i: Any  # row max
    l_i: Any  # sum of the weights
    max_abs: Any
    entropy: Any  # sum of p * (qk - m_i)
    mean_distance: Any
    mean_offset: Any
    mean_squared_distance: Any
    sink_mass: Any
    self_mass: Any
    previous_mass: Any
    next_mass: Any
    window_mass: Any
    visible_keys: Any


@triton.jit
def exp(x, EXACT: tl.constexpr):
    return exp2(x * LOG2E, EXACT)


@triton.jit
def empty_state(BLOCK_M: tl.constexpr):
    """Return the state of rows before their first tile."""
    zeros = tl.zeros([BLOCK_M], tl.float32)
    return RowState(
        m_i=tl.full([BLOCK_M], -float("inf"), tl.float32),
        l_i=zeros,
        max_abs=zeros,
        entropy=zeros,
        mean_distance=zeros,
        mean_offset=zeros,
        mean_squared_distance=zeros,
        sink_mass=zeros,
        self_mass=zeros,
        previous_mass=zeros,
        next_mass=zeros,
        window_mass=zeros,
        visible_keys=tl.zeros([BLOCK_M], tl.int32),
    )


@triton.jit
def update_state(
    state,
    stat_slots,
    qk,
    distance,
    visible,
    mask,
    i_batch,
    offs_n,
    num_keys,
    sink_keys,
    window,
    FULL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Update the state of rows with one tile of logits [BLOCK_M, BLOCK_N], which are -inf where masked.

    FULL guarantees that every row sees every key of the tile, and that none of them counts to a mass; `visible` is not
    read then. Returns the state, the weights [BLOCK_M, BLOCK_N] and the factor of earlier sums [BLOCK_M].
    """
    m_new = tl.maximum(state.m_i, tl.max(qk, 1))
    m_safe = tl.where(m_new == -float("inf"), 0.0, m_new)
    qk_shifted = qk - m_safe[:, None]
    p = exp(qk_shifted, EXACT)
    alpha = exp(state.m_i - m_safe, EXACT)
    max_abs, entropy, visible_keys = state.max_abs, state.entropy, state.visible_keys
    if stat_slots.entropy is not None:
        # The sum of p * (qk - m) is corrected by the change of the row max, so that no difference of two numbers as
        # large as the logits is ever taken.
        m_diff = tl.where(state.m_i == -float("inf"), 0.0, state.m_i - m_safe)
        product = tl.where(p > 0.0, p * qk_shifted, 0.0)
        entropy = alpha * (entropy + m_diff * state.l_i) + tl.sum(product, 1)
    if stat_slots.max_abs_logit is not None:
        abs_qk = tl.where(qk == -float("inf"), 0.0, tl.abs(qk))
        max_abs = tl.maximum(max_abs, tl.max(abs_qk, 1))
    if stat_slots.visible_keys is not None:
        if FULL:
            visible_keys += BLOCK_N
        else:
            visible_keys += tl.sum(visible.to(tl.int32), 1)
    offset = distance.to(tl.float32)
    mean_distance, mean_offset = state.mean_distance, state.mean_offset
    mean_squared_distance = state.mean_squared_distance
    if stat_slots.mean_distance is not None:
        mean_distance = mean_distance * alpha + tl.sum(p * tl.abs(offset), 1)
    if stat_slots.mean_offset is not None:
        mean_offset = mean_offset * alpha + tl.sum(p * offset, 1)
    if stat_slots.mean_squared_distance is not None:
        mean_squared_distance = mean_squared_distance * alpha + tl.sum(p * offset * offset, 1)
    sink_mass, self_mass, previous_mass = state.sink_mass, state.self_mass, state.previous_mass
    next_mass, window_mass = state.next_mass, state.window_mass
    if stat_slots.sink_mass is not None:
        sink_mass *= alpha
        if not FULL:
            is_sink = key_ordinals(mask, i_batch, offs_n, num_keys) < sink_keys
            sink_mass += tl.sum(tl.where(is_sink[None, :], p, 0.0), 1)
    if stat_slots.self_mass is not None:
        self_mass *= alpha
        if not FULL:
            self_mass += tl.sum(tl.where(distance == 0, p, 0.0), 1)
    if stat_slots.previous_mass is not None:
        previous_mass *= alpha
        if not FULL:
            previous_mass += tl.sum(tl.where(distance == -1, p, 0.0), 1)
    if stat_slots.next_mass is not None:
        next_mass *= alpha
        if not FULL:
            next_mass += tl.sum(tl.where(distance == 1, p, 0.0), 1)
    if stat_slots.window_mass is not None:
        window_mass *= alpha
        if not FULL:
            window_mass += tl.sum(tl.where(tl.abs(distance) <= window, p, 0.0), 1)
    state = RowState(
        m_i=m_new,
        l_i=state.l_i * alpha + tl.sum(p, 1),
        max_abs=max_abs,
        entropy=entropy,
        mean_distance=mean_distance,
        mean_offset=mean_offset,
        mean_squared_distance=mean_squared_distance,
        sink_mass=sink_mass,
        self_mass=self_mass,
        previous_mass=previous_mass,
        next_mass=next_mass,
        window_mass=window_mass,
        visible_keys=visible_keys,
    )
    return state, p, alpha


@triton.jit
def reset_padding(state, mask_real):
    """Return the state with padding rows, which full tiles do not mask, as rows without visible keys."""
    return RowState(
        m_i=tl.where(mask_real, state.m_i, -float("inf")),
        l_i=tl.where(mask_real, state.l_i, 0.0),
        max_abs=tl.where(mask_real, state.max_abs, 0.0),
        entropy=state.entropy,
        mean_distance=state.mean_distance,
        mean_offset=state.mean_offset,
        mean_squared_distance=state.mean_squared_distance,
        sink_mass=state.sink_mass,
        self_mass=state.self_mass,
        previous_mass=state.previous_mass,
        next_mass=state.next_mass,
        window_mass=state.window_mass,
        visible_keys=tl.where(mask_real, state.visible_keys, 0),
    )
