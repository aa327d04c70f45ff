"""Checks of arguments that several operations have, and their handling of autocast."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from polyhead.errors import DeviceError, DtypeError, MaskError, OptionError, ShapeError
from polyhead.masks import Mask

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_NOTHING = nullcontext()
_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)


def is_number(x: object) -> bool:
    return isinstance(x, _NUMBERS) and not isinstance(x, bool)


def checked_scale(scale: float | Tensor | None, heads: int, query: Tensor) -> float | Tensor:
    """Return the scale of the dot products, 1/sqrt(head_dim) by default: a finite number, or a tensor [heads]."""
    if scale is None:
        return 1.0 / math.sqrt(query.shape[-1])
    if isinstance(scale, Tensor):
        check_per_head("scale", scale, heads, query)
    elif not (is_number(scale) and math.isfinite(scale)):
        raise OptionError(f"scale must be a finite number, or a tensor with one number per head, got {scale!r}")
    return scale


def check_softcap(softcap: float) -> None:
    if not (is_number(softcap) and 0 < softcap < math.inf):
        raise OptionError(f"softcap must be positive and finite, got {softcap!r}; pass None for no softcap")


def check_per_head(name: str, tensor: Tensor, heads: int, query: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise OptionError(f"{name} must be a tensor with one number per head, got {type(tensor).__name__}")
    if tensor.shape != (heads,):
        raise ShapeError(f"{name} must have one number per head, got shape {list(tensor.shape)} for {heads} heads")
    if not tensor.is_floating_point():
        raise DtypeError(f"{name} must be floating point, got {tensor.dtype}")
    if tensor.device != query.device:
        raise DeviceError(f"{name} must be on the device of the query, got {tensor.device} and {query.device}")


def check_mask(mask: Mask) -> None:
    if not isinstance(mask, Mask):
        hint = "Mask.dense(mask) for a boolean tensor (True = may attend), Mask.bias(mask) for values to add"
        raise MaskError(f"mask must be a polyhead.Mask, got {type(mask).__name__}; use {hint}")


def check_backend(backend: str, backends: Iterable[str]) -> None:
    if not isinstance(backend, str) or backend not in ("auto", *backends):
        raise OptionError(f"backend must be 'auto' or one of {', '.join(map(repr, backends))}, got {backend!r}")


def cast_for_autocast(device_type: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast tensors of at most 32 bits as autocast, which is enabled, does for PyTorch's attention."""
    dtype = torch.get_autocast_dtype(device_type)
    return tuple([x.to(dtype) if x.dtype in (torch.float32, torch.float16, torch.bfloat16) else x for x in tensors])


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Return a context in which autocast is disabled, which would round what is computed in float32."""
    return torch.autocast(device_type, enabled=False) if is_autocast(device_type) else _NOTHING


def is_autocast(device_type: str) -> bool:
    return device_type != "meta" and torch.is_autocast_enabled(device_type)  # there is none for meta tensors
