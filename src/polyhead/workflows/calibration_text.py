"""Calibration of the editing workflows: a text in three parts, and the evidence of the part that calibrates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from polyhead.analysis.importance.losses import Masked
from polyhead.errors import OptionError
from polyhead.progress import ProgressCallback
from polyhead.sources import Context, LoadedModel, batches
from polyhead.sources.text_contexts import Text, TextContexts, read_contexts
from polyhead.surgery.adapters.discovery import find_layers
from polyhead.surgery.selection.evidence import Evidence, Objectives
from polyhead.surgery.selection.journal import Journal
from polyhead.surgery.selection.quality import Fidelity, Perplexity, Probe, Quality, language_slope

MIN_GROUPS = 8  # of a text that is split; of every 8 groups, 5 calibrate, 1 selects and 2 are held out
SELECTING, HELD_OUT = 3, (1, 6)
MIN_TOKENS, TOKENS_PER_CHANNEL = 12_288, 24  # of a text, by default; docs/surgery.md has the measurement
SEARCHED_TOKENS = 65_536  # the same for a search, which compares some hundred models
BATCH_TOKENS = 512  # also of a step of distillation; activations and logits of a batch are in memory until its backward


@dataclass(frozen=True, slots=True, eq=False)
class CalibrationText:
    """Contexts of a text in three parts, by group: to calibrate edits, to select one of several, and held out.

    All contexts calibrate if there are too few groups, or if the model is an encoder-decoder.
    """

    loaded: LoadedModel
    text: TextContexts
    kind: type[Quality]  # by which models are compared on it
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
        metric: str | None = None,
        purpose: str = "calibration",
    ) -> CalibrationText:
        """Read a text, sampled over all of it, and split it.

        Args:
            tokens: maximum number of tokens; default: 24 for each channel of the widest layer, at least 12,288.
            test_text: another text to hold out; all of `text` then calibrates and selects.
            selects: whether a part of the text selects; it calibrates otherwise.
            metric: quality by which models are compared; default: perplexity for a causal model, else fidelity.
            loaded, text, field, context, purpose: as in `read_contexts`.
        """
        kind = quality_type(loaded, metric)
        tokens = default_tokens(loaded.model) if tokens is None else tokens
        read = partial(read_contexts, loaded, field=field, context=context, sampled=True, purpose=purpose)
        found = read(text, tokens=tokens)
        groups = found.groups
        can_split = loaded.kind != "encoder-decoder" and max(groups) + 1 >= MIN_GROUPS
        selecting = {SELECTING} if can_split and selects else set()
        held_out = set(HELD_OUT) if can_split and test_text is None else set()

        def contexts_at(places: Iterable[int]) -> tuple[Context, ...]:
            return tuple(x for x, group in zip(found.contexts, groups, strict=True) if group % MIN_GROUPS in places)

        parts = cls(
            loaded,
            found,
            kind,
            calibrating=contexts_at(set(range(MIN_GROUPS)) - selecting - held_out),
            selecting=contexts_at(selecting),
            held_out=contexts_at(held_out),
            groups=tuple(group for group in groups if group % MIN_GROUPS in held_out),
        )
        if test_text is None:
            return parts
        tested = read(test_text, tokens=tokens // 4)
        return replace(parts, held_out=tested.contexts, groups=tested.groups, has_test_text=True)


def quality_type(loaded: LoadedModel, metric: str | None = None) -> type[Quality]:
    """Return the quality of a metric; by default perplexity for a causal model, else fidelity."""
    if metric == "perplexity" and loaded.kind != "causal":
        raise OptionError(
            f"perplexity needs a causal model, got {loaded.name}, which is {loaded.kind}; omit the metric to use "
            "fidelity"
        )
    return Perplexity if metric != "fidelity" and loaded.kind == "causal" else Fidelity


def default_tokens(model: nn.Module) -> int:
    """Return how many tokens of text are enough, by the widest layer: compensation solves for each of its channels."""
    widths = [x.layout.num_heads * x.layout.value_dim for x in find_layers(model) if x.layout is not None]
    return max(MIN_TOKENS, TOKENS_PER_CHANNEL * max(widths, default=0))


def collect_evidence(
    text: CalibrationText, progress: ProgressCallback, *, journal: Journal | None = None, stack: str | None = None
) -> Evidence:
    """Return the evidence of the calibrating part of a text."""
    inputs = list(model_inputs(text.loaded, text.calibrating))
    objectives = objectives_of(text.loaded)
    return Evidence(text.loaded.model, inputs, objectives, journal=journal, stack=stack, progress=progress)


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


def objectives_of(loaded: LoadedModel) -> Objectives:
    """Return the objective of a model: its token loss (causal or masked), else fidelity of its representations."""
    if loaded.kind == "causal":
        return Objectives(slope=language_slope, ablated="language", gradient="language", slopes=16, ablations=2)
    if loaded.kind == "masked":
        loss = Masked(loaded.tokenizer.mask_token_id)
        return Objectives(slope=Probe(), ablated=loss, gradient=loss, slopes=16, ablations=2)
    return Objectives(slope=Probe(), ablated="representation", slopes=16, ablations=2)
