"""Row statistics of weights that combine several softmax maps.

Combined weights may be negative and need not sum to 1, so they have no entropy; each softmax map has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from polyhead.errors import OptionError

COMBINED = ("signed_mass", "absolute_mass", "largest_weight")


@dataclass(frozen=True, slots=True, eq=False)
class CombinedWeights:
    """Statistics of each row u of combined weights, [batch, heads, queries].

    They are float32 (float64 for float64 input). Statistics that were not requested are None.
    """

    signed_mass: Tensor | None = None  # sum_j u_j
    absolute_mass: Tensor | None = None  # sum_j |u_j|
    largest_weight: Tensor | None = None  # max_j |u_j|


def checked_names(requested: str | Sequence[str]) -> tuple[str, ...]:
    """Return the requested statistics of combined weights; raise OptionError for undefined ones."""
    names = (requested,) if isinstance(requested, str) else tuple(requested)
    for name in names:
        if name not in COMBINED:
            raise OptionError(
                "combined weights can be negative and need not sum to 1: only "
                f"{', '.join(COMBINED)} are defined for them, got {name!r}; each softmax map has row statistics"
            )
    return names
