"""The runner of all timings: times cases in turn, repeats noisy rows, prints and writes the results."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.measuring import results
from benchmarks.measuring.cases import Case, Run, Step, tidy
from benchmarks.measuring.results import Row
from benchmarks.measuring.verdicts import Verdict
from polyhead.costs.measuring import machine_facts
from polyhead.costs.measuring.runner import Timings, alternate, settled

HEADER = ("benchmark", "shape", "ours", "baseline", "baseline time", "ratio [95% CI]", "bound")
STYLES = {"miss": "bold red", "unsettled": "yellow"}
VERDICTS: tuple[Verdict, ...] = ("miss", "unsettled")  # that are listed below the table


def measure(case: Case, run: Run) -> Row:
    """Time a case, and again while a bound has an interval too wide for a verdict; the samples of all rounds count."""
    timings = Timings({})
    for rounds in range(1, run.repetitions + 2):
        taken = alternate(
            case.calls,
            device=run.device,
            alternations=run.alternations,
            seed=run.seed + rounds - 1,
            absent=case.absent,
            seconds=run.seconds,
            fewest=run.fewest,
        )
        timings = taken if rounds == 1 else joined(timings, taken)
        row = Row.of(case, run.dtype, timings, rounds)
        if not row.found("unsettled"):
            break
    return row


def rows_of(cases: Iterable[Case], run: Run) -> Iterator[Row]:
    """Time cases one after the other, each before the next is built."""
    for case in cases:
        row = measure(case, run)
        del case  # so that its tensors are freed while the next is built
        yield row


def joined(first: Timings, second: Timings) -> Timings:
    """Return the samples of two rounds; a contender that ran in only one of them is absent."""
    names = [name for name in first.samples_ms if name in second.samples_ms]
    both = {name: first.samples_ms[name] + second.samples_ms[name] for name in names}
    return Timings(both, {**first.absent, **second.absent}, first.peak_mib)


def run_steps(
    steps: Sequence[Step],
    device: torch.device,
    output: Path | None,
    *,
    commit: str | None = None,
    strict: bool = False,
    **settings: object,
) -> None:
    """Time all steps, print their rows and write them with the machine and the settings.

    Exits with 1 if a contender of ours failed or, if `strict`, a bound is missed.
    """
    facts = {**machine_facts.describe(device, commit), **settings}
    rows: list[Row] = []
    began = time.perf_counter()
    for row in _measured(steps):
        rows.append(row)
        if output is not None:
            results.write(output, {**facts, "seconds": round(time.perf_counter() - began, 1)}, rows)
    show(rows)
    typer.echo(f"{len(rows)} rows in {time.perf_counter() - began:.0f} seconds")
    if output is not None:
        typer.echo(f"written to {output}")
    if any(row.failed for row in rows) or (strict and results.listed(rows, "miss")):
        raise typer.Exit(1)


def _measured(steps: Sequence[Step]) -> Iterator[Row]:
    """Yield the rows, with a progress bar on a terminal and a line per step elsewhere."""
    console, began = Console(stderr=True, highlight=False), time.perf_counter()
    with settled(), progress_bar(console) as bar:
        task = bar.add_task("", total=len(steps))
        for step in steps:
            bar.update(task, description=f"{step.part} at {step.place}")
            yield from rows_of(step.cases(), step.run)
            tidy()
            bar.advance(task)
            if not console.is_terminal:
                console.print(f"{time.perf_counter() - began:6.1f} s  {step.part} at {step.place}", markup=False)


def show(rows: Sequence[Row]) -> None:
    """Print the table, then the misses and the unsettled bounds by name."""
    print_table(HEADER, *results.cells(rows))
    typer.echo(f"\n{results.counted(rows)}")
    for verdict in VERDICTS:
        for words in results.listed(rows, verdict):
            typer.echo(f"  {verdict}: {words}")


def print_table(header: Sequence[str], *lines: Sequence[str]) -> None:
    """Print lines of cells at the width of the terminal, with misses and unsettled ones in colour."""
    table = Table(box=None, pad_edge=False)
    for name in header:
        table.add_column(name, overflow="fold")
    for line in lines:
        table.add_row(*line, style=STYLES.get(line[-1].rpartition(" ")[2]))
    console = Console(highlight=False)
    # Files and pipes have no width of their own; a wrapped table there is no table.
    (console if console.is_terminal else Console(width=200, highlight=False)).print(table)


def progress_bar(console: Console) -> Progress:
    """Return a progress bar, which is removed at the end and shown on a terminal only."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
