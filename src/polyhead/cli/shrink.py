"""`polyhead shrink`: prune heads to a target size, with a curve of quality over size and two controls."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyhead.cli.calibration_text import CalibrationText
from polyhead.cli.edit_options import (
    ContextLength,
    Field,
    Model,
    Output,
    Replace,
    ResumeIn,
    SavedDtype,
    SavedForm,
    Tokens,
    check_criterion,
    check_output,
    check_reading,
)
from polyhead.cli.edited_model import open_model, show_preview, write_edited
from polyhead.cli.objectives import judge_of, weighting_of
from polyhead.cli.options import AllowPickle, Device, TrustRemoteCode
from polyhead.cli.progress import bar, errors_told, working
from polyhead.cli.shrink_curve import measured_curve, show_curve
from polyhead.cli.shrink_search import search_batches, search_heads
from polyhead.cli.shrink_timing import meet_measured_target

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from rich.console import Console

    from polyhead.sources import LoadedModel
    from polyhead.surgery.compensation.masked_trial import Outputs
    from polyhead.surgery.selection.budgets import Target, Trials
    from polyhead.surgery.selection.journal import Journal
    from polyhead.surgery.selection.quality import Quality
    from polyhead.surgery.selection.shrinking import Shrinker
    from polyhead.surgery.selection.uniform import UniformLayout, UniformShrinker

METRICS = ("perplexity", "fidelity")
WAYS = {
    "layer": "compensated layer by layer for the output of the unpruned layer",
    "output": "compensated layer by layer for the layer's output in the original model",
    "stream": "compensated layer by layer for the residual stream of the original model",
}
SPLITS = (0.6, 0.8)  # ends of the text that selects heads, and of the text that selects the compensation


def shrink(
    model: Model,
    target: Annotated[
        str,
        typer.Option(
            metavar="N%-heads|Nx-cache|Nx-faster",
            help="30%-heads: remove 30% of the heads. 2x-cache: halve the KV cache. 1.2x-faster: 1.2 times fewer FLOPs "
            "of the model or, with --measured, 1.2 times less time on this machine.",
        ),
    ],
    text: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|DIR|-",
            help="Text like the model's inputs (required): .txt, .md, .jsonl or .parquet (also .gz), a folder of them, "
            "or - for standard input. The first 60% select heads, the next 20% the compensation, the last 20% are the "
            "test set.",
            show_default=False,
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(METRICS),
            help="Quality: perplexity (causal models), or fidelity, the mean cosine of final hidden states with those "
            "of the original. [default: perplexity for causal models, else fidelity]",
            show_default=False,
        ),
    ] = None,
    output: Output = None,
    preview: Annotated[
        bool, typer.Option("--preview", help="Show the curve and the pruned model's size; write nothing.")
    ] = False,
    criterion: Annotated[
        str, typer.Option(metavar="NAME", help="Importance score of heads, as in `polyhead prune`.")
    ] = "compensated",
    measured: Annotated[
        bool, typer.Option("--measured", help="Measure Nx-faster on this machine instead of counting FLOPs.")
    ] = False,
    search: Annotated[
        bool,
        typer.Option(
            "--search",
            help="Improve the selection by local search: move removals between layers (with --form uniform: swap heads "
            "within layers) while quality improves and the target holds. Takes some hundred evaluations; does not "
            "affect the curve.",
        ),
    ] = False,
    field: Field = "text",
    form: SavedForm = None,
    replace: Replace = False,
    context: ContextLength = None,
    tokens: Tokens = 65_536,
    resume: ResumeIn = None,
    device: Device = None,
    dtype: SavedDtype = None,
    allow_pickle: AllowPickle = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Prune heads of a trained model to a target size, without retraining, and show quality over size.

    Selects heads over all layers, with errors weighted by their effect on the model's loss per layer, direction and
    token; the remaining heads compensate by least squares. The curve has two controls: the same heads without
    compensation, and random heads with it. With --form uniform all layers keep the same number of heads and KV heads,
    the largest that reaches the target, so that the model loads in plain transformers.

    With --resume DIR every measurement is saved. Repeat the same command to continue an interrupted run with identical
    results; another model, text or option is refused.

    Example: `polyhead shrink smollm2 --target 30%-heads --text corpus.txt --output small`
    """
    from rich.console import Console

    from polyhead.observation.run_folder import held
    from polyhead.surgery import apply
    from polyhead.surgery.compensation.masked_trial import GivenOutputs
    from polyhead.surgery.selection.budgets import Target, check_target
    from polyhead.surgery.selection.uniform import uniform_layouts

    console = Console(highlight=False)
    console = console if console.is_terminal else Console(width=120, highlight=False)
    with errors_told("shrink", resume), ExitStack() as stack:
        goal = Target.parse(target)
        check_output(output, form, preview=preview, replace=replace, source=model)
        _check(text, metric, goal, measured=measured)
        _check_combination(form, criterion, search=search, measured=measured)
        check_criterion(criterion)
        check_reading(text, field, context, tokens)
        if resume is not None:
            stack.enter_context(held(resume))
        loaded = open_model(
            model,
            device=device,
            dtype=dtype,
            output=output,
            allow_pickle=allow_pickle,
            trust_remote_code=trust_remote_code,
        )
        check_target(goal, loaded.model)
        layouts = None
        if form == "uniform":
            with working("List the layouts that the model class supports"):
                layouts = uniform_layouts(loaded.model)  # raises before the text is read
        options = {"target": str(goal), "criterion": criterion, "form": form, "measured": measured, "search": search}
        requested = _requested(loaded, text, field, context, tokens, metric, resume, options)
        with working(f"Select heads by {criterion}"):
            shrinker = _shrinker(requested, goal, criterion, layouts)
            removed = {} if measured else shrinker.meet_target(goal)  # raises before the curve is measured
        console.print(
            f"{loaded}\n{requested.tokens:,} tokens of text; {requested.report.name} of the original model "
            f"{requested.report.whole:.4g} on the test set (last 20%)",
            markup=False,
            soft_wrap=True,
        )
        show_curve(measured_curve(shrinker, requested.report), requested.report, console)
        if measured:
            removed = meet_measured_target(shrinker, shrinker.stages(), goal, requested.calibration, requested.journal)
        search_summary = ""
        if requested.search is not None:
            removed, search_summary = search_heads(shrinker, goal, requested.search, requested.choose)
        outputs, way = _compensate(shrinker, removed, requested)
        aim = f"{goal.amount:g} times less time on this machine" if measured else goal
        console.print(f"\nFor {aim}: {shrinker.in_words(removed)}, {way}", markup=False)
        if search_summary:
            console.print(search_summary, markup=False, soft_wrap=True)
        show_preview(shrinker.counted(removed), console)
        _show_quality(shrinker, removed, outputs, requested.report, console)
        if preview or output is None:
            return
        record = apply(loaded.model, shrinker.edits(removed), compensation=GivenOutputs(outputs))
        write_edited(loaded, record, output, form, console, replace=replace)


