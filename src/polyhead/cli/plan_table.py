"""Tables of a plan for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from polyhead.costs import plan_wording as wording
from polyhead.costs.layout_warnings import explained
from polyhead.costs.phases import PhasePlan
from polyhead.costs.planning import Plan
from polyhead.costs.ranks_plan import RankPhase
from polyhead.costs.timing.machine_files import machine_names


def draw(plan: Plan, console: Console) -> None:
    console.print(Text(f"{plan.model.name}: {wording.layout_words(plan.model)}", style="bold"))
    console.print(wording.requested(plan), markup=False)
    warnings = [("warning", f"{kind}: {text}", "yellow") for kind, text in plan.warnings]
    console.print(labelled([*((name, text, "") for name, text in wording.facts(plan)), *warnings]))
    for phase in plan.phases:
        console.print()
        console.print(_table(plan, phase))
        console.print(labelled([(name, text, "") for name, text in wording.below(phase)]))
    for rank_phase in plan.ranks.phases if plan.ranks is not None else ():
        console.print()
        console.print(_collectives(wording.title(plan, plan[rank_phase.phase]), rank_phase))
    for kind, explanation in explained(plan.warnings):
        console.print(Text(f"{kind}: {explanation}", style="dim"))
    for note in (*plan.model.notes, *plan.notes):
        console.print(Text(f"note: {note}", style="dim"))
    if plan.machine is None:
        console.print(
            Text(f"note: use --machine to see whether it fits, and times; machines: {machine_names()}", style="dim")
        )
    elif plan.machine.source is not None:
        console.print(Text(f"note: datasheet of {plan.machine.name}: {plan.machine.source}", style="dim"))


def _collectives(title: str, phase: RankPhase) -> Table:
    table = _titled(f"{title}: bytes that a rank sends")
    rows = wording.collective_rows(phase)
    shown = len(rows[0]) if any(row[-1] for row in rows) else len(rows[0]) - 1
    for column in wording.COLLECTIVE_COLUMNS[: shown - 1]:
        table.add_column(column, justify="left" if column in ("pass", "operation", "ranks of") else "right")
    for row in rows:
        table.add_row(*row[:shown], style="bold" if row[0] == "total" else "")
    return table


def _titled(title: str) -> Table:
    table = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="bold")
    table.add_column("")
    return table


def _table(plan: Plan, phase: PhasePlan) -> Table:
    table = _titled(wording.title(plan, phase) + (" (attention alone)" if phase.timing is not None else ""))
    columns = ["FLOPs", "exponentials", "bytes moved", "time"]
    shown = len(columns) if phase.timing is not None else len(columns) - 1
    for column in columns[:shown]:
        table.add_column(column, justify="right", no_wrap=True)
    for name, *cells in wording.rows(phase):
        indent = "  " if name in wording.WITHIN_ATTENTION else ""
        table.add_row(indent + name, *cells[:shown], style="bold" if name == "total" else "")
    return table


def labelled(lines: Sequence[tuple[str, str, str]]) -> Table:
    """Return a two-column table of (name, text, style) lines; nothing in them is parsed as markup."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text, style in lines:
        table.add_row(Text(name, style=style or "bold"), Text(text, style=style))
    return table
