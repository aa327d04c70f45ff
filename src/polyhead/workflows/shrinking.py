"""`polyhead.shrink`: prune heads to a target size, with a curve of quality over size and two controls.

The steps are those of `polyhead.prune`: read a text and split it into three parts (`calibration_text`), collect the
statistics of each layer on the calibrating part (`selection.evidence`), select heads (`selection.uniform`, or
`selection.free` for the other forms), compensate for them (`compensating`), evaluate the model on the held-out part
(`evaluating`), apply the edits and save (`edited_model`). Optional: the curve (`selection.curve`), a local search
(`selection.search`) and a target in measured time (`selection.measured_speed`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from polyhead.errors import OptionError
from polyhead.observation.run_folder import lock_folder
from polyhead.progress import Progress, ProgressCallback, ignore_progress
from polyhead.sources import LoadedModel
from polyhead.sources.batching import digest_of
from polyhead.sources.fingerprint import model_digest
from polyhead.sources.text_contexts import Text
from polyhead.surgery.edits.preview import preview as count
from polyhead.surgery.options import Form, Target, check_shrinking
from polyhead.surgery.selection.budgets import COUNTED_CALL, RemovedHeads, Size, check_target, prune_edits
from polyhead.surgery.selection.criteria import WEIGHTED
from polyhead.surgery.selection.curve import Choice, CurvePoint, choices_of, measure_curve
from polyhead.surgery.selection.free import FreeSelection
from polyhead.surgery.selection.journal import Journal
from polyhead.surgery.selection.measured_speed import heads_for_measured_target
from polyhead.surgery.selection.quality import Measurement
from polyhead.surgery.selection.search import search_heads
from polyhead.surgery.selection.uniform import UniformSelection, heads_for_target, uniform_layouts
from polyhead.version import VERSION
from polyhead.workflows.calibration_text import (
    MIN_GROUPS,
    SEARCHED_TOKENS,
    CalibrationText,
    collect_evidence,
    model_inputs,
)
from polyhead.workflows.compensating import compensate
from polyhead.workflows.edited_model import EditedModel, apply_edits
from polyhead.workflows.evaluating import evaluate, measure_original
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
    with nullcontext() if resume is None else lock_folder(Path(resume)):
        check = partial(_check_model, target=goal, form=form, measured=measured)
        loaded = as_loaded(model, tokenizer, dtype="saved", check=check)
        tokens = SEARCHED_TOKENS if search and tokens is None else tokens
        parts = _read_text(
            loaded, text, field=field, context=context, tokens=tokens, test_text=test_text, metric=metric
        )
        options = {"target": str(goal), "criterion": criterion, "form": form, "measured": measured, "search": search}
        journal = _open_journal(resume, parts, {**options, "curve": curve})
        evidence = collect_evidence(parts, progress, journal=journal)
        progress(Progress(f"Measure the {parts.kind.name} of the original model"))
        original = measure_original(parts, journal)

        selection: UniformSelection | FreeSelection
        if form == "uniform":
            selection = UniformSelection(evidence, progress)
        else:
            selection = FreeSelection(evidence, criterion=criterion, by_kv_heads=goal.kind == "cache")
        removed = {} if measured else selection.for_target(goal)  # raises before the curve is measured

        # The options: a curve, a target in measured time, a search.
        choices = choices_of(selection) if curve else []
        _report_resumed(journal, choices, progress)
        points, gain = [], None
        if curve:
            assert original.held_out is not None
            points = measure_curve(selection, choices, original.held_out, progress=progress)
        if measured:
            removed = heads_for_measured_target(selection, goal, progress=progress)
        if search:
            removed, gain = _search(selection, goal, parts, progress)

        compensated = compensate(evidence, removed, parts, progress)
        evaluation = evaluate(parts, original, compensated.projections)
        edits = prune_edits(evidence.layers, removed)
        counted, size = count(loaded.model, edits), selection.size(removed)
        record, attention = (None, None) if preview else apply_edits(loaded.model, edits, compensated.projections)
        return ShrunkModel(
            loaded=loaded,
            edits=tuple(edits),
            preview=counted,
            form=form,
            record=record,
            attention=attention,
            target=goal,
            measured=measured,
            tokens=parts.text.tokens,
            removed=removed,
            summary=selection.summary(removed),
            metric_description=parts.kind.words,
            size=size,
            flops_tokens=COUNTED_CALL.queries,
            compensation=compensated.method,
            curve=tuple(points),
            search=gain,
            **vars(evaluation),
        )


def _check_model(network: Any, *, target: Target, form: Form, measured: bool) -> None:
    """Raise if the model cannot be shrunk to the target in this form, by the shapes of its weights."""
    if network.config.is_encoder_decoder:
        raise OptionError(
            f"shrink measures causal models and encoders, got a {type(network).__name__}, an encoder-decoder; "
            "use prune, which edits it without a measurement"
        )
    if form == "uniform" and measured:
        next(uniform_layouts(network))  # raises if there is none
    elif form == "uniform":
        heads_for_target(network, target, option="--target")
    elif not measured:
        check_target(target, network)


def _read_text(loaded: LoadedModel, text: Text, **options: Any) -> CalibrationText:
    """Read a text and split it; raise if it is too short."""
    parts = CalibrationText.of(loaded, text, purpose="shrinking", **options)
    if not parts.held_out or not parts.selecting:
        raise OptionError(
            f"the text must have at least {MIN_GROUPS} documents or contexts, to be split into three parts, got "
            f"{len(parts.text.contexts)} contexts; use more text, or shorter contexts"
        )
    return parts


def _open_journal(folder: str | os.PathLike[str] | None, parts: CalibrationText, options: Mapping[str, Any]) -> Journal:
    """Return the journal of a run in a folder, which is continued with the same model, text and options alone."""
    if folder is None:
        return Journal()
    model = parts.loaded.model
    origin = {
        "model": model_digest(model),
        "text": digest_of((*parts.text.contexts, *parts.held_out)),
        "metric": parts.kind.name,
        "device": str(next(model.parameters()).device),
        **options,
    }
    if options["form"] != "uniform":  # the other two are of the same heads: a run in one may be resumed in the other
        origin["form"] = None
    if options["criterion"] not in WEIGHTED:  # earlier runs with such a criterion compensated otherwise
        origin["weighting"] = "token"
    if options["curve"]:  # its measurements come before that of the result; earlier runs always had one
        del origin["curve"]
    return Journal(Path(folder), {**origin, "polyhead": VERSION})


_OPTIONAL_STEPS = {"times faster": "timings", "search loss": "measurements of the search"}


def _report_resumed(journal: Journal, choices: Sequence[Choice], progress: ProgressCallback) -> None:
    """Report what a resumed run has stored of the curve and of the steps after it."""
    if not journal.resumed:
        return
    total = sum(choice.measurements for choice in choices)
    measured = f"{min(journal.stored('report measure'), total)} of {total} measurements of the curve"
    steps = [
        "the statistics of the text",
        *([measured] if total else ()),
        *(f"{count} {words}" for name, words in _OPTIONAL_STEPS.items() if (count := journal.stored(name))),
        *(["the distilled output projections"] if journal.stored("distilled") else ()),
    ]
    progress(Progress(f"Resume: stored are {', '.join(steps)}"))


def _search(
    selection: UniformSelection | FreeSelection,
    target: Target,
    parts: CalibrationText,
    progress: ProgressCallback,
) -> tuple[RemovedHeads, SearchGain]:
    """Search by the quality on a few contexts; keep the result only if it is better on the whole selecting part."""
    evidence, loaded = selection.evidence, parts.loaded
    few, quality = (
        parts.kind(loaded.model, list(model_inputs(loaded, contexts)), journal=evidence.journal, role=role)
        for role, contexts in (
            ("search", parts.selecting[:: -(-len(parts.selecting) // SEARCH_CONTEXTS)]),
            ("searched", parts.selecting),
        )
    )
    found = search_heads(selection, target, few, progress=progress)
    action = "exchanged within layers" if isinstance(selection, UniformSelection) else "moved between layers"
    if not found.moved:
        return found.first, SearchGain(found.measured, 0, action, quality.original)
    before, after = (quality.measure(evidence.compensated(removed)).value for removed in (found.first, found.removed))
    used = after > before if quality.name == "fidelity" else after < before
    gain = SearchGain(found.measured, found.moved, action, quality.original, before, after, used)
    return (found.removed if used else found.first), gain
