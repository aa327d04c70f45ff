"""How far a share counted on some text can be trusted."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from polyhead.errors import OptionError

Z = 1.959963984540054  # 95 of 100 draws of a normal variable lie within so many standard deviations


def wilson(hits: int, count: int) -> tuple[float, float]:
    """The 95% interval of Wilson for a share of `hits` in `count` independent draws; all of [0, 1] for none.

    >>> [round(x, 3) for x in wilson(8, 10)]
    [0.49, 0.943]
    """
    if not 0 <= hits <= count:
        raise OptionError(f"hits must lie between 0 and the count, got {hits} of {count}")
    if not count:
        return 0.0, 1.0
    share, room = hits / count, Z * Z / count
    middle = (share + room / 2) / (1 + room)
    reach = Z * math.sqrt(share * (1 - share) / count + room / (4 * count)) / (1 + room)
    # At the ends the formula gives the share itself, up to rounding.
    return min(share, max(0.0, middle - reach)), max(share, min(1.0, middle + reach))


def ratio_of_sums(sums: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over counts, both [texts, ...], and the ends of the 95% interval of that ratio, drawn over texts.

    Words of one text are not independent, texts are: the interval follows from how much texts differ (the linearised
    variance of a ratio). NaN where there is nothing to count, and an interval of NaN for fewer than two texts.
    """
    texts = sums.shape[0]
    total = counts.sum(0).to(torch.float64)
    ratio = sums.sum(0) / torch.where(total > 0, total, torch.nan)
    apart = sums - ratio * counts
    factor = texts / (texts - 1) if texts > 1 else torch.nan
    reach = Z * (factor * apart.square().sum(0)).sqrt() / total
    return ratio, ratio - reach, ratio + reach
