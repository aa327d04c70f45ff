"""Relative position biases that depend on the distance only: ALiBi and T5."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from polyhead.errors import OptionError
from polyhead.layers.positions.position_encoding import BiasesLogits, check_count
from polyhead.layers.positions.row_tables import Recipe, row_table
from polyhead.masks import Mask


class BiasesByDistance(BiasesLogits):
    """Base of biases by key position - query position, stored as a table [heads, distances]."""

    @abstractmethod
    def table(self, before: int, after: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return the bias at the distances -before .. after, [heads, before + 1 + after].

        Args:
            before: largest distance of a key before its query.
            after: largest distance of a key after its query.
            device: device of the table.
            dtype: dtype of the table.
        """

    def covered(self, before: int, after: int) -> tuple[int, int]:
        """Return the range of distances that the table must cover; beyond it the bias is constant.

        Args:
            before: largest distance of a key before its query.
            after: largest distance of a key after its query.
        """
        return before, after

    def forward(
        self,
        query_length: int,
        key_length: int,
        *,
        max_distance: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Mask:
        """Return the bias as a Mask; query i is at key position i + key_length - query_length.

        With explicit positions (`Mask.positions`, e.g. of a rolling cache), distances may exceed the lengths;
        `max_distance` is then the largest distance. `device` is that of the parameters by default; `dtype` is float32
        by default, or float64 for float64 parameters.

        Args:
            query_length: number of queries.
            key_length: number of keys.
            max_distance: largest distance between positions, where positions are explicit.
            device: device of the bias.
            dtype: dtype of the bias.
        """
        check_lengths(query_length, key_length)
        before, after = max(key_length - 1, 0), max(query_length - 1, 0)
        if max_distance is not None:
            before, after = max(before, max_distance), max(after, max_distance)
        before, after = self.covered(before, after)
        table = self.table(before, after, bias_device(self, device), bias_dtype(self, dtype))
        return Mask.relative(cast_bias(table, dtype), before)


class ALiBi(BiasesByDistance):
    """Attention with linear biases (Press et al. 2022): `-slope * |key - query|`, one slope per head.

    The slopes are the paper's geometric sequence; for head counts that are not a power of two, the remaining heads take
    slopes of the next power of two, as in the paper. `learnable` makes them a parameter with these initial values.

    Args:
        num_heads: heads of the layer.
        learnable: whether slopes are trained.

    >>> ALiBi(4).slopes().tolist()
    [0.25, 0.0625, 0.015625, 0.00390625]
    """

    weight: nn.Parameter | None

    def __init__(self, num_heads: int, *, learnable: bool = False) -> None:
        super().__init__()
        check_count("num_heads", num_heads)
        self.num_heads = num_heads
        self._row_table = row_table(_LinearBias(num_heads))
        self.register_parameter("weight", nn.Parameter(torch.empty(num_heads)) if learnable else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            with torch.no_grad():
                self.weight.copy_(alibi_slopes(self.num_heads, self.weight.device))

    @property
    def learnable(self) -> bool:
        return self.weight is not None

    def slopes(self, device: torch.device | str | None = None) -> Tensor:
        """Return the slope of every head, [heads].

        Args:
            device: device of the result; that of the parameters by default.
        """
        return self.weight if self.weight is not None else alibi_slopes(self.num_heads, bias_device(self, device))

    def table(self, before: int, after: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        count = before + 1 + after
        if self.weight is None:
            return self._row_table.rows(-before, count, device, dtype)[0].t()
        distance = torch.arange(-before, after + 1, device=device).abs()
        return self.weight.to(device, dtype).unsqueeze(1) * -distance

    def extra_repr(self) -> str:
        return f"{self.num_heads}, learnable={self.learnable}"


@dataclass(frozen=True)
class _LinearBias(Recipe):
    num_heads: int

    def build(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        slopes = alibi_slopes(self.num_heads, positions.device, dtype)
        return (-positions.abs().to(dtype).unsqueeze(-1) * slopes,)


def alibi_slopes(num_heads: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return 2 ** (-8 i / h), i = 1 .. h; heads beyond a power of two interpolate between these slopes."""
    power = 1 << (num_heads.bit_length() - 1)
    base = torch.arange(1, power + 1, device=device).to(dtype) * (-8.0 / power)
    interpolated = (2 * torch.arange(num_heads - power, device=device) + 1).to(dtype) * (-4.0 / power)
    return torch.cat((base, interpolated)).exp2()


class T5Bias(BiasesByDistance):
    """Relative position bias of T5 (Raffel et al. 2020): a learned bias per head and bucket of distances.

    `weight` is [num_buckets, num_heads], the embedding in T5 checkpoints. Small distances have a bucket each, larger
    ones share buckets that grow logarithmically up to `max_distance`, and all beyond share the last. With
    `bidirectional` half of the buckets are for keys after the query; without it all those keys share bucket 0.

    Args:
        num_heads: heads of the layer.
        num_buckets: buckets of distances.
        max_distance: distance from which on all share the last bucket.
        bidirectional: whether keys after the query have buckets.
    """

    def __init__(
        self, num_heads: int, *, num_buckets: int = 32, max_distance: int = 128, bidirectional: bool = True
    ) -> None:
        super().__init__()
        check_count("num_heads", num_heads)
        check_count("num_buckets", num_buckets)
        check_count("max_distance", max_distance)
        sides = 2 if bidirectional else 1
        if num_buckets % sides or num_buckets < 2 * sides:
            rule = "even and at least 4 when bidirectional" if bidirectional else "at least 2"
            raise OptionError(f"num_buckets must be {rule}, got {num_buckets}")
        exact = num_buckets // sides // 2
        if max_distance <= exact:
            raise OptionError(
                f"max_distance must exceed the {exact} distances that have their own of {num_buckets} buckets, "
                f"got {max_distance}"
            )
        self.num_heads = num_heads
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        self.bidirectional = bidirectional
        self._row_table = row_table(_T5Buckets(num_buckets, max_distance, bidirectional))
        self.weight = nn.Parameter(torch.empty(num_buckets, num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)

    def covered(self, before: int, after: int) -> tuple[int, int]:
        # All distances from max_distance on share a bucket, so clamping the index of a shorter table is exact.
        return min(before, self.max_distance), min(after, self.max_distance)

    def table(self, before: int, after: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        (buckets,) = self._row_table.rows(-before, before + 1 + after, device, torch.int64)
        return functional.embedding(buckets, self.weight.to(device, dtype)).t()

    def extra_repr(self) -> str:
        return (
            f"{self.num_heads}, num_buckets={self.num_buckets}, max_distance={self.max_distance}, "
            f"bidirectional={self.bidirectional}"
        )


@dataclass(frozen=True)
class _T5Buckets(Recipe):
    num_buckets: int
    max_distance: int
    bidirectional: bool

    def build(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        buckets = self.num_buckets // 2 if self.bidirectional else self.num_buckets
        distance = positions.abs() if self.bidirectional else (-positions).clamp(min=0)
        exact = buckets // 2
        # float32, as the checkpoints were trained: rounding decides the bucket of a power of two.
        log_distance = torch.log(distance.clamp(min=1).float() / exact) / math.log(self.max_distance / exact)
        far = (exact + (log_distance * (buckets - exact)).to(dtype)).clamp(max=buckets - 1)
        bucket = torch.where(distance < exact, distance, far)
        return (bucket + buckets * (positions > 0) if self.bidirectional else bucket,)


def check_lengths(query_length: int, key_length: int) -> None:
    for name, length in (("query_length", query_length), ("key_length", key_length)):
        if length < 0:
            raise OptionError(f"{name} must not be negative, got {length}")


def bias_device(module: nn.Module, device: torch.device | str | None) -> torch.device:
    """Return the requested device, else that of the parameters, else the default device."""
    if device is not None:
        return torch.device(device)
    for parameter in module.parameters():
        return parameter.device
    return torch.empty(0).device


def bias_dtype(module: nn.Module, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype to compute in, at least float32: half precision merges large distances."""
    if dtype is None:
        dtype = next((parameter.dtype for parameter in module.parameters()), torch.float32)
    return torch.promote_types(dtype, torch.float32)


def cast_bias(bias: Tensor, dtype: torch.dtype | None) -> Tensor:
    if dtype is None or dtype == bias.dtype:
        return bias
    if dtype == torch.float16:
        # An overflow to -inf would mask the key.
        bias = bias.clamp(min=torch.finfo(dtype).min, max=torch.finfo(dtype).max)
    return bias.to(dtype)
