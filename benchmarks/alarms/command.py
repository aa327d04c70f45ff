"""`python -m benchmarks alarms`: planted instabilities and healthy runs, with the alarms that each raises."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.options import Commit
from polyhead.cli.options import ResultFile

FIRST_SEED = {"tune": 100_000, "test": 0}


def alarms(
    output: ResultFile = None,
    split: Annotated[
        str,
        typer.Option(metavar="test|tune", help="Seeds: those of the figures, or those that thresholds were chosen on."),
    ] = "test",
    traces: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of trained runs, which are read again instead of trained."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Two short runs of each kind: a look, no figure.")] = False,
    commit: Commit = None,
) -> None:
    """Train small language models with planted instabilities and healthy ones, and count their alarms.

    From step 200 on, W_Q of one head, the learning rate of one layer's attention, or the whole learning rate grows. A
    spike is a loss 5 MAD above the median of the last 100 steps for 5 steps. Counted are spikes that an alarm announces
    20 to 500 steps ahead with the name of the planted head or layer, and healthy runs that raise any alarm. The
    statistics do not change training, so that a run spikes whether or not it is monitored. About 25 minutes on a core.
    """
    import torch

    from benchmarks.alarms.outcomes import outcome, summary
    from benchmarks.alarms.runs import study
    from benchmarks.measuring.json_lines import write_rows
    from polyhead.costs.measuring import machine_facts
    from polyhead.errors import OptionError

    if split not in FIRST_SEED:
        raise OptionError(f"--split must be test or tune, got {split!r}")
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for name, runs in study(FIRST_SEED[split], quick=quick).items():
        rows += map(outcome, _trained(runs, traces and traces / f"{name}.pt"))
        typer.echo(f"{name}: {len(runs)} runs")
    if output is not None:
        facts = {**machine_facts.describe(torch.device("cpu"), commit), "split": split, "quick": quick}
        write_rows(output, facts, rows)
    typer.echo(summary(rows))


def _trained(runs: Any, path: Path | None) -> Any:
    """Train runs, or read them from a file that an earlier call wrote."""
    import torch

    from benchmarks.alarms.runs import Trace, train

    if path is not None and path.exists():
        return [Trace(run, *found) for run, found in zip(runs, torch.load(path, weights_only=True), strict=True)]
    trained = train(runs)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save([(trace.losses.clone(), trace.values.clone()) for trace in trained], path)
    return trained
