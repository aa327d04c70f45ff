"""Shared by commands that measure step by step: a bar, a table of rows, and a file that grows with them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console

    from benchmarks.measuring.results import Row
    from benchmarks.statistics_speed import Step


def run_and_keep(steps: Sequence[Step], facts: dict[str, object], output: Path | None) -> None:
    """Run the steps, show their rows and keep them."""
    from rich.console import Console

    from benchmarks.measuring import results

    progress, console = Console(stderr=True, highlight=False), Console(highlight=False)
    rows: list[Row] = []
    began = time.perf_counter()
    for row in _measured(steps, progress):
        rows.append(row)
        if output is not None:
            results.write(output, {**facts, "seconds": round(time.perf_counter() - began, 1)}, rows)
    # Files and pipes have no width of their own; a wrapped table there is no table.
    (console if console.is_terminal else Console(width=170, highlight=False)).print(results.rich_table(rows))
    typer.echo(f"\n{results.count_of_misses(rows)}\n{len(rows)} rows in {time.perf_counter() - began:.0f} seconds")
    if output is not None:
        typer.echo(f"written to {output}")
    if any(row.failed for row in rows):
        raise typer.Exit(1)


def _measured(steps: Sequence[Step], console: Console) -> Iterator[Row]:
    """The rows as they come, with a bar on a terminal and a line a step elsewhere."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from polyhead.costs.measuring import runner

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    began = time.perf_counter()
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with runner.settled(), progress as bar:
        task = bar.add_task("", total=len(steps))
        for step in steps:
            bar.update(task, description=f"{step.part} at {step.place}")
            yield from step.rows()
            bar.advance(task)
            if not console.is_terminal:
                console.print(f"{time.perf_counter() - began:6.1f} s  {step.part} at {step.place}", markup=False)
