"""What can be told of weights that were made of several softmax maps: how much they add and take, and the largest.

They may be negative and need not sum to 1, so they are no distribution and have no entropy; each map has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from polyhead.errors import OptionError

COMBINED = ("signed_mass", "absolute_mass", "largest_weight")


@dataclass(frozen=True, slots=True, eq=False)
class CombinedWeights:
    """Of every row of combined weights u, [batch, heads, queries] in float32 (float64 for float64 input).

    What was not asked for is None.
    """

    signed_mass: Tensor | None = None  # sum_j u_j
    absolute_mass: Tensor | None = None  # sum_j |u_j|
    largest_weight: Tensor | None = None  # max_j |u_j|


def checked_names(requested: str | Sequence[str]) -> tuple[str, ...]:
    """What is asked of combined weights, refused where they do not have it."""
    names = (requested,) if isinstance(requested, str) else tuple(requested)
    for name in names:
        if name not in COMBINED:
            raise OptionError(
                "combined weights can be negative and need not sum to 1: only "
                f"{', '.join(COMBINED)} are told of them, got {name!r}; each softmax has statistics of its own"
            )
    return names
