"""Replace NaN and Inf in keys and values by zeros in one pass, and mark the keys that had any.

Memory-bound: keys and values are read once and written once. On an H200 in bf16, (8, 16, 2048, 64) takes 41 us,
3.2 TB/s, where causal attention over them takes 186 us; (2, 16, 8192, 128) takes 94 us where that takes 899. Plain
PyTorch needs seven kernels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from polyhead.ops.common.kernels.sizes import blocks_of, power_of_two


@triton.jit
def _clean_tile(ptr_src, ptr_dst, offs_src, offs_dst, mask_tile):
    """Copy a tile with zeros for non-finite elements; return the number of those in each row."""
    tile = tl.load(ptr_src + offs_src, mask=mask_tile, other=0.0)
    # x - x is 0 for every finite x and NaN for all others.
    nonfinite = (tile - tile) != 0.0
    tl.store(ptr_dst + offs_dst, tl.where(nonfinite, 0.0, tile).to(ptr_dst.dtype.element_ty), mask=mask_tile)
    return tl.sum(nonfinite.to(tl.int32), axis=1)


@triton.jit
def _clean_kernel(
    ptr_key,
    ptr_value,
    ptr_clean_key,
    ptr_clean_value,
    ptr_poison,
    stride_key_batch,
    stride_key_head,
    stride_key_token,
    stride_value_batch,
    stride_value_head,
    stride_value_token,
    tokens,
    HEADS: tl.constexpr,
    DIM_KEY: tl.constexpr,
    DIM_VALUE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
):
    blocks = tl.cdiv(tokens, BLOCK_TOKENS)
    i_pair = (tl.program_id(0) // blocks).to(tl.int64)  # batch * HEADS + head
    i_block = tl.program_id(0) % blocks
    i_batch, i_head = i_pair // HEADS, i_pair % HEADS
    # [BLOCK_TOKENS]
    offs_token = i_block.to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    mask_token = offs_token < tokens
    # The clean tensors are [batch, tokens, heads, dim] in memory, like attention's output.
    row = (i_batch * tokens + offs_token) * HEADS + i_head

    # [BLOCK_TOKENS, BLOCK_KEY]
    offs_dim = tl.arange(0, BLOCK_KEY)
    offs_key = i_batch * stride_key_batch + i_head * stride_key_head + offs_token * stride_key_token
    nonfinite = _clean_tile(
        ptr_key,
        ptr_clean_key,
        offs_key[:, None] + offs_dim[None, :],
        row[:, None] * DIM_KEY + offs_dim[None, :],
        mask_token[:, None] & (offs_dim < DIM_KEY)[None, :],
    )
    # [BLOCK_TOKENS, BLOCK_VALUE]
    offs_dim = tl.arange(0, BLOCK_VALUE)
    offs_value = i_batch * stride_value_batch + i_head * stride_value_head + offs_token * stride_value_token
    nonfinite += _clean_tile(
        ptr_value,
        ptr_clean_value,
        offs_value[:, None] + offs_dim[None, :],
        row[:, None] * DIM_VALUE + offs_dim[None, :],
        mask_token[:, None] & (offs_dim < DIM_VALUE)[None, :],
    )
    poison = tl.where(nonfinite > 0, float("nan"), 0.0)
    tl.store(ptr_poison + i_pair * tokens + offs_token, poison.to(ptr_poison.dtype.element_ty), mask=mask_token)


def clean_keys(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return finite keys and values, and the poison [batch, kv_heads, tokens].

    The poison is NaN at non-finite keys, else 0. The last axis of both inputs must be contiguous.
    """
    batch, heads, tokens, dim_key = key.shape
    dim_value = value.shape[3]
    clean_key = key.new_empty(batch, tokens, heads, dim_key).transpose(1, 2)
    clean_value = value.new_empty(batch, tokens, heads, dim_value).transpose(1, 2)
    poison = key.new_empty(batch, heads, tokens)
    if not poison.numel():
        return clean_key, clean_value, poison
    block_key, block_value = power_of_two(dim_key), power_of_two(dim_value)
    block_tokens = max(1, min(64, 8192 // max(block_key, block_value)))
    grid = (batch * heads * blocks_of(tokens, block_tokens),)
    with torch.cuda.device_of(key):
        _clean_kernel[grid](
            key,
            value,
            clean_key,
            clean_value,
            poison,
            *key.stride()[:3],
            *value.stride()[:3],
            tokens,
            HEADS=heads,
            DIM_KEY=dim_key,
            DIM_VALUE=dim_value,
            BLOCK_TOKENS=block_tokens,
            BLOCK_KEY=block_key,
            BLOCK_VALUE=block_value,
        )
    return clean_key, clean_value, poison
