"""How far apart two heads attend: Jensen-Shannon divergence and distance, tile by tile from both log-sum-exps.

Bound by arithmetic on the weights: two tiles of Q K^T, two exponentials and two logarithms a (query, key).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from polyhead.ops.common.kernels.mask_arguments import MaskArguments
from polyhead.ops.common.kernels.sizes import blocks_of
from polyhead.ops.profile.kernels.prepare import Problem, block_dim, tiles_for
from polyhead.ops.profile.kernels.tiles import column_span, head_factor, load_rows, log2_weights


@triton.jit
def _divergence(one, other):
    """Terms of the divergence in nats, from weights.

    With x = (p - q) / (p + q) a term is (p + q) / 4 times (1 + x) log(1 + x) + (1 - x) log(1 - x), whose logarithms
    cancel for small x; its series is exact there.
    """
    total = one + other
    x = (one - other) / tl.where(total == 0.0, 1.0, total)
    square = x * x
    series = square * (1 / 2 + square * (1 / 12 + square * (1 / 30 + square * (1 / 56 + square * (1 / 90)))))
    # Neither logarithm meets a zero: the factor before it makes the term 0 there.
    above, below = tl.maximum(1.0 + x, 1e-30), tl.maximum(1.0 - x, 1e-30)
    exact = ((1.0 + x) * tl.log(above) + (1.0 - x) * tl.log(below)) * 0.5
    return total * tl.where(square < 0.04, series, exact) * 0.5


@triton.jit
def _divergence_kernel(
    problem,
    mask,
    ptr_pairs,
    ptr_sums,
    stride_sums,
    pairs,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """A block of queries of two heads. Leaves the sums over its rows of divergence and distance, and their number."""
    row_stop, column_stop = problem.row_stop, problem.column_stop
    rows = row_stop - problem.row_start
    blocks = tl.cdiv(rows, BLOCK_M)
    i_pair = (tl.program_id(0) // blocks).to(tl.int64)  # batch * pairs + pair
    i_block = blocks - 1 - tl.program_id(0) % blocks
    i_batch = i_pair // pairs
    # A pair on a device was not looked at before; nothing is read outside the tensors whatever it holds.
    one = tl.minimum(tl.maximum(tl.load(ptr_pairs + (i_pair % pairs) * 2), 0), problem.heads - 1)
    other = tl.minimum(tl.maximum(tl.load(ptr_pairs + (i_pair % pairs) * 2 + 1), 0), problem.heads - 1)
    first_row = problem.row_start + i_block * BLOCK_M
    # [BLOCK_M]
    offs_m = first_row + tl.arange(0, BLOCK_M)
    ptr_shift = problem.shift + (offs_m - problem.row_start)
    shift_one = tl.load(ptr_shift + (i_batch * problem.heads + one) * problem.shift_rows)
    shift_other = tl.load(ptr_shift + (i_batch * problem.heads + other) * problem.shift_rows)
    factor_one, factor_other = head_factor(problem, one), head_factor(problem, other)
    # [BLOCK_M, BLOCK_DIM]
    ptr_query = problem.query + i_batch * problem.query_batch
    query_one = load_rows(
        ptr_query + one * problem.query_head, problem.query_token, first_row, row_stop, DIM, BLOCK_DIM, BLOCK_M, True
    )
    query_other = load_rows(
        ptr_query + other * problem.query_head, problem.query_token, first_row, row_stop, DIM, BLOCK_DIM, BLOCK_M, True
    )
    ptr_key = problem.key + i_batch * problem.key_batch
    ptr_one = ptr_key + one // problem.group * problem.key_head
    ptr_other = ptr_key + other // problem.group * problem.key_head

    count_kept, start, stop = column_span(problem, mask, i_batch, first_row, BLOCK_M, BLOCK_N)
    divergence = tl.zeros([BLOCK_M], tl.float32)
    largest = tl.full([BLOCK_M], -float("inf"), tl.float32)
    for i_tile in tl.range(0, count_kept + tl.cdiv(stop - start, BLOCK_N)):
        first = tl.where(i_tile < count_kept, problem.column_start, start - count_kept * BLOCK_N) + i_tile * BLOCK_N
        offs_n = first + tl.arange(0, BLOCK_N)
        # [BLOCK_N, BLOCK_DIM]
        key_one = load_rows(ptr_one, problem.key_token, first, column_stop, DIM, BLOCK_DIM, BLOCK_N, True)
        key_other = load_rows(ptr_other, problem.key_token, first, column_stop, DIM, BLOCK_DIM, BLOCK_N, True)
        # [BLOCK_M, BLOCK_N]
        logs_one = log2_weights(
            problem, mask, query_one, key_one, shift_one, factor_one, i_batch, one, offs_m, offs_n, True, False
        )
        logs_other = log2_weights(
            problem,
            mask,
            query_other,
            key_other,
            shift_other,
            factor_other,
            i_batch,
            other,
            offs_m,
            offs_n,
            True,
            False,
        )
        divergence += tl.sum(_divergence(tl.exp2(logs_one), tl.exp2(logs_other)), 1)
        largest = tl.maximum(largest, tl.max(tl.maximum(logs_one, logs_other), 1))
    seen = largest > -float("inf")
    divergence = tl.where(seen, divergence, 0.0)
    ptr_sums += i_pair * blocks + i_block
    tl.store(ptr_sums, tl.sum(divergence, 0))
    tl.store(ptr_sums + stride_sums, tl.sum(tl.sqrt(divergence), 0))
    tl.store(ptr_sums + 2 * stride_sums, tl.sum(seen.to(tl.float32), 0))


def divergences(problem: Problem, mask: MaskArguments, head_pairs: Tensor) -> Tensor:
    """Sums over the rows of divergence and distance, and the number of rows that see a key, [3, batch, pairs]."""
    query, pairs = problem.query, head_pairs.shape[0]
    tiles = tiles_for(query, by_columns=False, heads_at_once=2)
    blocks = blocks_of(problem.rows, tiles.rows)
    sums = torch.empty(3, problem.batch, pairs, blocks, device=query.device)
    if not sums.numel() or not problem.columns:
        return sums.zero_().sum(-1)
    with torch.cuda.device_of(query):
        _divergence_kernel[(problem.batch * pairs * blocks,)](
            problem,
            mask,
            head_pairs.contiguous(),
            sums,
            sums.stride(0),
            pairs,
            DIM=query.shape[3],
            BLOCK_DIM=block_dim(query),
            BLOCK_M=tiles.rows,
            BLOCK_N=tiles.columns,
            **tiles.options,
        )
    return sums.sum(-1)
