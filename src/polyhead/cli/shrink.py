"""`polyhead shrink`: heads taken out under a budget, with what every size costs the model beside controls."""

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
    "layer": "repaired layer by layer for what each would write whole",
    "output": "repaired layer by layer for what each wrote in the whole model",
    "stream": "repaired layer by layer for the stream of the whole model",
}
SPLITS = (0.6, 0.8)  # where the text ends that heads are chosen on, and the text that repair is chosen on


def shrink(
    model: Model,
    target: Annotated[
        str,
        typer.Option(
            metavar="N%-heads|Nx-cache|Nx-faster",
            help="30%-heads: so many heads go. 2x-cache: a cache of half the bytes. 1.2x-faster: so many times fewer "
            "FLOPs of the whole model, counted, or with --measured so many times less time on this machine.",
        ),
    ],
    text: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|DIR|-",
            help="Text such as the model will read: .txt, .md, .jsonl or .parquet (also .gz), a folder of them, or - "
            "for standard input. Its first 60% choose the heads, the next 20% the repair, and the last 20% are what "
            "the figures are of.",
            show_default=False,
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(METRICS),
            help="What the model is worth: perplexity (of a causal model, and its default), or fidelity, the mean "
            "cosine of its final hidden states to those of the whole model (of any other).",
            show_default=False,
        ),
    ] = None,
    output: Output = None,
    preview: Annotated[
        bool, typer.Option("--preview", help="Only show the curve and what the target takes; nothing is written.")
    ] = False,
    criterion: Annotated[
        str, typer.Option(metavar="NAME", help="By what heads are chosen, as in polyhead prune.")
    ] = "compensated",
    measured: Annotated[
        bool, typer.Option("--measured", help="Nx-faster is measured on this machine instead of counted.")
    ] = False,
    search: Annotated[
        bool,
        typer.Option(
            "--search",
            help="Move heads between layers (with --form uniform: exchange them within layers) while the model "
            "measures better on some of the text that repair is chosen on and the target is still reached; that takes "
            "some hundred measurements. The curve is not searched.",
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
    """Make a trained model smaller by its heads, without retraining, and show what every size costs it.

    The heads that go are chosen over all layers, an error weighed by what it costs the model in its layer, direction
    and token; those that stay are repaired in closed form. Beside the curve stand two controls: the same heads not
    repaired, and random heads repaired as well. With --form uniform every layer keeps as many heads and KV heads, the
    most that reach the target, so that plain transformers loads the model.

    With --resume DIR every measurement is kept as soon as it is made. A run that was stopped goes on when the same
    command is given again, and ends as one that was never stopped; another model, text or option is refused.
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
        wanted = Target.parse(target)
        check_output(output, form, preview=preview, replace=replace, source=model)
        _check(text, metric, wanted, measured=measured)
        _check_ways(form, criterion, search=search, measured=measured)
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
        check_target(wanted, loaded.model)
        layouts = None
        if form == "uniform":
            with working("Find the layouts that its class can hold"):
                layouts = uniform_layouts(loaded.model)  # refused before the text is read
        options = {"target": str(wanted), "criterion": criterion, "form": form, "measured": measured, "search": search}
        requested = _requested(loaded, text, field, context, tokens, metric, resume, options)
        with working(f"Choose heads by {criterion}"):
            shrinker = _shrinker(requested, wanted, criterion, layouts)
            gone = {} if measured else shrinker.meet_target(wanted)  # refused before the curve is measured
        console.print(
            f"{loaded}\n{requested.tokens:,} tokens of text; {requested.report.name} of the whole model "
            f"{requested.report.whole:.4g} on the last fifth",
            markup=False,
            soft_wrap=True,
        )
        show_curve(measured_curve(shrinker, requested.report), requested.report, console)
        if measured:
            gone = meet_measured_target(shrinker, shrinker.stages(), wanted, requested.calibration, requested.journal)
        gained = ""
        if requested.search is not None:
            gone, gained = search_heads(shrinker, wanted, requested.search, requested.choose)
        outputs, way = _compensate(shrinker, gone, requested)
        aim = f"{wanted.amount:g} times less time on this machine" if measured else wanted
        console.print(f"\nFor {aim}: {shrinker.in_words(gone)}, {way}", markup=False)
        if gained:
            console.print(gained, markup=False, soft_wrap=True)
        show_preview(shrinker.counted(gone), console)
        _show_worth(shrinker, gone, outputs, requested.report, console)
        if preview or output is None:
            return
        record = apply(loaded.model, shrinker.edits(gone), compensation=GivenOutputs(outputs))
        write_edited(loaded, record, output, form, console, replace=replace)


@dataclass(frozen=True, eq=False)
class _Request:
    """A model and its text in three parts: to choose heads on, to choose the repair on, to report.

    `search` is of some of the second part, where heads are to be moved by it.
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
            "heads are chosen, repaired and judged on text such as the model will read, got none; give some with "
            "--text FILE, 20,000 tokens or more: .txt, .md, .jsonl or .parquet, a folder of them, or - for standard "
            "input"
        )
    if metric is not None and metric not in METRICS:
        raise OptionError(f"a metric is {' or '.join(METRICS)}, got {metric!r}")
    if measured and target.kind != "faster":
        raise OptionError(f"--measured is for a target such as 1.2x-faster, got {target}")


def _check_ways(form: str | None, criterion: str, *, search: bool, measured: bool) -> None:
    """That what is asked for goes together."""
    from polyhead.errors import OptionError

    if search and measured:
        raise OptionError(
            "--search moves heads while a target that is counted is still reached, got --measured as well; leave one "
            "out"
        )
    if form == "uniform" and criterion != "compensated":
        raise OptionError(f"with --form uniform heads go by the criterion repaired, got {criterion!r}; leave one out")


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

    read = CalibrationText.of(loaded, text, field, context, tokens)
    count = len(read.contexts)
    if count < 5:
        raise OptionError(
            f"the text is cut into three parts, of five contexts at least, got {count}; give more, or --context N for "
            "shorter ones"
        )
    first, second = (max(1, int(share * count)) for share in SPLITS)
    parts = [
        list(CalibrationText(loaded, contexts).batches())
        for contexts in (read.contexts[:first], read.contexts[first:second], read.contexts[second:])
    ]
    name = metric or ("perplexity" if loaded.kind == "causal" else "fidelity")
    if name == "perplexity" and loaded.kind != "causal":
        raise OptionError(
            f"perplexity is of a causal model, got {loaded.name}, which is of the kind {loaded.kind}; leave --metric "
            "out for its fidelity"
        )
    kind = Perplexity if name == "perplexity" else Fidelity
    with working(f"Measure the {name} of the whole model"):
        journal = Journal()
        if resume is not None:
            device = str(next(loaded.model.parameters()).device)
            origin = {"model": model_digest(loaded.model), "text": read.digest, "metric": name, "device": device}
            journal = Journal(resume, {**origin, **options, "polyhead": VERSION})

        def kept(role: str, batches: Sequence[Mapping[str, Any]]) -> Quality:
            return KeptQuality(kind(loaded.model, batches), journal, role)

        choose, report = kept("choose", parts[1]), kept("report", parts[2])
        few = kept("search", search_batches(loaded, read.contexts[first:second])) if options["search"] else None
    return _Request(loaded, parts[0], choose, report, few, read.tokens, journal)


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
    shrinker: Trials, gone: Mapping[str, tuple[int, ...]], requested: _Request
) -> tuple[dict[str, Outputs], str]:
    """Repaired all at once or layer by layer: what is best on the part of the text that is there to choose on."""
    from polyhead.surgery.compensation.masked_trial import as_if
    from polyhead.surgery.compensation.sequential import AIMS, solve_in_order

    ways = {"repaired all at once": shrinker.compensated(gone)}
    with bar("Repair layer by layer", len(AIMS) * len(gone)) as step:
        for aim in AIMS:
            solve = partial(
                solve_in_order, shrinker.model, gone, lambda: requested.calibration, aim=aim, ridge=1e-3,
                progress=lambda *_: step(1),
            )  # fmt: skip
            ways[WAYS[aim]] = requested.journal.outputs(f"repaired_for_{aim}", solve)
    losses = {}
    for name, outputs in ways.items():
        with as_if(shrinker.model, shrinker.evidence.layers, outputs):
            losses[name] = requested.choose.loss()
    best = min(losses, key=losses.__getitem__)
    return ways[best], best


def _show_worth(
    shrinker: Trials,
    gone: Mapping[str, tuple[int, ...]],
    outputs: Mapping[str, Outputs],
    quality: Quality,
    console: Console,
) -> None:
    from polyhead.surgery.compensation.masked_trial import as_if

    with as_if(shrinker.model, shrinker.evidence.layers, outputs):
        found = quality.measure()
    size = shrinker.size(gone)
    console.print(
        f"{quality.name} {found.value:.4g} ± {found.error:.2g}, of the whole model {quality.whole:.4g}; "
        f"{size.flops:.0%} of the FLOPs of the whole model at {shrinker.work.queries} tokens",
        markup=False,
    )
