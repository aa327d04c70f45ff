"""Checks of results against float64, before anything is timed: times of different functions are not compared."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Tests hold our precision to a factor of 2. Here it matters only that contenders, also those of others, compute the
# same function.
FACTOR = 4


class Disagreement(Exception):
    """A contender computes something else than the formula, so that its time is not comparable."""


@dataclass(frozen=True)
class Agreement:
    """Largest error, and largest allowed error."""

    error: float
    allowed: float


def hold(what: str, actual: Tensor, exact: Tensor, plain: Tensor) -> Agreement:
    """Raise unless error <= FACTOR * (error of the formula in the dtype of `plain` + eps * max|exact|)."""
    rounding = (plain.double() - exact).abs().max() + torch.finfo(plain.dtype).eps * exact.abs().max()
    return hold_within(what, actual, exact, FACTOR * float(rounding), why="is explained by rounding")


def hold_within(
    what: str, actual: Tensor, exact: Tensor, allowed: float | Tensor, *, why: str = "is allowed"
) -> Agreement:
    """Raise unless error <= `allowed`, a number or one for each element of `exact`; NaN never passes."""
    if actual.shape != exact.shape:
        raise Disagreement(f"{what} has shape {list(actual.shape)}, not {list(exact.shape)}")
    errors = (actual.detach().double() - exact).abs()
    limits = torch.as_tensor(allowed, dtype=torch.float64, device=errors.device).expand_as(errors)
    if not bool((errors <= limits).all()):
        worst = int(torch.where(errors <= limits, -torch.inf, (errors - limits).nan_to_num(nan=torch.inf)).argmax())
        error, limit = float(errors.flatten()[worst]), float(limits.flatten()[worst])
        raise Disagreement(f"{what} is off by {error:.3g}, at most {limit:.3g} {why}")
    return Agreement(float(errors.max()), float(limits.max()))
