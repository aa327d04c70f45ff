"""`python -m benchmarks stability`: training runs that diverge, remedies, and alarms, at 100M parameters."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from benchmarks.options import Commit
from polyhead.cli.options import writable_file
from polyhead.errors import OptionError

QUICK: dict[str, Any] = {"layers": 2, "width": 64, "heads": 4, "context": 64, "batch": 8, "steps": 60, "warm_up": 10}
RATE = 100e12  # FLOP/s assumed for eager, monitored steps of this size on an H200, which mostly wait for the host


def stability(
    text: Annotated[
        Path,
        typer.Option(metavar="FILE", exists=True, dir_okay=False, help="Text to train on; plain or .gz."),
    ],
    output: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="File of finished runs, one per line; a call resumes from it.",
            callback=writable_file,
        ),
    ],
    parts: Annotated[str, typer.Option(metavar="PART,...", help="Any of clip, alarms.")] = "clip,alarms",
    seconds: Annotated[
        float | None,
        typer.Option(help="Begin no run that would end after so many seconds, at the pace of the last one."),
    ] = None,
    rates: Annotated[
        str,
        typer.Option(metavar="RATE,...", help="Learning rates of the plain runs, tried in ascending order."),
    ] = "1e-3,3e-3,1e-2,3e-2",
    contests: Annotated[
        int, typer.Option(min=1, help="Number of learning rates that diverge at which the remedies are tried.")
    ] = 1,
    threshold: Annotated[float, typer.Option(help="Threshold of QK-clip.")] = 100.0,
    alarm_rate: Annotated[float, typer.Option(help="Learning rate of the runs with alarms.")] = 6e-4,
    optimizer: Annotated[str, typer.Option(metavar="adamw|muon", help="Optimizer of the part clip.")] = "adamw",
    qk_rate_factor: Annotated[
        float, typer.Option(help="Multiply the learning rate of W_Q and W_K, so that logits grow for sure.")
    ] = 1.0,
    weight_decay: Annotated[float, typer.Option(min=0, help="Weight decay of the part clip.")] = 0.0,
    warm_up: Annotated[
        int | None, typer.Option(min=0, help="Steps of linear warm-up, at most 50 with alarms.  [default: 100]")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of a run.  [default: 500]")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Contexts per step.  [default: 16]")] = None,
    context: Annotated[int | None, typer.Option(min=2, help="Bytes per context.  [default: 512]")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers.  [default: 12]")] = None,
    width: Annotated[int | None, typer.Option(min=8, help="Width of the model.  [default: 768]")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Heads per layer.  [default: 12]")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the batches.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="A small model and few steps: a look, no figure.")] = False,
    commit: Commit = None,
) -> None:
    """Train a byte-level language model of 104M parameters until it diverges, with remedies and with alarms.

    Part clip: at ascending learning rates the plain model is trained, until it diverges; there the same model is
    trained with `QKClip` and with QK-norm, from the same seed on the same batches. The learning rate below is the
    third remedy. A run diverged if its loss spikes (5 MAD above the median of the last 100 steps, for 5 steps), is not
    finite, or ends 0.5 nats per byte above the best. Part alarms: a healthy run, one in which W_Q of one head grows
    from step 200 on, and one in which the learning rate does, with the alarms that `HeadAlarms` raises.

    A step of the default size is 5.4 TFLOP. On an H200 a run is estimated to take 25 to 30 seconds; one that is not
    finite ends early.
    """
    import torch
    from rich.console import Console

    from benchmarks.measuring.json_lines import append_result
    from benchmarks.measuring.runner import print_table
    from benchmarks.stability.loop import train
    from benchmarks.stability.tables import alarm_rows, clip_rows
    from benchmarks.stability.trials import Optimizer, Part, Setting, Study, next_trial, read_results
    from benchmarks.training.text import Text
    from polyhead.costs.measuring import machine_facts

    start = time.monotonic()
    given: dict[str, Any] = {
        "layers": layers,
        "width": width,
        "heads": heads,
        "context": context,
        "batch": batch,
        "steps": steps,
        "warm_up": warm_up,
    }
    sizes = {name: value for name, value in given.items() if value is not None}
    setting = replace(
        Setting(),
        **(QUICK if quick else {}) | sizes,
        weight_decay=weight_decay,
        optimizer=_one_of("--optimizer", optimizer, get_args(Optimizer)),
        qk_rate_factor=qk_rate_factor,
        seed=seed,
    )
    chosen = [_one_of("--parts", part, get_args(Part)) for part in parts.split(",")]
    study = Study(setting, _rates(rates), threshold, alarm_rate, chosen, contests)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts = {**machine_facts.describe(device, commit), "text": text.name, "quick": quick}
    content = Text.read(text, setting.context)
    console = Console(stderr=True, highlight=False)
    console.print(str(setting), markup=False)
    estimate = setting.steps * setting.step_flops / RATE
    work = f"{setting.step_flops / 1e12:.3g} TFLOP per step"
    console.print(f"{work}: {estimate:.2g} s per run at {RATE / 1e12:g} TFLOP/s", markup=False)
    while (trial := next_trial(study, finished := read_results(output))) is not None:
        elapsed, pace = time.monotonic() - start, finished[-1].seconds if finished else 0.0
        if seconds is not None and elapsed + pace >= seconds:
            console.print(f"{elapsed:6.1f} s  not begun: {trial}", markup=False)
            break
        console.print(f"{elapsed:6.1f} s  {trial}", markup=False)

        def report(done: int, total: int) -> None:
            if done % 100 == 0 and done < total:
                console.print(f"{time.monotonic() - start:6.1f} s    step {done} of {total}", markup=False)

        result = train(trial, content, device, facts=facts, report=report)
        append_result(output, result)
        last, largest = result.losses[-1], max(result.max_logits)
        console.print(
            f"{time.monotonic() - start:6.1f} s    loss {last:.3f} after {len(result.losses)} steps, largest logit "
            f"{largest:.4g}, {result.seconds:.0f} s",
            markup=False,
        )
    for header, *lines in (clip_rows(finished), alarm_rows(finished)):
        if lines:
            print_table(header, *lines)


def _one_of(option: str, value: str, known: tuple[Any, ...]) -> Any:
    if value not in known:
        raise OptionError(f"{option} must be one of {', '.join(known)}; got {value!r}")
    return value


def _rates(text: str) -> list[float]:
    try:
        found = [float(x) for x in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) <= 0:
        raise OptionError(f"--rates must be positive numbers with commas between them, got {text!r}")
    return found
