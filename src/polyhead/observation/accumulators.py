"""Values that gather statistics piece by piece: any split of the data, merged in any order, equals one pass.

Each has three verbs. `update` takes samples along the last axis, with weights, and gives the value that knows them as
well; `merge` joins two values; `compute` says what was gathered. None of them waits for a device, and a sample of
weight 0 is never read, whatever stands there. `state` and `from_state` turn a value into named tensors and back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor

from polyhead.errors import OptionError, ShapeError


class Accumulator(Protocol):
    """What every value of this module can do."""

    def update(self, values: Tensor, weights: Tensor | None = None) -> Self: ...

    def merge(self, other: Self) -> Self: ...

    def state(self) -> dict[str, Tensor]: ...

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> Self: ...


class Moments(NamedTuple):
    """How much was seen, its mean and its standard deviation; NaN where nothing was seen."""

    total: Tensor
    mean: Tensor
    spread: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class MeanAndStd:
    """Weighted mean and standard deviation, of any shape, in float64.

    >>> import torch
    >>> one, other = torch.tensor([[1.0, 2.0, 9.0]]), torch.tensor([[6.0]])
    >>> seen = MeanAndStd.empty((1,)).update(one, torch.tensor([[True, True, False]]))
    >>> seen.merge(MeanAndStd.empty((1,)).update(other)).compute().mean
    tensor([3.], dtype=torch.float64)
    """

    count: Tensor  # the sum of the weights
    mean: Tensor
    squares: Tensor  # the weighted sum of squared distances from the mean

    @classmethod
    def empty(cls, shape: Sequence[int], device: torch.device | str | None = None) -> Self:
        zeros = torch.zeros(tuple(shape), dtype=_wide(device), device=device)
        return cls(zeros, zeros, zeros)

    def update(self, values: Tensor, weights: Tensor | None = None) -> Self:
        """With samples [*shape, samples], and a weight for each: real tokens True, padding False."""
        weights = _checked(values, weights, self.count.shape)
        values = values if values.dtype is torch.float64 else values.float()  # squares of halves overflow
        wide, plain = self.count.dtype, weights.dtype is torch.bool
        used = weights if plain else weights != 0

        def weighted(x: Tensor) -> Tensor:
            x = torch.where(used, x, 0)
            return x if plain else x * weights

        count = weights.sum(-1, dtype=wide)
        some = torch.where(count > 0, count, 1.0)
        # Distances from a first mean in the dtype of the samples: no copy in float64 is made of all the rows, and
        # nothing of the size of the values themselves is ever squared.
        first = (weighted(values).sum(-1, dtype=wide) / some).to(values.dtype)
        distance = values - first[..., None]
        rest = weighted(distance).sum(-1, dtype=wide)
        squares = weighted(distance.square()).sum(-1, dtype=wide) - rest * rest / some
        mean = torch.where(count > 0, first.to(wide) + rest / some, 0.0)
        return self.merge(type(self)(count, mean, squares.clamp_min(0.0)))

    def merge(self, other: Self) -> Self:
        """Chan, Golub and LeVeque's rule, written so that the order of the two does not change a bit."""
        _check_same(self.count.shape, other.count.shape)
        count, mean, squares = _beside(self.count, other.count, other.mean, other.squares)
        total = self.count + count
        some = torch.where(total > 0, total, 1.0)
        share, other_share = self.count / some, count / some
        apart = self.mean - mean
        return type(self)(
            total,
            share * self.mean + other_share * mean,
            self.squares + squares + apart * apart * (share * other_share * total),
        )

    def compute(self) -> Moments:
        nothing = self.count == 0
        some = torch.where(nothing, 1.0, self.count)
        mean = torch.where(nothing, torch.nan, self.mean)
        return Moments(self.count, mean, torch.where(nothing, torch.nan, (self.squares / some).sqrt()))

    def state(self) -> dict[str, Tensor]:
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> Self:
        return cls(*(_named(state, name) for name in ("count", "mean", "squares")))


@dataclass(frozen=True, slots=True, eq=False)
class Maximum:
    """The largest sample of any weight, in float64; -inf where nothing was seen."""

    largest: Tensor

    @classmethod
    def empty(cls, shape: Sequence[int], device: torch.device | str | None = None) -> Self:
        return cls(torch.full(tuple(shape), -torch.inf, dtype=_wide(device), device=device))

    def update(self, values: Tensor, weights: Tensor | None = None) -> Self:
        weights = _checked(values, weights, self.largest.shape)
        if values.shape[-1] == 0:
            return self
        used = weights if weights.dtype is torch.bool else weights != 0
        largest = torch.where(used, values, -torch.inf).amax(-1)
        return self.merge(type(self)(largest.to(self.largest.dtype)))

    def merge(self, other: Self) -> Self:
        _check_same(self.largest.shape, other.largest.shape)
        (largest,) = _beside(self.largest, other.largest)
        return type(self)(torch.maximum(self.largest, largest))

    def compute(self) -> Tensor:
        return self.largest

    def state(self) -> dict[str, Tensor]:
        return {"largest": self.largest}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> Self:
        return cls(_named(state, "largest"))


def _wide(device: torch.device | str | None) -> torch.dtype:
    """float64, wherever the device has it."""
    return torch.float32 if device is not None and torch.device(device).type == "mps" else torch.float64


def _checked(values: Tensor, weights: Tensor | None, shape: torch.Size) -> Tensor:
    if values.shape[:-1] != shape or not values.is_floating_point():
        raise ShapeError(
            f"samples must be floating point, {list(shape)} and an axis of samples, "
            f"got {values.dtype} of shape {list(values.shape)}"
        )
    if weights is None:
        return torch.ones((), dtype=torch.bool, device=values.device).expand(values.shape)
    if weights.shape != values.shape:
        raise ShapeError(
            f"every sample has a weight of its own, got {list(weights.shape)} weights for {list(values.shape)} samples"
        )
    return weights


def _check_same(shape: torch.Size, other: torch.Size) -> None:
    if shape != other:
        raise ShapeError(f"only values of one shape can be merged, got {list(shape)} and {list(other)}")


def _beside(tensor: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    return tuple(other.to(tensor.device) for other in others)


def _named(state: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in state:
        raise OptionError(f"a saved value must hold {name!r}, got {', '.join(sorted(state)) or 'nothing'}")
    return state[name]
