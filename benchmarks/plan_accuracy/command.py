"""`python -m benchmarks plan`: errors of predicted times on layers that no calibration has seen."""

from __future__ import annotations

import math
import time
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.options import Commit
from polyhead.cli.options import ResultFile
from polyhead.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.plan_accuracy import Outcome
    from benchmarks.plan_accuracy.shapes import Shape
    from polyhead.costs.timing.machine import Machine


def plan(
    machine: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="Calibrated machine that this runs on, or its .json file.")
    ],
    output: ResultFile = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A dozen small shapes, as on a CPU: a functional check.")
    ] = False,
    seconds: Annotated[float | None, typer.Option(help="Start no shape after this many seconds.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the shapes, instead of the committed one.")] = None,
    times: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="Predict the measured times of this result file again, and measure nothing.",
        ),
    ] = None,
    commit: Commit = None,
) -> None:
    """Measure the error of predicted times.

    Draws layers by a seed, log-uniform in every size, causal and windowed; predicts each on the calibrated machine,
    then runs it: forward, one token of decoding, or a training step. Prints median and worst errors by regime, next to
    those of a datasheet's roofline. A miss is a median above 15% or a worst above 35%.
    """
    from benchmarks import plan_accuracy
    from benchmarks.measuring.runner import print_table
    from polyhead.costs.timing.machine import Machine

    calibrated = Machine.load(machine)
    if times is not None:
        facts, outcomes = _predicted_again(times, calibrated)
        if output is not None:
            plan_accuracy.write(output, facts, outcomes)
    else:
        outcomes = _measured(calibrated, output, quick, seconds, seed, commit)
    print_table(*_rows(outcomes))
    typer.echo()
    print_table(*_summary(outcomes))
    if output is not None:
        typer.echo(f"written to {output}")


def _predicted_again(times: Path, calibrated: Machine) -> tuple[dict[str, object], list[Outcome]]:
    """Return the facts of a stored run and the current predictions of its times."""
    from benchmarks import plan_accuracy
    from benchmarks.plan_accuracy.shapes import REGIMES
    from polyhead.files import read_json, refusing

    rule = "--times must be a run that `python -m benchmarks plan --output` has kept"
    content = read_json(times, rule)
    with refusing(times, rule):
        facts = {name: content[name] for name in content if name not in ("bounds", "summary", "rows")}
        facts["calibration"] = _calibration(calibrated)
        outcomes = plan_accuracy.predict_again(content, calibrated)
        for outcome in outcomes:
            known = [seconds for seconds in (outcome.measured, outcome.usual) if seconds is not None]
            if outcome.regime not in REGIMES or len(known) == 1 or not all(0 < seconds < math.inf for seconds in known):
                row = f"{outcome.regime!r} with {outcome.measured!r} and {outcome.usual!r} seconds"
                raise ValueError(f"it has a row of {row}")
    return facts, outcomes


def _measured(
    calibrated: Machine, output: Path | None, quick: bool, seconds: float | None, seed: int | None, commit: str | None
) -> list[Outcome]:
    import torch
    from rich.console import Console

    from benchmarks import plan_accuracy
    from benchmarks.measuring.runner import progress_bar
    from benchmarks.plan_accuracy import shapes
    from polyhead.costs import calibration
    from polyhead.costs.calibration.timing import undisturbed
    from polyhead.costs.measuring import machine_facts as described

    gpu = calibrated.device == "cuda"
    if gpu and not torch.cuda.is_available():
        raise OptionError(
            f"--machine must be like the one that this runs on, got {calibrated.name}, which has a CUDA GPU, and "
            "this machine has none; name one without"
        )
    device = torch.device(calibrated.device)
    ranges = shapes.GPU if gpu and not quick else shapes.CPU
    if gpu and quick:
        ranges = shapes.on_a_gpu(ranges)
    drawn_by = shapes.SEED if seed is None else seed
    # All pieces that a calibration may time, so that the shapes do not depend on how many this one did.
    known = [piece for group in calibration.planned(device, calibrated.dtypes) for piece in group.pieces]
    drawn = shapes.draw(ranges, seed=drawn_by, known=known)
    facts = {
        **described.describe(device, commit),
        "calibration": _calibration(calibrated),
        "dtype": str(ranges.dtype).removeprefix("torch."),
        "drawn": len(drawn),
        "quick": quick,
        "seed": drawn_by,
    }
    progress, began = Console(stderr=True, highlight=False), time.perf_counter()
    outcomes: dict[Shape, Outcome] = {}
    limit = math.inf if seconds is None else seconds
    with undisturbed(), progress_bar(progress) as bar:
        task = bar.add_task("", total=len(drawn))
        for outcome in plan_accuracy.measure(drawn, calibrated, ranges, device=device, seconds=limit):
            first = outcome.shape not in outcomes
            outcomes[outcome.shape] = outcome
            taken = time.perf_counter() - began
            if output is not None:
                plan_accuracy.write(output, {**facts, "seconds": round(taken, 1)}, list(outcomes.values()))
            bar.update(task, advance=first, description=f"{outcome.regime} {outcome.shape}")
            if not progress.is_terminal:
                progress.print(f"{taken:6.1f} s  {outcome.regime} {outcome.shape}", markup=False)
    typer.echo(f"{len(outcomes)} of {len(drawn)} shapes in {time.perf_counter() - began:.0f} seconds")
    return list(outcomes.values())


def _calibration(calibrated: Machine) -> dict[str, object]:
    return {"name": calibrated.name, "date": calibrated.facts.get("date"), "samples": len(calibrated.samples)}


def _rows(outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    from benchmarks.plan_accuracy.shapes import REGIMES

    place = ("regime", "phase", "batch x heads x n x d", "bound by")
    lines: list[tuple[str, ...]] = [(*place, "predicted", "measured", "error", "datasheet")]
    for outcome in sorted(outcomes, key=lambda outcome: REGIMES.index(outcome.regime)):
        times = ("no memory", "", "")
        if outcome.measured is not None:
            times = (f"{1e3 * outcome.measured:.4g} ms", f"{outcome.error:+.1%}", f"{outcome.datasheet_error:+.1%}")
        place = (outcome.regime, outcome.shape.phase, str(outcome.shape), outcome.bound)
        lines.append((*place, f"{1e3 * outcome.predicted:.4g} ms", *times))
    return lines


def _summary(outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    from benchmarks.plan_accuracy import summaries

    errors = ("median error", "worst", "at any moment: median", "worst", "datasheet: median", "worst")
    lines: list[tuple[str, ...]] = [("regime", "shapes", *errors, "")]
    for summary in summaries(outcomes):
        regime, shapes, *values = astuple(summary)
        lines.append((regime, str(shapes), *(f"{x:.1%}" for x in values), "miss" if summary.missed else "ok"))
    return lines
