"""Calibration data of the editing commands: a text split into contexts and batches, with a held-out part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from polyhead.cli.edit_options import CONTEXT

if TYPE_CHECKING:
    from polyhead.sources import Context, LoadedModel
    from polyhead.surgery.selection.quality import Fidelity

# From MIN_CONTEXTS contexts on, every HELD_OUT_EVERY-th is held out for evaluation, up to MAX_HELD_OUT_TOKENS tokens.
MIN_CONTEXTS, HELD_OUT_EVERY, MAX_HELD_OUT_TOKENS = 10, 5, 8192


@dataclass(frozen=True, slots=True, eq=False)
class CalibrationText:
    """Contexts of a text: those in `held_out` evaluate the edited model, the others calibrate it."""

    loaded: LoadedModel
    contexts: tuple[Context, ...]
    held_out: tuple[Context, ...] = ()
    batch_tokens: int = 4096

    @classmethod
    def of(cls, loaded: LoadedModel, text: str | None, field: str, context: int | None, tokens: int) -> CalibrationText:
        from polyhead.errors import OptionError
        from polyhead.sources import cut_into_contexts, default_documents, read_texts

        if loaded.tokenizer is None or loaded.main_input != "input_ids":
            raise OptionError(
                f"calibration needs a model that reads text, got {loaded.name}, which reads {loaded.main_input}; "
                "select the heads with --heads and skip compensation with --no-compensate"
            )
        max_context = loaded.trained_context
        length = min(CONTEXT, max_context or CONTEXT) if context is None else context
        if max_context is not None and length > max_context:
            raise OptionError(f"--context must be at most {max_context} tokens for {loaded.name}, got {length}")
        documents = default_documents() if text is None else read_texts(text, field=field)
        contexts: list[Context] = []
        num_tokens = 0
        for piece in cut_into_contexts(documents, loaded.tokenizer, length):
            if num_tokens and num_tokens + len(piece.ids) > tokens:
                break
            contexts.append(piece)
            num_tokens += len(piece.ids)
        if not contexts:
            raise OptionError(f"calibration needs a text of at least 8 tokens, got {text!r}")
        if len(contexts) < MIN_CONTEXTS or loaded.kind == "encoder-decoder":
            return cls(loaded, tuple(contexts))
        held_out = contexts[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
        while len(held_out) > 1 and sum(len(context.ids) for context in held_out) > MAX_HELD_OUT_TOKENS:
            held_out.pop()
        return cls(loaded, tuple(contexts), tuple(held_out))

    @property
    def tokens(self) -> int:
        return sum(len(context.ids) for context in self.contexts)

    @property
    def digest(self) -> str:
        """Digest of the token ids of all contexts."""
        from polyhead.sources.batching import digest_of

        return digest_of(self.contexts)

    def batches(self) -> Iterator[dict[str, Any]]:
        """Yield the model inputs of the calibration part on the model's device, in the same order each time."""
        held_out = {id(context) for context in self.held_out}
        return self._batches_of([context for context in self.contexts if id(context) not in held_out])

    def fidelity(self) -> Fidelity | None:
        """Return the fidelity to the current model on the held-out part; None if nothing is held out."""
        from polyhead.surgery.selection.quality import Fidelity

        return Fidelity(self.loaded.model, list(self._batches_of(self.held_out))) if self.held_out else None

    def _batches_of(self, contexts: Sequence[Context]) -> Iterator[dict[str, Any]]:
        from polyhead.sources import batches

        device = next(self.loaded.model.parameters()).device
        for batch in batches(contexts, self.loaded.tokenizer, batch_tokens=self.batch_tokens):
            ids, mask = batch.ids.to(device), batch.mask.to(device)
            inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
            if self.loaded.kind == "encoder-decoder":
                inputs |= {"decoder_input_ids": ids, "decoder_attention_mask": mask}
            if self.loaded.kind not in ("encoder", "masked"):
                inputs["use_cache"] = False
            yield inputs

    def batches_with_progress(self, step: Callable[[int], None]) -> Sequence[Mapping[str, Any]]:
        """Return the batches as a sequence that calls `step(1)` after each batch of an iteration."""
        return _BatchesWithProgress(list(self.batches()), step)


class _BatchesWithProgress(Sequence[Mapping[str, Any]]):
    def __init__(self, batches: list[dict[str, Any]], step: Callable[[int], None]) -> None:
        self._batches = batches
        self._step = step

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: Any) -> Any:
        return self._batches[index]

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        for batch in self._batches:
            yield batch
            self._step(1)
