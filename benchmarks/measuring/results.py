"""Results of a run: rows as plain values, their JSON file, and the lines of their table."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring.cases import Case, Pair
from benchmarks.measuring.verdicts import Bounded, Comparison, Figure, Ratio, Verdict, paired_ratio
from polyhead.costs.measuring.runner import Timings
from polyhead.observation.saving import write_atomically


@dataclass(frozen=True)
class Row:
    """A timed case: the times of all contenders, and the ratios and figures derived from them."""

    bench: str
    shape: str
    dtype: str
    timings: Timings
    comparisons: tuple[Comparison, ...] = ()
    figures: tuple[Figure, ...] = ()
    failed: str = ""
    notes: Mapping[str, object] = field(default_factory=dict)
    rounds: int = 1  # how often it was timed; the samples are those of all

    @classmethod
    def of(cls, case: Case, dtype: torch.dtype, timings: Timings, rounds: int = 1) -> Row:
        """Return the row of a case with these times of its calls."""
        each = {name: [sample / case.items for sample in samples] for name, samples in timings.samples_ms.items()}
        timings = Timings(each, timings.absent, timings.peak_mib)
        comparisons, floor = _compared(timings, case.pairs)
        notes = dict(case.notes) if floor is None else {"floor": floor, **case.notes}
        name = str(dtype).removeprefix("torch.")
        figures = tuple(case.figures(timings))
        return cls(case.bench, case.shape, name, timings, comparisons, figures, case.failed, notes, rounds)

    @property
    def bounded(self) -> list[Bounded]:
        return [x for x in (*self.comparisons, *self.figures) if x.bound is not None]

    def found(self, verdict: Verdict) -> list[str]:
        """Return the comparisons and figures with a verdict as text; a failure is a miss."""
        words = [f"{x}, {'above' if x.above else 'within'} {x.bound:g}" for x in self.bounded if x.verdict == verdict]
        words += [self.failed] if self.failed and verdict == "miss" else []
        return [f"{self.bench} at {self.shape}: {what}" for what in words]

    def to_dict(self) -> dict[str, object]:
        return {
            "bench": self.bench,
            "shape": self.shape,
            "dtype": self.dtype,
            "median_ms": {name: round(self.timings.median_ms(name), 6) for name in self.timings.samples_ms},
            "absent": dict(self.timings.absent),
            "peak_mib": {name: round(peak, 1) for name, peak in self.timings.peak_mib.items()},
            "comparisons": [{**asdict(c), "verdict": c.verdict} for c in self.comparisons],
            "figures": [{**asdict(figure), "verdict": figure.verdict} for figure in self.figures],
            "failed": self.failed,
            "notes": self.notes,
            "rounds": self.rounds,
            "samples_ms": {name: [round(s, 6) for s in samples] for name, samples in self.timings.samples_ms.items()},
        }

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Row:
        """Read a row, also of a file from before rows were repeated; verdicts are computed again."""
        comparisons = [
            Comparison(c["subject"], c["against"], Ratio(**c["ratio"]), c["bound"]) for c in row["comparisons"]
        ]
        names = ("what", "value", "unit", "bound", "low", "high")
        figures = [Figure(**{name: x[name] for name in names if name in x}) for x in row.get("figures", ())]
        timings = Timings(row["samples_ms"], row["absent"], row["peak_mib"])
        place = row["bench"], row["shape"], row["dtype"], timings
        return cls(*place, tuple(comparisons), tuple(figures), row["failed"], row["notes"], row.get("rounds", 1))


def _compared(timings: Timings, pairs: Sequence[Pair]) -> tuple[tuple[Comparison, ...], str | None]:
    """Return the comparisons of contenders that ran, and the fastest baseline if there were several."""
    found: dict[tuple[str, str], Comparison] = {}
    floor = None
    for pair in pairs:
        names = (pair.against,) if isinstance(pair.against, str) else pair.against
        against = min((name for name in names if name in timings.samples_ms), key=timings.median_ms, default=None)
        floor = against if not isinstance(pair.against, str) else floor
        if against is not None and pair.subject in timings.samples_ms and (pair.subject, against) not in found:
            ratio = paired_ratio(timings.samples_ms[pair.subject], timings.samples_ms[against])
            found[pair.subject, against] = Comparison(pair.subject, against, ratio, pair.bound)
    return tuple(found.values()), floor


def write(path: Path, facts: Mapping[str, object], rows: Sequence[Row]) -> None:
    """Write the rows of a run so far, so that an interrupted run keeps them."""
    verdicts = {"misses": listed(rows, "miss"), "unsettled": listed(rows, "unsettled")}
    content = {**facts, **verdicts, "rows": [row.to_dict() for row in rows]}
    text = json.dumps(content, indent=1, ensure_ascii=False)
    write_atomically(path, (_samples_on_one_line(text) + "\n").encode())


def read(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """Return the facts and the rows of a run."""
    facts = json.loads(path.read_text(encoding="utf-8"))
    return facts, [Row.from_dict(row) for row in facts.pop("rows")]


def _samples_on_one_line(text: str) -> str:
    """Put each list of numbers on one line."""
    return re.sub(r"\[\s+([-+.\de,\s]+?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text)


def listed(rows: Sequence[Row], verdict: Verdict) -> list[str]:
    """Return the comparisons and figures of all rows with a verdict as text."""
    return [words for row in rows for words in row.found(verdict)]


def counted(rows: Sequence[Row]) -> str:
    """Return the number of misses and of unsettled bounds, and of these with a median above the bound, as text."""
    misses = len(listed(rows, "miss"))
    unsettled = [x for row in rows for x in row.bounded if x.verdict == "unsettled"]
    words = f"{misses} miss{'es' * (misses != 1)}" if misses else "No miss"
    if not unsettled:
        return words
    return f"{words}, {len(unsettled)} unsettled ({sum(x.above for x in unsettled)} with a median above the bound)"


def cells(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """Yield the lines of the table: a comparison or a figure each, and contenders that could not run.

    The columns are benchmark, shape, ours, baseline, its time, the ratio with its interval, and the bound.
    """
    for row in rows:
        place, timings = (row.bench, row.shape), row.timings
        for c in row.comparisons:
            ours, theirs = (f"{timings.median_ms(name):.4g} ms" for name in (c.subject, c.against))
            _, _, option = c.subject.partition(", ")  # "polyhead, finite=True" is ours with an option
            against = c.against + (" (floor)" if row.notes.get("floor") == c.against else "")
            yield *place, ours + (f" ({option})" if option else ""), against, theirs, str(c.ratio), _bound(c)
        for figure in row.figures:
            yield *place, figure.amount, figure.what, "", "", _bound(figure)
        for name, reason in timings.absent.items():
            yield *place, "", name, reason, "", ""
        if row.failed:
            yield *place, "", "", row.failed, "", "miss"


def at_most(bound: float | None) -> str:
    """Return a bound as text; one far below 1 as a fraction.

    >>> at_most(1.05), at_most(1 / 23)
    ('<= 1.05', '<= 1/23')
    """
    if bound is None:
        return ""
    return f"<= 1/{1 / bound:.4g}" if 0 < bound <= 0.1 else f"<= {bound:g}"


def _bound(x: Bounded) -> str:
    return f"{at_most(x.bound)} {x.verdict}".strip()
