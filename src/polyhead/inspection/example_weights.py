"""Attention weights of every head on a few short excerpts of the text, shown token by token.

The excerpts are the first context of each of the first three documents, cut to 32 tokens including special tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from polyhead.inspection.text_reader import Reader, cut_context
from polyhead.observation import AttentionSite, BatchMetadata
from polyhead.ops.attended import Attended
from polyhead.sources import Batch, Context, batches, special_tokens

DOCUMENTS = 3
TOKENS = 32


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """One excerpt and the attention weights of every head on it."""

    title: str  # of its document
    queries: tuple[str, ...]  # texts of the query tokens
    keys: tuple[str, ...]  # texts of the key tokens
    weights: Mapping[AttentionSite, Tensor]  # [heads, queries, keys] float32 each


@dataclass(frozen=True, slots=True, eq=False)
class ExampleWeights:
    """Weights of short texts, recorded by `CallRecorder(example_weights.record)`; each batch has one text."""

    calls: dict[AttentionSite, dict[int, list[Tensor]]] = field(default_factory=dict)  # by site and text

    def record(
        self, site: AttentionSite, attended: Attended, non_padding: Tensor | None, metadata: BatchMetadata
    ) -> None:
        assert metadata.documents is not None
        weights = attended.profile(block_map=(1, 1)).block_map  # blocks of one query and one key: the weights
        assert weights is not None and weights.shape[0] == 1
        self.calls.setdefault(site, {}).setdefault(int(metadata.documents[0]), []).append(weights[0])

    def of(self, text: int) -> dict[AttentionSite, Tensor]:
        """Return the weights of a text, [heads, queries, keys] by site.

        They are averaged over calls: a module that several layers share is called several times.
        """
        calls = {site: by_text[text] for site, by_text in self.calls.items() if text in by_text}
        return {site: (sum(x[1:], start=x[0]) / len(x)).cpu().float() for site, x in calls.items()}


def example_batches(reader: Reader) -> list[Batch]:
    """Return the excerpts as batches of one, so that none is padded."""
    after = special_tokens(reader.loaded.tokenizer).after
    first: dict[int, Context] = {}
    for context in reader.contexts:
        first.setdefault(context.document, context)
    excerpts = []
    for context in list(first.values())[:DOCUMENTS]:
        excerpts += list(batches([cut_context(context, TOKENS, after)], reader.loaded.tokenizer))
    return excerpts


def examples_of(reader: Reader, excerpts: Sequence[Batch], example_weights: ExampleWeights) -> tuple[Example, ...]:
    """Return the excerpts with their weights, also of cross-attention if its keys are the same tokens."""
    examples = []
    for batch in excerpts:
        documents = reader.metadata(batch).documents
        assert documents is not None
        texts = token_texts(reader.loaded.tokenizer, batch.ids[0].tolist())
        shape = (len(texts), len(texts))
        weights = {site: x for site, x in example_weights.of(int(documents[0])).items() if x.shape[1:] == shape}
        if weights:
            examples.append(Example(reader.text.documents[int(batch.documents[0])], texts, texts, weights))
    return tuple(examples)


def token_texts(tokenizer: Any, ids: Sequence[int]) -> tuple[str, ...]:
    """Return the text of each token; part of a multi-byte character is shown by its name in the vocabulary."""
    texts = []
    for token in ids:
        text = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if not text or "\ufffd" in text:
            text = tokenizer.convert_ids_to_tokens(int(token)) or text
        texts.append(text)
    return tuple(texts)
