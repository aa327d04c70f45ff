"""Gradients of attention and of its row statistics, from the output and the log-sum-exp, in tiles.

As in FlashAttention-2 (Dao 2023, arXiv:2307.08691), tiles are recomputed from the log-sum-exp. With
p_j = exp(s_j - L) and dp_j = dO . v_j, the gradient of logit j of a row is

    ds_j = p_j * (keep_j * dp_j / (1 - rate) + C - g_entropy * log p_j + sum_F g_F * f_j)

where C is one number per row and F = sum_j p_j * f_j are the statistics that are linear in the weights. Three kernels:
one reads output and its gradient once and writes C; one loops over the rows for each block of keys (and the query heads
that share them) and writes the gradients of keys and values; one loops over the keys for each block of rows and writes
the gradient of queries. No two blocks write to the same element, so these results are deterministic; only the gradients
of a bias or a table that several rows, heads or sequences share are summed atomically, in varying order. On Hopper
GPUs `backward_hopper` computes what it can instead, unless deterministic algorithms are requested.

Compute-bound: seven matrix products per tile where the forward has two, because logits and dp are computed twice, which
avoids partial sums in memory. A row statistic adds a few operations per element to the one exponential; the kernel that
writes C is memory-bound.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from polyhead.ops.attention.kernels.backward_tiles import (
    Problem,
    RowTerms,
    distance_tile,
    fresh_like,
    head_scales,
    load_logsumexp,
    load_row,
    load_tile,
    store_tile,
    strided,
    tile_gradients,
)
from polyhead.ops.common.kernel_call import KernelCall, with_dense_rows
from polyhead.ops.common.kernels.availability import has_hopper_kernels
from polyhead.ops.common.kernels.launching import launch_repeated
from polyhead.ops.common.kernels.mask_arguments import MaskArguments, shared_strides
from polyhead.ops.common.kernels.mask_tiles import full_key_span, full_query_span, key_spans, query_span, visible_tile
from polyhead.ops.common.kernels.resources import Blocks, launch_fitting
from polyhead.ops.common.kernels.sizes import blocks_of, padded_dim
from polyhead.ops.common.kernels.softmax_tiles import add_product, products


class BiasGradients(NamedTuple):
    """Output pointers of the gradients of a bias and a table; strides are 0 along broadcast axes.

    Sums over many pairs are float64: they are accumulated in any order, and float32 would lose too many digits.
    """

    bias: Tensor | None = None
    bias_batch: int = 0
    bias_head: int = 0
    bias_query: int = 0
    ONE_ROW: tl.constexpr = tl.constexpr(False)  # all queries share the bias
    SHARED: tl.constexpr = tl.constexpr(False)  # queries, heads or sequences share it
    table: Tensor | None = None


def choose_blocks(head_dim: int, value_dim: int, dtype: torch.dtype) -> tuple[Blocks, Blocks]:
    """Return the tiles of the kernel for the gradients of keys and values, and of the one for queries."""
    dim = max(head_dim, value_dim)
    if dtype is torch.float32:
        # Without tensor cores a product is unrolled: tiles of twice this size compile for minutes and spill.
        if dim <= 64:
            return Blocks(32, 32, 8, 1), Blocks(32, 32, 8, 1)
        return (Blocks(16, 32, 8, 1), Blocks(32, 16, 8, 1)) if dim <= 128 else (Blocks(16, 16, 8, 1),) * 2
    if dim <= 64:
        return Blocks(64, 128, 8, 3), Blocks(128, 64, 8, 3)
    if dim <= 128:
        return Blocks(64, 128, 8, 2), Blocks(128, 64, 8, 2)
    return Blocks(32, 64, 8, 2), Blocks(64, 32, 8, 2)


@triton.jit
def _subtract_term(constant, pointer_gradient, pointer_value, problem, i_pair, first_row, BLOCK_M: tl.constexpr):
    """Subtract gradient * value from C; 0 where the value is 0, even if the gradient is not finite."""
    if pointer_gradient is not None:
        gradient = load_row(pointer_gradient, problem, i_pair, first_row, BLOCK_M)
        value = load_row(pointer_value, problem, i_pair, first_row, BLOCK_M)
        constant -= tl.where(value == 0.0, 0.0, gradient.to(constant.dtype) * value.to(constant.dtype))
    return constant


@triton.jit
def constants_kernel(problem, output, gradients, values, BLOCK_M: tl.constexpr):
    num_queries, heads = problem.num_queries, problem.kv_heads * problem.group
    blocks = tl.cdiv(num_queries, BLOCK_M)
    i_pair = (tl.program_id(0) // blocks).to(tl.int64)  # batch * heads + head
    i_batch, i_head = i_pair // heads, i_pair % heads
    first_row = (tl.program_id(0) % blocks) * BLOCK_M
    # [BLOCK_M, BLOCK_VALUE]
    DIM: tl.constexpr = problem.DIM_VALUE
    BLOCK: tl.constexpr = problem.BLOCK_VALUE
    tile_o = load_tile(output, i_batch, i_head, first_row, num_queries, BLOCK_M, DIM, BLOCK, False).to(tl.float32)
    tile_do = load_tile(problem.grad_output, i_batch, i_head, first_row, num_queries, BLOCK_M, DIM, BLOCK, False)
    # A row without visible keys has an output of zeros, and its gradient, which may be NaN, is ignored.
    tile_product = tl.where(tile_o == 0.0, 0.0, tile_o * tile_do.to(tl.float32))
    if tile_do.dtype == tl.float32:
        # Gradients of the logits are small differences from C, so it is rounded only once.
        tile_product = tl.where(tile_o == 0.0, 0.0, tile_o.to(tl.float64) * tile_do.to(tl.float64))
    constant = -tl.sum(tile_product, 1)
    if gradients.logsumexp is not None:
        constant += load_row(gradients.logsumexp, problem, i_pair, first_row, BLOCK_M)
    constant = _subtract_term(constant, gradients.entropy, values.entropy, problem, i_pair, first_row, BLOCK_M)
    constant = _subtract_term(constant, gradients.confidence, values.confidence, problem, i_pair, first_row, BLOCK_M)
    constant = _subtract_term(
        constant, gradients.learned_sink_mass, values.learned_sink_mass, problem, i_pair, first_row, BLOCK_M
    )
    constant = _subtract_term(
        constant, gradients.mean_distance, values.mean_distance, problem, i_pair, first_row, BLOCK_M
    )
    constant = _subtract_term(constant, gradients.mean_offset, values.mean_offset, problem, i_pair, first_row, BLOCK_M)
    constant = _subtract_term(
        constant, gradients.mean_squared_distance, values.mean_squared_distance, problem, i_pair, first_row, BLOCK_M
    )
    constant = _subtract_term(constant, gradients.sink_mass, values.sink_mass, problem, i_pair, first_row, BLOCK_M)
    constant = _subtract_term(constant, gradients.self_mass, values.self_mass, problem, i_pair, first_row, BLOCK_M)
    constant = _subtract_term(
        constant, gradients.previous_mass, values.previous_mass, problem, i_pair, first_row, BLOCK_M
    )
    constant = _subtract_term(constant, gradients.next_mass, values.next_mass, problem, i_pair, first_row, BLOCK_M)
    constant = _subtract_term(constant, gradients.window_mass, values.window_mass, problem, i_pair, first_row, BLOCK_M)
    constant = tl.where(load_logsumexp(problem, i_pair, first_row, BLOCK_M) == float("inf"), 0.0, constant)
    offs = tl.arange(0, BLOCK_M)
    base = problem.constant + i_pair * num_queries + first_row
    tl.store(base + offs, constant.to(tl.float32), mask=offs < num_queries - first_row)


@triton.jit
def _keys_step(
    problem,
    tile_dk,
    tile_dv,
    tile_k,
    tile_v,
    i_batch,
    i_head,
    first_row,
    offs_n,
    BLOCK_M: tl.constexpr,
    EDGE: tl.constexpr,
):
    """Add the contribution of one block of rows to the gradients of a block of keys and values."""
    num_queries, num_keys = problem.num_queries, problem.num_keys
    DIM_KEY: tl.constexpr = problem.DIM_KEY
    DIM_VALUE: tl.constexpr = problem.DIM_VALUE
    BLOCK_KEY: tl.constexpr = problem.BLOCK_KEY
    BLOCK_VALUE: tl.constexpr = problem.BLOCK_VALUE
    # [BLOCK_M]
    i_pair = i_batch * (problem.kv_heads * problem.group) + i_head
    logsumexp = load_logsumexp(problem, i_pair, first_row, BLOCK_M)
    constant = load_row(problem.constant, problem, i_pair, first_row, BLOCK_M)
    # [BLOCK_M, BLOCK_KEY], [BLOCK_M, BLOCK_VALUE]
    tile_q = load_tile(problem.query, i_batch, i_head, first_row, num_queries, BLOCK_M, DIM_KEY, BLOCK_KEY, not EDGE)
    tile_do = load_tile(
        problem.grad_output, i_batch, i_head, first_row, num_queries, BLOCK_M, DIM_VALUE, BLOCK_VALUE, not EDGE
    )
    # [BLOCK_M, BLOCK_N]
    offs_m = first_row + tl.arange(0, BLOCK_M)
    distance = distance_tile(problem, i_batch, offs_m, offs_n)
    visible = distance == distance
    if EDGE:
        visible = visible_tile(problem.mask, i_batch, i_head, offs_m, offs_n, distance, num_queries, num_keys)
        # Rows without visible keys may contain NaN. With a learned sink their log-sum-exp is finite.
        has_keys = logsumexp != float("inf")
        if problem.SINKS:
            has_keys = has_keys & (tl.max(visible.to(tl.int32), 1) > 0)
        visible = visible & has_keys[:, None]
        tile_q = tl.where(has_keys[:, None], tile_q, 0.0).to(tile_q.dtype)
        tile_do = tl.where(has_keys[:, None], tile_do, 0.0).to(tile_do.dtype)
    # [BLOCK_N, BLOCK_M]: transposed, weights and gradients feed the next products from registers.
    tile_s = products(tile_k, tile_q)
    tile_dp = products(tile_v, tile_do)
    tile_dropped, _, tile_dqk = tile_gradients(
        problem, tile_s, tile_dp, visible, logsumexp, constant, i_batch, i_head, first_row, offs_n, BLOCK_M, EDGE, True
    )
    if problem.head_scale is not None:
        _, head_factor = head_scales(problem, i_head)
        tile_dqk *= head_factor  # the heads of a group share one sum
    tile_dv = add_product(tile_dv, tile_dropped.to(tile_do.dtype), tile_do)
    tile_dk = add_product(tile_dk, tile_dqk.to(tile_q.dtype), tile_q)
    return tile_dk, tile_dv


@triton.jit
def full_rows(problem, i_batch, first_column, start, stop, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the range of full blocks among rows `start` to `stop` that see every column."""
    mask = problem.mask
    low, high = start, stop
    last_column = tl.minimum(first_column + BLOCK_N, problem.num_keys) - 1
    if mask.right is not None:
        low = tl.maximum(low, last_column - mask.right - mask.offset)
    if mask.left is not None:
        visible_stop = tl.minimum(high, first_column + mask.left - mask.offset + 1)
        if mask.sinks is not None and mask.key_ordinal is None:
            visible_stop = tl.where(last_column < mask.sinks, high, visible_stop)
        high = visible_stop
    if mask.full_query is not None:
        first, last = full_query_span(mask, i_batch, first_column, problem.num_queries, problem.num_keys, BLOCK_N)
        low, high = tl.maximum(low, first), tl.minimum(high, last)
    end = tl.cdiv(stop, BLOCK_M) * BLOCK_M
    full_start = tl.minimum(tl.cdiv(tl.maximum(low, 0), BLOCK_M) * BLOCK_M, end)
    return full_start, tl.maximum(tl.maximum(high, 0) // BLOCK_M * BLOCK_M, full_start)


@triton.jit
def _keys_kernel(problem, grad_key, grad_value, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
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

    start, stop = query_span(mask, i_batch, first_column, problem.num_queries, num_keys, BLOCK_N, BLOCK_M)
    full_start, full_stop = start, start
    if problem.HAS_FULL:
        full_start, full_stop = full_rows(problem, i_batch, first_column, start, stop, BLOCK_M, BLOCK_N)
    leading_edges = (full_start - start) // BLOCK_M
    edges = leading_edges + tl.cdiv(tl.maximum(stop - full_stop, 0), BLOCK_M)
    for i_member in range(group):
        i_head = i_kv_head * group + i_member
        if problem.HAS_FULL:
            for first_row in range(full_start, full_stop, BLOCK_M):
                tile_dk, tile_dv = _keys_step(
                    problem, tile_dk, tile_dv, tile_k, tile_v, i_batch, i_head, first_row, offs_n, BLOCK_M, False
                )
        for i_edge in range(edges):
            row = tl.where(
                i_edge < leading_edges, start + i_edge * BLOCK_M, full_stop + (i_edge - leading_edges) * BLOCK_M
            )
            tile_dk, tile_dv = _keys_step(
                problem, tile_dk, tile_dv, tile_k, tile_v, i_batch, i_head, row, offs_n, BLOCK_M, True
            )
    if problem.seed is not None:
        tile_dv *= problem.kept_scale
    tile_dk *= problem.scale
    store_tile(grad_key, tile_dk, i_batch, i_kv_head, first_column, num_keys, BLOCK_N, DIM_KEY, BLOCK_KEY)
    store_tile(grad_value, tile_dv, i_batch, i_kv_head, first_column, num_keys, BLOCK_N, DIM_VALUE, BLOCK_VALUE)


@triton.jit
def _add_bias_gradient(bias_grads, tile_ds, visible, i_batch, i_head, offs_m, offs_n, num_keys):
    base = bias_grads.bias + i_batch * bias_grads.bias_batch + i_head.to(tl.int64) * bias_grads.bias_head
    if bias_grads.ONE_ROW:
        tl.atomic_add(base + offs_n, tl.sum(tile_ds.to(tl.float64), 0), mask=offs_n < num_keys, sem="relaxed")
    else:
        pointers = base + offs_m.to(tl.int64)[:, None] * bias_grads.bias_query + offs_n[None, :]
        if bias_grads.SHARED:
            tl.atomic_add(pointers, tile_ds.to(tl.float64), mask=visible, sem="relaxed")
        else:
            tl.store(pointers, tile_ds, mask=visible)


@triton.jit
def _add_table_gradient(bias_grads, problem, tile_ds, visible, i_batch, i_head, offs_m, offs_n):
    mask = problem.mask
    base = bias_grads.table + i_head.to(tl.int64) * mask.table_head
    last = mask.table_width - 1
    offs_table = distance_tile(problem, i_batch, offs_m, offs_n) + mask.table_zero
    max_offset = tl.max(tl.max(offs_table, 1), 0)
    # Far from the diagonal a whole tile reads one end of the table: one sum avoids contention for one address.
    if (max_offset <= 0) | (tl.min(tl.min(offs_table, 1), 0) >= last):
        tile_sum = tl.sum(tl.sum(tile_ds.to(tl.float64), 1), 0)
        tl.atomic_add(base + tl.where(max_offset <= 0, 0, last), tile_sum, sem="relaxed")
    else:
        offs_table = tl.minimum(tl.maximum(offs_table, 0), last)
        tl.atomic_add(base + offs_table, tile_ds.to(tl.float64), mask=visible, sem="relaxed")


@triton.jit
def _queries_step(
    problem,
    bias_grads,
    tile_dq,
    tile_q,
    tile_do,
    logsumexp,
    constant,
    i_batch,
    i_head,
    first_row,
    first_column,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EDGE: tl.constexpr,
):
    """Add the contribution of one block of keys to the gradient of a block of queries."""
    num_queries, num_keys = problem.num_queries, problem.num_keys
    DIM_KEY: tl.constexpr = problem.DIM_KEY
    DIM_VALUE: tl.constexpr = problem.DIM_VALUE
    BLOCK_KEY: tl.constexpr = problem.BLOCK_KEY
    BLOCK_VALUE: tl.constexpr = problem.BLOCK_VALUE
    i_kv_head = i_head // problem.group
    # [BLOCK_N, BLOCK_KEY], [BLOCK_N, BLOCK_VALUE]
    tile_k = load_tile(problem.key, i_batch, i_kv_head, first_column, num_keys, BLOCK_N, DIM_KEY, BLOCK_KEY, not EDGE)
    tile_v = load_tile(
        problem.value, i_batch, i_kv_head, first_column, num_keys, BLOCK_N, DIM_VALUE, BLOCK_VALUE, not EDGE
    )
    # [BLOCK_M, BLOCK_N]
    tile_s = products(tile_q, tile_k)
    tile_dp = products(tile_do, tile_v)
    offs_m = first_row + tl.arange(0, BLOCK_M)
    offs_n = first_column + tl.arange(0, BLOCK_N)
    distance = distance_tile(problem, i_batch, offs_m, offs_n)
    visible = distance == distance
    if EDGE:
        visible = visible_tile(problem.mask, i_batch, i_head, offs_m, offs_n, distance, num_queries, num_keys)
        visible = visible & (logsumexp != float("inf"))[:, None]
    _, tile_ds, tile_dqk = tile_gradients(
        problem, tile_s, tile_dp, visible, logsumexp, constant, i_batch, i_head, first_row, offs_n, BLOCK_M, EDGE, False
    )
    if bias_grads.bias is not None:
        _add_bias_gradient(bias_grads, tile_ds, visible, i_batch, i_head, offs_m, offs_n, num_keys)
    if bias_grads.table is not None:
        _add_table_gradient(bias_grads, problem, tile_ds, visible, i_batch, i_head, offs_m, offs_n)
    return add_product(tile_dq, tile_dqk.to(tile_k.dtype), tile_k)


@triton.jit
def full_columns(problem, i_batch, first_row, start, stop, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the range of full blocks among columns `start` to `stop` that every row sees."""
    mask = problem.mask
    low, high = start, stop
    last_row = first_row + BLOCK_M - 1
    if mask.left is not None:
        low = tl.maximum(low, last_row + mask.offset - mask.left)
    if mask.right is not None:
        high = tl.minimum(high, first_row + mask.offset + mask.right + 1)
    if mask.full_key is not None:
        first, last = full_key_span(mask, i_batch, first_row, problem.num_queries, problem.num_keys, BLOCK_M)
        low, high = tl.maximum(low, first), tl.minimum(high, last)
    # Rows past the end see no key, so a block with such rows has no full tile.
    high = tl.where(last_row < problem.num_queries, high, 0)
    end = tl.cdiv(stop, BLOCK_N) * BLOCK_N
    full_start = tl.minimum(tl.cdiv(tl.maximum(low, 0), BLOCK_N) * BLOCK_N, end)
    return full_start, tl.maximum(tl.maximum(high, 0) // BLOCK_N * BLOCK_N, full_start)


@triton.jit
def _queries_kernel(problem, bias_grads, grad_query, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    num_queries, heads = problem.num_queries, problem.kv_heads * problem.group
    DIM_KEY: tl.constexpr = problem.DIM_KEY
    DIM_VALUE: tl.constexpr = problem.DIM_VALUE
    BLOCK_KEY: tl.constexpr = problem.BLOCK_KEY
    BLOCK_VALUE: tl.constexpr = problem.BLOCK_VALUE
    blocks = tl.cdiv(num_queries, BLOCK_M)
    i_batch = (tl.program_id(0) // blocks // heads).to(tl.int64)
    i_head = tl.program_id(0) // blocks % heads
    # Under a causal mask the last rows have the most work, so they start first.
    first_row = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_M
    # [BLOCK_M]
    logsumexp = load_logsumexp(problem, i_batch * heads + i_head, first_row, BLOCK_M)
    constant = load_row(problem.constant, problem, i_batch * heads + i_head, first_row, BLOCK_M)
    # [BLOCK_M, BLOCK_KEY], [BLOCK_M, BLOCK_VALUE]
    tile_q = load_tile(problem.query, i_batch, i_head, first_row, num_queries, BLOCK_M, DIM_KEY, BLOCK_KEY, False)
    tile_do = load_tile(
        problem.grad_output, i_batch, i_head, first_row, num_queries, BLOCK_M, DIM_VALUE, BLOCK_VALUE, False
    )
    tile_dq = tl.zeros([BLOCK_M, BLOCK_KEY], tl.float32)

    sink_stop, start, stop = key_spans(
        problem.mask, i_batch, first_row, num_queries, problem.num_keys, BLOCK_M, BLOCK_N
    )
    full_start, full_stop = start, start
    if problem.HAS_FULL:
        full_start, full_stop = full_columns(problem, i_batch, first_row, start, stop, BLOCK_M, BLOCK_N)
        for column in range(full_start, full_stop, BLOCK_N):
            tile_dq = _queries_step(
                problem,
                bias_grads,
                tile_dq,
                tile_q,
                tile_do,
                logsumexp,
                constant,
                i_batch,
                i_head,
                first_row,
                column,
                BLOCK_M,
                BLOCK_N,
                False,
            )
    sink_tiles = sink_stop // BLOCK_N
    leading_edges = sink_tiles + (full_start - start) // BLOCK_N
    edges = leading_edges + tl.cdiv(tl.maximum(stop - full_stop, 0), BLOCK_N)
    for i_edge in range(edges):
        column = tl.where(
            i_edge < leading_edges,
            start + (i_edge - sink_tiles) * BLOCK_N,
            full_stop + (i_edge - leading_edges) * BLOCK_N,
        )
        column = tl.where(i_edge < sink_tiles, i_edge * BLOCK_N, column)
        tile_dq = _queries_step(
            problem,
            bias_grads,
            tile_dq,
            tile_q,
            tile_do,
            logsumexp,
            constant,
            i_batch,
            i_head,
            first_row,
            column,
            BLOCK_M,
            BLOCK_N,
            True,
        )
    scale, _ = head_scales(problem, i_head)
    store_tile(grad_query, tile_dq * scale, i_batch, i_head, first_row, num_queries, BLOCK_M, DIM_KEY, BLOCK_KEY)


def backward(
    call: KernelCall,
    grad_output: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    *,
    row_gradients: dict[str, Tensor],
    row_values: dict[str, Tensor],
    bias_shape: tuple[int, ...] | None,
    table_shape: tuple[int, ...] | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of query, key, value, sinks, bias and table.

    Args:
        call: the arguments of the forward, with a mask packed with `for_columns=True`.
        grad_output: [batch, heads, queries, value_dim], like `output`.
        output: output of the forward, with its rounding.
        logsumexp: float32 [batch, heads, queries], sinks and poison included; -inf for rows without any weight.
        row_gradients: float32 [batch, heads, queries] each, of "logsumexp" and of statistics; of "confidence" only the
            term that all keys of a row share is added here, and nothing of the maxima.
        row_values: the statistics themselves, under the same names.
        bias_shape: [batch or 1, heads or 1, queries or 1, keys] if the gradient of the bias is requested, which is
            float32, or float64 if it is a sum; likewise `table_shape` [heads or 1, distances].

    The gradients of query, key and value have the strides of `torch.empty_like`, provided that their last axis is then
    contiguous.
    """
    query, key, value, mask = call.query, call.key, call.value, call.mask
    head_scale, softcap, sinks, dropout = call.head_scale, call.softcap, call.sinks, call.dropout
    assert not dropout or call.seed is not None
    batch, heads, num_queries, head_dim = query.shape
    kv_heads, num_keys, value_dim = key.shape[1], key.shape[2], value.shape[3]
    grad_output = with_dense_rows(grad_output)
    logsumexp = logsumexp.contiguous()
    if query.is_cuda and has_hopper_kernels(query.device):
        from polyhead.ops.attention.kernels import backward_hopper

        if backward_hopper.can_serve(call, grad_output, row_gradients):
            options = {"row_gradients": row_gradients, "row_values": row_values}
            grads = backward_hopper.backward(call, grad_output, output, logsumexp, **options)
            return *grads, None, None, None
    gradients = RowTerms(**{name: x.contiguous() for name, x in row_gradients.items()})
    values = RowTerms(**{name: row_values[name].contiguous() for name in row_gradients if name != "logsumexp"})
    constant = torch.empty((batch, heads, num_queries), dtype=torch.float32, device=query.device)
    bias_grads = BiasGradients()
    if bias_shape is not None:
        is_shared = tuple(bias_shape[:3]) != (batch, heads, num_queries)
        grad_bias = torch.zeros(bias_shape, dtype=torch.float64 if is_shared else torch.float32, device=query.device)
        strides = shared_strides(grad_bias)
        bias_grads = bias_grads._replace(
            bias=grad_bias,
            bias_batch=strides[0],
            bias_head=strides[1],
            bias_query=strides[2],
            ONE_ROW=tl.constexpr(bias_shape[2] == 1),
            SHARED=tl.constexpr(is_shared),
        )
    if table_shape is not None:
        bias_grads = bias_grads._replace(table=torch.zeros(table_shape, dtype=torch.float64, device=query.device))
    # Terms that are the same for every key of a row are in C, so the loops over tiles do not need them.
    per_key = gradients._replace(logsumexp=None, confidence=None, learned_sink_mass=None)
    problem = backward_problem(
        call,
        query,
        grad_output,
        mask,
        logsumexp=logsumexp,
        constant=constant,
        gradients=per_key,
        heads=heads,
        num_queries=num_queries,
    )
    key_blocks, query_blocks = choose_blocks(head_dim, value_dim, query.dtype)
    device = query.get_device()

    def tile_sizes(blocks: Blocks) -> dict[str, int]:
        return {"BLOCK_M": blocks.rows, "BLOCK_N": blocks.columns}

    def launch_queries(blocks: Blocks) -> None:
        programs = batch * heads * blocks_of(num_queries, blocks.rows)
        arguments = (problem, bias_grads, strided(grad_query))
        launch_repeated(_queries_kernel, programs, arguments, tile_sizes(blocks), blocks.options, device=device)

    def launch_keys(blocks: Blocks) -> None:
        programs = batch * kv_heads * blocks_of(num_keys, blocks.columns)
        arguments = (problem, strided(grad_key), strided(grad_value))
        launch_repeated(_keys_kernel, programs, arguments, tile_sizes(blocks), blocks.options, device=device)

    def kind() -> tuple[Hashable, ...]:
        present = tuple(
            x is not None for x in (*per_key, *mask, bias_grads.bias, bias_grads.table, head_scale, softcap, sinks)
        )
        return device, query.dtype, head_dim, value_dim, present, bool(dropout)

    with torch.cuda.device_of(query):
        if constant.numel():
            block_m = max(1, min(64, 8192 // padded_dim(value_dim)))
            programs = batch * heads * blocks_of(num_queries, block_m)
            arguments = (problem, strided(output), gradients, values)
            launch_repeated(constants_kernel, programs, arguments, {"BLOCK_M": block_m}, {}, device=device)
        grad_query, grad_key, grad_value = (fresh_like(x) for x in (query, key, value))
        if constant.numel():
            launch_fitting(launch_queries, query_blocks, Blocks.smaller, lambda: ("queries", *kind()))
        if grad_key.numel():
            launch_fitting(launch_keys, key_blocks, Blocks.smaller, lambda: ("keys", *kind()))
    grad_sinks = None if sinks is None else sinks_gradient(sinks, logsumexp, constant, row_gradients, row_values)
    return grad_query, grad_key, grad_value, grad_sinks, bias_grads.bias, bias_grads.table


def backward_problem(
    call: KernelCall,
    query: Tensor,
    grad_output: Tensor,
    mask: MaskArguments,
    *,
    logsumexp: Tensor,
    constant: Tensor,
    gradients: RowTerms,
    heads: int,
    num_queries: int,
) -> Problem:
    """Return the arguments that all kernels of the backward share.

    `gradients` has the terms that differ between the keys of a row.
    """
    key, value, softcap, dropout = call.key, call.value, call.softcap, call.dropout
    kv_heads, num_keys, value_dim = value.shape[1:]
    head_dim = key.shape[3]
    return Problem(
        query=strided(query),
        key=strided(key),
        value=strided(value),
        grad_output=strided(grad_output),
        logsumexp=logsumexp,
        constant=constant,
        gradients=gradients,
        mask=mask,
        num_queries=num_queries,
        num_keys=num_keys,
        kv_heads=kv_heads,
        group=heads // kv_heads,
        scale=float(call.scale),
        head_scale=call.head_vectors[0],
        softcap=None if softcap is None else float(softcap),
        seed=call.seed if dropout else None,
        threshold=round(dropout * (1 << 24)),
        kept_scale=1 / (1 - dropout),
        sink_keys=call.sink_keys,
        window=call.window,
        DIM_KEY=tl.constexpr(head_dim),
        DIM_VALUE=tl.constexpr(value_dim),
        BLOCK_KEY=tl.constexpr(padded_dim(head_dim)),
        BLOCK_VALUE=tl.constexpr(padded_dim(value_dim)),
        BASE_TWO=tl.constexpr(
            query.dtype is not torch.float32 and softcap is None and mask.bias is None and mask.table is None
        ),
        HAS_FULL=tl.constexpr(
            mask.full_key is not None
            or all(x is None for x in (mask.query_position, mask.query_document, mask.allowed, mask.bias))
        ),
        SINKS=tl.constexpr(call.sinks is not None),
        LINEAR_TERMS=tl.constexpr(any(x is not None for x in gradients._replace(entropy=None))),
    )


def sinks_gradient(
    sinks: Tensor,
    logsumexp: Tensor,
    constant: Tensor,
    row_gradients: dict[str, Tensor],
    row_values: dict[str, Tensor],
) -> Tensor:
    """Return the gradient of the learned sinks, summed over all rows in float64.

    A sink is one more key of every row, without value and position.
    """
    log_weight = sinks.double()[:, None] - logsumexp.double()
    weight = torch.where(logsumexp == -torch.inf, 0.0, torch.exp(log_weight))
    inner = constant.double()
    if "entropy" in row_gradients:
        # A row without visible keys has an entropy of 0, and its gradient is ignored even if it is not finite. The
        # log-sum-exp does not identify such rows: it is the sink's logit, but rounded.
        has_entropy = (weight > 0) & (row_values["entropy"] != 0)
        inner = inner - torch.where(has_entropy, row_gradients["entropy"] * log_weight, 0.0)
    total = torch.where(weight == 0, 0.0, weight * inner)
    if "learned_sink_mass" in row_gradients:
        total = total + row_gradients["learned_sink_mass"] * row_values["learned_sink_mass"]
    return total.sum((0, 2)).to(sinks.dtype)
