"""Keeping NaN and Inf in hidden keys and values where they are: they are taken out first, never multiplied by zero."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyhead.ops.common.kernels.availability import HAS_TRITON


def without_broken(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys and values with zeros in place of NaN and Inf, and a poison [batch, kv_heads, keys]: NaN at keys that held
    any, 0 elsewhere.

    A query that sees such a key is to give NaN, as the formula would; a query that does not is to know nothing of it.
    The poison is None where all is known to be finite: on the CPU a sum tells, being finite only if every element
    is. On a device nobody waits for the answer.
    """
    if _readable(key) and bool((key.detach().sum() + value.detach().sum()).isfinite()):
        return key, value, None
    if key.is_cuda and _is_eager() and HAS_TRITON and key.stride(-1) == value.stride(-1) == 1:
        if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
            return _CleanKeys.apply(key, value)
        from polyhead.ops.common.kernels.clean_keys import clean_keys

        return clean_keys(key, value)
    largest_key = torch.linalg.vector_norm(key.detach(), torch.inf, -1)
    largest_value = torch.linalg.vector_norm(value.detach(), torch.inf, -1)
    return _finite(key), _finite(value), largest_key * 0 + largest_value * 0


class _CleanKeys(torch.autograd.Function):
    """One kernel in place of seven; the gradient passes, as through `_Finite`."""

    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        from polyhead.ops.common.kernels.clean_keys import clean_keys

        clean_key, clean_value, poison = clean_keys(key, value)
        ctx.mark_non_differentiable(poison)
        return clean_key, clean_value, poison

    @staticmethod
    def backward(ctx: Any, grad_key: Tensor, grad_value: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        return grad_key, grad_value


def without_broken_queries(query: Tensor) -> tuple[Tensor, Tensor | None]:
    """The same for queries, so that what stands in a row that sees nothing reaches no key's gradient."""
    if _readable(query) and bool(query.detach().sum().isfinite()):
        return query, None
    return _finite(query), torch.linalg.vector_norm(query.detach(), torch.inf, -1) * 0


def _finite(x: Tensor) -> Tensor:
    if not _is_eager():
        return torch.where(x.detach().isfinite(), x, 0.0)
    return _Finite.apply(x) if x.requires_grad and torch.is_grad_enabled() else _Finite.forward(None, x)


class _Finite(torch.autograd.Function):
    """Zeros for NaN and Inf. The gradient passes: a hidden key has none, and who sees a broken one gets NaN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _readable(x: Tensor) -> bool:
    """Whether a value can be looked at without waiting for a device or breaking a trace."""
    return _is_eager() and x.device.type == "cpu" and type(x) in (Tensor, torch.nn.Parameter)


def _is_eager() -> bool:
    """Whether operators run as they are called, with no trace and no function transform looking on."""
    traced = torch.compiler.is_compiling() or torch._C._is_tracing()
    return not traced and torch._C._functorch.maybe_current_level() is None


def over_heads(x: Tensor, heads: int) -> Tensor:
    """[batch, kv_heads, ...] with each head repeated for the query heads that share it; `x` itself where none do."""
    if x.shape[1] == heads:
        return x
    # By index: what `repeat_interleave` does inside ties an exported graph to its length.
    return x.index_select(1, torch.arange(heads, device=x.device) // (heads // x.shape[1]))