@dataclass(frozen=True, eq=False)
class _Request:
    """A model and its text in three parts: `calibration`, `choose` (for the compensation) and `report` (test set).

    `search` evaluates a subset of the second part, if requested.
    """

    loaded: LoadedModel
    calibration: Sequence[Mapping[str, Any]]
    choose: Quality
    report: Quality
    search: Quality | None
    tokens: int
    journal: Journal


def _check(text: str | None, metric: str | None, target: Target, *, measured: bool) -> None:
    from polyhead.errors import OptionError

    if text is None:
        raise OptionError(
            "--text is required: text like the model's inputs for calibration and testing, got none; use 20,000 tokens "
            "or more in .txt, .md, .jsonl or .parquet files, a folder of them, or - for standard input"
        )
    if metric is not None and metric not in METRICS:
        raise OptionError(f"--metric must be {' or '.join(METRICS)}, got {metric!r}")
    if measured and target.kind != "faster":
        raise OptionError(f"--measured needs a target such as 1.2x-faster, got {target}")


def _check_combination(form: str | None, criterion: str, *, search: bool, measured: bool) -> None:
    """Raise on options that exclude each other."""
    from polyhead.errors import OptionError

    if search and measured:
        raise OptionError("--search needs a target that is counted, got --measured as well; omit one of them")
    if form == "uniform" and criterion != "compensated":
        raise OptionError(f"--form uniform needs the criterion compensated, got {criterion!r}; omit one of them")


