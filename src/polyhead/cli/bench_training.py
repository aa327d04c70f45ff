"""`polyhead bench training`: arrangements of heads trained side by side, in as many runs as it takes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polyhead.cli.options import part_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.progress import Progress, TaskID
    from rich.table import Table

    from polyhead.lab.training.standings import Standing


def training(
    text: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="What to learn from and, its last tenth, to be asked about; plain or .gz.",
        ),
    ],
    output: Annotated[
        Path, typer.Option(metavar="FILE", help="Where finished trainings are kept, a line each; a run goes on there.")
    ],
    minutes: Annotated[float | None, typer.Option(help="Begin no training after so many minutes.")] = None,
    share: Annotated[
        str, typer.Option(metavar="I/N", help="Of N processes that share a GPU and the file, this is number I.")
    ] = "1/1",
    quick: Annotated[bool, typer.Option("--quick", help="A small model and few steps: a look, no figure.")] = False,
    commit: Annotated[
        str | None, typer.Option(metavar="SHA", help="What is measured, for a copy without its repository.")
    ] = None,
) -> None:
    """How well models learn that differ in nothing but the arrangement of their heads.

    Byte models of about eleven million parameters each, whatever the arrangement takes: first over equally many
    tokens, then over equal compute. Each gets the same sweep over four learning rates, and the best of them two more
    seeds; how far the seeds of multi-head attention lie apart is the noise below which no difference counts. Finished
    trainings are kept one by one, so the comparison can be spread over any number of runs.
    """
    import torch
    from rich.console import Console
    from rich.progress import Progress

    from polyhead.lab.measuring import machine
    from polyhead.lab.training.contestants import contest
    from polyhead.lab.training.loop import train
    from polyhead.lab.training.standings import standings
    from polyhead.lab.training.text import Text
    from polyhead.lab.training.trials import append_result, next_trial, read_results

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    asked, mine = contest(quick=quick), part_of(share)
    learned = Text.read(text, asked.sizes.context)
    facts = {**machine.describe(device, commit), "text": text.name, "quick": quick}
    console, began = Console(stderr=True, highlight=False), time.monotonic()
    while minutes is None or time.monotonic() - began < 60 * minutes:
        trial = next_trial(asked, read_results(output), mine)
        if trial is None:
            break
        name = f"{trial.arrangement}, equal {trial.budget}, rate {trial.rate:g}, seed {trial.seed}"
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            shown = _Shown(bar, bar.add_task(name))
            result = train(asked, trial, learned, device, facts=facts, report=shown)
        append_result(output, result)
        console.print(f"{name}: {result.bits:.4f} bits a byte after {result.steps} steps, {result.seconds:.0f} s")
    found = standings(asked, read_results(output))
    out = Console(highlight=False)
    (out if out.is_terminal else Console(width=150, highlight=False)).print(_table(found))


@dataclass(frozen=True)
class _Shown:
    """The bar of one training."""

    bar: Progress
    task: TaskID

    def __call__(self, done: int, steps: int) -> None:
        self.bar.update(self.task, completed=done, total=steps)


def _table(found: Sequence[Standing]) -> Table:
    from rich.table import Table

    from polyhead.lab.training.standings import rows

    table = Table(box=None, pad_edge=False)
    header, *lines = rows(found)
    for column in header:
        table.add_column(column, justify="left" if column == header[0] else "right")
    for line in lines:
        table.add_row(*line)
    return table
