"""PyTorch's causal flash attention with gradients, for keys and values that may not be finite, as one autograd node.

Replacing NaN and Inf, attending, and setting the rows that see them to NaN are several nodes otherwise, each of which
takes the host's time in both passes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyhead.ops.attention.alignment import aligned
from polyhead.ops.attention.scaled_dot_product import kernel_name
from polyhead.ops.common.nonfinite import can_launch, over_heads

_backward_operator = torch.ops.aten._scaled_dot_product_flash_attention_backward.default


def can_serve(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return True if PyTorch would run its flash kernel for a causal call that records gradients."""
    if not (can_launch(query) and can_launch(key) and can_launch(value)) or query.shape[-1] % 8:
        return False
    if torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") is not query.dtype:
        return False
    if not query.stride(-1) == key.stride(-1) == value.stride(-1) == 1:
        return False
    return kernel_name(query, key, value, causal=True, grouped=key.shape[1] != query.shape[1]) == "flash"


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Attend to the query's own position and earlier ones; a row that sees a non-finite key or value is NaN."""
    return _CausalFlash.apply(query, key, value, query.shape[-1] ** -0.5 if scale is None else scale)


class _CausalFlash(torch.autograd.Function):
    """Its gradients are those of the cleaned tensors, as in `nonfinite.without_nonfinite`."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        from polyhead.ops.common.kernels.clean_keys import clean_keys

        (query,) = aligned(query)
        key, value, poison = clean_keys(key, value)
        output, logsumexp, *sizes, seed, offset, _ = torch._scaled_dot_product_flash_attention(
            query, key, value, 0.0, True, scale=scale
        )
        ctx.save_for_backward(query, key, value, output, logsumexp, seed, offset)
        ctx.sizes, ctx.scale = sizes, scale
        return output + over_heads(poison.cumsum(-1), query.shape[1])[..., None]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, seed, offset = ctx.saved_tensors
        grads = _backward_operator(
            *aligned(grad_output), *tensors, *ctx.sizes, 0.0, True, seed, offset, scale=ctx.scale
        )
        return *grads, None
