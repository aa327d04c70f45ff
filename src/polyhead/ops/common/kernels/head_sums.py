"""Sums per head that a monitor of training takes in every attention call: an entropy histogram and squared norms.

Plain PyTorch needs some thirty launches per layer for them, whose host time is longer than the kernels take.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from polyhead.ops.common.kernels.launching import launch, wide
from polyhead.ops.common.kernels.sizes import blocks_of, power_of_two

_BLOCK_ROWS = 64
_MAX_BLOCK_HEADS = 32
_BLOCK_PRODUCTS = 4096


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

    `ptr_counts` is [heads, BINS + 1], then the number of tokens; integers, so that the order of additions is no matter.
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


@triton.jit(do_not_specialize=("size",))
def _products_kernel(ptr_a, ptr_b, ptr_sums, size, BLOCK: tl.constexpr):
    """Sum the products of the elements of two matrices of a head, in float64."""
    i_head = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, size, BLOCK):
        # [BLOCK]
        offs = start + tl.arange(0, BLOCK)
        mask = offs < size
        a = tl.load(ptr_a + i_head * size + offs, mask=mask, other=0.0)
        total += (a * tl.load(ptr_b + i_head * size + offs, mask=mask, other=0.0)).to(tl.float64)
    tl.store(ptr_sums + i_head, tl.sum(total, 0))


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


def summed_products(a: Tensor, b: Tensor) -> Tensor:
    """Return the sum of the elementwise product of two contiguous tensors [heads, n, m], [heads] in float64."""
    heads, size = len(a), a[0].numel()
    sums = torch.empty(heads, dtype=torch.float64, device=a.device)
    with torch.cuda.device_of(a):
        variant = a.get_device(), a.dtype, b.dtype, a.data_ptr() % 16, b.data_ptr() % 16, wide(size)
        launch(_products_kernel, heads, (a, b, sums, size), (_BLOCK_PRODUCTS,), variant=variant, num_warps=8)
    return sums
