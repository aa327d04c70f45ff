"""Summary of the points so far: curves, and the best method at each target, with validation and test figures."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.surgery_quality.points import DRAWN, Point, Result, curves
from benchmarks.surgery_quality.tasks import SPLITS, Figure, Split

HEADLINES = {"perplexity": False, "spearman": True}  # and whether more of it is better


@dataclass(frozen=True)
class Curve:
    """One way to choose heads and to compensate, over shares of removed heads: at each the figures of its seeds."""

    name: str
    shares: tuple[float, ...]
    figures: tuple[tuple[float, ...], ...]

    @property
    def medians(self) -> tuple[float, ...]:
        return tuple(map(statistics.median, self.figures))


def headline(results: Sequence[Result]) -> str:
    """Return the figure by which the best of these results is chosen."""
    return next(name for name in HEADLINES if name in results[0].figures["report"])


def place_of(point: Point) -> str:
    """Target of a point: a share of the heads, or heads and KV heads of every layer."""
    return f"{point.share:.0%} of heads" if point.native is None else f"{point.native} in every layer"


def is_curve(point: Point) -> bool:
    return (
        point.native is None
        and not point.searched
        and point.compensation in ("no", "once")
        and point.weighting in DRAWN
    )


def best_by_place(results: Sequence[Result]) -> dict[str, Result]:
    """Return the best result at each place on the choosing split, without the random controls."""
    if not results:
        return {}
    name = headline(results)
    sign = -1 if HEADLINES[name] else 1
    found: dict[str, Result] = {}
    for result in results:
        place = place_of(result.point)
        if result.point.criterion == "random" or "choose" not in result.figures:
            continue
        held = found.get(place)
        value = result.figures["choose"][name].value
        if held is None or sign * value < sign * held.figures["choose"][name].value:
            found[place] = result
    return found


def way_of(point: Point) -> str:
    """Describe criterion and compensation, whatever the share and the seed."""
    words = point.criterion + (f", weighted by {point.weighting}" if point.weighting != "none" else "")
    return words + (", not compensated" if point.compensation == "no" else ", compensated")


def curves_of(results: Sequence[Result], figure: str, split: Split = "report") -> list[Curve]:
    """Return the curve of every method over its shares, in the order of `curves`; other results are ignored."""
    found: dict[str, dict[float, list[float]]] = {}
    drawn = [result for result in results if is_curve(result.point)]
    ridge = statistics.mode(result.point.ridge for result in drawn) if drawn else 0.0  # tuned methods have others
    for result in drawn:
        if result.point.ridge == ridge:
            value = result.figures[split][figure].value
            # A point may belong to a curve and to the tuned methods; it counts once.
            values = found.setdefault(way_of(result.point), {}).setdefault(result.point.share, [])
            if result.point.criterion == "random" or not values:
                values.append(value)
    ways = dict.fromkeys(map(way_of, curves((0.5,))))
    return [
        Curve(name, tuple(sorted(own)), tuple(tuple(own[share]) for share in sorted(own)))
        for name in ways
        if (own := found.get(name))
    ]


def rows(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """Return the best way at each place as a table, header first."""
    names = list(results[0].figures["report"]) if results else []
    figures = [(name, split) for name in names for split in SPLITS]
    header = ("place", "heads gone", "way, chosen on the choosing split", "loads in")
    lines: list[tuple[str, ...]] = [(*header, *(f"{name}, {split}" for name, split in figures))]
    for place, result in best_by_place(results).items():
        cells = (formatted(result.figures[split][name]) for name, split in figures)
        loads = "native" if result.form == "native" else "polyhead"
        lines.append((place, f"{result.share:.0%}", str(result.point), loads, *cells))
    return lines


def formatted(figure: Figure) -> str:
    """Return a figure with its standard error as text."""
    places = 2 if abs(figure.value) >= 2 else 4
    return f"{figure.value:.{places}f} ± {figure.error:.{places}f}"
