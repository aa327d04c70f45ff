"""`polyhead.shrink`: prune heads to a target size, with a curve of quality over size and two controls."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from polyhead.errors import OptionError
from polyhead.observation.run_folder import lock_folder
from polyhead.progress import Progress, ProgressCallback, Step, ignore_progress
from polyhead.sources import Context, LoadedModel
from polyhead.sources.batching import digest_of
from polyhead.sources.fingerprint import model_digest
from polyhead.sources.text_contexts import Text
from polyhead.surgery.compensation.least_squares import PrecomputedProjections, swapped_projections
from polyhead.surgery.edits.applying import apply
from polyhead.surgery.options import Form, Target, check_shrinking
from polyhead.surgery.selection.budgets import Size, check_target
from polyhead.surgery.selection.criteria import WEIGHTED
from polyhead.surgery.selection.journal import Journal
from polyhead.surgery.selection.quality import Measurement, Quality
from polyhead.surgery.selection.shrinker import BaseShrinker, CurvePoint, RemovedHeads, Shrinker
from polyhead.surgery.selection.uniform import UniformShrinker, heads_for_target, uniform_layouts
from polyhead.version import VERSION
from polyhead.workflows.calibration_text import (
    MIN_GROUPS,
    SEARCHED_TOKENS,
    CalibrationText,
    model_inputs,
    quality_type,
)
from polyhead.workflows.compensating import compensate
from polyhead.workflows.edited_model import AttentionSwitch, EditedModel
from polyhead.workflows.model_loading import Model, as_loaded

SEARCH_CONTEXTS = 16  # a search evaluates the model some hundred times


@dataclass(frozen=True, slots=True)
class SearchGain:
    """Outcome of a local search: quality before and after on the text that selects the compensation.

    The search's heads are used only if `after` is better; both are None if no head was moved.
    """

    measurements: int
    moved: int
    search_action: str  # the moves: "moved between layers" or "exchanged within layers"
    original: float  # quality of the original model on that text
    before: float | None = None
    after: float | None = None
    used: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class ShrunkModel(EditedModel):
    """A model pruned to a target: the removed heads, and the quality on the test set.

    `metric` is "perplexity" or "fidelity"; `original` is the original model's on the test set. `summary` has the number
    of heads that go and, if uniform, stay.
    """

    target: Target
    measured: bool
    tokens: int  # of the text
    removed: RemovedHeads
    summary: str
    metric: str
    metric_description: str
    original: float
    quality: Measurement
    size: Size
    flops_tokens: int  # tokens of the call whose FLOPs are counted
    curve: tuple[CurvePoint, ...]  # empty if it was not requested
    search: SearchGain | None


def shrink(
    model: Model,
    target: str | Target,
    text: Text,
    *,
    metric: Literal["perplexity", "fidelity"] | None = None,
    criterion: str = "compensated",
    form: Form = "uniform",
    measured: bool = False,
    search: bool = False,
    curve: bool = False,
    preview: bool = False,
    field: str = "text",
    test_text: Text = None,
    context: int | None = None,
    tokens: int | None = None,
    resume: str | os.PathLike[str] | None = None,
    tokenizer: Any = None,
    progress: ProgressCallback = ignore_progress,
) -> ShrunkModel:
    """Prune heads of a trained model to a target size, without retraining; edits the model in place.

    Selects heads and compensates as `polyhead.prune` does, with errors weighted by their effect on the model's loss per
    layer, direction and token. In the uniform form every layer keeps the same number of heads and KV heads, the largest
    that reaches the target; in the others heads are selected over all layers. Of the text, 5 of 8 documents select
    heads and calibrate, 1 selects the compensation, and 2 are the test set.

    Args:
        target: "30%-heads" removes 30% of the heads, "2x-cache" halves the KV cache, "1.2x-faster" needs 1.2 times
            fewer FLOPs of the model or, with `measured`, 1.2 times less time on this machine.
        text: text like the model's inputs, a path or documents in memory; sampled over all of it.
        metric: quality; default: perplexity for causal models, else fidelity, the mean cosine of final hidden states
            with those of the original.
        criterion: importance score of heads, as in `polyhead.prune`.
        form: form of the saved model, as in `polyhead.prune`.
        measured: measure a speed target on this machine instead of counting FLOPs.
        search: improve the selection by local search; takes some hundred evaluations, and does not affect the curve.
        curve: also measure the quality over sizes, with two controls: the same heads without compensation, and random
            heads with it. Takes several times as long as the result.
        preview: measure everything, but do not change the model.
        resume: a folder in which every measurement is saved; repeat the same call to continue an interrupted one with
            identical results. Another model, text or option is rejected.
        model, field, test_text, context, tokenizer, progress: as in `polyhead.prune`.
        tokens: as in `polyhead.prune`; with `search`, 65,536 by default.

    Returns:
        The edited model, with its preview, `save` and `undo`, and the curve if requested.

    Raises:
        OptionError: the target cannot be met, or the text is too short to be split.

    >>> import torch, polyhead
    >>> from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM
    >>> tokenizer = ByT5Tokenizer(extra_ids=0)  # bytes
    >>> config = LlamaConfig(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    ...                      num_attention_heads=4)
    >>> model = LlamaForCausalLM(config).eval()
    >>> text = ["the cat sat on the mat. " * 40] * 4
    >>> shrunk = polyhead.shrink(model, "50%-heads", text, tokenizer=tokenizer, context=64, tokens=2048)
    >>> shrunk.size.heads
    0.5
    """
    goal = target if isinstance(target, Target) else Target.parse(target)
    check_shrinking(
        goal, has_text=text is not None, metric=metric, criterion=criterion, form=form, measured=measured, search=search
    )
    folder = None if resume is None else Path(resume)
    with nullcontext() if folder is None else lock_folder(folder):

        def check(network: Any) -> None:
            if network.config.is_encoder_decoder:
                raise OptionError(
                    f"shrink measures causal models and encoders, got a {type(network).__name__}, an encoder-decoder; "
                    "use prune, which edits it without a measurement"
                )
            if form == "uniform" and measured:
                next(uniform_layouts(network))  # raises if there is none
            elif form == "uniform":
                heads_for_target(network, goal, option="--target")
            elif not measured:
                check_target(goal, network)

        loaded = as_loaded(model, tokenizer, dtype="saved", check=check)
        layouts = None
        if form == "uniform":
            progress(Progress("List the layouts that the model class supports"))
            layouts = tuple(uniform_layouts(loaded.model))
        calibrated = CalibrationText.of(
            loaded,
            text,
            field=field,
            context=context,
            tokens=SEARCHED_TOKENS if search and tokens is None else tokens,
            test_text=test_text,
            purpose="shrinking",
        )
        if not calibrated.held_out or not calibrated.selecting:
            raise OptionError(
                f"the text must have at least {MIN_GROUPS} documents or contexts, to be split into three parts, got "
                f"{len(calibrated.text.contexts)} contexts; use more text, or shorter contexts"
            )
        kind = quality_type(loaded, metric)
        name = kind.name
        # The other two forms are of the same heads, and a run in one may be resumed in the other.
        equal = "uniform" if form == "uniform" else None
        options = {"target": str(goal), "criterion": criterion, "form": equal, "measured": measured, "search": search}
        if criterion not in WEIGHTED:  # earlier runs with such a criterion compensated otherwise
            options["weighting"] = "token"
        if not curve:  # its measurements come before that of the result
            options["curve"] = False
        journal = _journal(folder, loaded, calibrated, name, options)
        progress(Progress(f"Measure the {name} of the original model"))
        report = calibrated.quality(kind, journal=journal, role="report")
        assert report is not None
        calibration_original = calibrated.original_on_calibration(kind)

        def quality_on(role: str, contexts: Sequence[Context]) -> Quality:
            return kind(loaded.model, list(model_inputs(loaded, contexts)), journal=journal, role=role)

        evidence = calibrated.evidence(progress, journal=journal)
        shrinker: BaseShrinker
        if layouts is not None:
            shrinker = UniformShrinker(evidence, layouts=layouts)
        else:
            shrinker = Shrinker(evidence, criterion=criterion, by_kv_heads=goal.kind == "cache")
        removed = {} if measured else shrinker.meet_target(goal)  # raises before the curve is measured

        choices = shrinker.choices() if curve else []
        total = sum(x.measurements for x in choices)
        if journal.resumed:
            progress(Progress(_stored(journal, total)))
        points: Sequence[CurvePoint] = ()
        if curve:
            step = Step(progress, f"Measure the {name} at every size", total, "runs")
            points = shrinker.curve(report, choices, progress=step.advance)
        if measured:
            stages = shrinker.stages()
            step = Step(progress, "Time the model with fewer and fewer heads", len(stages), "runs")
            removed = shrinker.meet_measured_target(
                stages, goal, list(calibrated.batches()), journal, progress=step.advance
            )
        gain = None
        if search:
            selecting = calibrated.selecting
            few = quality_on("search", selecting[:: -(-len(selecting) // SEARCH_CONTEXTS)])
            removed, gain = _search(shrinker, goal, few, quality_on("searched", selecting), progress)
        projections, compensation = compensate(shrinker, removed, calibrated, kind, progress, journal=journal)
        with swapped_projections(loaded.model, evidence.layers, projections):
            evaluation = calibrated.evaluated(report)

        edits = shrinker.edits(removed)
        counted, size = shrinker.preview(removed), shrinker.size(removed)
        attention, record = AttentionSwitch(loaded.model), None
        if not preview:
            record = apply(loaded.model, edits, compensation=PrecomputedProjections(projections))
            attention.to_polyhead_if_uneven()
        return ShrunkModel(
            loaded=loaded,
            edits=tuple(edits),
            preview=counted,
            form=form,
            record=record,
            attention=attention,
            target=goal,
            measured=measured,
            tokens=calibrated.text.tokens,
            removed=removed,
            summary=shrinker.summary(removed),
            metric_description=report.words,
            size=size,
            flops_tokens=shrinker.work.queries,
            curve=tuple(points),
            compensation=compensation,
            search=gain,
            calibration_original=calibration_original,
            **evaluation,
        )


def _journal(
    folder: Path | None, loaded: LoadedModel, text: CalibrationText, metric: str, options: Mapping[str, Any]
) -> Journal:
    if folder is None:
        return Journal()
    device = str(next(loaded.model.parameters()).device)
    digest = digest_of((*text.text.contexts, *text.held_out))
    origin = {"model": model_digest(loaded.model), "text": digest, "metric": metric, "device": device}
    return Journal(folder, {**origin, **options, "polyhead": VERSION})


_OPTIONAL_STEPS = {"times faster": "timings", "search loss": "measurements of the search"}


def _stored(journal: Journal, curve: int) -> str:
    """Describe what a resumed run has stored of a curve of so many measurements, and of the steps after it."""
    steps = [
        "the statistics of the text",
        *([f"{min(journal.stored('report measure'), curve)} of {curve} measurements of the curve"] if curve else ()),
        *(f"{count} {words}" for name, words in _OPTIONAL_STEPS.items() if (count := journal.stored(name))),
        *(["the distilled output projections"] if journal.stored("distilled") else ()),
    ]
    return f"Resume: stored are {', '.join(steps)}"


def _search(
    shrinker: BaseShrinker, target: Target, few: Quality, quality: Quality, progress: ProgressCallback
) -> tuple[RemovedHeads, SearchGain]:
    """Search by the quality on a few contexts; keep the result only if it is better on the whole part."""
    total = shrinker.search_measurements()
    step = Step(progress, f"Search heads, up to {total:,} measurements of the {few.name}", total, "runs")
    found = shrinker.searched(target, few, progress=step.advance)
    if not found.moved:
        return found.first, SearchGain(found.measured, 0, shrinker.search_action, quality.original)
    before, after = (
        shrinker.measure(shrinker.compensated(removed), quality).value for removed in (found.first, found.removed)
    )
    used = after > before if quality.name == "fidelity" else after < before
    gain = SearchGain(found.measured, found.moved, shrinker.search_action, quality.original, before, after, used)
    return (found.removed if used else found.first), gain
