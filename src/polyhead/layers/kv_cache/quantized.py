"""KV cache in int8: about half the memory of bfloat16, with a bounded error."""

from __future__ import annotations

import torch
from torch import Tensor

from polyhead.layers.kv_cache.slots import PreallocatedCache
from polyhead.layers.kv_cache.tokens import TokenLayout
from polyhead.ops.decode.fused import CacheArguments


class QuantizedCache(PreallocatedCache):
    """Preallocated cache of int8 keys and values with one float32 scale per sequence, head and token.

    The quantisation error is at most `largest / 254`, where `largest` is the largest magnitude of that token in that
    head, plus the rounding of float32 and of the cache's dtype. Zeros are exact. A token with a non-finite value is
    read back as all NaN in that head, and no other token is affected. The decode kernels read the int8 values; `key`
    and `value` of a view are dequantised copies of the whole cache.

    >>> cache = QuantizedCache(capacity=7, batch_size=1, num_kv_heads=1, head_dim=2)
    >>> key = torch.tensor([[[[127.0, -63.7]]]])
    >>> cache.append(key, key).key
    tensor([[[[127., -64.]]]])
    """

    def _buffer_formats(self, layout: TokenLayout) -> tuple[tuple[int, torch.dtype], ...]:
        scale = (1, torch.float32)
        return (layout.head_dim, torch.int8), scale, (layout.value_dim, torch.int8), scale

    def _encode(self, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        return (*quantize(key), *quantize(value))

    def _describe(self, stored: tuple[Tensor, ...]) -> CacheArguments:
        key, key_scale, value, value_scale = stored
        return CacheArguments(key, value, key_scale=key_scale.squeeze(-1), value_scale=value_scale.squeeze(-1))

    def _read(self, stored: tuple[Tensor, ...], num_keys: int) -> tuple[Tensor, Tensor]:
        key, key_scale, value, value_scale = stored
        dtype = self._require_layout().dtype
        return dequantize(key, key_scale, dtype), dequantize(value, value_scale, dtype)


def quantize(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise symmetrically per row of the last axis; returns int8 values and float32 scales [..., 1]."""
    high_precision = tensor if tensor.dtype is torch.float64 else tensor.float()
    scale = (high_precision.abs().amax(-1, keepdim=True) / 127).float()
    # NaN comes from 0 / 0, where 0 is correct, and from a non-finite scale, which times 0 is NaN again.
    steps = (high_precision / scale).round().clamp(-127, 127).nan_to_num(0.0)
    return steps.to(torch.int8), scale


def dequantize(steps: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (steps * scale).to(dtype)