def _requested(
    loaded: LoadedModel,
    text: str | None,
    field: str,
    context: int | None,
    tokens: int,
    metric: str | None,
    resume: Path | None,
    options: Mapping[str, Any],
) -> _Request:
    from polyhead.errors import OptionError
    from polyhead.sources.fingerprint import model_digest
    from polyhead.surgery.selection.journal import Journal, KeptQuality
    from polyhead.surgery.selection.quality import Fidelity, Perplexity
    from polyhead.version import VERSION

    data = CalibrationText.of(loaded, text, field, context, tokens)
    count = len(data.contexts)
    if count < 5:
        raise OptionError(
            f"the text must have at least five contexts, to be split into three parts, got {count}; use more text, or "
            "a smaller --context"
        )
    first, second = (max(1, int(share * count)) for share in SPLITS)
    parts = [
        list(CalibrationText(loaded, contexts).batches())
        for contexts in (data.contexts[:first], data.contexts[first:second], data.contexts[second:])
    ]
    name = metric or ("perplexity" if loaded.kind == "causal" else "fidelity")
    if name == "perplexity" and loaded.kind != "causal":
        raise OptionError(
            f"perplexity needs a causal model, got {loaded.name}, which is {loaded.kind}; omit --metric to use fidelity"
        )
    kind = Perplexity if name == "perplexity" else Fidelity
    with working(f"Measure the {name} of the original model"):
        journal = Journal()
        if resume is not None:
            device = str(next(loaded.model.parameters()).device)
            origin = {"model": model_digest(loaded.model), "text": data.digest, "metric": name, "device": device}
            journal = Journal(resume, {**origin, **options, "polyhead": VERSION})

        def journaled(role: str, batches: Sequence[Mapping[str, Any]]) -> Quality:
            return KeptQuality(kind(loaded.model, batches), journal, role)

        choose, report = journaled("choose", parts[1]), journaled("report", parts[2])
        search = journaled("search", search_batches(loaded, data.contexts[first:second])) if options["search"] else None
    return _Request(loaded, parts[0], choose, report, search, data.tokens, journal)


def _shrinker(
    requested: _Request, target: Target, criterion: str, layouts: Sequence[UniformLayout] | None
) -> Shrinker | UniformShrinker:
    from polyhead.surgery.selection.journal import KeptEvidence
    from polyhead.surgery.selection.shrinking import Shrinker
    from polyhead.surgery.selection.uniform import UniformShrinker

    evidence = KeptEvidence(requested.loaded.model, requested.calibration, judge_of(requested.loaded))
    evidence.journal = requested.journal
    if layouts is not None:
        return UniformShrinker(evidence, weighting=weighting_of(criterion), layouts=layouts)
    return Shrinker(
        evidence, criterion=criterion, weighting=weighting_of(criterion), by_key_heads=target.kind == "cache"
    )


def _compensate(
    shrinker: Trials, removed: Mapping[str, tuple[int, ...]], requested: _Request
) -> tuple[dict[str, Outputs], str]:
    """Compensate all layers at once and layer by layer; return the outputs with the smallest loss, and their name."""
    from polyhead.surgery.compensation.masked_trial import as_if
    from polyhead.surgery.compensation.sequential import AIMS, solve_in_order

    ways = {"compensated all at once": shrinker.compensated(removed)}
    with bar("Compensate layer by layer", len(AIMS) * len(removed)) as step:
        for aim in AIMS:
            solve = partial(
                solve_in_order, shrinker.model, removed, lambda: requested.calibration, aim=aim, ridge=1e-3,
                progress=lambda *_: step(1),
            )  # fmt: skip
            ways[WAYS[aim]] = requested.journal.outputs(f"repaired_for_{aim}", solve)
    losses = {}
    for name, outputs in ways.items():
        with as_if(shrinker.model, shrinker.evidence.layers, outputs):
            losses[name] = requested.choose.loss()
    best = min(losses, key=losses.__getitem__)
    return ways[best], best


def _show_quality(
    shrinker: Trials,
    removed: Mapping[str, tuple[int, ...]],
    outputs: Mapping[str, Outputs],
    quality: Quality,
    console: Console,
) -> None:
    from polyhead.surgery.compensation.masked_trial import as_if

    with as_if(shrinker.model, shrinker.evidence.layers, outputs):
        estimate = quality.measure()
    size = shrinker.size(removed)
    console.print(
        f"{quality.name} {estimate.value:.4g} ± {estimate.error:.2g}, original model {quality.whole:.4g}; "
        f"{size.flops:.0%} of the original model's FLOPs at {shrinker.work.queries} tokens",
        markup=False,
    )
