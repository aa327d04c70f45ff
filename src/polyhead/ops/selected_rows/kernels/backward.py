"""Backward kernels for selected rows, from the output and the log-sum-exp, as in FlashAttention-2.

As in `attention.kernels.backward` there are three kernels: one number per row, computed by the kernel of that module;
the gradients of queries, with a loop over the visible keys of a block of rows; and the gradients of keys and values,
with a loop over the rows that see a block of keys, which are adjacent within each pair and found by a search. There are
no atomics. The gradients of a tile are computed by `backward_tiles`, which identifies rows by their query index.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
import triton
import triton.language as tl
from torch import Tensor

from polyhead.ops.attention.kernels.backward import (
    backward_problem,
    choose_blocks,
    constants_kernel,
    full_columns,
    full_rows,
)
from polyhead.ops.attention.kernels.backward_tiles import (
    RowTerms,
    distance_tile,
    fresh_like,
    head_scales,
    load_tile,
    store_tile,
    strided,
    tile_gradients,
)
from polyhead.ops.common.kernel_call import KernelCall
from polyhead.ops.common.kernels.mask_tiles import query_span, visible_tile
from polyhead.ops.common.kernels.resources import Blocks, launch_fitting
from polyhead.ops.common.kernels.sizes import blocks_of, padded_dim
from polyhead.ops.common.kernels.softmax_tiles import add_product, products
from polyhead.ops.selected_rows.kernels.forward import num_programs, pack_rows, without_full_spans
from polyhead.ops.selected_rows.kernels.tiles import (
    find_rows,
    first_and_last,
    first_from,
    load_queries,
    pair_of,
    sequence_and_head,
    visible_keys_span,
)
from polyhead.ops.selected_rows.rows import SelectedRows


@triton.jit
def _load_rows(problem, first_row, stop, BLOCK_M: tl.constexpr):
    """Load log-sum-exp (+inf for empty rows) and C of rows, float32 [BLOCK_M] each."""
    offs_row = first_row + tl.arange(0, BLOCK_M)
    logsumexp = tl.load(problem.logsumexp + offs_row, mask=offs_row < stop, other=float("inf"))
    constant = tl.load(problem.constant + offs_row, mask=offs_row < stop, other=0.0)
    return tl.where(logsumexp == -float("inf"), float("inf"), logsumexp), constant


@triton.jit
def _step(
    problem,
    tile_q,
    tile_k,
    tile_do,
    tile_v,
    logsumexp,
    constant,
    i_batch,
    i_head,
    offs_m,
    offs_n,
    BLOCK_M: tl.constexpr,
    MASKED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """Return the weights of a tile and the gradients of its logits.

    Both are [rows, columns], or [columns, rows] if TRANSPOSED.
    """
    num_queries, num_keys = problem.num_queries, problem.num_keys
    # [BLOCK_M, BLOCK_N]
    distance = distance_tile(problem, i_batch, offs_m, offs_n)
    visible = distance == distance
    if MASKED:
        visible = visible_tile(problem.mask, i_batch, i_head, offs_m, offs_n, distance, num_queries, num_keys)
        # Rows without visible keys may contain NaN. With a learned sink, their log-sum-exp is finite as well.
        has_keys = logsumexp != float("inf")
        if problem.SINKS:
            has_keys = has_keys & (tl.max(visible.to(tl.int32), 1) > 0)
        visible = visible & has_keys[:, None]
        if TRANSPOSED:
            tile_q = tl.where(has_keys[:, None], tile_q, 0.0).to(tile_q.dtype)
            tile_do = tl.where(has_keys[:, None], tile_do, 0.0).to(tile_do.dtype)
    if TRANSPOSED:
        # Transposed, weights and gradients are operands of the next products without leaving registers.
        tile_s = products(tile_k, tile_q)
        tile_dp = products(tile_v, tile_do)
    else:
        tile_s = products(tile_q, tile_k)
        tile_dp = products(tile_do, tile_v)
    # `tile_gradients` identifies a row by its query: `first` plus its index in the tile.
    first = offs_m - tl.arange(0, BLOCK_M)
    tile_p, _, tile_raw = tile_gradients(
        problem,
        tile_s,
        tile_dp,
        visible,
        logsumexp,
        constant,
        i_batch,
        i_head,
        first,
        offs_n,
        BLOCK_M,
        MASKED,
        TRANSPOSED,
    )
    return tile_p, tile_raw, tile_q, tile_do


@triton.jit
def _queries_step(
    problem,
    tile_dq,
    tile_q,
    tile_do,
    logsumexp,
    constant,
    i_batch,
    i_head,
    offs_m,
    first_column,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add the contribution of one block of keys to the query gradient of a block of rows."""
    num_keys = problem.num_keys
    DIM_KEY: tl.constexpr = problem.DIM_KEY
    DIM_VALUE: tl.constexpr = problem.DIM_VALUE
    BLOCK_KEY: tl.constexpr = problem.BLOCK_KEY
    BLOCK_VALUE: tl.constexpr = problem.BLOCK_VALUE
    i_kv_head = i_head // problem.group
    offs_n = first_column + tl.arange(0, BLOCK_N)
    # [BLOCK_N, BLOCK_KEY], [BLOCK_N, BLOCK_VALUE]
    tile_k = load_tile(problem.key, i_batch, i_kv_head, first_column, num_keys, BLOCK_N, DIM_KEY, BLOCK_KEY, not MASKED)
    tile_v = load_tile(
        problem.value, i_batch, i_kv_head, first_column, num_keys, BLOCK_N, DIM_VALUE, BLOCK_VALUE, not MASKED
    )
    _, tile_raw, _, _ = _step(
        problem, tile_q, tile_k, tile_do, tile_v, logsumexp, constant, i_batch, i_head, offs_m, offs_n, BLOCK_M, MASKED,
        False,
    )  # fmt: skip
    return add_product(tile_dq, tile_raw.to(tile_k.dtype), tile_k)


