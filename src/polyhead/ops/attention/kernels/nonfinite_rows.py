"""Recompute the rows of an attention output that are not finite, without the keys and values that they do not see.

A kernel that masks logits still multiplies a masked weight of 0 with the value, and 0 * NaN is NaN. So NaN and Inf in a
masked value make the output of a row NaN, and nothing else does harm: logits are replaced where they are masked. This
kernel follows the forward, tests its rows and returns at once where all are finite. Removing NaN and Inf from keys and
values before a forward reads and writes both; here only the output is read or, where the forward has marked its rows
in the log-sum-exp, 4 bytes per row.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from polyhead.ops.common.kernels.launching import bounded, launch
from polyhead.ops.common.kernels.sizes import blocks_of, padded_dim
from polyhead.ops.common.kernels.softmax_tiles import LN2, LOG2E

# That depend on logits, in the order of the kernel's pointers.
_STATISTICS = ("max_logit", "entropy", "confidence", "mean_distance", "mean_offset")
_ROWS = 64  # of a block
_MOST_PLANS = 4096
_plans: dict[Hashable, tuple[int, tuple[int, ...], tuple[int, ...]]] = {}
_MASKED = tl.constexpr(-1.0e30)
_LOWEST = tl.constexpr(-1.0e20)  # lower bound of the row max, so that the weight of a masked logit is 0


@triton.jit
def _load_rows(ptr, stride, offs_row, limit, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Load rows of one head, [rows, BLOCK_DIM], zeros past `limit` and DIM."""
    offs_dim = tl.arange(0, BLOCK_DIM)
    mask = (offs_row < limit)[:, None] & (offs_dim < DIM)[None, :]
    return tl.load(ptr + (offs_row.to(tl.int64) * stride)[:, None] + offs_dim[None, :], mask=mask, other=0.0)


@triton.jit
def _is_nonfinite(x):
    return (x - x) != 0.0  # x - x is 0 for every finite x and NaN for all others


@triton.jit
def _is_row_nonfinite(
    ptr_output, ptr_logsumexp, stride_output, offs_m, queries, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr
):  # fmt: skip
    """Return which rows of one head are to be recomputed, read off the log-sum-exp if there is one."""
    if ptr_logsumexp is not None:
        # The forward has set the log-sum-exp of a row to NaN if any element of its output is not finite.
        result = _is_nonfinite(tl.load(ptr_logsumexp + offs_m, mask=offs_m < queries, other=0.0))
    else:
        tile_o = _load_rows(ptr_output, stride_output, offs_m, queries, DIM, BLOCK_DIM)
        result = tl.max(_is_nonfinite(tile_o).to(tl.int32), 1) > 0
    return result


