"""Whether the printed loss of quality holds on text that the command did not read.

`python -m benchmarks prediction --help`: the documents of a text are split at random into two halves. One is the text
of `polyhead shrink` or `polyhead prune` with its defaults; the loss is measured on the other.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import polyhead
from polyhead.errors import OptionError
from polyhead.sources import Context, LoadedModel
from polyhead.sources.text_contexts import MIN_DOCUMENTS, read_contexts
from polyhead.surgery.options import Form
from polyhead.workflows.calibration_text import default_tokens, model_inputs, quality_type
from polyhead.workflows.edited_model import EditedModel

HELD_OUT = 4  # the command holds out a quarter of its text


def predicted_rows(
    loaded: LoadedModel, documents: Sequence[str], targets: Sequence[str], draws: int, form: Form, tokens: int | None
) -> Iterator[dict[str, Any]]:
    """Yield a row for each random split of the documents and each target; the model is as before after each."""
    half = len(documents) // 2
    if half < MIN_DOCUMENTS:
        raise OptionError(
            f"the text must have at least {2 * MIN_DOCUMENTS} documents, half of which the command does not read, got "
            f"{len(documents)}; write one per line of a .jsonl file"
        )
    kind, limit = quality_type(loaded), tokens or default_tokens(loaded.model)

    def contexts(part: Sequence[str]) -> tuple[Context, ...]:
        return read_contexts(loaded, part, tokens=limit, sampled=True).contexts

    for draw in range(draws):
        drawn = random.Random(draw).sample(documents, len(documents))
        unread = contexts(drawn[half:])
        parts = {"whole": unread, "small": unread[: -(-len(unread) // HELD_OUT)]}
        qualities = {name: kind(loaded.model, list(model_inputs(loaded, part))) for name, part in parts.items()}
        read_tokens = sum(len(context.ids) for context in contexts(drawn[:half]))
        for target in targets:
            began = time.perf_counter()
            edited = _edited(loaded, target, drawn[:half], form, tokens)
            seconds = time.perf_counter() - began
            quality, original = edited.quality, edited.original
            if quality is None or original is None:
                raise OptionError(f"the command must measure the quality of the model, got none of {loaded}")
            yield {
                "draw": draw,
                "target": target,
                "form": form,
                "metric": edited.metric,
                "tokens": read_tokens,
                "ratio": quality.value / original,
                "low": quality.ratio_low,
                "high": quality.ratio_high,
                **{name: part.measure().value / part.original for name, part in qualities.items()},
                "comp": edited.compensation,
                "s": round(seconds, 1),
                "held": edited.held_out_tokens,
                "groups": edited.held_out_groups,
            }
            edited.undo()


def _edited(loaded: LoadedModel, target: str, text: list[str], form: Form, tokens: int | None) -> EditedModel:
    """Return the result of `polyhead shrink --target`, or of `polyhead prune --share` for a percentage alone."""
    if target.endswith("%"):
        return polyhead.prune(loaded, share=float(target[:-1]) / 100, text=text, form=form, tokens=tokens)
    return polyhead.shrink(loaded, target, text, form=form, tokens=tokens)


def coverage(rows: Sequence[dict[str, Any]]) -> str:
    """Return how often the ratio on text that was not read is in the printed 95% prediction interval."""
    inside = {name: sum(row["low"] <= row[name] <= row["high"] for row in rows) for name in ("whole", "small")}
    return (
        f"In the printed interval: {inside['whole']} of {len(rows)} ratios on the text that was not read, "
        f"{inside['small']} of {len(rows)} on a quarter of it, about as much as was held out"
    )
