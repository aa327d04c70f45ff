"""Charts of a plan as data for its page: one per question, with labels in both languages."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from polyhead.analysis.languages import Text
from polyhead.costs.comparison import Comparison, LayoutPoint
from polyhead.costs.planning import Plan
from polyhead.costs.quantities import decimal_size
from polyhead.report import plan_words as words

COLOURS = 8  # of the palette of the page
Unit = Literal["bytes", "seconds", "ratio"]


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart: one value per x value."""

    name: Text
    values: tuple[float, ...]
    colour: int  # index into the palette of the page
    dashed: bool = False
    wide: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """A horizontal line with a label."""

    label: str
    value: float


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines on a logarithmic axis; frontend/src/plan/chart.tsx draws it."""

    title: Text
    y_label: Text
    unit: Unit
    x_label: Text
    x_values: tuple[str, ...]
    series: tuple[Series, ...]
    rules: tuple[Rule, ...] = ()


def plan_charts(plan: Plan, comparison: Comparison) -> dict[str, Any]:
    """Return the charts of each question, as JSON-compatible values; that of times has one variant per phase."""
    layouts = _layouts(plan, comparison.layouts)
    times = ((words.short_name(plan, phase), _times(plan, comparison, i)) for i, phase in enumerate(plan.phases))
    charts: dict[str, list[tuple[Text | None, Chart]]] = {
        "fit": [(None, _memory(plan, comparison))],
        "speed": [(name, chart) for name, chart in times if chart is not None],
        "layout": [] if layouts is None else [(None, layouts)],
    }
    return {
        view: [{"name": None if name is None else asdict(name), "chart": asdict(chart)} for name, chart in variants]
        for view, variants in charts.items()
    }


def _contexts(comparison: Comparison) -> tuple[str, ...]:
    return tuple(short(point.context) for point in comparison.contexts)


def _memory(plan: Plan, comparison: Comparison) -> Chart:
    series = tuple(
        Series(words.short_name(plan, phase), tuple(point.phases[i].needed for point in comparison.contexts), i)
        for i, phase in enumerate(plan.phases)
    )
    memories = sorted({point.memory_bytes for point in comparison.machines})
    return Chart(
        Text("Peak memory by context length", "峰值内存与上下文长度"),
        Text("peak memory", "峰值内存"),
        "bytes",
        Text("tokens of context", "上下文词元数"),
        _contexts(comparison),
        series,
        tuple(Rule(decimal_size(memory), memory) for memory in memories),
    )


def _times(plan: Plan, comparison: Comparison, phase: int) -> Chart | None:
    timed = [point for point in comparison.machines if point.curves]
    if not timed:
        return None
    # A decode step computes one token; the other phases compute all of them.
    is_decode = plan.phases[phase].phase == "decode"
    tokens = [plan.batch * (1 if is_decode else point.context) for point in comparison.contexts]
    series = []
    for i, point in enumerate(timed):
        kind, name = words.KINDS[point.machine.kind], point.machine.name
        values = tuple(time / n for time, n in zip(point.curves[phase], tokens, strict=True))
        is_planned = plan.machine is not None and name == plan.machine.name
        label = Text(f"{name} ({kind.en})", f"{name}（{kind.zh}）")
        series.append(Series(label, values, i % COLOURS, point.machine.kind == "datasheet", is_planned))
    title = words.title(plan, plan.phases[phase])
    return Chart(
        Text(f"{title.en}: device time per token", f"{title.zh}：每词元设备时间"),
        Text("device time per token", "每词元设备时间"),
        "seconds",
        Text("tokens of context", "上下文词元数"),
        _contexts(comparison),
        tuple(series),
    )


def _layouts(plan: Plan, layouts: tuple[LayoutPoint, ...]) -> Chart | None:
    shared = [point for point in layouts if point.kv_heads is not None]
    if len(shared) < 2:
        return None
    last, name = [point.phases[-1] for point in shared], words.short_name(plan, plan.phases[-1])
    costs: dict[Text, list[float]] = {
        Text("cache per token", "每词元缓存"): [point.cache_bytes_per_token for point in shared],
        words.NAMES["parameters"]: [point.parameters for point in shared],
        Text("memory, {phase}", "{phase}的内存").format(phase=name): [phase.fused.total for phase in last],
        words.DEVICE_TIME.format(phase=name): [x.timing.device_seconds for x in last if x.timing is not None],
    }
    series = tuple(
        Series(label, tuple(value / row[0] for value in row), colour)
        for colour, (label, row) in enumerate(costs.items())
        if row and row[0]
    )
    return Chart(
        Text("Cost relative to MHA, by number of KV heads", "相对 MHA 的成本与 KV 头数"),
        Text("relative to MHA", "相对 MHA"),
        "ratio",
        Text("layout of the same heads", "相同头的布局"),
        tuple(point.name for point in shared),
        series,
    )


def short(number: int) -> str:
    """Format an x value: 4096 as 4K."""
    return f"{number // 1024:,}K" if number >= 1024 and number % 1024 == 0 else f"{number:,}"
