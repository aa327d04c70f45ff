"""Keeping NaN and Inf in hidden keys and values where they are: they are selected away, never multiplied by zero."""

from __future__ import annotations

import torch
from torch import Tensor


def without_broken(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys and values with zeros in place of NaN and Inf, and which keys held any, [batch, kv_heads, keys].

    The third is None where all are known to be finite. On the CPU a sum tells: it is finite only if every element
    is. On a device nobody waits for the answer. A query that sees a broken key is to give NaN, as the formula would.
    """
    if _readable(key) and bool((key.detach().sum() + value.detach().sum()).isfinite()):
        return key, value, None
    finite_key, finite_value = key.detach().isfinite(), value.detach().isfinite()
    broken = ~(finite_key.all(-1) & finite_value.all(-1))
    return torch.where(finite_key, key, 0.0), torch.where(finite_value, value, 0.0), broken


def _readable(x: Tensor) -> bool:
    """Whether a value can be looked at without waiting for a device or breaking a trace."""
    eager = not torch.compiler.is_compiling() and torch._C._functorch.maybe_current_level() is None
    return eager and x.device.type == "cpu" and type(x) in (Tensor, torch.nn.Parameter)


def over_heads(x: Tensor, heads: int) -> Tensor:
    """[batch, kv_heads, ...] repeated so that every query head has its own; `x` itself where there is nothing to repeat."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)
