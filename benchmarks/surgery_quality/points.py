"""Points of the curves, and the file of finished ones from which a run resumes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.measuring.json_lines import read_lines
from benchmarks.surgery_quality.tasks import Figure, Split
from polyhead.errors import OptionError
from polyhead.surgery.compensation.least_squares import RIDGE
from polyhead.surgery.options import CRITERIA
from polyhead.surgery.selection.criteria import WEIGHTED
from polyhead.surgery.selection.evidence import Weighting

# "once" solves all layers by least squares, on head outputs in the whole model; "distilled" continues from there.
# Records of earlier versions also have "layer", "output" and "stream", solved layer by layer.
Compensation = Literal["no", "once", "distilled", "layer", "output", "stream"]
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
SEEDS = (0, 1, 2, 3, 4)
SAME = ("model", "text", "calibration", "rows")  # facts that all points of a file share
DRAWN: tuple[Weighting, ...] = ("none", "direction", "token")  # the weightings that have whole curves


@dataclass(frozen=True)
class Point:
    """Heads to remove, the criterion by which they are chosen, and their compensation.

    `native` are the heads and KV heads of every layer afterwards, as "6/3", so that a native class can load them; None
    for any numbers. `searched` moves heads between layers by measured losses.
    """

    criterion: str
    share: float
    compensation: Compensation = "no"
    weighting: Weighting = "none"
    ridge: float = RIDGE
    seed: int = 0
    native: str | None = None
    searched: bool = False

    def __str__(self) -> str:
        words = [f"{self.share:.0%}" if self.native is None else self.native, self.criterion]
        words += [f"weighted by {self.weighting}"] if self.weighting != "none" else []
        words += ["searched"] if self.searched else []
        words += [f"seed {self.seed}"] if self.criterion == "random" else []
        words.append(
            "not compensated"
            if self.compensation == "no"
            else f"compensated ({self.compensation}, ridge {self.ridge:g})"
        )
        return ", ".join(words)


@dataclass(frozen=True)
class Result:
    """Result of a point: figures by split and name, and the number of heads pruned in each layer."""

    point: Point
    gone: Mapping[str, int]
    heads: int  # of the whole model
    form: str  # "native" where a native class can hold it, "own" where polyhead alone can
    figures: Mapping[Split, Mapping[str, Figure]]
    seconds: float
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """Share of the heads that were removed."""
        return sum(self.gone.values()) / self.heads

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Result:
        found = json.loads(text)
        figures = {
            split: {name: Figure(**figure) for name, figure in own.items()} for split, own in found["figures"].items()
        }
        return cls(**{**found, "point": Point(**found["point"]), "figures": figures})


def read_results(path: Path) -> list[Result]:
    return read_lines(path, Result.from_json)


def is_done(point: Point, results: Iterable[Result], splits: Iterable[Split]) -> bool:
    """Return True if this point was measured on all of these splits."""
    return any(result.point == point and set(splits) <= set(result.figures) for result in results)


def check_alike(results: Iterable[Result], facts: Mapping[str, Any]) -> None:
    """Raise unless the points of a file were measured on the same model and as much of the same text."""
    requested = {name: facts.get(name) for name in SAME}
    for result in results:
        held = {name: result.facts.get(name) for name in SAME}
        if held != requested:
            raise OptionError(f"a file holds points of one model, text and number of rows, {held}, got {requested}")


def curves(shares: Iterable[float] = SHARES) -> list[Point]:
    """Return every criterion at every share, with and without compensation and weights, and the random controls."""
    found = []
    for share in shares:
        for name in CRITERIA:
            for weighting in DRAWN if name in WEIGHTED else DRAWN[:1]:
                for seed in SEEDS if name == "random" else SEEDS[:1]:
                    for compensation in ("no", "once"):
                        found.append(Point(name, share, compensation, weighting, seed=seed))
    return found


def tuned(shares: Iterable[float], native: Iterable[str]) -> list[Point]:
    """Return ways to weigh errors, to compensate and to search, at the shares that matter.

    `native` are forms that native classes can hold, "heads/KV heads" of every layer.
    """
    found = []
    places = [(share, None) for share in shares] + [(0.0, form) for form in native]
    for share, form in places:
        ways: list[tuple[Weighting, Compensation, float, bool]] = [
            ("token", "once", 1e-2, False),
            ("token", "once", 1e-4, False),
            ("none", "once", 1e-4, False),
            ("layer", "once", 1e-4, False),
            ("direction", "once", 1e-4, False),
            ("direction", "once", 1e-2, False),
            ("token", "distilled", 1e-2, False),
            ("token", "once", 1e-3, True),
            ("token", "distilled", 1e-2, True),
        ]
        for weighting, compensation, ridge, searched in ways:
            found.append(Point("compensated", share, compensation, weighting, ridge, native=form, searched=searched))
    return found


def parse_native(text: str) -> tuple[int, int]:
    """Parse the numbers of heads and KV heads of a layer, such as "6/3"."""
    heads, _, keys = text.partition("/")
    if not (heads.isdecimal() and keys.isdecimal() and int(keys) > 0 and int(heads) % int(keys) == 0):
        raise OptionError(f"heads and KV heads are written as 6/3, the second dividing the first, got {text!r}")
    return int(heads), int(keys)
