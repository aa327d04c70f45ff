"""Streaming accumulators: any split of the data, merged in any order, equals one pass.

`MeanAndStd` and `Maximum` have three methods. `update` takes samples along the last axis, with weights, and returns the
updated accumulator; `merge` combines two accumulators; `compute` returns the result. A `Histogram` is made of all
samples of a call by `Histogram.of`, merged, and read by `quantile`. None of them synchronises with a device, and a
sample of weight 0 is ignored, even if it is NaN. `state` and `with_state` convert to named tensors and back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from polyhead.errors import OptionError, ShapeError
from polyhead.ops.common.head_sums import histogram


class NamedTensors:
    """Base of frozen dataclasses that are saved as named tensors: their tensor fields, and those of nested values.

    The tensors of a nested value have the name of its field as a prefix, as in `moments.count`.
    """

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def state(self) -> dict[str, Tensor]:
        """Return the tensors by name, for a file."""
        tensors: dict[str, Tensor] = {}
        for name, value in self._parts():
            if isinstance(value, Tensor):
                tensors[name] = value
            else:
                tensors |= {f"{name}.{inner}": x for inner, x in value.state().items()}
        return tensors

    def with_state(self, state: Mapping[str, Tensor]) -> Self:
        """Return a copy with the saved tensors, on the device of those tensors.

        Args:
            state: tensors that `state` returned.
        """
        missing = [name for name in self.state() if name not in state]
        if missing:
            raise OptionError(
                f"a saved {type(self).__name__} must contain {', '.join(self.state())}, got none for "
                f"{', '.join(missing)}"
            )
        values = {
            name: state[name] if isinstance(value, Tensor) else value.with_state(with_prefix(state, f"{name}."))
            for name, value in self._parts()
        }
        return replace(self, **values)

    def _parts(self) -> list[tuple[str, Any]]:
        values = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return [(name, value) for name, value in values if isinstance(value, Tensor | NamedTensors)]


class Sums(NamedTensors):
    """Base of values whose tensors are sums over samples, so that two are merged by adding them."""

    __slots__ = ()

    def merge(self, other: Self) -> Self:
        """Return the sums of both.

        Args:
            other: sums of other samples.
        """
        sums = {}
        for (name, own), (_, added) in zip(self._parts(), other._parts(), strict=True):
            sums[name] = own + added.to(own.device) if isinstance(own, Tensor) else own.merge(added)
        return replace(self, **sums)


def with_prefix(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names start with a prefix, without it."""
    return {name.removeprefix(prefix): x for name, x in state.items() if name.startswith(prefix)}


class Moments(NamedTuple):
    """Total weight, mean and standard deviation; the last two are NaN where there were no samples."""

    total: Tensor
    mean: Tensor
    std: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class MeanAndStd(NamedTensors):
    """Weighted mean and standard deviation, of any shape, in float64 (float32 on MPS).

    >>> import torch
    >>> first, second = torch.tensor([[1.0, 2.0, 9.0]]), torch.tensor([[6.0]])
    >>> moments = MeanAndStd.empty((1,)).update(first, torch.tensor([[True, True, False]]))
    >>> moments.merge(MeanAndStd.empty((1,)).update(second)).compute().mean
    tensor([3.], dtype=torch.float64)
    """

    count: Tensor  # the sum of the weights
    mean: Tensor
    squares: Tensor  # the weighted sum of squared deviations from the mean

    @classmethod
    def empty(cls, shape: Sequence[int], device: torch.device | str | None = None) -> Self:
        zeros = torch.zeros(tuple(shape), dtype=accumulator_dtype(device), device=device)
        return cls(zeros, zeros, zeros)

    def update(self, values: Tensor, weights: Tensor | None = None) -> Self:
        """Add samples [*shape, samples] with one weight each, e.g. a mask that is False for padding."""
        weights = _checked(values, weights, self.count.shape)
        values = values if values.dtype is torch.float64 else values.float()  # squares of halves overflow
        sum_dtype, is_mask = self.count.dtype, weights.dtype is torch.bool
        used = weights if is_mask else weights != 0

        def weighted(x: Tensor) -> Tensor:
            x = torch.where(used, x, 0)
            return x if is_mask else x * weights

        count = weights.sum(-1, dtype=sum_dtype)
        divisor = torch.where(count > 0, count, 1.0)
        # Two passes: deviations from a first mean in the dtype of the samples. This avoids a float64 copy of all rows,
        # and never squares the values themselves.
        first = (weighted(values).sum(-1, dtype=sum_dtype) / divisor).to(values.dtype)
        deviation = values - first[..., None]
        correction = weighted(deviation).sum(-1, dtype=sum_dtype)
        squares = weighted(deviation.square()).sum(-1, dtype=sum_dtype) - correction * correction / divisor
        mean = torch.where(count > 0, first.to(sum_dtype) + correction / divisor, 0.0)
        return self.merge(type(self)(count, mean, squares.clamp_min(0.0)))

    def merge(self, other: Self) -> Self:
        """Merge by the pairwise update of Chan, Golub and LeVeque (1979); bitwise symmetric in its arguments."""
        _check_same_shape(self.count.shape, other.count.shape)
        count, mean, squares = _to_device_of(self.count, other.count, other.mean, other.squares)
        total = self.count + count
        divisor = torch.where(total > 0, total, 1.0)
        share, other_share = self.count / divisor, count / divisor
        delta = self.mean - mean
        return type(self)(
            total,
            share * self.mean + other_share * mean,
            self.squares + squares + delta * delta * (share * other_share * total),
        )

    def compute(self) -> Moments:
        is_empty = self.count == 0
        divisor = torch.where(is_empty, 1.0, self.count)
        mean = torch.where(is_empty, torch.nan, self.mean)
        return Moments(self.count, mean, torch.where(is_empty, torch.nan, (self.squares / divisor).sqrt()))


