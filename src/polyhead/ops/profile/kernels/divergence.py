"""Jensen-Shannon divergence and distance of pairs of heads, tile by tile from both log-sum-exps.

Compute-bound: two tiles of Q K^T, and two exponentials and two logarithms per (query, key).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from polyhead.ops.common.kernels.mask_arguments import MaskArguments
from polyhead.ops.common.kernels.sizes import blocks_of, padded_dim
from polyhead.ops.profile.kernels.prepare import Problem, tiles_for
from polyhead.ops.profile.kernels.tiles import column_span, head_sm_scale, load_rows, log2_weights


@triton.jit
def _divergence(p, q):
    """Return the terms of the Jensen-Shannon divergence of weights p and q, in nats.

    With x = (p - q) / (p + q) a term is (p + q) / 4 times (1 + x) log(1 + x) + (1 - x) log(1 - x), whose logarithms
    cancel for small x; the series is accurate there.
    """
    total = p + q
    x = (p - q) / tl.where(total == 0.0, 1.0, total)
    square = x * x
    series = square * (1 / 2 + square * (1 / 12 + square * (1 / 30 + square * (1 / 56 + square * (1 / 90)))))
    # The logarithms are never of zero: their factors make the terms 0 there.
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
    """Store sums of divergence and distance over a block of rows, and the number of rows.

    Rows without visible keys are not counted.
    """
    row_stop, column_stop = problem.row_stop, problem.column_stop
    rows = row_stop - problem.row_start
    blocks = tl.cdiv(rows, BLOCK_M)
    i_pair = (tl.program_id(0) // blocks).to(tl.int64)  # batch * pairs + pair
    i_block = blocks - 1 - tl.program_id(0) % blocks
    i_batch = i_pair // pairs
    # Pairs on a device are not checked by the host, so they are clamped: nothing is read outside the tensors.
    head_a = tl.minimum(tl.maximum(tl.load(ptr_pairs + (i_pair % pairs) * 2), 0), problem.heads - 1)
    head_b = tl.minimum(tl.maximum(tl.load(ptr_pairs + (i_pair % pairs) * 2 + 1), 0), problem.heads - 1)
    first_row = problem.row_start + i_block * BLOCK_M
    # [BLOCK_M]
    offs_m = first_row + tl.arange(0, BLOCK_M)
    ptr_lse = problem.lse + (offs_m - problem.row_start)
    lse_a = tl.load(ptr_lse + (i_batch * problem.heads + head_a) * problem.lse_rows)
    lse_b = tl.load(ptr_lse + (i_batch * problem.heads + head_b) * problem.lse_rows)
    sm_scale_a, sm_scale_b = head_sm_scale(problem, head_a), head_sm_scale(problem, head_b)
    # [BLOCK_M, BLOCK_DIM]
    ptr_query = problem.query + i_batch * problem.query_batch
    tile_query_a = load_rows(
        ptr_query + head_a * problem.query_head, problem.query_token, first_row, row_stop, DIM, BLOCK_DIM, BLOCK_M, True
    )
    tile_query_b = load_rows(
        ptr_query + head_b * problem.query_head, problem.query_token, first_row, row_stop, DIM, BLOCK_DIM, BLOCK_M, True
    )
    ptr_key = problem.key + i_batch * problem.key_batch
    ptr_key_a = ptr_key + head_a // problem.group * problem.key_head
    ptr_key_b = ptr_key + head_b // problem.group * problem.key_head

    sink_tiles, start, stop = column_span(problem, mask, i_batch, first_row, BLOCK_M, BLOCK_N)
    divergence = tl.zeros([BLOCK_M], tl.float32)
    row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
    for i_tile in tl.range(0, sink_tiles + tl.cdiv(stop - start, BLOCK_N)):
        first = tl.where(i_tile < sink_tiles, problem.column_start, start - sink_tiles * BLOCK_N) + i_tile * BLOCK_N
        offs_n = first + tl.arange(0, BLOCK_N)
        # [BLOCK_N, BLOCK_DIM]
        tile_key_a = load_rows(ptr_key_a, problem.key_token, first, column_stop, DIM, BLOCK_DIM, BLOCK_N, True)
        tile_key_b = load_rows(ptr_key_b, problem.key_token, first, column_stop, DIM, BLOCK_DIM, BLOCK_N, True)
        # [BLOCK_M, BLOCK_N]
        log2_p_a = log2_weights(
            problem, mask, tile_query_a, tile_key_a, lse_a, sm_scale_a, i_batch, head_a, offs_m, offs_n, True, False
        )
        log2_p_b = log2_weights(
            problem,
            mask,
            tile_query_b,
            tile_key_b,
            lse_b,
            sm_scale_b,
            i_batch,
            head_b,
            offs_m,
            offs_n,
            True,
            False,
        )
        divergence += tl.sum(_divergence(tl.exp2(log2_p_a), tl.exp2(log2_p_b)), 1)
        row_max = tl.maximum(row_max, tl.max(tl.maximum(log2_p_a, log2_p_b), 1))
    has_keys = row_max > -float("inf")
    divergence = tl.where(has_keys, divergence, 0.0)
    ptr_sums += i_pair * blocks + i_block
    tl.store(ptr_sums, tl.sum(divergence, 0))
    tl.store(ptr_sums + stride_sums, tl.sum(tl.sqrt(divergence), 0))
    tl.store(ptr_sums + 2 * stride_sums, tl.sum(has_keys.to(tl.float32), 0))


def divergences(problem: Problem, mask: MaskArguments, head_pairs: Tensor) -> Tensor:
    """Return sums of divergence and distance over rows and the row count, [3, batch, pairs].

    Rows without visible keys are not counted.
    """
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
            BLOCK_DIM=padded_dim(query.shape[3]),
            BLOCK_M=tiles.rows,
            BLOCK_N=tiles.columns,
            **tiles.options,
        )
    return sums.sum(-1)
