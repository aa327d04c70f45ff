"""Running a model over a text: documents to batches, batches to forward passes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polyhead.inspection.settings import Settings
from polyhead.observation import BatchMetadata
from polyhead.sources import (
    Batch,
    Batches,
    Context,
    LoadedModel,
    Shard,
    TokenClass,
    batches,
    special_tokens,
    token_classes,
)
from polyhead.sources.shards import WHOLE
from polyhead.sources.text_contexts import Text, TextContexts, read_contexts

# Intervals are over documents; with fewer documents than this, each context counts as one.
FEW_DOCUMENTS = 10
CONTEXTS_OF_A_PROBE = 8  # over which the tokens of a probe are spread


@dataclass(frozen=True, slots=True, eq=False)
class Reader:
    """A model, the contexts to run it on, and the forward call."""

    loaded: LoadedModel
    text: TextContexts
    batch_tokens: int
    classes: Tensor  # [vocabulary]

    @classmethod
    def of(cls, loaded: LoadedModel, settings: Settings, text: Text = None) -> Reader:
        contexts = read_contexts(
            loaded,
            settings.text if text is None else text,
            field=settings.field,
            context=settings.context,
            tokens=settings.tokens,
            purpose="an inspection",
        )
        return cls(loaded, contexts, settings.batch_tokens, token_classes(loaded.tokenizer))

    @property
    def contexts(self) -> tuple[Context, ...]:
        return self.text.contexts

    @property
    def counts(self) -> Tensor:
        """Number of occurrences of each token, [vocabulary]."""
        ids = torch.tensor([token for context in self.contexts for token in context.ids])
        return torch.bincount(ids, minlength=len(self.classes))

    @property
    def unknown(self) -> float:
        """Share of unknown tokens."""
        counts = self.counts
        return float(counts[self.classes == TokenClass.UNKNOWN].sum() / counts.sum())

    def batches(self, start: int = 0, digest: str | None = None, shard: Shard = WHOLE) -> Batches:
        """Return the batches of a shard, without the first `start` of the text."""
        tokenizer, size = self.loaded.tokenizer, self.batch_tokens
        return batches(self.contexts, tokenizer, batch_tokens=size, start=start, digest=digest, shard=shard)

    def whole_batches(self, tokens: int) -> list[Batch]:
        """Return batches of whole contexts of different documents, at least two of them and `tokens` in total."""
        contexts = sorted(self.contexts, key=lambda x: x.piece)
        totals = itertools.accumulate(len(context.ids) for context in contexts)
        return self.batches_of(contexts[: max(2, 1 + sum(total < tokens for total in totals))])

    def some_batches(self, tokens: int, batch_tokens: int | None = None) -> list[Batch]:
        """Return batches of the first tokens of contexts of different documents, about `tokens` in total."""
        length = max(16, tokens // CONTEXTS_OF_A_PROBE)
        after = special_tokens(self.loaded.tokenizer).after
        chosen: list[Context] = []
        total = 0
        for context in sorted(self.contexts, key=lambda x: x.piece):
            if total >= tokens:
                break
            chosen.append(cut_context(context, length, after))
            total += len(chosen[-1].ids)
        return self.batches_of(chosen, batch_tokens)

    def batches_of(self, contexts: Sequence[Context], batch_tokens: int | None = None) -> list[Batch]:
        """Return batches of contexts that are not part of the text; of fewer tokens if `batch_tokens` is smaller."""
        most = min(self.batch_tokens, batch_tokens or self.batch_tokens)
        return list(batches(contexts, self.loaded.tokenizer, batch_tokens=most))

    @property
    def counts_contexts(self) -> bool:
        """True if each context counts as a document of its own."""
        return len({context.document for context in self.contexts}) < FEW_DOCUMENTS

    def metadata(self, batch: Batch) -> BatchMetadata:
        classes = self.classes[batch.ids]
        return BatchMetadata(self.documents_of(batch), pieces=batch.pieces, tokens=batch.ids, classes=classes)

    def documents_of(self, batch: Batch) -> Tensor:
        """Return the document of each context, [contexts]; each context is one if there are few documents."""
        # A distinct number for each context of each document, the same in every batch. The factor is odd, so that the
        # even and the odd numbers are two halves with contexts of every document.
        return batch.documents + (FEW_DOCUMENTS + 1) * batch.pieces if self.counts_contexts else batch.documents

    @torch.no_grad()
    def call(self, batch: Batch, model: nn.Module | None = None) -> Any:
        """Run the base model, without the language-modelling head, which no attention head needs."""
        full_model: Any = self.loaded.model if model is None else model
        device = next(full_model.parameters()).device
        ids, mask = batch.ids.to(device), batch.mask.to(device)
        inputs = {"input_ids": ids, "attention_mask": mask}
        if self.loaded.kind == "encoder-decoder":
            inputs |= {"decoder_input_ids": ids, "decoder_attention_mask": mask}
        if self.loaded.kind != "encoder" and self.loaded.kind != "masked":
            return _base_model(full_model)(**inputs, use_cache=False)
        return _base_model(full_model)(**inputs)


def cut_context(context: Context, length: int, after: Sequence[int]) -> Context:
    """Return a context with at most `length` tokens, which ends with the special tokens `after`."""
    if len(context.ids) <= length:
        return context
    end = max(1, length - len(after))
    ids, special = [*context.ids[:end], *after], [*context.special[:end], *(True for _ in after)]
    return Context(context.document, context.piece, ids, special)


def _base_model(model: Any) -> Any:
    return getattr(model, model.base_model_prefix, model) if model.base_model_prefix else model
