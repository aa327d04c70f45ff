"""Token layout and integer arguments of caches, with the checks common to all kinds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict

import torch
from torch import Tensor

from polyhead.errors import CacheError
from polyhead.geometry import checked_integer

count = partial(checked_integer, error=CacheError)
positive = partial(checked_integer, at_least=1, error=CacheError)


class CacheSizes(TypedDict, total=False):
    """Options that every cache has; those of the first block by default."""

    batch_size: int | None
    num_kv_heads: int | None
    head_dim: int | None
    value_dim: int | None
    dtype: torch.dtype | None
    device: torch.device | str | None


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """Heads, widths, dtype and device of a cached token."""

    num_kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def build(cls, sizes: Mapping[str, Any]) -> TokenLayout:
        """Return the layout of `checked_sizes`, with defaults for the width of values, dtype and device."""
        return cls(
            sizes["num_kv_heads"],
            sizes["head_dim"],
            sizes["head_dim"] if sizes["value_dim"] is None else sizes["value_dim"],
            torch.get_default_dtype() if sizes["dtype"] is None else sizes["dtype"],
            torch.empty(0).device if sizes["device"] is None else sizes["device"],
        )

    def sizes(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    def check(self, sizes: Mapping[str, Any]) -> None:
        """Raise unless this layout agrees with the arguments of a constructor; None agrees with anything."""
        if not self.dtype.is_floating_point:
            raise CacheError(f"dtype of a cache must be floating point, got {self.dtype}")
        for name, size in sizes.items():
            if size not in (None, getattr(self, name)):
                raise CacheError(f"this cache has {name} {size}, got {name} {getattr(self, name)}")

    @classmethod
    def of(cls, key: Tensor, value: Tensor) -> TokenLayout:
        return cls(key.shape[1], key.shape[3], value.shape[3], key.dtype, key.device)


def checked_sizes(
    num_kv_heads: int | None,
    head_dim: int | None,
    value_dim: int | None,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> dict[str, Any]:
    """Check the sizes that a cache is built with, and return them by the names of `TokenLayout`."""
    if dtype is not None and not dtype.is_floating_point:
        raise CacheError(f"dtype of a cache must be floating point, got {dtype}")
    sizes = {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "value_dim": value_dim}
    return {
        **{name: None if size is None else positive(name, size) for name, size in sizes.items()},
        "dtype": dtype,
        # Resolves 'cuda' to 'cuda:0', as tensors report it.
        "device": None if device is None else torch.empty(0, device=device).device,
    }


def integers(values: Sequence[int], device: torch.device | str | None) -> Tensor:
    """Return Python integers as an int64 tensor on a device, without synchronisation."""
    return torch.tensor(values, dtype=torch.int64).to(device or "cpu", non_blocking=True)


def new_tokens(starts: Sequence[int], new_lengths: Sequence[int], num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sequence, the index in its block and the position of each non-padding token of a block, on the CPU."""
    is_token = torch.arange(num_tokens, device="cpu") < integers(new_lengths, "cpu")[:, None]
    row, in_block = is_token.nonzero(as_tuple=True)
    return row, in_block, integers(starts, "cpu")[row] + in_block


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
