"""`python -m benchmarks surgery`: quality without heads, by criterion, share and compensation, and the time saved."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyhead.cli.options import Device, check_positive, device_or_gpu, part_of, writable_file
from polyhead.cli.progress import errors_told
from polyhead.errors import OptionError

if TYPE_CHECKING:
    from benchmarks.surgery_quality.points import Point, Result
    from benchmarks.surgery_quality.tasks import Split, Task

PARTS = ("tuned", "curves")


def surgery(
    model: Annotated[
        str, typer.Option("--model", metavar="NAME|FOLDER", help="minilm, smollm2, a folder, or a name on the hub.")
    ] = "minilm",
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            exists=True,
            help="For an encoder the folder of STS-B (sts-train.csv, sts-dev.csv, sts-test.csv); for a causal model a "
            "text: its first 60% to calibrate on, the next 20% to choose on, the last to report.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Where finished points are kept, a line each; a run goes on there.",
            callback=writable_file,
        ),
    ] = None,
    part: Annotated[
        str | None, typer.Option(metavar="tuned|curves", help="Ways at the shares that matter, or all curves; both.")
    ] = None,
    shares: Annotated[
        str | None, typer.Option(metavar="N%,...", help="Only these shares of heads in the curves; 10% to 80%.")
    ] = None,
    calibration: Annotated[
        int | None, typer.Option(metavar="N", help="At most so many rows, or sentences, to calibrate on.")
    ] = None,
    rows: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="At most so many rows, or pairs of sentences, to measure on: faster and coarser."
        ),
    ] = None,
    share: Annotated[
        str, typer.Option(metavar="I/N", help="Of N processes that share the file, this is number I.")
    ] = "1/1",
    minutes: Annotated[float | None, typer.Option(help="Begin no point after so many minutes.")] = None,
    timed: Annotated[
        bool,
        typer.Option(
            "--time", help="Only the time that heads which are gone save, over counted FLOPs; needs no text or model."
        ),
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Little text and few shares: a look, no figure.")] = False,
    commit: Annotated[
        str | None, typer.Option(metavar="SHA", help="What is measured, for a copy without its repository.")
    ] = None,
    device: Device = None,
) -> None:
    """Measure the quality of models pruned in closed form.

    Every criterion at every share, not repaired and repaired, and random heads five times; then, where it matters,
    ways to weigh errors, to repair in order and to search. The best way is chosen on the choosing split, and the last
    table tells what it is worth on the reporting split. Finished points are kept one by one.
    """
    from rich.console import Console

    from benchmarks.measuring.runner import print_table, progress_bar
    from benchmarks.surgery_quality.measuring import Bench
    from benchmarks.surgery_quality.points import append_result, check_alike, is_done, read_results
    from benchmarks.surgery_quality.standings import rows as rows_of

    if timed:
        _time(output, commit, quick=quick)
        return
    with errors_told("bench surgery"):
        if text is None or output is None:
            raise OptionError("points are measured on a text and kept in a file, got no --text or no --output")
        if part is not None and part not in PARTS:
            raise OptionError(f"a part is {' or '.join(PARTS)}, got {part!r}")
        wanted = _shares(shares)
        number, of = part_of(share)
        for option, value in (("--calibration", calibration), ("--rows", rows), ("--minutes", minutes)):
            check_positive(option, value, zero=option == "--minutes")
        console, began = Console(stderr=True, highlight=False), time.monotonic()
        task, facts = _task(model, text, device_or_gpu(device), commit, calibration=calibration, rows=rows, quick=quick)
        points = _points(task, part, wanted, quick=quick)
        found = read_results(output)
        check_alike(found, facts)
        left = [point for point in list(points)[number::of] if not is_done(point, found, points[point])]
        with progress_bar(console) as bar:
            shown = bar.add_task("", total=len(left))
            bench = Bench(task, facts=facts, report=lambda said: bar.update(shown, description=said))
            for point in left:
                if minutes is not None and time.monotonic() - began > 60 * minutes:
                    console.print(f"{minutes:g} minutes are over; the same command goes on", style="yellow")
                    break
                result = bench.measure(point, points[point])
                append_result(output, result)
                bar.advance(shown)
                console.print(f"{time.monotonic() - began:6.1f} s  {point}: {_headline(result)}", markup=False)
        found = [result for result in read_results(output) if result.point in points]
        if found:
            print_table(*rows_of(found))


def _time(output: Path | None, commit: str | None, *, quick: bool) -> None:
    import torch

    from benchmarks.measuring.runner import run_steps
    from benchmarks.surgery_quality import timing

    gpu = torch.device("cuda") if torch.cuda.is_available() else None
    steps = timing.plan(quick=quick, seed=0, gpu=gpu)
    run_steps(steps, gpu or torch.device("cpu"), output, commit=commit, quick=quick)


def _task(
    name: str, text: Path, device: str, commit: str | None, *, calibration: int | None, rows: int | None, quick: bool
) -> tuple[Task, dict[str, Any]]:
    import torch

    from benchmarks.surgery_quality.language import LanguageTask
    from benchmarks.surgery_quality.sentences import SentenceTask
    from polyhead.costs.measuring import machine
    from polyhead.sources import load_model

    loaded = load_model(name, device=device, dtype=torch.float32)
    loaded.model.requires_grad_(False)
    options = {"calibration": 128 if quick else calibration, "rows": 16 if quick else rows}
    facts = {**machine.describe(torch.device(device), commit), "model": loaded.name, "text": text.name, **options}
    task: Task
    if loaded.kind == "causal":
        task = LanguageTask.read(loaded.model, loaded.tokenizer, text, **options)
    elif loaded.kind == "encoder":
        task = SentenceTask.read(loaded.model, loaded.tokenizer, text, **options)
    else:
        raise OptionError(f"points are measured of causal models and of encoders without a head, got {loaded}")
    return task, facts


def _points(
    task: Task, part: str | None, shares: tuple[float, ...] | None, *, quick: bool
) -> dict[Point, tuple[Split, ...]]:
    """Points to measure, and their splits: curves choose nothing, and are measured on the reporting one alone."""
    from benchmarks.surgery_quality.points import SHARES, curves, tuned

    found: dict[Point, tuple[Split, ...]] = {}
    if part in (None, "curves"):
        drawn = curves(shares or ((0.3,) if quick else SHARES))
        found |= dict.fromkeys(drawn, ("report",))
    if part in (None, "tuned"):
        at = (0.3,) if quick else (0.2, 0.3) if task.name == "language" else (0.5,)
        found |= dict.fromkeys(tuned(at, _native(task)), ("choose", "report"))
    return found


def _shares(text: str | None) -> tuple[float, ...] | None:
    if text is None:
        return None
    found = [re.fullmatch(r"\s*(\d+)%\s*", part) for part in text.split(",")]
    shares = [int(part[1]) / 100 if part else 0.0 for part in found]
    if not all(0 < share < 1 for share in shares):
        raise OptionError(f"shares of heads are written as 20%,50%, over 0% and under 100%, got {text!r}")
    return tuple(shares)


def _native(task: Task) -> list[str]:
    """Layouts of fewer heads that a native class can hold, as 6/3 and 6/2 of 9/3: none where heads share no keys."""
    from polyhead.surgery import find_layers

    layouts = {(x.layout.num_heads, x.layout.num_kv_heads) for x in find_layers(task.model) if x.layout is not None}
    if len(layouts) != 1:
        return []
    ((heads, keys),) = layouts
    group = heads // keys
    fewer = [(keys * (group - 1), keys), (group * (keys - 1), keys - 1)]
    return [f"{h}/{k}" for h, k in fewer if keys < heads and k > 0 and h > 0]


def _headline(result: Result) -> str:
    from benchmarks.surgery_quality.standings import headline, said

    name = headline([result])
    told = ", ".join(f"{said(own[name])} on the {split} split" for split, own in result.figures.items())
    return f"{name} {told}, {result.seconds:.1f} s"