@triton.jit
def _ragged_queries_kernel(
    problem, rows, grad_query, HEAVY_LAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    DIM_KEY: tl.constexpr = problem.DIM_KEY
    DIM_VALUE: tl.constexpr = problem.DIM_VALUE
    BLOCK_KEY: tl.constexpr = problem.BLOCK_KEY
    BLOCK_VALUE: tl.constexpr = problem.BLOCK_VALUE
    i_program = tl.program_id(0)
    if HEAVY_LAST:
        # Under a causal mask the last rows have the most work, so they start first.
        i_program = tl.num_programs(0) - 1 - i_program
    i_pair, first_row, stop_row = find_rows(rows, i_program, BLOCK_M)
    if first_row >= stop_row:
        return
    is_padding = i_pair == rows.pairs
    i_batch, i_head = sequence_and_head(rows, tl.where(is_padding, 0, i_pair))
    i_batch = i_batch.to(tl.int64)
    i_zero = i_batch * 0  # rows are stored as one sequence of one head
    stop_load = tl.where(is_padding, first_row, stop_row)  # padding is not read
    # [BLOCK_M]
    offs_m = load_queries(rows, first_row + tl.arange(0, BLOCK_M), stop_load, problem.num_queries)
    first, last = first_and_last(offs_m, problem.num_queries)
    logsumexp, constant = _load_rows(problem, first_row, stop_row, BLOCK_M)
    # [BLOCK_M, BLOCK_KEY], [BLOCK_M, BLOCK_VALUE]
    tile_q = load_tile(problem.query, i_zero, i_zero, first_row, stop_load, BLOCK_M, DIM_KEY, BLOCK_KEY, False)
    tile_do = load_tile(
        problem.grad_output, i_zero, i_zero, first_row, stop_load, BLOCK_M, DIM_VALUE, BLOCK_VALUE, False
    )
    tile_dq = tl.zeros([BLOCK_M, BLOCK_KEY], tl.float32)

    sink_stop, start, stop = visible_keys_span(
        problem.mask, rows, i_batch, offs_m, first, last, problem.num_queries, problem.num_keys, BLOCK_N
    )
    full_start, full_stop = start, start
    if problem.HAS_FULL:
        full_start, full_stop = full_columns(problem, i_batch, first, start, stop, last - first + 1, BLOCK_N)
        # Rows past the end see no keys, so a block with such rows has no full tile.
        full_stop = tl.where(first_row + BLOCK_M <= stop_row, full_stop, full_start)
        for column in range(full_start, full_stop, BLOCK_N):
            tile_dq = _queries_step(
                problem, tile_dq, tile_q, tile_do, logsumexp, constant, i_batch, i_head, offs_m, column, BLOCK_M,
                BLOCK_N, False,
            )  # fmt: skip
    sink_tiles = sink_stop // BLOCK_N
    before = sink_tiles + (full_start - start) // BLOCK_N
    partial_tiles = before + tl.cdiv(tl.maximum(stop - full_stop, 0), BLOCK_N)
    for i_partial in range(partial_tiles):
        column_after = full_stop + (i_partial - before) * BLOCK_N
        column = tl.where(i_partial < before, start + (i_partial - sink_tiles) * BLOCK_N, column_after)
        column = tl.where(i_partial < sink_tiles, i_partial * BLOCK_N, column)
        tile_dq = _queries_step(
            problem, tile_dq, tile_q, tile_do, logsumexp, constant, i_batch, i_head, offs_m, column, BLOCK_M, BLOCK_N,
            True,
        )  # fmt: skip
    scale, _ = head_scales(problem, i_head)
    store_tile(grad_query, tile_dq * scale, i_zero, i_zero, first_row, stop_row, BLOCK_M, DIM_KEY, BLOCK_KEY)


@triton.jit
def _keys_step(
    problem,
    rows,
    tile_dk,
    tile_dv,
    tile_k,
    tile_v,
    i_batch,
    i_head,
    first_row,
    stop_row,
    offs_n,
    BLOCK_M: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add the contribution of at most a block of rows to the gradients of a block of keys."""
    DIM_KEY: tl.constexpr = problem.DIM_KEY
    DIM_VALUE: tl.constexpr = problem.DIM_VALUE
    BLOCK_KEY: tl.constexpr = problem.BLOCK_KEY
    BLOCK_VALUE: tl.constexpr = problem.BLOCK_VALUE
    i_zero = i_batch * 0
    # [BLOCK_M]
    offs_m = load_queries(rows, first_row + tl.arange(0, BLOCK_M), stop_row, problem.num_queries)
    logsumexp, constant = _load_rows(problem, first_row, stop_row, BLOCK_M)
    # [BLOCK_M, BLOCK_KEY], [BLOCK_M, BLOCK_VALUE]
    tile_q = load_tile(problem.query, i_zero, i_zero, first_row, stop_row, BLOCK_M, DIM_KEY, BLOCK_KEY, not MASKED)
    tile_do = load_tile(
        problem.grad_output, i_zero, i_zero, first_row, stop_row, BLOCK_M, DIM_VALUE, BLOCK_VALUE, not MASKED
    )
    # [BLOCK_N, BLOCK_M]
    tile_p, tile_raw, tile_q, tile_do = _step(
        problem, tile_q, tile_k, tile_do, tile_v, logsumexp, constant, i_batch, i_head, offs_m, offs_n, BLOCK_M, MASKED,
        True,
    )  # fmt: skip
    if problem.head_scale is not None:
        _, head_factor = head_scales(problem, i_head)
        tile_raw *= head_factor  # the heads of a group share one accumulator
    tile_dv = add_product(tile_dv, tile_p.to(tile_do.dtype), tile_do)
    tile_dk = add_product(tile_dk, tile_raw.to(tile_q.dtype), tile_q)
    return tile_dk, tile_dv


@triton.jit
def _ragged_keys_kernel(
    problem, rows, grad_key, grad_value, HAS_SPANS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    mask, num_keys, group = problem.mask, problem.num_keys, problem.group
    DIM_KEY: tl.constexpr = problem.DIM_KEY
    DIM_VALUE: tl.constexpr = problem.DIM_VALUE
    BLOCK_KEY: tl.constexpr = problem.BLOCK_KEY
    BLOCK_VALUE: tl.constexpr = problem.BLOCK_VALUE
    blocks = tl.cdiv(num_keys, BLOCK_N)
    i_batch = (tl.program_id(0) // blocks // problem.kv_heads).to(tl.int64)
    i_kv_head = tl.program_id(0) // blocks % problem.kv_heads
    first_column = (tl.program_id(0) % blocks) * BLOCK_N
    # [BLOCK_N]
    offs_n = first_column + tl.arange(0, BLOCK_N)
    # [BLOCK_N, BLOCK_KEY], [BLOCK_N, BLOCK_VALUE]
    tile_k = load_tile(problem.key, i_batch, i_kv_head, first_column, num_keys, BLOCK_N, DIM_KEY, BLOCK_KEY, False)
    tile_v = load_tile(
        problem.value, i_batch, i_kv_head, first_column, num_keys, BLOCK_N, DIM_VALUE, BLOCK_VALUE, False
    )
    tile_dk = tl.zeros([BLOCK_N, BLOCK_KEY], tl.float32)
    tile_dv = tl.zeros([BLOCK_N, BLOCK_VALUE], tl.float32)

    for i_member in range(group):
        i_head = i_kv_head * group + i_member
        i_pair = pair_of(rows, i_batch, i_head)
        begin = tl.load(rows.offsets + i_pair)
        end = tl.load(rows.offsets + i_pair + 1)
        full_begin, full_end = begin, begin
        if problem.HAS_FULL:
            full_end = end
        if HAS_SPANS:
            # The span in query indices, then in rows.
            start, stop = query_span(mask, i_batch, first_column, problem.num_queries, num_keys, BLOCK_N, 1)
            begin, end = first_from(rows, begin, end, start), first_from(rows, begin, end, stop)
            full_begin, full_end = begin, begin
            if problem.HAS_FULL:
                full_start, full_stop = full_rows(problem, i_batch, first_column, start, stop, 1, BLOCK_N)
                full_begin = first_from(rows, begin, end, full_start)
                full_end = first_from(rows, full_begin, end, full_stop)
        # Full blocks of rows, which see all of these keys, then the rows before and after them.
        full_end = full_begin + (full_end - full_begin) // BLOCK_M * BLOCK_M
        if problem.HAS_FULL:
            for row in range(full_begin, full_end, BLOCK_M):
                tile_dk, tile_dv = _keys_step(
                    problem, rows, tile_dk, tile_dv, tile_k, tile_v, i_batch, i_head, row, row + BLOCK_M,
                    offs_n, BLOCK_M, False,
                )  # fmt: skip
        before = tl.cdiv(full_begin - begin, BLOCK_M)
        partial_tiles = before + tl.cdiv(end - full_end, BLOCK_M)
        for i_partial in range(partial_tiles):
            is_before = i_partial < before
            row = tl.where(is_before, begin + i_partial * BLOCK_M, full_end + (i_partial - before) * BLOCK_M)
            row_end = tl.minimum(row + BLOCK_M, tl.where(is_before, full_begin, end))
            tile_dk, tile_dv = _keys_step(
                problem, rows, tile_dk, tile_dv, tile_k, tile_v, i_batch, i_head, row, row_end, offs_n,
                BLOCK_M, True,
            )  # fmt: skip
    tile_dk *= problem.scale
    store_tile(grad_key, tile_dk, i_batch, i_kv_head, first_column, num_keys, BLOCK_N, DIM_KEY, BLOCK_KEY)
    store_tile(grad_value, tile_dv, i_batch, i_kv_head, first_column, num_keys, BLOCK_N, DIM_VALUE, BLOCK_VALUE)


def ragged_backward(
    selected: SelectedRows,
    call: KernelCall,
    grad_output: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    *,
    row_gradients: dict[str, Tensor],
    row_values: dict[str, Tensor],
    full_gradients: dict[str, Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, and C, which the gradient of sinks needs.

    C is one number per row.

    Args:
        selected, call: the arguments of `ragged_forward`, with a mask packed with `for_columns=True`.
        grad_output: [total, value_dim], like `output`.
        output, logsumexp: results of the forward.
        row_gradients: float32 [total] each, of "logsumexp" and of statistics, none of them a maximum.
        row_values: the statistics themselves, under the same names.
        full_gradients: those of `row_gradients` that contribute differently to each key, scattered to all queries,
            [batch, heads, num_queries], with zeros for rows that are not selected.
    """
    call = without_full_spans(call)
    query, key, value, mask = call.query, call.key, call.value, call.mask
    head_scale, softcap, has_sinks = call.head_scale, call.softcap, call.sinks is not None
    total, head_dim = query.shape
    batch, kv_heads, num_keys, value_dim = value.shape
    pairs = selected.offsets.shape[0] - 1
    grad_key, grad_value = fresh_like(key), fresh_like(value)
    grad_query = query.new_empty(total, head_dim)
    constant = query.new_empty(total, dtype=torch.float32)
    per_key = RowTerms(**full_gradients)
    problem = backward_problem(
        call,
        query[None, None],
        grad_output[None, None],
        mask._replace(first_key=None, last_key=None),
        logsumexp=logsumexp,
        constant=constant,
        gradients=per_key,
        heads=pairs // batch,
        num_queries=selected.num_queries,
    )
    rows = pack_rows(selected, mask, batch)
    has_spans = any(x is not None for x in (mask.left, mask.right, mask.first_query))
    for_keys, for_queries = choose_blocks(head_dim, value_dim, query.dtype)

    def launch_queries(blocks: Blocks) -> None:
        _ragged_queries_kernel[(num_programs(total, pairs, blocks.rows),)](
            problem._replace(mask=problem.mask._replace(first_query=None, last_query=None)),
            rows,
            strided(grad_query[None, None]),
            HEAVY_LAST=mask.right is not None and mask.left is None,
            BLOCK_M=blocks.rows,
            BLOCK_N=blocks.columns,
            **blocks.options,
        )

    def launch_keys(blocks: Blocks) -> None:
        _ragged_keys_kernel[(batch * kv_heads * blocks_of(num_keys, blocks.columns),)](
            problem,
            rows,
            strided(grad_key),
            strided(grad_value),
            HAS_SPANS=has_spans,
            BLOCK_M=blocks.rows,
            BLOCK_N=blocks.columns,
            **blocks.options,
        )

    def compile_key() -> tuple[Hashable, ...]:
        present = tuple(x is not None for x in (*per_key, *mask, head_scale, softcap))
        return query.get_device(), query.dtype, head_dim, value_dim, present, has_sinks

    with torch.cuda.device_of(query):
        if total:
            block_m = max(1, min(64, 8192 // padded_dim(value_dim)))
            constants_kernel[(blocks_of(total, block_m),)](
                # All rows as one sequence of one head.
                problem._replace(num_queries=total, kv_heads=1, group=1),
                strided(output[None, None]),
                RowTerms(**row_gradients),
                RowTerms(**{name: row_values[name] for name in row_gradients if name != "logsumexp"}),
                BLOCK_M=block_m,
            )
            launch_fitting(launch_queries, for_queries, Blocks.smaller, lambda: ("ragged queries", *compile_key()))
        if grad_key.numel():
            launch_fitting(launch_keys, for_keys, Blocks.smaller, lambda: ("ragged keys", *compile_key()))
    return grad_query, grad_key, grad_value, constant
