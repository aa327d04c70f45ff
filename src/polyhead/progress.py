"""Progress of long computations, reported to a callback."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of one step of a computation; `total` is None if unknown, `unit` is empty for an undivided step.

    `detail` names what is done next.
    """

    step: str
    done: int = 0
    total: int | None = None
    unit: str = ""
    detail: str = ""


ProgressCallback = Callable[[Progress], object]


def ignore_progress(progress: Progress) -> None:
    """Report nothing; the default callback."""


class Step:
    """One step of a computation: calls `report` when it starts and after every `advance`."""

    def __init__(self, report: ProgressCallback, name: str, total: int | None = None, unit: str = "") -> None:
        self._report = report
        self._progress = Progress(name, 0, total, unit)
        report(self._progress)

    def advance(self, count: int = 1) -> None:
        now = self._progress
        self._progress = Progress(now.step, now.done + count, now.total, now.unit)
        self._report(self._progress)
