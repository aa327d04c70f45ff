"""`python -m benchmarks training`: attention variants trained under equal budgets, over any number of runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.options import Commit
from polyhead.cli.options import writable_file

if TYPE_CHECKING:
    from rich.progress import TaskID


def training(
    text: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="Text to train on, its last tenth held out; plain or .gz.",
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="File of finished trainings, one per line; a run resumes from it.",
            callback=writable_file,
        ),
    ],
    minutes: Annotated[float | None, typer.Option(help="Begin no training after so many minutes.")] = None,
    processes: Annotated[
        int, typer.Option(min=1, help="So many trainings at a time; one leaves most of a large GPU idle.")
    ] = 1,
    quick: Annotated[bool, typer.Option("--quick", help="A small model and few steps: a look, no figure.")] = False,
    commit: Commit = None,
) -> None:
    """Train models that differ only in their attention variant.

    Byte models of about eleven million parameters each, whatever the variant: first over equally many tokens, then
    over equal compute. Each gets the same sweep over four learning rates, and the best of them two more
    seeds; how far the seeds of multi-head attention lie apart is the noise below which no difference counts. Finished
    trainings are kept one by one, so the comparison can be spread over any number of runs.
    """
    import torch
    from rich.console import Console
    from rich.progress import Progress

    from benchmarks.measuring.runner import print_table
    from benchmarks.training.contestants import contest
    from benchmarks.training.running import Comparison
    from benchmarks.training.standings import rows, standings
    from benchmarks.training.text import Text
    from benchmarks.training.trials import Trial, read_results
    from polyhead.costs.measuring import machine_facts

    def named(trial: Trial) -> str:
        return f"{trial.variant}, equal {trial.budget}, rate {trial.rate:g}, seed {trial.seed}"

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    requested = contest(quick=quick)
    Text.read(text, requested.sizes.context)  # so that one that is too short is refused here
    facts = {**machine_facts.describe(device, commit), "text": text.name, "quick": quick}
    console = Console(stderr=True, highlight=False)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        shown: dict[Trial, TaskID] = {}

        def began(trial: Trial) -> None:
            shown[trial] = bar.add_task(named(trial), total=None)

        def step(done: int, steps: int) -> None:
            (task,) = shown.values()
            bar.update(task, completed=done, total=steps)

        comparison = Comparison(requested, text, device, output, facts)
        for result in comparison.run(processes=processes, minutes=minutes, began=began, step=step):
            bar.remove_task(shown.pop(result.trial))
            outcome = f"{result.bits:.4f} bits a byte after {result.steps} steps, {result.seconds:.0f} s"
            console.print(f"{named(result.trial)}: {outcome}")
    print_table(*rows(standings(requested, read_results(output))))
