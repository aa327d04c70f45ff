"""Scaling of rotary frequencies for context extension."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from polyhead.errors import OptionError
from polyhead.layers.positions.position_encoding import check_count, check_positive
from polyhead.layers.positions.row_tables import powers


def inverse_frequencies(base: float, rotary_dim: int, device: torch.device) -> Tensor:
    """Return radians per token of each channel pair i (`inv_freq`), base ** (-2 i / rotary_dim), [rotary_dim / 2]."""
    return powers(base, rotary_dim // 2, rotary_dim, device)


@dataclass(frozen=True)
class RotaryScaling(ABC):
    """Base of rotary scalings, which extend the context by a factor of at least 1.

    Args:
        factor: by how much the context is longer than in training.
    """

    min_rotary_dim: ClassVar[int] = 2

    factor: float

    def __post_init__(self) -> None:
        check_positive("factor", self.factor)
        if self.factor < 1:
            raise OptionError(
                f"factor must be at least 1, got {self.factor}; it is the ratio of extended to original context length"
            )

    @abstractmethod
    def frequencies(self, base: float, rotary_dim: int, device: torch.device, length: int | None) -> Tensor:
        """Return radians per token of every channel pair, [rotary_dim / 2]; `length` is the current length.

        Args:
            base: base of the frequencies (`rope_theta`).
            rotary_dim: channels that are rotated.
            device: device of the result.
            length: current length; None if it is not known.
        """

    @property
    def magnitude(self) -> float:
        """Factor by which the rotated vectors are multiplied."""
        return 1.0

    def depends_on(self, length: int) -> bool:
        """Return True if the frequencies at this current length differ from those of short sequences.

        Args:
            length: current length.
        """
        return False

    def check(self, base: float, rotary_dim: int) -> None:
        """Raise if the scaling is not defined for this base and width.

        Args:
            base: base of the frequencies (`rope_theta`).
            rotary_dim: channels that are rotated.
        """
        if rotary_dim < self.min_rotary_dim:
            raise OptionError(
                f"{type(self).__name__} needs a rotary_dim of at least {self.min_rotary_dim}, got {rotary_dim}"
            )


@dataclass(frozen=True)
class LinearScaling(RotaryScaling):
    """Position interpolation (Chen et al. 2023): every position is divided by `factor`."""

    def frequencies(self, base: float, rotary_dim: int, device: torch.device, length: int | None) -> Tensor:
        return inverse_frequencies(base, rotary_dim, device) / self.factor


@dataclass(frozen=True)
class NTKScaling(RotaryScaling):
    """NTK-aware scaling (bloc97 2023): a larger base, the same at every length.

    The base is multiplied by factor ** (d / (d - 2)), d = rotary_dim, which leaves the highest frequency unchanged and
    divides the lowest by exactly `factor`. Rotated keys stay valid at any length, so they can be cached.
    """

    min_rotary_dim = 4

    def frequencies(self, base: float, rotary_dim: int, device: torch.device, length: int | None) -> Tensor:
        return inverse_frequencies(base * self.factor ** (rotary_dim / (rotary_dim - 2)), rotary_dim, device)


@dataclass(frozen=True)
class DynamicNTKScaling(RotaryScaling):
    """NTK-aware scaling that depends on the current length (emozilla 2023; "dynamic" in transformers).

    Frequencies are unchanged up to `original_length`; at a length n beyond it the base is multiplied by
    (factor * n / original_length - (factor - 1)) ** (d / (d - 2)), d = rotary_dim. The current length is the offset
    plus the number of tokens, or `length` if positions are passed as a tensor, whose values are never read. Cached keys
    have the frequencies of the length at which they were rotated, as in transformers.

    Args:
        original_length: context length of the training.
    """

    min_rotary_dim = 4

    original_length: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("original_length", self.original_length)

    def frequencies(self, base: float, rotary_dim: int, device: torch.device, length: int | None) -> Tensor:
        if length is not None and self.depends_on(length):
            stretch = self.factor * length / self.original_length - (self.factor - 1)
            base = base * stretch ** (rotary_dim / (rotary_dim - 2))
        return inverse_frequencies(base, rotary_dim, device)

    def depends_on(self, length: int) -> bool:
        return length > self.original_length


@dataclass(frozen=True)
class YarnScaling(RotaryScaling):
    """YaRN (Peng et al. 2023): high frequencies unchanged, low ones interpolated, a ramp between.

    A pair with more than `beta_fast` rotations in `original_length` tokens is unchanged; the frequency of one with
    fewer than `beta_slow` is divided by `factor`. Rotated vectors are multiplied by `attention_factor`, by default
    0.1 ln(factor) + 1, or with both `mscale` and `mscale_all_dim`, as in DeepSeek's models,
    (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1).

    Args:
        original_length: context length of the training.
        beta_fast: channel pairs with more rotations than this over the original context are not scaled.
        beta_slow: channel pairs with fewer rotations than this over the original context are scaled in full.
        attention_factor: factor of the rotated queries and keys; computed from `factor` by default.
        mscale, mscale_all_dim: coefficients of that computation in DeepSeek's models.
        truncate: round the ends of the ramp outwards to whole channel pairs.
    """

    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("original_length", self.original_length)
        for name in ("beta_fast", "beta_slow"):
            check_positive(name, getattr(self, name))
        if self.beta_fast < self.beta_slow:
            raise OptionError(f"beta_fast must be at least beta_slow, got {self.beta_fast} and {self.beta_slow}")
        if self.attention_factor is not None:
            check_positive("attention_factor", self.attention_factor)

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        growth = 0.1 * math.log(self.factor)
        if self.mscale and self.mscale_all_dim:
            return (self.mscale * growth + 1.0) / (self.mscale_all_dim * growth + 1.0)
        return growth + 1.0

    def frequencies(self, base: float, rotary_dim: int, device: torch.device, length: int | None) -> Tensor:
        first, last = (self._pair_with_rotations(beta, base, rotary_dim) for beta in (self.beta_fast, self.beta_slow))
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, rotary_dim - 1)  # the upper limit is that of transformers
        if first == last:
            last += 0.001  # avoids a division by zero
        unscaled = inverse_frequencies(base, rotary_dim, device)
        pair = torch.arange(rotary_dim // 2, device=device).to(unscaled.dtype)
        interpolated = ((pair - first) / (last - first)).clamp(0.0, 1.0)
        return unscaled * (1.0 - interpolated) + unscaled / self.factor * interpolated

    def _pair_with_rotations(self, rotations: float, base: float, rotary_dim: int) -> float:
        """Return the (fractional) index of the pair with this many rotations within the original length."""
        return rotary_dim * math.log(self.original_length / (rotations * 2 * math.pi)) / (2 * math.log(base))

    def check(self, base: float, rotary_dim: int) -> None:
        super().check(base, rotary_dim)
        if base <= 1:
            raise OptionError(f"YarnScaling needs a base above 1, got {base}")


@dataclass(frozen=True)
class Llama3Scaling(RotaryScaling):
    """Scaling of Llama 3.1, by wavelength.

    Wavelengths below original_length / high_freq_factor are unchanged, those above original_length / low_freq_factor
    are multiplied by `factor`, and those between are interpolated.

    Args:
        low_freq_factor: wavelengths longer than original_length / low_freq_factor are scaled in full.
        high_freq_factor: wavelengths shorter than original_length / high_freq_factor are not scaled.
        original_length: context length of the training.
    """

    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("original_length", self.original_length)
        check_positive("low_freq_factor", self.low_freq_factor)
        check_positive("high_freq_factor", self.high_freq_factor)
        if self.high_freq_factor <= self.low_freq_factor:
            raise OptionError(
                "high_freq_factor must be larger than low_freq_factor, "
                f"got {self.high_freq_factor} and {self.low_freq_factor}"
            )

    def frequencies(self, base: float, rotary_dim: int, device: torch.device, length: int | None) -> Tensor:
        unscaled = inverse_frequencies(base, rotary_dim, device)
        rotations = unscaled * (self.original_length / (2.0 * math.pi))
        ramp = (rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        unscaled_share = ramp.clamp(0.0, 1.0)
        return unscaled * unscaled_share + unscaled / self.factor * (1.0 - unscaled_share)
