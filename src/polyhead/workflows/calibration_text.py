"""Calibration of the editing workflows: a text in contexts and batches, a held-out part, and objectives on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyhead.analysis.importance.losses import Masked
from polyhead.errors import OptionError
from polyhead.progress import Step
from polyhead.sources import Context, LoadedModel, batches
from polyhead.sources.text_contexts import Text, TextContexts, read_contexts
from polyhead.sources.texts import TOKENS
from polyhead.surgery.options import check_criterion
from polyhead.surgery.selection.criteria import WEIGHTED
from polyhead.surgery.selection.evidence import Objectives, Weighting
from polyhead.surgery.selection.quality import Fidelity, Perplexity, Probe, Quality, language_slope

# From MIN_CONTEXTS contexts on, every HELD_OUT_EVERY-th is held out for evaluation; a multiple of it if these have more
# than MAX_HELD_OUT_TOKENS tokens and FEW_CONTEXTS are left.
MIN_CONTEXTS, HELD_OUT_EVERY, MAX_HELD_OUT_TOKENS = 10, 5, 8192
FEW_CONTEXTS = 8  # a standard error over fewer is itself unreliable
BATCH_TOKENS = 4096


@dataclass(frozen=True, slots=True, eq=False)
class CalibrationText:
    """Contexts of a text: those in `held_out` evaluate the edited model, the others calibrate it."""

    loaded: LoadedModel
    text: TextContexts
    held_out: tuple[Context, ...] = ()

    @classmethod
    def of(
        cls,
        loaded: LoadedModel,
        text: Text = None,
        *,
        field: str = "text",
        context: int | None = None,
        tokens: int = TOKENS,
    ) -> CalibrationText:
        found = read_contexts(loaded, text, field=field, context=context, tokens=tokens, purpose="calibration")
        if len(found.contexts) < MIN_CONTEXTS or loaded.kind == "encoder-decoder":
            return cls(loaded, found)
        for every in range(HELD_OUT_EVERY, len(found.contexts) + 1, HELD_OUT_EVERY):
            held_out = found.contexts[every - 1 :: every]  # from all of the text
            fewer = len(found.contexts) // (every + HELD_OUT_EVERY)
            if count_tokens(held_out) <= MAX_HELD_OUT_TOKENS or fewer < FEW_CONTEXTS:
                break
        return cls(loaded, found, tuple(held_out))

    def batches(self) -> Iterator[dict[str, Any]]:
        """Yield the model inputs of the calibration part on the model's device, in the same order each time."""
        held_out = {id(context) for context in self.held_out}
        return model_inputs(self.loaded, [context for context in self.text.contexts if id(context) not in held_out])

    def quality(self) -> Quality | None:
        """Return the quality on the held-out part, relative to the current model; None if nothing is held out."""
        if not self.held_out:
            return None
        return quality_type(self.loaded)(self.loaded.model, list(model_inputs(self.loaded, self.held_out)))

    def evaluated(self, quality: Quality | None) -> dict[str, Any]:
        """Return the fields of `EditedModel` about the text, measured on the model as it is now."""
        fields: dict[str, Any] = {"contexts": len(self.text.contexts), "held_out_contexts": len(self.held_out)}
        if quality is not None:
            fields |= {"metric": quality.name, "original": quality.original, "quality": quality.measure()}
        return fields | {"held_out_tokens": count_tokens(self.held_out)}


def count_tokens(contexts: Sequence[Context]) -> int:
    return sum(len(context.ids) for context in contexts)


def model_inputs(loaded: LoadedModel, contexts: Sequence[Context]) -> Iterator[dict[str, Any]]:
    """Yield batches of contexts as keyword arguments of the model, on its device."""
    device = next(loaded.model.parameters()).device
    for batch in batches(contexts, loaded.tokenizer, batch_tokens=BATCH_TOKENS):
        ids, mask = batch.ids.to(device), batch.mask.to(device)
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
        if loaded.kind == "encoder-decoder":
            inputs |= {"decoder_input_ids": ids, "decoder_attention_mask": mask}
        if loaded.kind not in ("encoder", "masked"):
            inputs["use_cache"] = False
        yield inputs


class BatchesWithProgress(Sequence[Mapping[str, Any]]):
    """Batches that advance a step after each batch of an iteration."""

    def __init__(self, batches: Sequence[Mapping[str, Any]], step: Step) -> None:
        self._batches = batches
        self._step = step

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: Any) -> Any:
        return self._batches[index]

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        for batch in self._batches:
            yield batch
            self._step.advance()


def quality_type(loaded: LoadedModel, metric: str | None = None) -> type[Quality]:
    """Return the quality of a metric; by default perplexity for a causal model, else fidelity."""
    if metric == "perplexity" and loaded.kind != "causal":
        raise OptionError(
            f"perplexity needs a causal model, got {loaded.name}, which is {loaded.kind}; omit the metric to use "
            "fidelity"
        )
    return Perplexity if metric != "fidelity" and loaded.kind == "causal" else Fidelity


def objectives_of(loaded: LoadedModel) -> Objectives:
    """Return the objective of a model: its token loss (causal or masked), else fidelity of its representations."""
    if loaded.kind == "causal":
        return Objectives(slope=language_slope, ablated="language", gradient="language", slopes=8, ablations=1)
    if loaded.kind == "masked":
        loss = Masked(loaded.tokenizer.mask_token_id)
        return Objectives(slope=Probe(), ablated=loss, gradient=loss, slopes=8, ablations=1)
    return Objectives(slope=Probe(), ablated="representation", slopes=8, ablations=1)


def weighting_of(criterion: str) -> Weighting:
    """Return per-token weighting by the loss for criteria that support weights, else none; raises on unknown ones."""
    check_criterion(criterion)
    return "token" if criterion in WEIGHTED else "none"
