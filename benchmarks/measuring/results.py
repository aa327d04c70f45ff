"""Results of a run: rows as plain values, written as JSON, and the lines of a table with its misses marked."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from polyhead.costs.measuring.runner import Comparison, Timings
from polyhead.observation.saving import write_whole

if TYPE_CHECKING:
    from rich.table import Table

HEADER = ("bench", "shape", "ours", "against", "theirs", "ours / theirs [95%]", "bound", "")


@dataclass(frozen=True)
class Figure:
    """A number that stands by itself, as bytes do, with the most it may be."""

    what: str
    value: float
    unit: str = ""
    bound: float | None = None

    @property
    def missed(self) -> bool:
        return self.bound is not None and not self.value <= self.bound

    def __str__(self) -> str:
        return f"{self.value:.4g} {self.unit}".rstrip()


@dataclass(frozen=True)
class Row:
    """One bench at one shape: every contender's time, and the ratios that follow."""

    bench: str
    shape: str
    dtype: str
    timings: Timings
    comparisons: tuple[Comparison, ...]
    notes: dict[str, object] = field(default_factory=dict)
    failed: str = ""  # a promise beside the times that was broken
    figures: tuple[Figure, ...] = ()

    @classmethod
    def of(
        cls,
        bench: str,
        shape: str,
        dtype: torch.dtype,
        timings: Timings,
        comparisons: Iterable[Comparison | None],
        *,
        notes: dict[str, object] | None = None,
        failed: str = "",
        figures: Iterable[Figure] = (),
    ) -> Row:
        kept = tuple(comparison for comparison in comparisons if comparison is not None)
        name = str(dtype).removeprefix("torch.")
        return cls(bench, shape, name, timings, kept, notes or {}, failed, tuple(figures))

    @property
    def misses(self) -> list[str]:
        found = [f"{c.subject} / {c.against} is {c.ratio}, above {c.bound}" for c in self.comparisons if c.missed]
        found += [f"{figure.what} is {figure}, above {figure.bound:g}" for figure in self.figures if figure.missed]
        return [f"{self.bench} at {self.shape}: {what}" for what in [*found, *([self.failed] if self.failed else [])]]

    def to_dict(self) -> dict[str, object]:
        return {
            "bench": self.bench,
            "shape": self.shape,
            "dtype": self.dtype,
            "median_ms": {name: round(self.timings.median_ms(name), 6) for name in self.timings.samples_ms},
            "absent": dict(self.timings.absent),
            "peak_mib": {name: round(peak, 1) for name, peak in self.timings.peak_mib.items()},
            "comparisons": [{**asdict(c), "missed": c.missed} for c in self.comparisons],
            "figures": [{**asdict(figure), "missed": figure.missed} for figure in self.figures],
            "failed": self.failed,
            "notes": self.notes,
            "samples_ms": {name: [round(s, 6) for s in samples] for name, samples in self.timings.samples_ms.items()},
        }


def write(path: Path, facts: dict[str, object], rows: Sequence[Row]) -> None:
    """The whole run so far; written after every row, so that a run that is cut short leaves what it found."""
    content = {**facts, "misses": misses(rows), "rows": [row.to_dict() for row in rows]}
    text = json.dumps(content, indent=1, ensure_ascii=False)
    write_whole(path, (_samples_on_one_line(text) + "\n").encode())


def _samples_on_one_line(text: str) -> str:
    """Keep a list of numbers on one line: thirty lines a list would bury the figures."""
    return re.sub(r"\[\s+([-+.\de,\s]+?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text)


def misses(rows: Sequence[Row]) -> list[str]:
    return [miss for row in rows for miss in row.misses]


def cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The table's lines, a comparison or a figure each; who could not run gets a line that says why."""
    lines: list[tuple[str, ...]] = []
    for row in rows:
        timings = row.timings
        place = (row.bench, row.shape)
        for c in row.comparisons:
            ours, theirs = (f"{timings.median_ms(name):.4g} ms" for name in (c.subject, c.against))
            _, _, option = c.subject.partition(", ")  # "polyhead, finite=True" is ours with an option
            ours += f" {option}" if option else ""
            against = c.against + (" (floor)" if row.notes.get("floor") == c.against else "")
            lines.append((*place, ours, against, theirs, str(c.ratio), *_verdict(c)))
            place = ("", "")
        for figure in row.figures:
            lines.append((*place, str(figure), figure.what, "", "", *_verdict(figure)))
            place = ("", "")
        for name, reason in timings.absent.items():
            lines.append((*place, "", name, reason, "", "", ""))
            place = ("", "")
        if row.failed:
            lines.append((*place, "", "", row.failed, "", "", "MISS"))
    return lines


def at_most(bound: float | None) -> str:
    """A bound in words; one far below 1 as the fraction it was meant as.

    >>> at_most(1.05), at_most(1 / 23)
    ('<= 1.05', '<= 1/23')
    """
    if bound is None:
        return ""
    return f"<= 1/{1 / bound:.4g}" if 0 < bound <= 0.1 else f"<= {bound:g}"


def _verdict(found: Comparison | Figure) -> tuple[str, str]:
    return at_most(found.bound), "MISS" if found.missed else "ok" if found.bound is not None else ""


def rich_table(rows: Sequence[Row]) -> Table:
    """For a terminal; the misses are red."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in HEADER:
        table.add_column(name, overflow="fold")
    for line in cells(rows):
        table.add_row(*line, style="bold red" if line[-1] == "MISS" else None)
    return table


def plain_table(rows: Sequence[Row]) -> str:
    """For where there are only letters."""
    lines = [HEADER, *cells(rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADER))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def count_of_misses(rows: Sequence[Row]) -> str:
    """Number of misses, then each by name."""
    found = misses(rows)
    first = f"{len(found)} miss{'' if len(found) == 1 else 'es'}" + (":" if found else "")
    return "\n".join([first, *(f"  {miss}" for miss in found)])
