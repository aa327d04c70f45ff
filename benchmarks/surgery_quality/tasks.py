"""Quality of a model: splits of a text to calibrate, choose and report on, and the figures of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor, nn

from polyhead.surgery.selection.evidence import Objectives

Split = Literal["choose", "report"]
SPLITS: tuple[Split, ...] = get_args(Split)
Batch = Mapping[str, Any]


@dataclass(frozen=True)
class Figure:
    """A number, and the standard error of its difference to the whole model's on the same rows."""

    value: float
    error: float = 0.0


class Task(Protocol):
    """A model on a text; it is measured as it is at the call, whichever heads were removed."""

    model: nn.Module
    objectives: Objectives

    @property
    def name(self) -> str: ...

    @property
    def calibration(self) -> Sequence[Batch]: ...

    def figures(self, split: Split) -> dict[str, Figure]:
        """Return every figure of the model as it is."""

    def loss(self) -> float:
        """Return the loss that a search minimises, on a part of the choosing split."""


def spearman(one: Tensor, other: Tensor) -> float:
    """Return the rank correlation of two columns of numbers; equal numbers have the mean of their ranks.

    >>> round(spearman(torch.tensor([1.0, 2.0, 3.0, 3.0]), torch.tensor([10.0, 20.0, 40.0, 30.0])), 6)
    0.948683
    """
    ranks = torch.stack((_ranks(one), _ranks(other)))
    ranks = ranks - ranks.mean(1, keepdim=True)
    return float((ranks[0] * ranks[1]).sum() / ranks.norm(dim=1).prod())


def _ranks(x: Tensor) -> Tensor:
    _, places, counts = torch.unique(x, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts.double() - 1) / 2)[places]
