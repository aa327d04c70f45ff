"""How far a share counted on some text can be trusted."""

from __future__ import annotations

import math
from statistics import NormalDist

import torch
from torch import Tensor

from polyhead.errors import OptionError

Z = 1.959963984540054  # 95 of 100 draws of a normal variable lie within so many standard deviations


def normal_quantile(tail: float) -> float:
    """How many standard deviations above its mean a normal variable lies with the chance `tail`.

    >>> round(normal_quantile(0.025), 3)
    1.96
    """
    return NormalDist().inv_cdf(1 - tail)


def student_quantile(tail: float, degrees: int) -> float:
    """The same of Student's t: the mean of few draws, over a spread that was estimated from them.

    >>> round(student_quantile(0.025, 9), 3)
    2.262
    """
    if degrees < 1 or not 0 < tail < 0.5:
        raise OptionError(f"degrees must be at least 1 and the tail below one half, got {degrees} and {tail}")
    low, high = 0.0, 1.0
    while _student_tail(high, degrees) > tail:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_tail(middle, degrees) > tail else (low, middle)
    return high


def _student_tail(t: float, degrees: int) -> float:
    """The chance of more than t >= 0: for whole degrees of freedom a finite sum (Abramowitz and Stegun, 26.7.3-4)."""
    angle = math.atan(t / math.sqrt(degrees))
    square = math.cos(angle) ** 2
    odd = degrees % 2
    term, total = 1.0, 0.0
    for step in range((degrees - odd) // 2):
        total += term
        term *= square * (2 * step + 1 + odd) / (2 * step + 2 + odd)
    inside = math.sin(angle) * total * (math.cos(angle) if odd else 1.0)
    if odd:
        inside = (angle + inside) * 2 / math.pi
    return (1 - inside) / 2


def wilson(hits: int, count: int, deviations: float = Z) -> tuple[float, float]:
    """The 95% interval of Wilson for a share of `hits` in `count` independent draws; all of [0, 1] for none.

    Of another level with other `deviations`.

    >>> [round(x, 3) for x in wilson(8, 10)]
    [0.49, 0.943]
    """
    if not 0 <= hits <= count:
        raise OptionError(f"hits must lie between 0 and the count, got {hits} of {count}")
    if not count:
        return 0.0, 1.0
    share, room = hits / count, deviations**2 / count
    middle = (share + room / 2) / (1 + room)
    half_width = deviations * math.sqrt(share * (1 - share) / count + room / (4 * count)) / (1 + room)
    # At the ends the formula gives the share itself, up to rounding.
    return min(share, max(0.0, middle - half_width)), max(share, min(1.0, middle + half_width))


def ratio_of_sums(sums: Tensor, counts: Tensor, deviations: float = Z) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over counts, both [texts, ...], and the ends of the 95% interval of that ratio, drawn over texts.

    Of another level with other `deviations`.

    Words of one text are not independent, texts are: the interval follows from how much texts differ (the linearised
    variance of a ratio). NaN where there is nothing to count, and an interval of NaN for fewer than two texts.
    """
    texts = sums.shape[0]
    total = _sum_in_order(counts).to(torch.float64)
    ratio = _sum_in_order(sums) / torch.where(total > 0, total, torch.nan)
    apart = sums - ratio * counts
    factor = texts / (texts - 1) if texts > 1 else torch.nan
    half_width = deviations * (factor * _sum_in_order(apart.square())).sqrt() / total
    return ratio, ratio - half_width, ratio + half_width


def _sum_in_order(x: Tensor) -> Tensor:
    """Sum over the first axis, one row after the other.

    `Tensor.sum` groups rows by how many columns there are and by the width of the CPU's vectors, so that the sum of
    one column would depend on its neighbours and on the machine.
    """
    return x.cumsum(0)[-1] if len(x) else x.sum(0)
