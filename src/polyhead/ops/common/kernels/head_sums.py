"""Sums per head that a monitor of training takes in every attention call: entropy histograms and squared norms.

Plain PyTorch needs some thirty launches per layer for them, whose host time is longer than the kernels take.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from polyhead.ops.common.kernels.availability import multiprocessors
from polyhead.ops.common.kernels.launching import launch, wide
from polyhead.ops.common.kernels.sizes import blocks_of, power_of_two

_BLOCK_ROWS = 64
_MAX_BLOCK_HEADS = 32


@triton.jit(
    do_not_specialize=(
        "stride_batch", "stride_head", "stride_query", "stride_keys_batch", "stride_keys_head", "stride_keys_query",
        "stride_real_batch", "stride_real_query", "queries", "rows", "heads",
    )
)  # fmt: skip
def _tokens_kernel(
    ptr_entropy, ptr_keys, ptr_real, ptr_tokens, ptr_counts,
    stride_batch, stride_head, stride_query, stride_keys_batch, stride_keys_head, stride_keys_query,
    stride_real_batch, stride_real_query, queries, rows, heads,
    EXTRA_TERMS: tl.constexpr, BINS: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """Mark the tokens of a block of rows, and count them and the bins of their normalized entropy in every head.

    `ptr_counts` is [heads, BINS + 1], then the number of tokens; integers, whose sums do not depend on the order.
    """
    # [BLOCK_ROWS]
    offs_row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    mask_row = offs_row < rows
    i_batch, i_query = offs_row // queries, offs_row % queries
    is_real = mask_row
    if ptr_real is not None:
        offs_real = i_batch * stride_real_batch + i_query * stride_real_query
        is_real = is_real & (tl.load(ptr_real + offs_real, mask=mask_row, other=0) != 0)
    sees = tl.zeros([BLOCK_ROWS], tl.int32)
    for first_head in range(0, heads, BLOCK_HEADS):
        # [BLOCK_HEADS, BLOCK_ROWS]
        offs_head = first_head + tl.arange(0, BLOCK_HEADS).to(tl.int64)
        mask_tile = (offs_head < heads)[:, None] & mask_row[None, :]
        offs_keys = offs_head[:, None] * stride_keys_head + (i_batch * stride_keys_batch + i_query * stride_keys_query)
        keys = tl.load(ptr_keys + offs_keys, mask=mask_tile, other=0).to(tl.float32)
        sees = tl.maximum(sees, tl.max((keys > 0).to(tl.int32), 0))
        if ptr_entropy is not None:
            terms = keys + EXTRA_TERMS
            counted = (keys > 0) & (terms > 1) & is_real[None, :]  # a single term has no entropy
            offs = offs_head[:, None] * stride_head + (i_batch * stride_batch + i_query * stride_query)
            share = tl.load(ptr_entropy + offs, mask=mask_tile, other=0.0).to(tl.float32)
            share = share / tl.log(tl.maximum(terms, 2.0))
            i_bin = tl.minimum(tl.maximum(share * BINS, 0.0), BINS - 1.0)
            i_bin = tl.where(share != share, BINS, i_bin).to(tl.int32)
            tl.atomic_add(ptr_counts + offs_head[:, None] * (BINS + 1) + i_bin, 1, mask=counted, sem="relaxed")
    is_token = (sees > 0) & is_real
    tl.store(ptr_tokens + offs_row, is_token, mask=mask_row)
    tl.atomic_add(ptr_counts + heads * (BINS + 1), tl.sum(is_token.to(tl.int64), 0), sem="relaxed")


@triton.jit(do_not_specialize=("stride_batch", "stride_head", "stride_row", "stride_dim", "queries", "rows", "heads"))
def _squares_kernel(
    ptr_x, ptr_tokens, ptr_sums, stride_batch, stride_head, stride_row, stride_dim, queries, rows, heads,
    UNIT: tl.constexpr, IS_DENSE: tl.constexpr, DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Sum the squares of a block of rows of a head. Strides but that of `dim` are passed divided by UNIT."""
    i_head = (tl.program_id(0) % heads).to(tl.int64)
    i_block = tl.program_id(0) // heads
    # [BLOCK_ROWS]
    offs_row = i_block.to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    mask_row = offs_row < rows
    mask_row = mask_row & (tl.load(ptr_tokens + offs_row, mask=mask_row, other=0) != 0)
    start = (offs_row // queries * stride_batch + offs_row % queries * stride_row + i_head * stride_head) * UNIT
    # [BLOCK_ROWS, BLOCK_DIM]
    offs_dim = tl.arange(0, BLOCK_DIM)
    mask_tile = mask_row[:, None] & (offs_dim < DIM)[None, :]
    offs = offs_dim if IS_DENSE else offs_dim * stride_dim
    tile = tl.load(ptr_x + start[:, None] + offs[None, :], mask=mask_tile, other=0.0)
    tile = tile.to(tl.float64) if tile.dtype == tl.float64 else tile.to(tl.float32)
    total = tl.sum(tl.sum(tile * tile, 1).to(tl.float64), 0)
    tl.store(ptr_sums + i_block.to(tl.int64) * heads + i_head, total)


@triton.jit(do_not_specialize=("stride_token", "stride_head", "tokens", "heads", "tokens_of_split", "splits"))
def _forms_kernel(
    ptr_x, ptr_matrices, ptr_tokens, ptr_sums, stride_token, stride_head, tokens, heads, tokens_of_split, splits,
    UNIT: tl.constexpr, DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Sum x_i A_ij x_j over a split of the tokens of a head, for i and j in two blocks of its channels.

    The matrix sum x^T x of these blocks is never stored. Strides are passed divided by UNIT.
    """
    i_head = (tl.program_id(0) % heads).to(tl.int64)
    i_split = tl.program_id(0) // heads % splits
    i_pair = tl.program_id(0) // heads // splits
    blocks: tl.constexpr = (DIM + BLOCK_DIM - 1) // BLOCK_DIM
    # [BLOCK_DIM]
    offs_i = i_pair // blocks * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    offs_j = i_pair % blocks * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    mask_i, mask_j = offs_i < DIM, offs_j < DIM
    tile = tl.zeros([BLOCK_DIM, BLOCK_DIM], tl.float32)
    first = i_split.to(tl.int64) * tokens_of_split
    last = tl.minimum(first + tokens_of_split, tokens)
    for start in range(first, last, BLOCK_TOKENS):
        # [BLOCK_TOKENS]
        offs_token = start + tl.arange(0, BLOCK_TOKENS)
        mask_token = offs_token < last
        if ptr_tokens is not None:
            mask_token = mask_token & (tl.load(ptr_tokens + offs_token, mask=mask_token, other=0) != 0)
        # [BLOCK_TOKENS, BLOCK_DIM]
        ptr_rows = ptr_x + ((offs_token * stride_token + i_head * stride_head) * UNIT)[:, None]
        x_i = tl.load(ptr_rows + offs_i[None, :], mask=mask_token[:, None] & mask_i[None, :], other=0.0)
        x_j = tl.load(ptr_rows + offs_j[None, :], mask=mask_token[:, None] & mask_j[None, :], other=0.0)
        tile = tl.dot(tl.trans(x_i), x_j, tile, input_precision="ieee")
    offs = (i_head * DIM + offs_i[:, None]) * DIM + offs_j[None, :]
    matrix = tl.load(ptr_matrices + offs, mask=mask_i[:, None] & mask_j[None, :], other=0.0)
    total = tl.sum(tl.sum(tile * matrix, 1).to(tl.float64), 0)
    tl.store(ptr_sums + (i_pair * splits + i_split) * heads + i_head, total)


def tokens_and_entropies(
    entropy: Tensor | None, keys: Tensor, real: Tensor | None, *, bins: int, learned_sinks: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tokens, their number and the entropy histogram; see `polyhead.ops.common.head_sums`."""
    batch, heads, queries = keys.shape
    tokens = torch.empty((batch, queries), dtype=torch.bool, device=keys.device)
    counts = torch.zeros(heads * (bins + 1) + 1, dtype=torch.int64, device=keys.device)
    strides = (0, 0, 0) if entropy is None else entropy.stride()
    real_strides = (0, 0) if real is None else (real.stride(0) if real.shape[0] > 1 else 0, real.stride(1))
    numbers = (*strides, *keys.stride(), *real_strides, queries, batch * queries, heads)
    block_heads = min(power_of_two(heads), _MAX_BLOCK_HEADS)
    constants = (int(learned_sinks), bins, block_heads, _BLOCK_ROWS)
    kinds = tuple(None if x is None else (x.dtype, x.data_ptr() % 16) for x in (entropy, keys, real))
    with torch.cuda.device_of(keys):
        arguments = (entropy, keys, real, tokens, counts, *numbers)
        variant = keys.get_device(), kinds, wide(*numbers)
        launch(_tokens_kernel, blocks_of(batch * queries, _BLOCK_ROWS), arguments, constants, variant=variant)
    return tokens, counts[-1], counts[:-1].view(heads, bins + 1)


def squared_norms(x: Tensor, tokens: Tensor) -> Tensor:
    """Return the squared norm of each head of [batch, heads, queries, dim] over the tokens [batch, queries], float64.

    Blocks are added in a fixed order: the same numbers give the same bits.
    """
    batch, heads, queries, dim = x.shape
    unit = 8 if not any(stride % 8 for stride in x.stride()[:3]) else 1
    strides = (*(stride // unit for stride in x.stride()[:3]), x.stride(3))
    block_dim = power_of_two(dim)
    block_rows = max(1, min(64, 8192 // block_dim))
    blocks = blocks_of(batch * queries, block_rows)
    sums = torch.empty((blocks, heads), dtype=torch.float64, device=x.device)
    numbers = (*strides, queries, batch * queries, heads)
    constants = (unit, x.stride(3) == 1, dim, block_rows, block_dim)
    with torch.cuda.device_of(x):
        kinds = tuple((tensor.dtype, tensor.data_ptr() % 16) for tensor in (x, tokens))
        variant = x.get_device(), kinds, wide(*numbers)
        launch(_squares_kernel, blocks * heads, (x, tokens, sums, *numbers), constants, variant=variant)
    return sums.sum(0)


def quadratic_forms(x: Tensor, matrices: Tensor, tokens: Tensor | None) -> Tensor:
    """Return the sum over the tokens of x A x^T for each head, float64 [heads]; the last axis of `x` is contiguous.

    Splits of the tokens are added in a fixed order: the same numbers give the same bits.
    """
    count, heads, dim = x.shape
    is_half = x.element_size() == 2
    block_dim = max(16, min(power_of_two(dim), 128 if is_half else 64))
    pairs = blocks_of(dim, block_dim) ** 2
    splits = max(1, min(multiprocessors(x.get_device()) // (heads * pairs), blocks_of(count, _BLOCK_ROWS)))
    tokens_of_split = blocks_of(blocks_of(count, splits), _BLOCK_ROWS) * _BLOCK_ROWS
    splits = blocks_of(count, tokens_of_split)
    unit = 8 if not (x.stride(0) % 8 or x.stride(1) % 8) else 1
    sums = torch.empty((pairs * splits, heads), dtype=torch.float64, device=x.device)
    numbers = (x.stride(0) // unit, x.stride(1) // unit, count, heads, tokens_of_split, splits)
    constants = (unit, dim, _BLOCK_ROWS, block_dim)
    with torch.cuda.device_of(x):
        kinds = tuple(None if y is None else (y.dtype, y.data_ptr() % 16) for y in (x, matrices, tokens))
        arguments, num_warps = (x, matrices, tokens, sums, *numbers), 8 if block_dim == 128 else 4
        variant = x.get_device(), kinds, wide(*numbers)
        launch(_forms_kernel, pairs * splits * heads, arguments, constants, variant=variant, num_warps=num_warps)
    return sums.sum(0)
