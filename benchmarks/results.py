"""What a run leaves behind: rows as plain values, written as JSON and shown as a table with its misses marked."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from benchmarks.runner import Comparison, Timings

HEADER = ("bench", "shape", "ours", "against", "theirs", "ours / theirs [95%]", "bound", "")


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
    ) -> Row:
        kept = tuple(comparison for comparison in comparisons if comparison is not None)
        return cls(bench, shape, str(dtype).removeprefix("torch."), timings, kept, notes or {}, failed)

    @property
    def misses(self) -> list[str]:
        found = [f"{c.subject} / {c.against} is {c.ratio}, above {c.bound}" for c in self.comparisons if c.missed]
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
            "failed": self.failed,
            "notes": self.notes,
            "samples_ms": {name: [round(s, 6) for s in samples] for name, samples in self.timings.samples_ms.items()},
        }


def write(path: Path, facts: dict[str, object], rows: Sequence[Row]) -> None:
    """The whole run so far; written after every row, so that a run that is cut short leaves what it found."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {**facts, "misses": misses(rows), "rows": [row.to_dict() for row in rows]}
    text = json.dumps(content, indent=1, ensure_ascii=False)
    path.write_text(_samples_on_one_line(text) + "\n", encoding="utf-8")


def _samples_on_one_line(text: str) -> str:
    """Keep a list of numbers on one line: thirty lines a list would bury the figures."""
    return re.sub(r"\[\s+([-+.\de,\s]+?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text)


def misses(rows: Sequence[Row]) -> list[str]:
    return [miss for row in rows for miss in row.misses]


def cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The table's lines, a comparison each; who could not run gets a line that says why."""
    lines: list[tuple[str, ...]] = []
    for row in rows:
        timings = row.timings
        place = (row.bench, row.shape)
        for c in row.comparisons:
            ours, theirs = (f"{timings.median_ms(name):.4g} ms" for name in (c.subject, c.against))
            _, _, option = c.subject.partition(", ")  # "polyhead, finite=True" is ours with an option
            ours += f" {option}" if option else ""
            bound = "" if c.bound is None else f"<= {c.bound:g}"
            against = c.against + (" (floor)" if row.notes.get("floor") == c.against else "")
            verdict = "MISS" if c.missed else "ok" if c.bound is not None else ""
            lines.append((*place, ours, against, theirs, str(c.ratio), bound, verdict))
            place = ("", "")
        for name, reason in timings.absent.items():
            lines.append((*place, "", name, reason, "", "", ""))
            place = ("", "")
        if row.failed:
            lines.append((*place, "", "", row.failed, "", "", "MISS"))
    return lines


def show(rows: Sequence[Row]) -> None:
    """Print the table, then the misses by name."""
    lines = cells(rows)
    if importlib.util.find_spec("rich") is not None:
        from rich.console import Console
        from rich.table import Table

        table = Table(*HEADER, box=None, pad_edge=False)
        for line in lines:
            table.add_row(*line, style="bold red" if line[-1] == "MISS" else None)
        console = Console()
        # Files and pipes have no width of their own; a wrapped table there is no table.
        (console if console.is_terminal else Console(width=150)).print(table)
    else:
        widths = [max(len(line[i]) for line in (HEADER, *lines)) for i in range(len(HEADER))]
        for line in (HEADER, *lines):
            print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    found = misses(rows)
    print(f"\n{len(found)} miss{'' if len(found) == 1 else 'es'}" + (":" if found else ""))
    for miss in found:
        print(f"  {miss}")
