"""Calibration of the editing workflows: a text in contexts and batches, a held-out part, and objectives on it."""

from __future__ import annotations

from collections import UserList
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import nn

from polyhead.analysis.importance.losses import Masked
from polyhead.errors import OptionError
from polyhead.progress import ProgressCallback, Step
from polyhead.sources import Context, LoadedModel, batches
from polyhead.sources.text_contexts import Text, TextContexts, read_contexts
from polyhead.sources.text_sampling import count_tokens
from polyhead.surgery.adapters.discovery import find_layers
from polyhead.surgery.selection.evidence import Evidence, Objectives
from polyhead.surgery.selection.quality import Fidelity, Perplexity, Probe, Quality, language_slope

MIN_GROUPS = 8  # of a text that is split; of every 8 groups, 5 calibrate, 1 selects and 2 are held out
SELECTING, HELD_OUT = 3, (1, 6)
FEW = 8  # contexts: a standard error over fewer is itself unreliable
FEW_GROUPS = 5  # the same for a prediction interval
MIN_TOKENS, TOKENS_PER_CHANNEL = 12_288, 24  # of a text, by default; docs/surgery.md has the measurement
SEARCHED_TOKENS = 65_536  # the same for a search, which compares some hundred models
BATCH_TOKENS = 512  # also of a step of distillation; activations and logits of a batch are in memory until its backward
MAX_PERPLEXITY_RATIO = 1.25  # between the text that calibrates and that of the test


Part = Literal["calibrating", "selecting", "held_out"]
PARTS: tuple[Part, ...] = get_args(Part)


@dataclass(frozen=True, slots=True, eq=False)
class CalibrationText:
    """Contexts of a text in three parts, by group: to calibrate edits, to select one of several, and held out.

    All contexts calibrate if there are too few groups, or if the model is an encoder-decoder.
    """

    loaded: LoadedModel
    text: TextContexts
    calibrating: tuple[Context, ...]
    selecting: tuple[Context, ...] = ()
    held_out: tuple[Context, ...] = ()
    groups: tuple[int, ...] = ()  # of the contexts in `held_out`
    has_test_text: bool = False  # whether `held_out` is of another text

    @classmethod
    def of(
        cls,
        loaded: LoadedModel,
        text: Text = None,
        *,
        field: str = "text",
        context: int | None = None,
        tokens: int | None = None,
        test_text: Text = None,
        selects: bool = True,
        purpose: str = "calibration",
    ) -> CalibrationText:
        """Read a text, sampled over all of it, and split it.

        Args:
            tokens: maximum number of tokens; default: 24 for each channel of the widest layer, at least 12,288.
            test_text: another text to hold out; all of `text` then calibrates and selects.
            selects: whether a part of the text selects; it calibrates otherwise.
            loaded, text, field, context, purpose: as in `read_contexts`.
        """
        tokens = default_tokens(loaded.model) if tokens is None else tokens
        options: dict[str, Any] = {"field": field, "context": context, "sampled": True, "purpose": purpose}
        found = read_contexts(loaded, text, tokens=tokens, **options)
        groups = found.groups
        parts: list[Part] = ["calibrating"] * MIN_GROUPS
        if max(groups) + 1 >= MIN_GROUPS and loaded.kind != "encoder-decoder":
            parts[SELECTING] = "selecting" if selects else "calibrating"
            for place in HELD_OUT if test_text is None else ():
                parts[place] = "held_out"
        split: dict[Part, list[Context]] = {name: [] for name in PARTS}
        for piece, group in zip(found.contexts, groups, strict=True):
            split[parts[group % MIN_GROUPS]].append(piece)
        held_out_groups = tuple(group for group in groups if parts[group % MIN_GROUPS] == "held_out")
        if test_text is not None:
            tested = read_contexts(loaded, test_text, tokens=tokens // 4, **options)
            split["held_out"], held_out_groups = list(tested.contexts), tested.groups
        contexts = {name: tuple(split[name]) for name in PARTS}
        return cls(loaded, found, **contexts, groups=held_out_groups, has_test_text=test_text is not None)

    def batches(self) -> Iterator[dict[str, Any]]:
        """Yield the model inputs of the calibration part on the model's device, in the same order each time."""
        return model_inputs(self.loaded, self.calibrating)

    def evidence(self, progress: ProgressCallback, **options: Any) -> Evidence:
        """Return the evidence of the calibration part, whose first reading advances a progress bar."""
        read = list(self.batches())
        step = Step(progress, "Read the text to choose heads", len(read), "batches")
        return Evidence(self.loaded.model, BatchesWithProgress(read, step), objectives_of(self.loaded), **options)

    def quality(self, kind: type[Quality] | None = None, **options: Any) -> Quality | None:
        """Return the quality on the held-out part, relative to the current model; None if nothing is held out."""
        if not self.held_out:
            return None
        group_of = {(x.document, x.piece): group for x, group in zip(self.held_out, self.groups, strict=True)}
        rows = [
            group_of[row]
            for batch in batches(self.held_out, self.loaded.tokenizer, batch_tokens=BATCH_TOKENS)
            for row in zip(batch.documents.tolist(), batch.pieces.tolist(), strict=True)
        ]
        kind = quality_type(self.loaded) if kind is None else kind
        return kind(self.loaded.model, list(model_inputs(self.loaded, self.held_out)), groups=rows, **options)

    def original_on_calibration(self, kind: type[Quality] | None = None) -> float | None:
        """Return the perplexity of the current model on text that calibrates, to compare it with that of a test text.

        None without a test text, and for fidelity, which is 1 on any text.
        """
        kind = quality_type(self.loaded) if kind is None else kind
        if not self.has_test_text or kind is not Perplexity:
            return None
        some = self.selecting or self.calibrating
        return kind(self.loaded.model, list(model_inputs(self.loaded, some))).original

    def evaluated(self, quality: Quality | None) -> dict[str, Any]:
        """Return the fields of `EditedModel` about the text, measured on the model as it is now."""
        fields: dict[str, Any] = {
            "contexts": len(self.text.contexts),
            "held_out_contexts": len(self.held_out),
            "held_out_groups": len(set(self.groups)),
            "held_out_tokens": count_tokens(self.held_out),
        }
        if quality is not None:
            fields |= {"metric": quality.name, "original": quality.original, "quality": quality.measure()}
        return fields


def default_tokens(model: nn.Module) -> int:
    """Return how many tokens of text are enough, by the widest layer: compensation solves for each of its channels."""
    widths = [x.layout.num_heads * x.layout.value_dim for x in find_layers(model) if x.layout is not None]
    return max(MIN_TOKENS, TOKENS_PER_CHANNEL * max(widths, default=0))


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


class BatchesWithProgress(UserList[Mapping[str, Any]]):
    """Batches that advance a step after each batch of an iteration."""

    def __init__(self, batches: Sequence[Mapping[str, Any]], step: Step) -> None:
        super().__init__(batches)
        self._step = step

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        for batch in self.data:
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
        return Objectives(slope=language_slope, ablated="language", gradient="language", slopes=16, ablations=2)
    if loaded.kind == "masked":
        loss = Masked(loaded.tokenizer.mask_token_id)
        return Objectives(slope=Probe(), ablated=loss, gradient=loss, slopes=16, ablations=2)
    return Objectives(slope=Probe(), ablated="representation", slopes=16, ablations=2)
