"""Tables of the stability benchmark: contenders at each learning rate, and runs with alarms."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.alarms.outcomes import AHEAD
from benchmarks.alarms.runs import PLANTED
from benchmarks.measuring.markdown import markdown_table
from benchmarks.stability.trials import CONTENDERS, PLANTS, Result, Setting, plant_name, read_results, verdict

LIMIT = 100.0  # of the logits, in the column of the step from which on they are above it
Row = tuple[str, ...]


def clip_rows(results: Sequence[Result]) -> list[Row]:
    """Return a table, header first: one row per contender and learning rate, in ascending order."""
    rows: list[Row] = [
        (
            "contender",
            "learning rate",
            "diverged",
            "steps",
            "final loss",
            "largest logit",
            f"first step above {LIMIT:g}",
            "clipped heads per step",
        )
    ]
    for result in clip_results(results):
        found, logits = verdict(result, results), result.max_logits
        finite = [x for x in logits if math.isfinite(x)]
        above = next((step for step, x in enumerate(logits) if not x <= LIMIT), None)
        rows.append(
            (
                result.trial.label,
                f"{result.trial.rate:.3g}",
                str(found),
                f"{len(result.losses)}",
                "" if math.isnan(found.final) else f"{found.final:.3f}",
                _logit(max(finite)) if finite else "",
                "never" if above is None else f"{above}",
                "" if result.clipped is None else f"{statistics.fmean(result.clipped):.1f}",
            )
        )
    return rows


def _logit(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def clip_results(results: Sequence[Result]) -> list[Result]:
    """Return the runs of the part clip by learning rate, then by contender."""
    found = [x for x in results if x.trial.part == "clip"]
    return sorted(found, key=lambda x: (x.trial.rate, CONTENDERS.index(x.trial.contender)))


def alarm_rows(results: Sequence[Result]) -> list[Row]:
    """Return a table, header first: one row per run with alarms. Alarms of planted runs count from step 200 on."""
    rows: list[Row] = [
        (
            "planted",
            "learning rate",
            "spike",
            f"alarms before step {PLANTED}",
            "alarms",
            "first alarm",
            "first alarm that names the plant",
            "spike announced",
        )
    ]
    found = [x for x in results if x.trial.part == "alarms" and x.outcome is not None]
    for result in sorted(found, key=lambda x: (x.trial.rate, PLANTS.index(x.trial.plant))):
        outcome: Mapping[str, Any] = result.outcome or {}
        plant, spike, named = result.trial.plant, outcome["spike"], outcome["named"]
        first = outcome["first"] if plant is not None else next(iter(outcome["alarms"]), None)
        rows.append(
            (
                plant_name(plant) + (f", {_head(outcome['place'])}" if plant == "query" else ""),
                f"{result.trial.rate:.3g}",
                "none" if spike is None else f"step {spike}",
                f"{outcome['before']}",
                f"{outcome['count']}",
                _alarm(first),
                "" if plant is None else "none" if named is None else f"step {named}",
                _announced(outcome) if plant is not None and spike is not None else "",
            )
        )
    return rows


def _announced(outcome: Mapping[str, Any]) -> str:
    lead = outcome["lead"]
    return f"no alarm {AHEAD[0]} to {AHEAD[1]} steps ahead" if lead is None else f"{lead} steps ahead, {outcome['by']}"


def _alarm(alarm: Sequence[Any] | None) -> str:
    """Return an alarm of an outcome in words."""
    if alarm is None:
        return "none"
    kind, step, place = alarm[:3]
    return f"step {step}, {kind}" + ("" if place is None else f": {_head(place)}")


def _head(place: Sequence[int]) -> str:
    return "L{}H{}".format(*place)


def settings_of(results: Sequence[Result]) -> list[Setting]:
    """Return the settings of the part clip, in the order of the record."""
    return list(dict.fromkeys(x.trial.setting for x in results if x.trial.part == "clip"))


def stability_section(path: Path) -> str:
    """Return the tables of a record, with a sentence on each setting and the figure."""
    results = read_results(path)
    facts = results[0].facts
    machine, versions = facts["machine"], facts["versions"]
    commits = ", ".join(dict.fromkeys(str(x.facts["commit"])[:7] for x in results))
    lines = [
        f"### {machine['gpu'] or machine['cpu']}",
        "",
        f"{len(results)} training runs on {facts['text']}, torch {versions['torch']}, Python {versions['python']}, "
        f"commit {commits}, {facts['date'][:10]}.",
        "",
    ]
    for setting in settings_of(results):
        own = [x for x in results if x.trial.setting == setting and x.trial.part == "clip"]
        lines += [f"{setting}. {_summary(own)}", "", *markdown_table(*clip_rows(own)), ""]
    if settings_of(results):
        image = f"../docs/images/{path.stem}.svg"
        lines += [f"![Loss and largest logit of each contender over the steps]({image})", ""]
    alarms = [x for x in results if x.trial.part == "alarms"]
    for setting in dict.fromkeys(x.trial.setting for x in alarms):
        own = [x for x in alarms if x.trial.setting == setting]
        lines += [f"With alarms: {setting}.", "", *markdown_table(*alarm_rows(own)), ""]
    return "\n".join(lines)


def _summary(results: Sequence[Result]) -> str:
    """Return the outcome of a setting: where the plain run diverged, and which remedies did not."""
    diverged = {x.trial: verdict(x, results).diverged for x in results}
    rates = sorted(x.rate for x, is_bad in diverged.items() if x.contender == "plain" and is_bad)
    if not rates:
        return "No plain run diverged."
    remedies, sentences = [x for x in diverged if x.contender != "plain"], []
    for rate in rates:
        words = [f"At a learning rate of {rate:.3g} the plain run diverged"]
        for is_bad, ending in ((True, "diverged as well"), (False, "did not")):
            names = [x.label for x in remedies if x.rate == rate and diverged[x] == is_bad]
            words += [f"{' and '.join(names)} {ending}"] if names else []
        sentences.append("; ".join(words))
    return ". ".join(sentences) + "."
