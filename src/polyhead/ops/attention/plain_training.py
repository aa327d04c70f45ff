"""Plain attention with gradients on Hopper GPUs: cuDNN's forward, and our backward.

cuDNN's backward is as fast, but PyTorch caches its execution plans by the sizes and strides of query, key and value,
and not by those of the output gradient: a call whose output gradient has another layout than that of the call that
built the plan gets wrong gradients, without an error (docs/attention.md has a reproduction).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyhead.ops.common.kernel_call import KernelCall
from polyhead.ops.common.kernels.availability import has_hopper_kernels
from polyhead.ops.common.kernels.mask_arguments import MaskArguments
from polyhead.ops.common.tracing import is_traced, is_transformed

# Batch x heads x queries x keys x head_dim from which it is faster than PyTorch's flash kernel, with less host time.
MIN_MULTIPLY_ADDS = 3 << 34
_aten = torch.ops.aten


def is_worth_it(query: Tensor, key: Tensor) -> bool:
    """Return True if the call is large enough to be faster than PyTorch's flash kernel."""
    return query.numel() * key.shape[2] >= MIN_MULTIPLY_ADDS


def can_serve(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> bool:
    """Return True if our kernel for Hopper computes the gradients; the caller checks that cuDNN's forward runs."""
    if not has_hopper_kernels(query.device) or is_traced(query) or is_transformed():
        return False
    from polyhead.ops.attention.kernels import backward_hopper

    # PyTorch aligns causal masks to the first key, so they are plain for as many queries as keys.
    is_plain = not causal or query.shape[2] == key.shape[2]
    return is_plain and backward_hopper.can_serve(_call(query, key, value, causal, 1.0), query, ())


def attend(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None) -> Tensor:
    """Attend to all keys, or to those up to the query's own position if `causal`."""
    return _Attention.apply(query, key, value, causal, query.shape[-1] ** -0.5 if scale is None else scale)


def _call(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> KernelCall:
    mask = MaskArguments(right=0 if causal else None, offset=key.shape[2] - query.shape[2])
    return KernelCall(query, key, value, mask, scale)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> Tensor:
        output, logsumexp, *_ = _aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, causal, scale=scale
        )
        ctx.save_for_backward(query, key, value, output, logsumexp.reshape(query.shape[:3]))
        ctx.causal, ctx.scale = causal, scale
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        from polyhead.ops.attention.kernels.backward import backward

        query, key, value, output, logsumexp = ctx.saved_tensors
        call = _call(query, key, value, ctx.causal, ctx.scale)
        options: dict[str, Any] = {"row_gradients": {}, "row_values": {}, "bias_shape": None, "table_shape": None}
        return *backward(call, grad_output, output, logsumexp, **options)[:3], None, None