@triton.jit(
    do_not_specialize=(
        "stride_query_batch", "stride_query_head", "stride_query_token", "stride_key_batch", "stride_key_head",
        "stride_key_token", "stride_value_batch", "stride_value_head", "stride_value_token", "stride_output_batch",
        "stride_output_head", "stride_output_token", "heads", "group", "queries", "keys", "left", "right", "scale",
    )
)  # fmt: skip
def _recompute_kernel(
    ptr_query, ptr_key, ptr_value, ptr_output, ptr_logsumexp,
    ptr_max, ptr_entropy, ptr_confidence, ptr_distance, ptr_offset,
    stride_query_batch, stride_query_head, stride_query_token,
    stride_key_batch, stride_key_head, stride_key_token,
    stride_value_batch, stride_value_head, stride_value_token,
    stride_output_batch, stride_output_head, stride_output_token,
    heads, group, queries, keys, left, right, scale,
    WIDE: tl.constexpr, OUTPUT_UNIT: tl.constexpr, DIM_KEY: tl.constexpr, DIM_VALUE: tl.constexpr, SPAN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_KEY: tl.constexpr, BLOCK_VALUE: tl.constexpr,
):  # fmt: skip
    """Test SPAN rows of one head and, if any is not finite, recompute those, a block of BLOCK_M at a time.

    The strides of the output are multiples of OUTPUT_UNIT, and are given divided by it: so the compiler knows. WIDE
    has a bit for each stride of 64 bits, and is not read.
    """
    spans = tl.cdiv(queries, SPAN)
    i_pair = (tl.program_id(0) // spans).to(tl.int64)  # batch * heads + head
    first_row = (tl.program_id(0) % spans) * SPAN
    i_batch, i_head = i_pair // heads, i_pair % heads
    ptr_output += (i_batch * stride_output_batch + i_head * stride_output_head) * OUTPUT_UNIT
    stride_output = stride_output_token.to(tl.int64) * OUTPUT_UNIT
    if ptr_logsumexp is not None:
        ptr_logsumexp += i_pair * queries
    # [SPAN]
    is_nonfinite = _is_row_nonfinite(
        ptr_output, ptr_logsumexp, stride_output, first_row + tl.arange(0, SPAN), queries, DIM_VALUE, BLOCK_VALUE
    )
    if tl.max(is_nonfinite.to(tl.int32), 0) == 0:
        return

    ptr_query += i_batch * stride_query_batch + i_head * stride_query_head
    ptr_key += i_batch * stride_key_batch + i_head // group * stride_key_head
    ptr_value += i_batch * stride_value_batch + i_head // group * stride_value_head
    for first in range(first_row, tl.minimum(first_row + SPAN, queries), BLOCK_M):
        # [BLOCK_M]
        offs_m = first + tl.arange(0, BLOCK_M)
        is_broken = _is_row_nonfinite(ptr_output, ptr_logsumexp, stride_output, offs_m, queries, DIM_VALUE, BLOCK_VALUE)
        positions = offs_m + (keys - queries)
        first_position = first + (keys - queries)
        start = tl.maximum(first_position - left, 0) // BLOCK_N * BLOCK_N
        stop = tl.minimum(first_position + BLOCK_M + right, keys)
        if tl.max(is_broken.to(tl.int32), 0) == 0:
            stop = start
        tile_q = _load_rows(ptr_query, stride_query_token, offs_m, queries, DIM_KEY, BLOCK_KEY)
        m_i = tl.full([BLOCK_M], _LOWEST, tl.float32)
        l_i = tl.zeros([BLOCK_M], tl.float32)
        num_nonfinite = tl.zeros([BLOCK_M], tl.int32)  # visible keys with NaN or Inf
        acc = tl.zeros([BLOCK_M, BLOCK_VALUE], tl.float32)
        for first_key in range(start, stop, BLOCK_N):
            # [BLOCK_N]
            offs_n = first_key + tl.arange(0, BLOCK_N)
            tile_k = _load_rows(ptr_key, stride_key_token, offs_n, keys, DIM_KEY, BLOCK_KEY)
            tile_v = _load_rows(ptr_value, stride_value_token, offs_n, keys, DIM_VALUE, BLOCK_VALUE)
            nonfinite_k, nonfinite_v = _is_nonfinite(tile_k), _is_nonfinite(tile_v)
            nonfinite = tl.maximum(tl.max(nonfinite_k.to(tl.int32), 1), tl.max(nonfinite_v.to(tl.int32), 1))
            tile_k = tl.where(nonfinite_k, 0.0, tile_k).to(tile_k.dtype)
            tile_v = tl.where(nonfinite_v, 0.0, tile_v).to(tile_v.dtype)
            # [BLOCK_M, BLOCK_N]
            distance = offs_n[None, :] - positions[:, None]
            visible = (distance <= right) & (distance >= -left) & (offs_n < keys)[None, :]
            num_nonfinite += tl.sum(tl.where(visible, nonfinite[None, :], 0), 1)
            tile_s = tl.where(visible, tl.dot(tile_q, tl.trans(tile_k)) * (scale * LOG2E), _MASKED)
            m_new = tl.maximum(m_i, tl.max(tile_s, 1))
            tile_p = tl.exp2(tile_s - m_new[:, None])
            alpha = tl.exp2(m_i - m_new)
            l_i = l_i * alpha + tl.sum(tile_p, 1)
            acc = tl.dot(tile_p.to(tile_v.dtype), tile_v, acc * alpha[:, None])
            m_i = m_new

        mask_m = (offs_m < queries) & is_broken
        nan = tl.where(num_nonfinite > 0, float("nan"), 0.0)
        tile_o = acc / l_i[:, None] + nan[:, None]
        offs_dim = tl.arange(0, BLOCK_VALUE)
        offs_output = (offs_m.to(tl.int64) * stride_output)[:, None] + offs_dim[None, :]
        mask_o = mask_m[:, None] & (offs_dim < DIM_VALUE)[None, :]
        tl.store(ptr_output + offs_output, tile_o.to(ptr_output.dtype.element_ty), mask=mask_o)
        if ptr_logsumexp is not None:
            tl.store(ptr_logsumexp + offs_m, (m_i + tl.log2(l_i)) * LN2 + nan, mask=mask_m)
        # The other statistics of a row are right unless it sees a key or a value that is not finite.
        sees_nonfinite = mask_m & (num_nonfinite > 0)
        offs_statistic = i_pair * queries + offs_m
        if ptr_max is not None:
            tl.store(ptr_max + offs_statistic, nan, mask=sees_nonfinite)
        if ptr_entropy is not None:
            tl.store(ptr_entropy + offs_statistic, nan, mask=sees_nonfinite)
        if ptr_confidence is not None:
            tl.store(ptr_confidence + offs_statistic, nan, mask=sees_nonfinite)
        if ptr_distance is not None:
            tl.store(ptr_distance + offs_statistic, nan, mask=sees_nonfinite)
        if ptr_offset is not None:
            tl.store(ptr_offset + offs_statistic, nan, mask=sees_nonfinite)


def recompute_nonfinite_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    *,
    scale: float,
    left: int | None,
    right: int | None,
    logsumexp: Tensor | None = None,
    statistics: Mapping[str, Tensor] | None = None,
) -> None:
    """Correct in place what a forward under a band of keys computed from keys and values that may not be finite.

    A row with an output that is not finite is recomputed: it is NaN in all results if it sees a key or a value that is
    not finite, otherwise as if those were absent. These rows are read off `logsumexp`, if it is given, in which the
    forward has marked them by NaN, or off the output itself. Every row must see a key.

    Args:
        query, key, value: inputs of the forward, in 16 bits, with dense last axes.
        output: its output, with a dense last axis.
        scale: factor of the dot products.
        left, right: the band, aligned to the last query.
        logsumexp: [batch, heads, queries], contiguous; None to read the output.
        statistics: results by name, each like `logsumexp`.
    """
    sizes = (query.shape, value.shape, query.stride(), key.stride(), value.stride(), output.stride())
    known = (*sizes, logsumexp is None)
    plan = _plans.get(known)
    if plan is None:
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        plan = _plans[known] = _plan(*sizes, span=_ROWS if logsumexp is None else 1024)
    programs, strides_and_sizes, constants = plan
    rows = (None,) * len(_STATISTICS) if statistics is None else tuple(map(statistics.get, _STATISTICS))
    arguments = (
        *(query, key, value, output, logsumexp, *rows),
        *(*strides_and_sizes, bounded(left), bounded(right), float(scale)),
    )
    # Triton compiles another variant where a pointer is absent or no multiple of 16 bytes. Statistics are aligned.
    offsets = query.data_ptr() % 16, key.data_ptr() % 16, value.data_ptr() % 16, output.data_ptr() % 16
    present = None if statistics is None else tuple(x is None for x in rows)
    variant = query.get_device(), query.dtype, offsets, logsumexp is None, present
    with torch.cuda.device_of(query):
        launch(_recompute_kernel, programs, arguments, constants, variant=variant)


def _plan(
    query: torch.Size,
    value: torch.Size,
    stride_query: tuple[int, ...],
    stride_key: tuple[int, ...],
    stride_value: tuple[int, ...],
    stride_output: tuple[int, ...],
    *,
    span: int,
) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Return the number of programs, the strides and sizes that the kernel takes, and its constants."""
    (batch, heads, queries, dim_key), (_, kv_heads, keys, dim_value) = query, value
    unit = 8 if not any(stride % 8 for stride in stride_output[:3]) else 1
    strides = (*stride_query[:3], *stride_key[:3], *stride_value[:3], *(x // unit for x in stride_output[:3]))
    # Triton compiles another variant for strides of 64 bits, and `launch` identifies variants by their constants.
    wide = sum(1 << i for i, stride in enumerate(strides) if stride >> 31)
    blocks = (span, _ROWS, 32, padded_dim(dim_key), padded_dim(dim_value))
    constants = (wide, unit, dim_key, dim_value, *blocks)
    return batch * heads * blocks_of(queries, span), (*strides, heads, heads // kv_heads, queries, keys), constants
