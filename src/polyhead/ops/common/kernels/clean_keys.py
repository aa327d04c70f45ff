"""Takes NaN and Inf out of keys and values in one pass, and marks the keys that held any.

Bound by bytes: keys and values are read once and written once. On an H200 in bf16, (8, 16, 2048, 64) takes 41 us,
3.2 TB/s, where causal attention over them takes 186 us; (2, 16, 8192, 128) takes 94 us where that takes 899. In plain
PyTorch the same takes seven kernels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from polyhead.ops.common.kernels.sizes import blocks_of, power_of_two


@triton.jit
def _clean_tile(ptr_from, ptr_to, offs_from, offs_to, mask_tile):
    """Copy a tile with zeros for what is not finite; returns how many of those each row had."""
    tile = tl.load(ptr_from + offs_from, mask=mask_tile, other=0.0)
    # x - x is 0 for every finite x and NaN for all others.
    broken = (tile - tile) != 0.0
    tl.store(ptr_to + offs_to, tl.where(broken, 0.0, tile).to(ptr_to.dtype.element_ty), mask=mask_tile)
    return tl.sum(broken.to(tl.int32), axis=1)


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
    # The clean tensors are [batch, tokens, heads, dim] in memory, as attention's own output is.
    row = (i_batch * tokens + offs_token) * HEADS + i_head

    # [BLOCK_TOKENS, BLOCK_KEY]
    offs_dim = tl.arange(0, BLOCK_KEY)
    from_key = i_batch * stride_key_batch + i_head * stride_key_head + offs_token * stride_key_token
    broken = _clean_tile(
        ptr_key,
        ptr_clean_key,
        from_key[:, None] + offs_dim[None, :],
        row[:, None] * DIM_KEY + offs_dim[None, :],
        mask_token[:, None] & (offs_dim < DIM_KEY)[None, :],
    )
    # [BLOCK_TOKENS, BLOCK_VALUE]
    offs_dim = tl.arange(0, BLOCK_VALUE)
    from_value = i_batch * stride_value_batch + i_head * stride_value_head + offs_token * stride_value_token
    broken += _clean_tile(
        ptr_value,
        ptr_clean_value,
        from_value[:, None] + offs_dim[None, :],
        row[:, None] * DIM_VALUE + offs_dim[None, :],
        mask_token[:, None] & (offs_dim < DIM_VALUE)[None, :],
    )
    poison = tl.where(broken > 0, float("nan"), 0.0)
    tl.store(ptr_poison + i_pair * tokens + offs_token, poison.to(ptr_poison.dtype.element_ty), mask=mask_token)


def clean_keys(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Finite keys and values, and the poison [batch, kv_heads, tokens]: NaN where one held NaN or Inf, else 0.

    The last axis of both must lie together in memory.
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
