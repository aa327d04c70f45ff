"""The text that heads are chosen, repaired and judged on, cut into contexts and held in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from polyhead.cli.edit_options import CONTEXT

if TYPE_CHECKING:
    from polyhead.sources import Context, LoadedModel
    from polyhead.surgery.selection.quality import Fidelity

# Of a text that has so many contexts, every so many-th is kept to judge the edited model by, up to so many tokens.
FEW, EVERY, JUDGED = 10, 5, 8192


@dataclass(frozen=True, slots=True, eq=False)
class CalibrationText:
    """Contexts of a text; all but those that are held out are read while heads are chosen and repaired.

    By what is held out the edited model is judged.
    """

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
                f"heads are chosen and repaired on text, got {loaded.name}, which reads {loaded.main_input}; name the "
                "heads with --heads and leave them unrepaired with --no-repair"
            )
        made_for = loaded.trained_context
        length = min(CONTEXT, made_for or CONTEXT) if context is None else context
        if made_for is not None and length > made_for:
            raise OptionError(f"{loaded.name} was made for contexts of up to {made_for} tokens, got {length}")
        documents = default_documents() if text is None else read_texts(text, field=field)
        contexts: list[Context] = []
        read = 0
        for piece in cut_into_contexts(documents, loaded.tokenizer, length):
            if read and read + len(piece.ids) > tokens:
                break
            contexts.append(piece)
            read += len(piece.ids)
        if not contexts:
            raise OptionError(f"calibration needs some text, got {text!r} without a piece of 8 tokens or more")
        if len(contexts) < FEW or loaded.kind == "encoder-decoder":
            return cls(loaded, tuple(contexts))
        held_out = contexts[EVERY - 1 :: EVERY]
        while len(held_out) > 1 and sum(len(context.ids) for context in held_out) > JUDGED:
            held_out.pop()
        return cls(loaded, tuple(contexts), tuple(held_out))

    @property
    def tokens(self) -> int:
        return sum(len(context.ids) for context in self.contexts)

    @property
    def digest(self) -> str:
        """All contexts as the model reads them, in short."""
        from polyhead.sources.batching import digest_of

        return digest_of(self.contexts)

    def batches(self) -> Iterator[dict[str, Any]]:
        """What the model is called with, on its device, without what is held out; the same each time."""
        held_out = {id(context) for context in self.held_out}
        return self._batches_of([context for context in self.contexts if id(context) not in held_out])

    def fidelity(self) -> Fidelity | None:
        """To the model as it is now, on the text that is held out; None where none is."""
        from polyhead.surgery.selection.quality import Fidelity

        return Fidelity(self.loaded.model, list(self._batches_of(self.held_out))) if self.held_out else None

    def _batches_of(self, contexts: Sequence[Context]) -> Iterator[dict[str, Any]]:
        from polyhead.sources import batches

        device = next(self.loaded.model.parameters()).device
        for batch in batches(contexts, self.loaded.tokenizer, batch_tokens=self.batch_tokens):
            ids, mask = batch.ids.to(device), batch.mask.to(device)
            given: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
            if self.loaded.kind == "encoder-decoder":
                given |= {"decoder_input_ids": ids, "decoder_attention_mask": mask}
            if self.loaded.kind not in ("encoder", "masked"):
                given["use_cache"] = False
            yield given

    def told(self, step: Callable[[int], None]) -> Sequence[Mapping[str, Any]]:
        """The batches as a list; whoever goes through it tells after each that it is done."""
        return _Told(list(self.batches()), step)


class _Told(Sequence[Mapping[str, Any]]):
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
