"""Keep NaN and Inf of masked keys and values from spreading: replace them first, as 0 * NaN is NaN."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from polyhead.ops.common.kernels.availability import HAS_TRITON


def without_nonfinite(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Replace NaN and Inf in keys and values by zeros; also return a "poison" [batch, kv_heads, keys].

    The poison is NaN at non-finite keys (with a NaN or Inf in key or value) and 0 elsewhere. Backends add it to the
    logits, or to the rows that see the key: a query that sees such a key must return NaN, as the formula does, and one
    that does not must be unaffected. It is None if all elements are known to be finite. That is only tested for eager
    tensors on the CPU: on a GPU the test would synchronise.
    """
    if _can_read(key) and is_finite(key) and is_finite(value):
        return key, value, None
    if can_launch(key) and can_launch(value) and key.stride(-1) == value.stride(-1) == 1:
        if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
            return _CleanKeys.apply(key, value)
        from polyhead.ops.common.kernels.clean_keys import clean_keys

        return clean_keys(key, value)
    max_key = torch.linalg.vector_norm(key.detach(), torch.inf, -1)
    max_value = torch.linalg.vector_norm(value.detach(), torch.inf, -1)
    return _finite(key), _finite(value), max_key * 0 + max_value * 0


def is_finite(x: Tensor) -> bool:
    """Return True if the sum is finite, so that no element is NaN or Inf; False also for a sum that overflows."""
    return math.isfinite((x.detach() if x.requires_grad else x).sum().item())


class _CleanKeys(torch.autograd.Function):
    """`_Finite` of keys and values, and their poison, by one kernel instead of seven."""

    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        from polyhead.ops.common.kernels.clean_keys import clean_keys

        clean_key, clean_value, poison = clean_keys(key, value)
        ctx.mark_non_differentiable(poison)
        return clean_key, clean_value, poison

    @staticmethod
    def backward(ctx: Any, grad_key: Tensor, grad_value: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        return grad_key, grad_value


def without_nonfinite_queries(query: Tensor) -> tuple[Tensor, Tensor | None]:
    """Replace NaN and Inf in queries by zeros; also return their poison [batch, heads, queries], or None.

    A row without visible keys would otherwise carry the NaN of its query into the gradients of keys, as 0 * NaN.
    """
    if _can_read(query) and is_finite(query):
        return query, None
    return _finite(query), torch.linalg.vector_norm(query.detach(), torch.inf, -1) * 0


def _finite(x: Tensor) -> Tensor:
    if not _is_eager():
        return torch.where(x.detach().isfinite(), x, 0.0)
    return _Finite.apply(x) if x.requires_grad and torch.is_grad_enabled() else _Finite.forward(None, x)


class _Finite(torch.autograd.Function):
    """Zeros for NaN and Inf, with a straight-through gradient.

    The gradient is exact all the same: that of a masked key is zero, and one through a row that sees a non-finite key
    is NaN.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _can_read(x: Tensor) -> bool:
    """Return True if values can be read without synchronising a device or breaking a trace."""
    return _is_eager() and x.device.type == "cpu" and type(x) in (Tensor, torch.nn.Parameter)


def can_launch(x: Tensor) -> bool:
    """Return True if a kernel can take the tensor: eager, on a GPU, and with memory, unlike a `FakeTensor`."""
    return x.is_cuda and HAS_TRITON and _is_eager() and type(x) in (Tensor, torch.nn.Parameter)


def _is_eager() -> bool:
    """Return True if operators run eagerly, without a trace or a function transform."""
    traced = torch.compiler.is_compiling() or torch._C._is_tracing()
    return not traced and torch._C._functorch.maybe_current_level() is None


def over_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat the KV heads of [batch, kv_heads, ...] for their query heads; `x` itself if there are as many."""
    if x.shape[1] == heads:
        return x
    # `repeat_interleave` would specialise an exported graph to the sequence length.
    return x.index_select(1, torch.arange(heads, device=x.device) // (heads // x.shape[1]))
