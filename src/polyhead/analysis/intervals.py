"""Confidence intervals of proportions and ratios."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from statistics import NormalDist

import torch
from torch import Tensor

from polyhead.errors import OptionError

Z = 1.959963984540054  # 97.5% quantile of the standard normal distribution


def normal_quantile(tail: float) -> float:
    """Return the standard normal quantile with upper tail probability `tail`.

    >>> round(normal_quantile(0.025), 3)
    1.96
    """
    return NormalDist().inv_cdf(1 - tail)


@functools.cache
def student_quantile(tail: float, degrees: int) -> float:
    """Return the quantile of Student's t distribution with upper tail probability `tail`.

    >>> round(student_quantile(0.025, 9), 3)
    2.262
    """
    if degrees < 1 or not 0 < tail < 0.5:
        raise OptionError(f"degrees must be at least 1 and the tail below one half, got {degrees} and {tail}")
    low, high = 0.0, 1.0
    while student_tail(high, degrees) > tail:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if student_tail(middle, degrees) > tail else (low, middle)
    return high


def student_tail(t: float, degrees: float) -> float:
    """Return P(T > t) for t >= 0: a finite sum, for integer degrees of freedom (Abramowitz and Stegun, 26.7.3-4).

    Other degrees of freedom are rounded down; infinitely many are the normal distribution.
    """
    if degrees == math.inf:
        return math.erfc(t / math.sqrt(2)) / 2
    degrees = max(1, int(degrees))
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


def expanded_tail(tail: float, samples: int) -> float:
    """Return the tail probability for bootstrap percentiles that restores nominal coverage for few samples.

    A resample has the variance of the sample without Bessel's correction, and normal instead of Student's tails; the
    percentiles are expanded for both (Hesterberg, What Teachers Should Know About the Bootstrap, 2015).

    >>> round(expanded_tail(0.025, 8), 4), round(expanded_tail(0.025, 1000), 4)
    (0.0057, 0.0248)
    """
    return student_tail(math.sqrt(samples / (samples - 1)) * student_quantile(tail, samples - 1), math.inf)


def wilson(hits: int, count: int, deviations: float = Z) -> tuple[float, float]:
    """Return the 95% Wilson score interval of `hits` in `count` independent draws; [0, 1] for none.

    Pass other `deviations` for another level.

    >>> [round(x, 3) for x in wilson(8, 10)]
    [0.49, 0.943]
    """
    if not 0 <= hits <= count:
        raise OptionError(f"hits must be between 0 and count, got {hits} of {count}")
    if not count:
        return 0.0, 1.0
    share, z2_n = hits / count, deviations**2 / count
    middle = (share + z2_n / 2) / (1 + z2_n)
    half_width = deviations * math.sqrt(share * (1 - share) / count + z2_n / (4 * count)) / (1 + z2_n)
    # At 0 and 1 the bound equals the share, up to rounding.
    return min(share, max(0.0, middle - half_width)), max(share, min(1.0, middle + half_width))


def wilson_of_ties(hits: float, count: int, deviations: float) -> tuple[float, float]:
    """Return the Wilson interval of hits that count ties as fractions: as 0 for the lower bound, as 1 for the upper."""
    return wilson(math.floor(hits), count, deviations)[0], wilson(math.ceil(hits), count, deviations)[1]


def ratio_of_sums(sums: Tensor, counts: Tensor, deviations: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return sums over counts, both [texts, ...], with the ends of the 95% interval of the ratio over texts.

    The interval is Student's t; pass `deviations` for another number of standard errors.

    Words of one text are not independent, texts are: the interval uses the variance between texts (the linearised
    variance of a ratio estimator). The ratio is NaN for a count of 0, the interval NaN for fewer than two texts with
    counts.
    """
    texts = (counts > 0).sum(0).to(torch.float64)
    total = _sum_in_order(counts).to(torch.float64)
    ratio = _sum_in_order(sums) / torch.where(total > 0, total, torch.nan)
    residual = sums - ratio * counts
    factor = texts / torch.where(texts > 1, texts - 1, torch.nan)
    error = (factor * _sum_in_order(residual.square())).sqrt() / total
    half_width = error * (_deviations(texts) if deviations is None else deviations)
    return ratio, ratio - half_width, ratio + half_width


def _deviations(texts: Tensor) -> Tensor:
    """Return the 97.5% quantiles of Student's t for numbers of texts; NaN for fewer than two."""
    quantiles = {n: student_quantile(0.025, int(n) - 1) for n in texts.unique().tolist() if n > 1}
    values = [quantiles.get(n, math.nan) for n in texts.flatten().tolist()]
    return torch.tensor(values, dtype=torch.float64, device=texts.device).view_as(texts)


def influence(sums: Tensor, counts: Tensor) -> Tensor:
    """Return the effect of each text on the ratio of sums to counts, both [texts, heads], to first order.

    These are the terms of the linearised ratio estimator (its empirical influence divided by the number of texts); they
    add up to 0. Texts without counts are left out.
    """
    used = (counts > 0).any(-1)
    sums, counts = sums[used], counts[used]
    total = _sum_in_order(counts).to(torch.float64)
    return (sums - _sum_in_order(sums) / total * counts) / total


def halves(sums: Tensor, counts: Tensor, documents: Tensor) -> Tensor:
    """Return the ratios of sums to counts, both [texts, heads], of the even and the odd documents, [2, heads].

    The ratio of a half without counts is NaN.
    """
    return torch.stack([sums[x].sum(0) / counts[x].sum(0) for x in (documents % 2 == 0, documents % 2 == 1)])


def influence_error(effects: Tensor) -> float:
    """Return the standard error of a ratio, or of a difference of two, from the effects of each text, [texts].

    NaN for fewer than two texts.
    """
    texts = len(effects)
    return float((effects.double().square().sum() * texts / (texts - 1)).sqrt()) if texts > 1 else math.nan


def adjusted(p: Sequence[float]) -> list[float]:
    """Return p-values adjusted for the false discovery rate (Benjamini and Hochberg, 1995).

    >>> adjusted([0.01, 0.04, 0.03, 0.5])
    [0.04, 0.05333333333333334, 0.05333333333333334, 0.5]
    """
    result, least = [1.0] * len(p), 1.0
    for rank, index in sorted(enumerate(sorted(range(len(p)), key=p.__getitem__), 1), reverse=True):
        least = min(least, p[index] * len(p) / rank)
        result[index] = least
    return result


def _sum_in_order(x: Tensor) -> Tensor:
    """Return the sum over the first axis, accumulated row by row.

    `Tensor.sum` groups rows depending on the number of columns and the CPU's vector width, so that the sum of one
    column would depend on the others and on the machine.
    """
    return x.cumsum(0)[-1] if len(x) else x.sum(0)
