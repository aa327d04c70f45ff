"""Fast path of plain calls of `attention` on a CPU: PyTorch's kernel, with as little Python around it as possible.

Plain calls are unmasked or causal, with default options. Between two kernels the caches are cold, so that each function
or operator of a small call costs a hundredth of the kernel's time or more. Nothing is kept between calls: comparing
sizes costs less than looking them up.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from polyhead.masks import Mask
from polyhead.ops.common.nonfinite import is_finite
from polyhead.ops.common.request import AttentionOutput
from polyhead.ops.common.validation import DTYPES

_functorch_level = torch._C._functorch.maybe_current_level
_is_tracing = torch._C._is_tracing
_is_flash_enabled = torch._C._get_flash_sdp_enabled


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask | None, scale: float | Tensor | None, finite: bool
) -> AttentionOutput | None:
    """Return the result of a call with default options; None if its arguments are wrong or need more than the kernel.

    Only plain tensors in eager mode are served, without autocast, which casts tensors of several dtypes, and under a
    mask only finite keys and values.
    """
    if not type(query) is type(key) is type(value) is Tensor or torch.compiler.is_compiling():
        return None
    if _functorch_level() is not None or forward_ad._current_level >= 0 or _is_tracing():
        return None
    if torch.is_autocast_enabled("cpu") or not _is_flash_enabled():
        return None
    causal = mask is not None
    if causal and not (isinstance(mask, Mask) and mask.is_just_causal):
        return None
    if scale is not None and not (type(scale) is float and 0.0 < scale < math.inf):
        return None
    query_shape, key_shape, dtype = query.shape, key.shape, query.dtype
    if key_shape != value.shape or not len(query_shape) == len(key_shape) == 4 or not query.numel():
        return None
    batch, heads, queries, head_dim = query_shape
    key_batch, kv_heads, keys, key_dim = key_shape
    if batch != key_batch or head_dim != key_dim or not (kv_heads and keys) or heads % kv_heads:
        return None
    if (causal and not queries == keys > 1) or not dtype is key.dtype is value.dtype or dtype not in DTYPES:
        return None
    if not (_is_dense(query) and _is_dense(key) and _is_dense(value) and key.is_cpu and value.is_cpu):
        return None
    if causal and not finite and not (is_finite(key) and is_finite(value)):
        return None
    if heads == kv_heads:
        output = F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scale)
    else:
        output = F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scale, enable_gqa=True)
    return AttentionOutput(output, None, None, None, "sdpa")


def _is_dense(x: Tensor) -> bool:
    """Return True if the elements of a row are adjacent; otherwise PyTorch silently runs its math path."""
    return x.is_contiguous() or x.stride(-1) == 1
