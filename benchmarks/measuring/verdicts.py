"""The definition of a miss, and the two kinds of measurements with bounds.

A miss is a median above its bound. A row with a 95% interval wider than 2% of its median is timed again; if it is still
as wide after the last repetition, the bound is unsettled, neither passed nor missed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

Verdict = Literal["", "ok", "miss", "unsettled"]
WIDEST = 0.02  # of the median, from the low end of a 95% interval to its high end
RESAMPLES = 10_000


def judge(median: float, low: float, high: float, bound: float | None) -> Verdict:
    """Return the verdict on a median and its interval; empty without a bound.

    >>> judge(1.04, 1.03, 1.05, 1.05), judge(1.06, 1.05, 1.07, 1.05), judge(1.3, 1.2, 1.4, 1.05)
    ('ok', 'miss', 'unsettled')
    """
    if bound is None:
        return ""
    if high - low > WIDEST * median:
        return "unsettled"
    return "ok" if median <= bound else "miss"  # NaN is a miss


@dataclass(frozen=True)
class Ratio:
    """Median of paired ratios and its 95% bootstrap interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        places = 3 if self.median >= 0.05 else 4
        return f"{self.median:.{places}f} [{self.low:.{places}f}, {self.high:.{places}f}]"


def paired_ratio(ours: list[float], theirs: list[float], *, seed: int = 0) -> Ratio:
    """Return the median of ours[i] / theirs[i], with its interval by resampling the pairs.

    >>> print(paired_ratio([2.0, 4.0, 8.0], [1.0, 2.0, 4.0]))
    2.000 [2.000, 2.000]
    """
    if len(ours) != len(theirs) or not ours:
        raise ValueError(f"paired samples must be as many on both sides, got {len(ours)} and {len(theirs)}")
    ratios = np.asarray(ours) / np.asarray(theirs)
    drawn = np.random.default_rng(seed).integers(0, len(ratios), (RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(ratios[drawn], axis=1), [2.5, 97.5])
    return Ratio(float(np.median(ratios)), float(low), float(high))


class Bounded:
    """A median with its interval, and its upper bound, if it has one."""

    bound: float | None

    @property
    def interval(self) -> tuple[float, float, float]:
        """Median, low end and high end."""
        raise NotImplementedError

    @property
    def verdict(self) -> Verdict:
        return judge(*self.interval, self.bound)

    @property
    def above(self) -> bool:
        """True if the median is above the bound, however wide its interval."""
        return self.bound is not None and not self.interval[0] <= self.bound


@dataclass(frozen=True)
class Comparison(Bounded):
    """One contender's time over another's."""

    subject: str
    against: str
    ratio: Ratio
    bound: float | None = None

    @property
    def interval(self) -> tuple[float, float, float]:
        return self.ratio.median, self.ratio.low, self.ratio.high

    def __str__(self) -> str:
        return f"{self.subject} / {self.against} is {self.ratio}"


@dataclass(frozen=True)
class Figure(Bounded):
    """A number by itself, such as bytes or milliseconds; a count without noise has no interval."""

    what: str
    value: float
    unit: str = ""
    bound: float | None = None
    low: float | None = None
    high: float | None = None

    @classmethod
    def of_time(cls, name: str, samples_ms: list[float], bound: float | None = None) -> Figure:
        """Return the median time of a contender, with its interval."""
        found = paired_ratio(samples_ms, [1.0] * len(samples_ms))
        return cls(name, found.median, "ms", bound, found.low, found.high)

    @property
    def interval(self) -> tuple[float, float, float]:
        low, high = (self.value if end is None else end for end in (self.low, self.high))
        return self.value, low, high

    @property
    def amount(self) -> str:
        interval = "" if self.low is None else f" [{self.low:.4g}, {self.high:.4g}]"
        return f"{self.value:.4g} {self.unit}".rstrip() + interval

    def __str__(self) -> str:
        return f"{self.what} is {self.amount}"
