"""The tables of benchmarks/RESULTS.md, from the results of `python -m benchmarks surgery`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measuring.markdown import markdown_table
from benchmarks.surgery_quality.points import Result, read_results
from benchmarks.surgery_quality.standings import best_by_place, curves_of, formatted, headline, is_curve, place_of
from benchmarks.surgery_quality.tasks import SPLITS

TITLES = {
    "perplexity": "perplexity",
    "ratio": "ratio to the unedited model",
    "spearman": "Spearman",
    "cosine": "cosine",
}


def quality_section(path: Path) -> str:
    """Return the section of one model: the methods compared at selected budgets, and every curve."""
    results = read_results(path)
    facts = results[0].facts
    machine, versions = facts["machine"], facts["versions"]
    commits = ", ".join(dict.fromkeys(str(result.facts["commit"]) for result in results))
    lines = [
        f"### {facts['model']}, {facts['text']}",
        "",
        f"{len(results)} points in float32 without TF32, {machine['gpu'] or machine['cpu']}, torch "
        f"{versions['torch']}, commit {commits}. Shares are of {results[0].heads} heads. Methods are selected on the "
        f"validation split and reported on the test split.{_limits(facts)}",
        "",
        *_ways(results),
        *_curves(results),
    ]
    return "\n".join(lines) + "\n"


def _limits(facts: Mapping[str, Any]) -> str:
    """Return the limits on calibration and evaluation data, if there were any."""
    calibration, rows = facts.get("calibration"), facts.get("rows")
    words = f" Calibrated on {calibration:,} rows or sentences." if calibration else ""
    return words + (f" Coarse: evaluated on {rows:,} rows or pairs of each split." if rows else "")


def _ways(results: list[Result]) -> list[str]:
    """Return the table of methods compared at one budget, the selected one in bold."""
    names = list(results[0].figures["report"])
    columns = [f"{TITLES[name]}, {'validation' if split == 'choose' else 'test'}" for name in names for split in SPLITS]
    table = []
    chosen = best_by_place(results)
    requested = [x for x in results if "choose" in x.figures and x.point.criterion != "random"]
    places = dict.fromkeys(place_of(result.point) for result in requested)
    if not places:
        return []
    for place in places:
        for result in requested:
            if place_of(result.point) != place:
                continue
            cells = [formatted(result.figures[split][name]) for name in names for split in SPLITS]
            words = str(result.point)
            if result is chosen[place]:
                words, cells = f"**{words}**", [f"**{x}**" for x in cells]
            table.append([words, "native" if result.form == "native" else "polyhead", *cells])
        table += _controls([x for x in results if place_of(x.point) == place], names)
    return [*markdown_table(("heads removed, criterion and compensation", "loads in", *columns), *table), ""]


def _controls(results: list[Result], names: list[str]) -> list[list[str]]:
    """Return the rows of random heads at the same budget: median and range over seeds, if there are two or more."""
    lines = []
    for compensation, words in (("no", "not compensated"), ("once", "compensated")):
        drawn = [x for x in results if x.point.criterion == "random" and x.point.compensation == compensation]
        if len(drawn) < 2:
            continue
        cells = []
        for name in names:
            values = [x.figures["report"][name].value for x in drawn]
            cells += ["", _seeds(values)]
        lines.append([f"random heads, {words}, {len(drawn)} seeds", "polyhead", *cells])
    return lines


def _curves(results: list[Result]) -> list[str]:
    """Return the table of every method at every share, on the test split; for sentences with the cosine in brackets."""
    name = headline(results)
    curves = curves_of(results, name)
    shares = sorted({share for curve in curves for share in curve.shares})
    if len(shares) < 2:
        return []
    beside = {curve.name: curve for curve in curves_of(results, "cosine")} if name == "spearman" else {}
    table = []
    for curve in curves:
        cells = [curve.name]
        for share in shares:
            if share not in curve.shares:
                cells.append("")
                continue
            at = curve.shares.index(share)
            cell = _seeds(curve.figures[at])
            cells.append(cell + (f" ({beside[curve.name].medians[at]:.2f})" if curve.name in beside else ""))
        table.append(cells)
    lines = markdown_table((f"{TITLES[name]}, test", *(f"{share:.0%}" for share in shares)), *table)
    native = any(result.form == "native" for result in results if is_curve(result.point))
    others = "Some points of these curves can be saved for the model's own class in transformers; the others"
    if not native:
        others = "No point of these curves can be saved for the model's own class in transformers; all"
    loaded = "are loaded by `polyhead.load`, or by transformers with zero heads as padding, which saves no time."
    return [*lines, "", f"{others} {loaded}"]


def _seeds(figures: Sequence[float]) -> str:
    """Return the median, and the range if there are several."""
    middle = _short(statistics.median(figures))
    return f"{middle} [{_short(min(figures))}, {_short(max(figures))}]" if len(figures) > 1 else middle


def _short(figure: float) -> str:
    if figure >= 100:
        return f"{figure:,.0f}"
    return f"{figure:.2f}" if figure >= 2 else f"{figure:.3f}"
