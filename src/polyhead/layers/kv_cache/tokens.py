"""Token layout and integer arguments of caches, with the checks common to all kinds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from polyhead.errors import CacheError
from polyhead.geometry import checked_integer

count = partial(checked_integer, error=CacheError)
positive = partial(checked_integer, at_least=1, error=CacheError)


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """Heads, widths, dtype and device of a cached token."""

    num_kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def build(
        cls,
        num_kv_heads: int,
        head_dim: int,
        value_dim: int | None,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
    ) -> TokenLayout:
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if not dtype.is_floating_point:
            raise CacheError(f"dtype of a cache must be floating point, got {dtype}")
        return cls(
            positive("num_kv_heads", num_kv_heads),
            positive("head_dim", head_dim),
            positive("value_dim", head_dim if value_dim is None else value_dim),
            dtype,
            torch.empty(0, device=device).device,  # resolves 'cuda' to 'cuda:0', as tensors report it
        )

    @classmethod
    def of(cls, key: Tensor, value: Tensor) -> TokenLayout:
        return cls(key.shape[1], key.shape[3], value.shape[3], key.dtype, key.device)


def integers(values: Sequence[int], device: torch.device | str | None) -> Tensor:
    """Return Python integers as an int64 tensor on a device, without synchronisation."""
    return torch.tensor(values, dtype=torch.int64).to(device or "cpu", non_blocking=True)


def host_integers(name: str, values: Sequence[int] | Tensor) -> tuple[int, ...]:
    if isinstance(values, Tensor):
        if values.device.type != "cpu":
            raise CacheError(
                f"{name} must be Python integers or a CPU tensor, got a tensor on {values.device}; "
                "reading it would synchronise with the device: keep integers in Python, or pass tensor.tolist()"
            )
        values = values.tolist()
    if not isinstance(values, Sequence) or any(isinstance(x, bool) or not isinstance(x, int) for x in values):
        raise CacheError(f"{name} must be a list of integers, got {values!r}")
    return tuple(values)


# Written with comparisons, which torch.compile can trace with lengths that change from step to step.


def all_equal(values: Sequence[Any]) -> bool:
    return all(value == values[0] for value in values)


def longest(lengths: Sequence[int], *, otherwise: int) -> int:
    return max(lengths) if lengths else otherwise