@dataclass(frozen=True, slots=True, eq=False)
class Maximum(NamedTensors):
    """Maximum over samples of non-zero weight, in float64 (float32 on MPS); -inf where there were none."""

    largest: Tensor

    @classmethod
    def empty(cls, shape: Sequence[int], device: torch.device | str | None = None) -> Self:
        return cls(torch.full(tuple(shape), -torch.inf, dtype=accumulator_dtype(device), device=device))

    def update(self, values: Tensor, weights: Tensor | None = None) -> Self:
        weights = _checked(values, weights, self.largest.shape)
        if values.shape[-1] == 0:
            return self
        used = weights if weights.dtype is torch.bool else weights != 0
        largest = torch.where(used, values, -torch.inf).amax(-1)
        return self.merge(type(self)(largest.to(self.largest.dtype)))

    def merge(self, other: Self) -> Self:
        _check_same_shape(self.largest.shape, other.largest.shape)
        (largest,) = _to_device_of(self.largest, other.largest)
        return type(self)(torch.maximum(self.largest, largest))

    def compute(self) -> Tensor:
        return self.largest


@dataclass(frozen=True, slots=True, eq=False)
class Histogram(Sums):
    """Counts of samples between 0 and 1 in `BINS` equal bins, from which quantiles are read.

    A quantile is off by at most half a bin, 1/512: each of the two samples between which it is interpolated is taken to
    be in the middle of its bin.

    >>> import torch
    >>> samples = torch.rand(1, 1000, generator=torch.Generator().manual_seed(0))
    >>> first, second = (Histogram.of(x, torch.ones_like(x, dtype=torch.bool)) for x in samples.split(600, -1))
    >>> error = first.merge(second).quantile(0.1) - samples.quantile(0.1)
    >>> bool(error.abs() <= 1 / 512)
    True
    """

    counts: Tensor  # [*shape, BINS + 1]; samples that are NaN are in the last one

    BINS: ClassVar[int] = 256

    @classmethod
    def of(cls, values: Tensor, counted: Tensor) -> Self:
        """Return the histogram of samples [*shape, samples]; those that are not `counted` are ignored."""
        return cls(histogram(values, counted, cls.BINS))

    def quantile(self, q: float) -> Tensor:
        """Return the q-quantile, as `torch.quantile` defines it; NaN without samples or if any sample is NaN."""
        cumulative = self.counts[..., :-1].cumsum(-1)
        total = cumulative[..., -1:]
        rank = q * (total - 1).clamp_min(0).to(accumulator_dtype(total.device))
        # Middles of the bins of the two samples next to the rank, in bins.
        below, above = ((cumulative <= x).sum(-1) + 0.5 for x in (rank.floor(), rank.ceil()))
        value = torch.lerp(below.to(rank.dtype), above.to(rank.dtype), rank.frac()[..., 0]) / self.BINS
        return torch.where((total[..., 0] > 0) & (self.counts[..., -1] == 0), value, torch.nan)


def accumulator_dtype(device: torch.device | str | None) -> torch.dtype:
    """Return float64, or float32 on devices that lack it (MPS)."""
    return torch.float32 if device is not None and torch.device(device).type == "mps" else torch.float64


def _checked(values: Tensor, weights: Tensor | None, shape: torch.Size) -> Tensor:
    if values.shape[:-1] != shape or not values.is_floating_point():
        raise ShapeError(
            f"samples must be floating point of shape {list(shape)} plus an axis of samples, "
            f"got {values.dtype} of shape {list(values.shape)}"
        )
    if weights is None:
        return torch.ones((), dtype=torch.bool, device=values.device).expand(values.shape)
    if weights.shape != values.shape:
        raise ShapeError(
            f"weights must have the shape of the samples, got {list(weights.shape)} weights for {list(values.shape)} "
            "samples"
        )
    return weights


def _check_same_shape(shape: torch.Size, other: torch.Size) -> None:
    if shape != other:
        raise ShapeError(f"only accumulators of the same shape can be merged, got {list(shape)} and {list(other)}")


def _to_device_of(tensor: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    return tuple(other.to(tensor.device) for other in others)
