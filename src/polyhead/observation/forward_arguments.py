"""Arguments of a module's call by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from torch import nn


def forward_arguments(module: nn.Module, positional: tuple[Any, ...], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of a module by name."""
    return {**dict(zip(parameters_of(type(module).forward), positional, strict=False)), **keywords}


@cache
def parameters_of(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the parameters of a forward, without `self`."""
    return tuple(inspect.signature(forward).parameters)[1:]
