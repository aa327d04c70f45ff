"""Charts of a plan as data for its page: costs over the context length, and over the number of heads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from polyhead.costs import plan_wording as wording
from polyhead.costs.curves import ContextPoint, HeadsPoint
from polyhead.costs.planning import Plan

_STAGES = ("projection", "positions", "cache", "attention", "mixing", "output", "launch")
_FLOPS = ("projection", "scores", "values", "mixing", "output")
_MEMORY = ("parameters", "gradients", "cache", "activations")

Unit = Literal["count", "bytes", "seconds", "ratio"]


@dataclass(frozen=True, slots=True)
class Series:
    """One series of a chart: one value per x value, None where it is missing."""

    name: str
    values: tuple[float | None, ...]
    colour: int  # index into the palette of the page
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """Stacked bars, or lines on a logarithmic axis; frontend/src/plan/chart.tsx draws it."""

    kind: Literal["bars", "lines"]
    title: str
    y_label: str
    unit: Unit
    x_label: str
    x_values: tuple[str, ...]
    series: tuple[Series, ...]


def plan_charts(plan: Plan, contexts: Sequence[ContextPoint], heads: Sequence[HeadsPoint]) -> dict[str, Any]:
    """Return the charts by section of the page, as JSON-compatible values."""
    sections: dict[str, Iterable[Chart]] = {"context": _over_context(plan, contexts), "heads": _over_heads(plan, heads)}
    return {name: [asdict(chart) for chart in charts] for name, charts in sections.items()}


def _over_context(plan: Plan, points: Sequence[ContextPoint]) -> Iterator[Chart]:
    x_label, x_values = "tokens of context", tuple(_short(point.context) for point in points)
    for index, phase in enumerate(plan.phases):
        phases = [point.phases[index] for point in points]
        # A decode step computes one token; the other phases compute all of them.
        tokens = [plan.batch * (1 if phase.phase == "decode" else point.context) for point in points]
        title = wording.title(plan, phase).capitalize()
        unit: Unit = "count" if phase.timing is None else "seconds"
        if phase.timing is None:
            costs = {name: [getattr(x.flops, name) for x in phases] for name in _FLOPS}
        else:
            stages = [x.timing.stages for x in phases if x.timing is not None]
            costs = {wording.STAGE_NAMES[name]: [x.get(name, 0.0) for x in stages] for name in _STAGES}
        per_token = _stack({name: [x / n for x, n in zip(row, tokens, strict=True)] for name, row in costs.items()})
        y_label = f"{'FLOPs' if phase.timing is None else 'time'} per token"
        yield Chart("bars", f"{title}: {y_label}", y_label, unit, x_label, x_values, per_token)
        memory = _stack({name: [getattr(x.fused, name) for x in phases] for name in _MEMORY})
        yield Chart("bars", f"{title}: memory, fused attention", "peak memory", "bytes", x_label, x_values, memory)
        both = (
            Series("fused", tuple(x.fused.total for x in phases), 0),
            Series("materialised weights", tuple(x.materialised.total for x in phases), 1, dashed=True),
        )
        name = f"{title}: memory of fused and materialised attention"
        yield Chart("lines", name, "peak memory", "bytes", x_label, x_values, both)


def _stack(parts: dict[str, list[float]]) -> tuple[Series, ...]:
    """Return the parts that cost anything; each keeps its colour in every chart."""
    return tuple(Series(name, tuple(row), colour) for colour, (name, row) in enumerate(parts.items()) if any(row))


def _over_heads(plan: Plan, points: Sequence[HeadsPoint]) -> Iterator[Chart]:
    if not points:
        return
    costs: dict[str, list[float]] = {
        "FLOPs of matrix products": [p.phase.flops.total for p in points],
        "exponentials": [p.phase.exponentials for p in points],
        "memory, materialised weights": [p.phase.materialised.total for p in points],
        "memory, fused attention": [p.phase.fused.total for p in points],
        "predicted time": [p.phase.timing.seconds for p in points if p.phase.timing is not None],
    }
    series = tuple(
        Series(name, tuple(x / row[0] for x in row), colour, dashed="materialised" in name)
        for colour, (name, row) in enumerate(costs.items())
        if row
    )
    first = points[0]
    title = (
        f"{wording.title(plan, first.phase).capitalize()}, relative to {first.heads:,} x {first.head_dim:,}, "
        f"at d_model {first.heads * first.head_dim:,}"
    )
    x_values = tuple(_short(point.heads) for point in points)
    yield Chart("lines", title, "relative cost", "ratio", "heads, at constant total width", x_values, series)


def _short(number: int) -> str:
    """Format an x value: 4096 as 4K."""
    return f"{number // 1024:,}K" if number >= 1024 and number % 1024 == 0 else f"{number:,}"
