"""`python -m benchmarks surgery`, `conversion`, `merging` and `prediction`: quality of models with edited heads."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks.options import Commit
from polyhead.cli.edit_options import SavedForm, Tokens
from polyhead.cli.options import Device, check_positive, default_device, part_of, writable_file
from polyhead.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from benchmarks.surgery_quality.points import Point, Result
    from benchmarks.surgery_quality.tasks import Split, Task

PARTS = ("tuned", "curves")
WAYS = "pooled,aligned,weights,converted"


Model = Annotated[
    str, typer.Option("--model", metavar="NAME|FOLDER", help="minilm, smollm2, a folder, or a name on the hub.")
]
TEXT = typer.Option(
    metavar="PATH",
    exists=True,
    help="For an encoder the folder of STS-B (sts-train.csv, sts-dev.csv, sts-test.csv); for a causal model a text: "
    "its first 60% to calibrate on, the next 20% to choose on, the last to report.",
)
Calibration = Annotated[
    int | None, typer.Option(metavar="N", help="At most so many rows, or sentences, to calibrate on.")
]
Rows = Annotated[
    int | None,
    typer.Option(metavar="N", help="At most so many rows, or pairs of sentences, to measure on: faster and coarser."),
]
Batch = Annotated[int | None, typer.Option(min=1, help="Rows of text, or sentences, at a time.")]
Lines = Annotated[
    Path | None, typer.Option(metavar="FILE", help="JSON lines, to which rows are added.", callback=writable_file)
]


def surgery(
    model: Model = "minilm",
    text: Annotated[Path | None, TEXT] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File of finished points, one per line; a run resumes from it.",
            callback=writable_file,
        ),
    ] = None,
    part: Annotated[
        str | None, typer.Option(metavar="tuned|curves", help="Ways at the shares that matter, or all curves; both.")
    ] = None,
    shares: Annotated[
        str | None, typer.Option(metavar="N%,...", help="Only these shares of heads in the curves; 10% to 80%.")
    ] = None,
    calibration: Calibration = None,
    rows: Rows = None,
    share: Annotated[
        str, typer.Option(metavar="I/N", help="Of N processes that share the file, this is number I.")
    ] = "1/1",
    minutes: Annotated[float | None, typer.Option(help="Begin no point after so many minutes.")] = None,
    timed: Annotated[
        bool,
        typer.Option(
            "--time", help="Only the time that removed heads save, over counted FLOPs; needs no text or model."
        ),
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Little text and few shares: a look, no figure.")] = False,
    commit: Commit = None,
    device: Device = None,
) -> None:
    """Measure the quality of models pruned in closed form.

    Every criterion at every share, with and without compensation, and random heads five times; then, at the shares
    that matter, ways to weigh errors, to compensate and to search. The best method is selected on the choosing split,
    and the last table has its result on the reporting split. Finished points are kept one by one.
    """
    from rich.console import Console

    from benchmarks.measuring.json_lines import append_result
    from benchmarks.measuring.runner import print_table, progress_bar
    from benchmarks.surgery_quality.measuring import Bench
    from benchmarks.surgery_quality.points import check_alike, is_done, read_results
    from benchmarks.surgery_quality.standings import rows as rows_of

    if timed:
        _time(output, commit, quick=quick)
        return
    if text is None or output is None:
        raise OptionError("points are measured on a text and kept in a file, got no --text or no --output")
    if part is not None and part not in PARTS:
        raise OptionError(f"a part is {' or '.join(PARTS)}, got {part!r}")
    wanted = _shares(shares)
    number, of = part_of(share)
    for option, value in (("--calibration", calibration), ("--rows", rows), ("--minutes", minutes)):
        check_positive(option, value, zero=option == "--minutes")
    console, began = Console(stderr=True, highlight=False), time.monotonic()
    options: dict[str, Any] = {"calibration": 128 if quick else calibration, "rows": 16 if quick else rows}
    task, facts = _task(model, text, device, commit, **options)
    task.model.requires_grad_(False)
    facts |= {"text": text.name, **options}
    points = _points(task, part, wanted, quick=quick)
    found = read_results(output)
    check_alike(found, facts)
    left = [point for point in list(points)[number::of] if not is_done(point, found, points[point])]
    with progress_bar(console) as bar:
        shown = bar.add_task("", total=len(left))
        bench = Bench(task, facts=facts, report=lambda text: bar.update(shown, description=text))
        for point in left:
            if minutes is not None and time.monotonic() - began > 60 * minutes:
                console.print(f"{minutes:g} minutes are over; run the same command to resume", style="yellow")
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


def conversion(
    text: Annotated[Path, TEXT],
    kv_heads: Annotated[str, typer.Option(metavar="N,...", help="KV heads to convert to, one after the other.")],
    model: Model = "minilm",
    output: Lines = None,
    ways: Annotated[str, typer.Option(metavar="WAY,...", help="Of pooled, aligned, weights and converted.")] = WAYS,
    options: Annotated[
        list[str] | None, typer.Option(metavar="JSON", help="Options of convert_groups; each that is given is tried.")
    ] = None,
    calibration: Calibration = None,
    rows: Rows = None,
    batch: Batch = None,
    report: Annotated[
        bool, typer.Option("--report", help="Measure the best options once on the reporting split.")
    ] = False,
    device: Device = None,
) -> None:
    """Measure the quality of models with fewer KV heads, converted in closed form or by pooling."""
    from benchmarks.conversion import METHODS, converted_rows

    chosen = ways.split(",")
    if unknown := [way for way in chosen if way not in METHODS]:
        raise OptionError(f"a way is one of {', '.join(METHODS)}, got {', '.join(unknown)}")
    counts = [int(count) for count in kv_heads.split(",") if count.isdecimal()]
    if len(counts) != len(kv_heads.split(",")):
        raise OptionError(f"KV heads are written as 4,1, got {kv_heads!r}")
    try:
        tried = [json.loads(given) for given in options or ["{}"]]
    except ValueError as error:
        raise OptionError(f"options are written as JSON: {error}") from None
    task, facts = _task(model, text, device, polyhead=True, calibration=calibration, rows=rows, batch=batch)
    for _ in _kept(converted_rows(task, counts, chosen, tried, report=report), facts, output):
        pass


def merging(
    text: Annotated[Path, TEXT],
    model: Model = "minilm",
    output: Lines = None,
    calibration: Calibration = None,
    rows: Rows = None,
    batch: Batch = None,
    pairs: Annotated[
        int | None,
        typer.Option(help="Pairs of each layer, beside groups; by default a few where no group can be merged."),
    ] = None,
    layer_only: Annotated[bool, typer.Option("--layer-only", help="Leave out the figures of the whole model.")] = False,
    device: Device = None,
) -> None:
    """Measure merging heads of a redundancy group against pruning as many with compensation."""
    from benchmarks.merging import judged, summary

    task, facts = _task(model, text, device, polyhead=True, calibration=calibration, rows=rows, batch=batch)
    typer.echo(summary(list(_kept(judged(task, pairs, whole=not layer_only), facts, output))))


def prediction(
    text: Annotated[
        str, typer.Option(metavar="FILE|DIR", help="Text of at least 32 documents, e.g. lines of a .jsonl file.")
    ],
    targets: Annotated[
        str,
        typer.Option(metavar="TARGET,...", help="As --target of `polyhead shrink`, or 30% as --share of `prune`."),
    ],
    model: Model = "minilm",
    draws: Annotated[int, typer.Option(min=1, help="Random splits of the documents.")] = 10,
    form: SavedForm = "uniform",
    tokens: Tokens = None,
    output: Lines = None,
    commit: Commit = None,
    device: Device = None,
) -> None:
    """Measure whether the loss of quality that `polyhead shrink` and `polyhead prune` print holds on other text.

    For each draw, half of the documents are the command's text, which it samples and splits itself, and half are not
    read by it. Each target has a row: `ratio` of qualities after and before, `low` and `high` of its printed interval,
    the ratio on the `whole` other half, sampled to as many tokens, and on a `small` part of it, as long as what the
    command held out. The model may also be `whisper` or a mathformer, as for `statements`.
    """
    import torch

    from benchmarks.prediction import coverage, predicted_rows
    from benchmarks.statements import models
    from polyhead.costs.measuring import machine_facts
    from polyhead.sources.text_contexts import documents_of
    from polyhead.surgery.options import check_form

    check_form(form)
    check_positive("--tokens", tokens)
    documents = [document.text for document in documents_of(text)]
    place = torch.device(default_device(device))
    torch.backends.cuda.matmul.allow_tf32 = False
    loaded = models.load(model, device=place)
    facts = {**machine_facts.describe(place, commit), "model": loaded.name}
    rows = predicted_rows(loaded, documents, targets.split(","), draws, form, tokens)  # type: ignore[arg-type]
    typer.echo(coverage(list(_kept(rows, facts, output))))


def _kept(rows: Iterable[dict[str, Any]], facts: dict[str, Any], output: Path | None) -> Iterator[dict[str, Any]]:
    """Yield the rows, after each was printed and added to the file."""
    name = facts.pop("model")
    for row in rows:
        typer.echo(json.dumps(row))
        if output is not None:
            with output.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"model": name, **row, "machine": facts}) + "\n")
        yield row


def _task(
    name: str,
    text: Path,
    device: str | None,
    commit: str | None = None,
    *,
    polyhead: bool = False,
    **options: int | None,
) -> tuple[Task, dict[str, Any]]:
    """Return a model on its text, and the facts of the machine; options that are None are left to the task.

    `polyhead` runs the model with polyhead's attention.
    """
    import torch

    from benchmarks.surgery_quality.language import LanguageTask
    from benchmarks.surgery_quality.sentences import SentenceTask
    from polyhead.costs.measuring import machine_facts
    from polyhead.integrations.huggingface import register
    from polyhead.workflows.model_loading import load_model

    place = torch.device(default_device(device))
    loaded = load_model(name, device=place, dtype=torch.float32)
    readers: dict[str, Any] = {"causal": LanguageTask, "encoder": SentenceTask}
    if loaded.kind not in readers:
        raise OptionError(f"a model must be causal or an encoder without a head, got {loaded}")
    if polyhead:
        torch.backends.cuda.matmul.allow_tf32 = False
        loaded.model.set_attn_implementation(register())
    given = {option: value for option, value in options.items() if value is not None}
    task: Task = readers[loaded.kind].read(loaded.model, loaded.tokenizer, text, **given)
    return task, {**machine_facts.describe(place, commit), "model": loaded.name}


def _points(
    task: Task, part: str | None, shares: tuple[float, ...] | None, *, quick: bool
) -> dict[Point, tuple[Split, ...]]:
    """Return the points to measure and their splits; curves are measured on the reporting split alone."""
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
    """Return layouts of fewer heads for native classes, as 6/3 and 6/2 of 9/3; none without shared KV heads."""
    from polyhead.surgery import find_layers

    layouts = {(x.layout.num_heads, x.layout.num_kv_heads) for x in find_layers(task.model) if x.layout is not None}
    if len(layouts) != 1:
        return []
    ((heads, keys),) = layouts
    group = heads // keys
    fewer = [(keys * (group - 1), keys), (group * (keys - 1), keys - 1)]
    return [f"{h}/{k}" for h, k in fewer if keys < heads and k > 0 and h > 0]


def _headline(result: Result) -> str:
    from benchmarks.surgery_quality.standings import formatted, headline

    name = headline([result])
    figures = ", ".join(f"{formatted(own[name])} on the {split} split" for split, own in result.figures.items())
    return f"{name} {figures}, {result.seconds:.1f} s"
