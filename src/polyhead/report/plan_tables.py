"""Tables of a plan's page, as HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from polyhead.analysis.languages import Language, Text
from polyhead.costs import plan_wording as wording
from polyhead.costs.choosing import Choice
from polyhead.costs.comparison import Comparison, LayoutPoint, MachinePoint
from polyhead.costs.curves import HeadsPoint
from polyhead.costs.phases import PhasePlan, Timing
from polyhead.costs.planning import Plan
from polyhead.costs.quantities import count, decimal_size, dtype_name, seconds, size
from polyhead.costs.ranks_plan import RankPhase
from polyhead.report import plan_answers as answers
from polyhead.report import plan_words as words
from polyhead.report.packing import text_in_html as escape
from polyhead.report.plan_payload import short

_FLOPS = ("projection", "scores", "values", "mixing", "output")
_STAGES = ("projection", "positions", "cache", "attention", "mixing", "output", "launch")
_SIGNS = {"fits": "✓", "tight": "~", "does not fit": "✗"}
_MEMORY = ("parameters", "gradients", "cache", "activations")
Cell = str | tuple[str, str]  # a text, or a text and a smaller one below it


class Row(NamedTuple):
    """A row of a table."""

    name: Cell
    cells: Sequence[Cell]
    kind: str = ""  # CSS class: "total", "planned", "sub" (part of the row above) or none


def table(caption: str, columns: Sequence[str], rows: Iterable[Row], *, stacked: bool = False) -> str:
    """Return a table whose first column has the names of its rows; a stacked one is a list on narrow screens."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = []
    for name, cells, kind in rows:
        columns_of_row = "".join(
            f'<td data-column="{escape(column)}">{_cell(cell)}</td>'
            for column, cell in zip(columns[1:], cells, strict=True)
        )
        sub = ' class="sub"' if kind == "sub" else ""
        row = f' class="{kind}"' if kind in ("total", "planned") else ""
        body.append(f'<tr{row}><th scope="row"{sub}>{_cell(name)}</th>{columns_of_row}</tr>')
    table_class = ' class="stacked"' if stacked else ""
    return (
        f'<div class="table-scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table{table_class}>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def _cell(cell: Cell) -> str:
    text, below = (cell, "") if isinstance(cell, str) else cell
    return escape(text) + (f"<small>{escape(below)}</small>" if below else "")


def fit_table(plan: Plan, comparison: Comparison, language: Language) -> str:
    """Return the share of each machine's memory that each phase needs."""
    columns = [words.COLUMNS[name][language] for name in ("machine", "memory")]
    columns += [words.short_name(plan, phase)[language] for phase in plan.phases]
    rows = []
    for point in comparison.machines:
        shares = [_share(phase, point.memory_bytes) for phase in point.phases]
        cells = [decimal_size(point.memory_bytes), *shares]
        rows.append(Row(_machine_cell(plan, point, language), cells, _kind(plan, point)))
    return table(words.VIEWS["fit"][language], columns, rows)


def _share(phase: PhasePlan, memory: int) -> Cell:
    share = phase.needed / memory
    text = "<1%" if share < 0.01 else f"{share:.0%}" if share < 10 else f"{share:,.0f}x"
    return f"{_SIGNS[phase.verdict(memory)]} {text}", decimal_size(phase.needed)


def _machine_cell(plan: Plan, point: MachinePoint, language: Language) -> Cell:
    machine = point.machine
    about = answers.error_words(machine)
    if not point.curves:
        about = Text("no rates in {dtype}", "没有 {dtype} 的速率").format(dtype=dtype_name(plan.dtype))
    return machine.name, f"{words.KINDS[machine.kind][language]}, {about[language]}"


def _kind(plan: Plan, point: MachinePoint) -> str:
    return "planned" if plan.machine is not None and plan.machine.name == point.machine.name else ""


def speed_table(plan: Plan, comparison: Comparison, language: Language) -> str:
    """Return the predicted device time of each phase on each machine, tokens per second, and eager time."""
    columns = [words.COLUMNS["machine"][language], *(words.short_name(plan, x)[language] for x in plan.phases)]
    rate = Text("{rate} tokens/s", "每秒 {rate} 词元")
    rows = []
    for point in comparison.machines:
        cells: list[Cell] = []
        for phase in point.phases:
            if phase.timing is None:
                cells.append(words.NO_TIMES[language])
                continue
            time, eager = _time_cell(phase.timing, language)
            tokens = rate.format(rate=answers.tokens_per_second(plan, phase))[language]
            cells.append((time, f"{tokens}; {eager}" if eager else tokens))
        rows.append(Row(_machine_cell(plan, point, language), cells, _kind(plan, point)))
    return table(words.VIEWS["speed"][language], columns, rows)


def _time_cell(timed: Timing | Choice, language: Language) -> tuple[str, str]:
    """Return the device time, and below it the eager time (with launch overhead) if it differs."""
    if timed.seconds is None or timed.device_seconds is None:
        return "–", ""
    device, eager = seconds(timed.device_seconds), seconds(timed.seconds)
    return device, "" if eager == device else Text(f"{eager} eager", f"eager {eager}")[language]


def collectives_table(plan: Plan, phase: RankPhase, language: Language) -> str:
    """Return the bytes that a rank sends in each collective of a phase."""
    caption = words.SENT.format(phase=words.title(plan, plan[phase.phase]))[language]
    columns = [caption, *(words.COLLECTIVE_COLUMNS[name][language] for name in wording.COLLECTIVE_COLUMNS)]
    rows = [Row(name, cells, "total" if name == "total" else "") for name, *cells in wording.collective_rows(phase)]
    return table(caption, columns, rows)


def layout_table(plan: Plan, comparison: Comparison, language: Language) -> str:
    """Return the costs of the planned heads with other numbers of KV heads, and with latents."""
    last = words.short_name(plan, plan.phases[-1])
    memory = Text("memory, {phase}", "{phase}的内存").format(phase=last)
    columns = [words.COLUMNS[name][language] for name in ("layout", "parameters", "cache per token")]
    columns.append(memory[language])
    columns += [words.DEVICE_TIME.format(phase=last)[language]] if plan.is_timed else []
    rows = []
    for point in comparison.layouts:
        phase = point.phases[-1]
        cells = [*_size_cells(point), size(phase.fused.total)]
        cells += [] if phase.timing is None else [_time_cell(phase.timing, language)]
        rows.append(Row(_layout_cell(point), cells, "planned" if point.is_planned else ""))
    return table(words.VIEWS["layout"][language], columns, rows)


def choices_table(caption: Text, choices: Sequence[Choice], language: Language, *, timed: bool) -> str:
    """Return layouts of `choose` with their costs."""
    names = ("layout", "parameters", "cache per token", *(("device time",) if timed else ()))
    rows = []
    for choice in choices:
        times = [_time_cell(choice, language)] if timed else []
        rows.append(Row(_layout_cell(choice), [*_size_cells(choice), *times]))
    return table(caption[language], [words.COLUMNS[name][language] for name in names], rows)


def _layout_cell(layout: LayoutPoint | Choice) -> Cell:
    return layout.name, ", ".join(dict.fromkeys(warned.kind for warned in layout.warnings))


def _size_cells(layout: LayoutPoint | Choice) -> list[Cell]:
    return [count(layout.parameters), size(layout.cache_bytes_per_token) if layout.cache_bytes_per_token else "–"]


def phase_table(plan: Plan, phase: PhasePlan, language: Language) -> str:
    """Return FLOPs, exponentials, bytes and time of a phase by stage."""
    names = ["FLOPs", "exponentials", "bytes moved", "time"]
    shown = len(names) if phase.timing is not None else len(names) - 1
    columns = ["", *(words.COLUMNS[name][language] for name in names[:shown])]
    rows = []
    for name, *cells in wording.rows(phase):
        kind = "total" if name == "total" else "sub" if name in wording.WITHIN_ATTENTION else ""
        rows.append(Row(words.NAMES[name][language], cells[:shown], kind))
    return table(words.title(plan, phase)[language], columns, rows)


def context_tables(plan: Plan, comparison: Comparison, index: int, language: Language) -> str:
    """Return FLOPs or time per token by stage, and memory by purpose, of a phase at every context length."""
    phases = [point.phases[index] for point in comparison.contexts]
    is_decode = phases[0].phase == "decode"
    tokens = [plan.batch * (1 if is_decode else point.context) for point in comparison.contexts]
    names = [short(point.context) for point in comparison.contexts]
    if not plan.is_timed:
        costs = {
            name: [count(getattr(x.flops, name) / n) for x, n in zip(phases, tokens, strict=True)] for name in _FLOPS
        }
        what = Text("FLOPs per token", "每词元 FLOPs")
    else:
        stages = [x.timing.stages for x in phases if x.timing is not None]
        costs = {
            wording.STAGE_NAMES[name]: [seconds(x.get(name, 0.0) / n) for x, n in zip(stages, tokens, strict=True)]
            for name in _STAGES
            if any(x.get(name) for x in stages)
        }
        what = Text("time per token", "每词元时间")
    memory = {name: [size(getattr(x.fused, name)) for x in phases] for name in _MEMORY}
    memory = {name: row for name, row in memory.items() if any(getattr(x.fused, name) for x in phases)}
    columns = [words.COLUMNS["context"][language]]
    first = [*columns, *(words.NAMES[name][language] for name in costs)]
    second = [*columns, *(words.NAMES[name][language] for name in memory)]
    second += [words.COLUMNS[name][language] for name in ("fused", "materialised")]
    totals = [[size(x.fused.total) for x in phases], [size(x.materialised.total) for x in phases]]
    title = words.title(plan, phases[0])[language]
    return "".join(
        f"<h4>{escape(about)}</h4>" + table(f"{title}: {about}", columns, rows, stacked=True)
        for about, columns, rows in (
            (what[language], first, _by_context(names, list(costs.values()))),
            (Text("peak memory", "峰值内存")[language], second, _by_context(names, [*memory.values(), *totals])),
        )
    )


def _by_context(names: Sequence[str], columns: Sequence[Sequence[str]]) -> list[Row]:
    return [Row(name, [column[i] for column in columns]) for i, name in enumerate(names)]


def heads_table(points: Sequence[HeadsPoint], language: Language) -> str:
    """Return the costs over numbers of heads with heads * head_dim = d_model."""
    names = ["heads", "FLOPs", "exponentials", "materialised", "fused"]
    timed = points[0].phase.timing is not None
    columns = [words.COLUMNS[name][language] for name in (*names, *(("device time",) if timed else ()))]
    rows = []
    for point in points:
        phase = point.phase
        cells: list[Cell] = [count(phase.flops.total), count(phase.exponentials)]
        cells += [size(phase.materialised.total), size(phase.fused.total)]
        cells += [] if phase.timing is None else [_time_cell(phase.timing, language)]
        rows.append(Row(f"{point.heads:,} x {point.head_dim:,}", cells))
    return table(words.COLUMNS["heads"][language], columns, rows, stacked=True)
