"""Running a model over a text: documents to batches, batches to forward passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polyhead.errors import OptionError
from polyhead.inspection.settings import CONTEXT, Settings
from polyhead.observation import BatchMetadata
from polyhead.sources import (
    Batch,
    Context,
    Document,
    LoadedModel,
    TokenClass,
    batches,
    cut_into_contexts,
    default_documents,
    read_texts,
    special_tokens,
    token_classes,
)
from polyhead.sources.batching import digest_of

# Intervals are over documents; with fewer documents than this, each context counts as one.
FEW_DOCUMENTS = 10


@dataclass(frozen=True, slots=True, eq=False)
class Reader:
    """A model, the contexts to run it on, and the forward call."""

    loaded: LoadedModel
    contexts: tuple[Context, ...]
    documents: tuple[str, ...]  # their names
    context: int
    batch_tokens: int
    classes: Tensor  # [vocabulary]

    @classmethod
    def of(cls, loaded: LoadedModel, settings: Settings) -> Reader:
        if loaded.tokenizer is None or loaded.main_input != "input_ids":
            raise OptionError(
                f"an inspection needs a model of text, got {loaded.name}, whose input is {loaded.main_input}; "
                "observe it with polyhead.observe while you call it"
            )
        max_context = loaded.trained_context
        context = min(CONTEXT, max_context or CONTEXT) if settings.context is None else settings.context
        if max_context is not None and context > max_context:
            raise OptionError(
                f"context must be at most {max_context} tokens, the maximum of {loaded.name}, got {context}"
            )
        source = default_documents() if settings.text is None else read_texts(settings.text, field=settings.field)
        names: list[str] = []
        contexts: list[Context] = []
        tokens = 0
        for piece in cut_into_contexts(_named(source, names), loaded.tokenizer, context):
            if tokens and tokens + len(piece.ids) > settings.tokens:
                break
            contexts.append(piece)
            tokens += len(piece.ids)
        if not contexts:
            raise OptionError(
                f"an inspection needs a text of at least 8 tokens, got {len(names)} documents that are shorter"
            )
        classes = token_classes(loaded.tokenizer)
        return cls(loaded, tuple(contexts), tuple(names), context, settings.batch_tokens, classes)

    @property
    def tokens(self) -> int:
        return sum(len(context.ids) for context in self.contexts)

    @property
    def counts(self) -> Tensor:
        """Number of occurrences of each token, [vocabulary]."""
        ids = torch.tensor([token for context in self.contexts for token in context.ids])
        return torch.bincount(ids, minlength=len(self.classes))

    @property
    def digest(self) -> str:
        """Fingerprint of all contexts, on which for example the set of rare tokens depends."""
        return digest_of(self.contexts)

    @property
    def unknown(self) -> float:
        """Share of unknown tokens."""
        counts = self.counts
        return float(counts[self.classes == TokenClass.UNKNOWN].sum() / counts.sum())

    def batches(self, start: int = 0, digest: str | None = None) -> Iterator[Batch]:
        return iter(
            batches(self.contexts, self.loaded.tokenizer, batch_tokens=self.batch_tokens, start=start, digest=digest)
        )

    def some_batches(self, tokens: int, documents: int = 8) -> list[Batch]:
        """Return batches of the first tokens of contexts of different documents, about `tokens` in total."""
        length = max(16, tokens // documents)
        after = special_tokens(self.loaded.tokenizer).after
        chosen: list[Context] = []
        total = 0
        for context in sorted(self.contexts, key=lambda x: x.piece):
            if total >= tokens:
                break
            if len(context.ids) > length:
                end = length - len(after)
                ids, special = [*context.ids[:end], *after], [*context.special[:end], *(True for _ in after)]
                context = Context(context.document, context.piece, ids, special)
            chosen.append(context)
            total += len(context.ids)
        return self.batches_of(chosen)

    def batches_of(self, contexts: Sequence[Context]) -> list[Batch]:
        """Return batches of contexts that are not part of the text."""
        return list(batches(contexts, self.loaded.tokenizer, batch_tokens=self.batch_tokens))

    @property
    def counts_contexts(self) -> bool:
        """True if each context counts as a document of its own."""
        return len({context.document for context in self.contexts}) < FEW_DOCUMENTS

    def metadata(self, batch: Batch) -> BatchMetadata:
        documents, pieces = batch.documents, batch.pieces
        if self.counts_contexts:
            # A distinct number for each context of each document, the same in every batch.
            documents = documents + FEW_DOCUMENTS * pieces
        return BatchMetadata(documents=documents, pieces=pieces, tokens=batch.ids, classes=self.classes[batch.ids])

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


def _base_model(model: Any) -> Any:
    return getattr(model, model.base_model_prefix, model) if model.base_model_prefix else model


def _named(documents: Any, names: list[str]) -> Iterator[Document]:
    for document in documents:
        names.append(document.name)
        yield document
