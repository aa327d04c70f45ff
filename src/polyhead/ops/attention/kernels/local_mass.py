"""Attention mass on the first keys and on keys near the query, given the log-sum-exp of a forward.

Companion of `forward_hopper`, which has no registers left for these sums. Only the keys that count are read for each
row, so the work grows with the length times the width of the band. Memory-bound: the queries are read once. In a model
on an H200 it took about 0.1 ms per layer at 8,192 and at 32,768 tokens (16 or 32 heads).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from polyhead.ops.common.kernel_call import KernelCall
from polyhead.ops.common.kernels.resources import Blocks
from polyhead.ops.common.kernels.sizes import blocks_of, padded_dim
from polyhead.ops.common.kernels.softmax_tiles import LOG2E, exp2, products
from polyhead.ops.common.statistics import row_tuple

STATISTICS = ("sink_mass", "self_mass", "previous_mass", "next_mass", "window_mass")

_UNDERFLOW = tl.constexpr(-200.0)  # exponent for which exp2 is 0 in float32


# Output pointers, each float32 [batch, heads, queries]; None if not requested.
MassPointers = row_tuple("MassPointers", STATISTICS, __name__)


@triton.jit
def _rows(ptr, step, first, limit, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Load rows of one head from `first` on, [ROWS, BLOCK_DIM], zeros past `limit` and DIM."""
    # [ROWS], [BLOCK_DIM]
    offs_row = first + tl.arange(0, ROWS)
    offs_dim = tl.arange(0, BLOCK_DIM)
    mask = (offs_row < limit)[:, None]
    if DIM != BLOCK_DIM:
        mask = mask & (offs_dim < DIM)[None, :]
    return tl.load(ptr + (offs_row.to(tl.int64) * step)[:, None] + offs_dim[None, :], mask=mask, other=0.0)


