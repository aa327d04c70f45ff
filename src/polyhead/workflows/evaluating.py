"""Quality of an edited model on the held-out part of a text, relative to that of the original."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from polyhead.sources import batches
from polyhead.sources.text_sampling import count_tokens
from polyhead.surgery.compensation.least_squares import OutputProjection
from polyhead.surgery.selection.journal import Journal
from polyhead.surgery.selection.quality import Measurement, Perplexity, Quality
from polyhead.workflows.calibration_text import BATCH_TOKENS, CalibrationText, model_inputs

FEW = 8  # contexts: a standard error over fewer is itself unreliable
FEW_GROUPS = 5  # the same for a prediction interval
MAX_PERPLEXITY_RATIO = 1.25  # between the text that calibrates and that of the test


@dataclass(frozen=True, slots=True, eq=False)
class OriginalQuality:
    """The original model on a text: what an edited model is compared with."""

    held_out: Quality | None  # on the held-out part, if there is one
    calibration: float | None = None  # perplexity on text that calibrates, to compare it with that of a test text


def measure_original(text: CalibrationText, journal: Journal | None = None) -> OriginalQuality:
    """Measure the current model, before it is edited, on the held-out part and on that of the calibration."""
    held_out = None
    if text.held_out:
        group_of = {(x.document, x.piece): group for x, group in zip(text.held_out, text.groups, strict=True)}
        rows = [
            group_of[row]
            for batch in batches(text.held_out, text.loaded.tokenizer, batch_tokens=BATCH_TOKENS)
            for row in zip(batch.documents.tolist(), batch.pieces.tolist(), strict=True)
        ]
        inputs = list(model_inputs(text.loaded, text.held_out))
        held_out = text.kind(text.loaded.model, inputs, groups=rows, journal=journal, role="report")
    # Fidelity is 1 on any text.
    if not text.has_test_text or text.kind is not Perplexity:
        return OriginalQuality(held_out)
    inputs = list(model_inputs(text.loaded, text.selecting or text.calibrating))
    return OriginalQuality(held_out, text.kind(text.loaded.model, inputs).original)


@dataclass(frozen=True)
class Evaluation:
    """Fields of `EditedModel` about the text and the quality on its held-out part, None without such a part."""

    contexts: int
    held_out_contexts: int
    held_out_groups: int
    held_out_tokens: int
    metric: str | None
    original: float | None
    quality: Measurement | None
    calibration_original: float | None


def evaluate(
    text: CalibrationText, original: OriginalQuality, projections: Mapping[str, OutputProjection] | None = None
) -> Evaluation:
    """Measure the model as it is now, with output projections swapped in, on the held-out part."""
    held_out = original.held_out
    return Evaluation(
        contexts=len(text.text.contexts),
        held_out_contexts=len(text.held_out),
        held_out_groups=len(set(text.groups)),
        held_out_tokens=count_tokens(text.held_out),
        metric=None if held_out is None else held_out.name,
        original=None if held_out is None else held_out.original,
        quality=None if held_out is None else held_out.measure(projections),
        calibration_original=original.calibration,
    )