@triton.jit
def _weights_and_distance(
    tile_q, logsumexp, ptr_key, step_key, positions, first_key, left, right, keys, scale, COLUMNS: tl.constexpr,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Return weights, 0 if masked, and distances of the keys from `first_key` on, [rows, COLUMNS]."""
    EXACT: tl.constexpr = tile_q.dtype == tl.float32
    # [COLUMNS]
    offs_n = first_key + tl.arange(0, COLUMNS)
    # [COLUMNS, BLOCK_DIM]
    tile_k = _rows(ptr_key, step_key, first_key, keys, COLUMNS, DIM, BLOCK_DIM)
    # [BLOCK_M, COLUMNS], all that follows
    tile_s = products(tile_q, tile_k)
    if EXACT:
        exponent = (tile_s * scale - logsumexp[:, None]) * LOG2E
    else:
        # The same factor as in the forward, with the same rounding.
        exponent = tile_s * (scale * LOG2E) - (logsumexp * LOG2E)[:, None]
    distance = offs_n[None, :] - positions[:, None]
    visible = (offs_n < keys)[None, :] & (distance <= right) & (distance >= -left)
    return exp2(tl.where(visible, exponent, _UNDERFLOW), EXACT), distance


@triton.jit
def _store(ptr, mass, logsumexp, mask):
    # A row that sees a non-finite key is NaN, even if its mass is of other keys.
    tl.store(ptr, tl.where(logsumexp != logsumexp, float("nan"), mass), mask=mask)


@triton.jit(
    do_not_specialize=("heads", "group", "queries", "keys", "offset", "left", "right", "sink_keys", "window", "scale")
)
def _masses_kernel(
    ptr_query,
    ptr_key,
    ptr_logsumexp,
    rows,
    strides_query,
    strides_key,
    heads,
    group,
    queries,
    keys,
    offset,
    left,
    right,
    sink_keys,
    window,
    scale,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SINKS: tl.constexpr,
):
    blocks = tl.cdiv(queries, BLOCK_M)
    i_pair = tl.program_id(0) // blocks  # batch * heads + head
    first_row = (tl.program_id(0) % blocks) * BLOCK_M
    i_batch, i_head = (i_pair // heads).to(tl.int64), (i_pair % heads).to(tl.int64)
    ptr_query += i_batch * strides_query[0] + i_head * strides_query[1]
    ptr_key += i_batch * strides_key[0] + i_head // group * strides_key[1]

    # [BLOCK_M]
    offs_m = first_row + tl.arange(0, BLOCK_M)
    mask_m = offs_m < queries
    positions = offs_m + offset
    offs_output = i_pair.to(tl.int64) * queries + offs_m
    logsumexp = tl.load(ptr_logsumexp + offs_output, mask=mask_m, other=0.0)
    # [BLOCK_M, BLOCK_DIM]
    tile_q = _rows(ptr_query, strides_query[2], first_row, queries, BLOCK_M, DIM, BLOCK_DIM)
    first, last = first_row + offset, tl.minimum(first_row + BLOCK_M, queries) - 1 + offset

    if rows.sink_mass is not None:
        sink_mass = tl.zeros([BLOCK_M], tl.float32)
        stop = tl.minimum(tl.minimum(sink_keys, keys), last + right + 1)
        for first_key in tl.range(0, stop, BLOCK_SINKS):
            tile_p, _ = _weights_and_distance(
                tile_q, logsumexp, ptr_key, strides_key[2], positions, first_key, left, right, keys, scale, BLOCK_SINKS,
                DIM, BLOCK_DIM,
            )  # fmt: skip
            is_first = first_key + tl.arange(0, BLOCK_SINKS) < sink_keys
            sink_mass += tl.sum(tl.where(is_first[None, :], tile_p, 0.0), 1)
        _store(rows.sink_mass + offs_output, sink_mass, logsumexp, mask_m)

    if (
        rows.self_mass is not None
        or rows.previous_mass is not None
        or rows.next_mass is not None
        or rows.window_mass is not None
    ):
        self_mass = tl.zeros([BLOCK_M], tl.float32)
        previous_mass, next_mass, window_mass = self_mass, self_mass, self_mass
        # Largest distances to either side that count.
        max_before, max_after = 0, 0
        if rows.previous_mass is not None:
            max_before = 1
        if rows.next_mass is not None:
            max_after = 1
        if rows.window_mass is not None:
            max_before, max_after = tl.maximum(window, max_before), tl.maximum(window, max_after)
        start = tl.maximum(first - tl.minimum(max_before, left), 0)
        stop = tl.minimum(last + tl.minimum(max_after, right) + 1, keys)
        for first_key in tl.range(start, stop, BLOCK_N):
            tile_p, distance = _weights_and_distance(
                tile_q, logsumexp, ptr_key, strides_key[2], positions, first_key, left, right, keys, scale, BLOCK_N,
                DIM, BLOCK_DIM,
            )  # fmt: skip
            if rows.self_mass is not None:
                self_mass += tl.sum(tl.where(distance == 0, tile_p, 0.0), 1)
            if rows.previous_mass is not None:
                previous_mass += tl.sum(tl.where(distance == -1, tile_p, 0.0), 1)
            if rows.next_mass is not None:
                next_mass += tl.sum(tl.where(distance == 1, tile_p, 0.0), 1)
            if rows.window_mass is not None:
                is_near = (distance <= window) & (distance >= -window)
                window_mass += tl.sum(tl.where(is_near, tile_p, 0.0), 1)
        if rows.self_mass is not None:
            _store(rows.self_mass + offs_output, self_mass, logsumexp, mask_m)
        if rows.previous_mass is not None:
            _store(rows.previous_mass + offs_output, previous_mass, logsumexp, mask_m)
        if rows.next_mass is not None:
            _store(rows.next_mass + offs_output, next_mass, logsumexp, mask_m)
        if rows.window_mass is not None:
            _store(rows.window_mass + offs_output, window_mass, logsumexp, mask_m)


def choose_blocks(width: int, element_size: int) -> Blocks:
    """Return the tile of one program, which fits into the shared memory of every GPU from sm_80 on.

    `width` is the padded head dim.
    """
    if element_size == 4:
        # The products, in several chains each, must stay in registers.
        return Blocks(32, 32, 8, 1) if width <= 128 else Blocks(32, 16, 8, 1)
    return Blocks(128, 64, 8, 2) if width <= 128 else Blocks(64, 32, 4, 2)


def can_serve(call: KernelCall) -> bool:
    """Return True if the mask is a band and few enough keys count for a separate pass to be faster."""
    mask, queries, keys = call.mask, call.query.shape[2], call.key.shape[2]
    max_keys = 64 + keys // 16
    return (
        mask.is_band
        and mask.key_ordinal is None
        and mask.offset == keys - queries
        and 0 < queries <= keys
        and call.sink_keys <= max_keys
        and call.window <= max_keys
    )


def masses(call: KernelCall, logsumexp: Tensor, *, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Return the named masses under a band of keys, each float32 [batch, heads, queries].

    The band is aligned to the last query. `logsumexp` is float32 [batch, heads, queries] and contiguous; NaN there
    makes all masses of the row NaN.
    """
    query, key, left, right = call.query, call.key, call.mask.left, call.mask.right
    batch, heads, queries, dim = query.shape
    kv_heads, keys = key.shape[1:3]
    statistics = {name: torch.empty_like(logsumexp) for name in names}
    if not logsumexp.numel():
        return statistics
    width = padded_dim(dim)
    blocks = choose_blocks(width, query.element_size())
    unbounded = keys  # beyond any distance of this sequence
    with torch.cuda.device_of(query):
        _masses_kernel[(batch * heads * blocks_of(queries, blocks.rows),)](
            query,
            key,
            logsumexp,
            MassPointers(**statistics),
            query.stride()[:3],
            key.stride()[:3],
            heads,
            heads // kv_heads,
            queries,
            keys,
            keys - queries,
            unbounded if left is None else min(left, unbounded),
            unbounded if right is None else min(right, unbounded),
            min(call.sink_keys, unbounded),
            min(call.window, unbounded),
            call.scale,
            DIM=dim,
            BLOCK_DIM=width,
            BLOCK_M=blocks.rows,
            BLOCK_N=blocks.columns,
            BLOCK_SINKS=16,
            **blocks.options,
        )
    return statistics
