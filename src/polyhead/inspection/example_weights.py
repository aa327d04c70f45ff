"""Attention weights of every head on a few short excerpts of the text, shown token by token.

The excerpts are the first context of each of the first three documents, cut to 32 tokens including special tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from polyhead.inspection.text_reader import Reader
from polyhead.observation import AttentionSite, BatchMetadata, Observations
from polyhead.observation.collectors import states_of
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


@dataclass(frozen=True, slots=True)
class ExampleWeights:
    """Collector of all weights of short texts; each call has one text, identified by `metadata.documents`."""

    name: str = "examples"

    def empty(self, site: AttentionSite, device: torch.device) -> SiteWeights:
        return SiteWeights()


@dataclass(frozen=True, slots=True, eq=False)
class SiteWeights:
    """Weights of one site by text, summed over calls: a module shared by several layers is called several times."""

    sums: Mapping[int, Tensor] = field(default_factory=dict)  # [heads, queries, keys] each
    calls: Mapping[int, int] = field(default_factory=dict)

    def update(self, attended: Attended, non_padding: Tensor | None, metadata: BatchMetadata) -> Self:
        assert metadata.documents is not None
        weights = attended.profile(block_map=(1, 1)).block_map  # blocks of one query and one key: the weights
        assert weights is not None and weights.shape[0] == 1
        return self.merge(type(self)({int(metadata.documents[0]): weights[0]}, {int(metadata.documents[0]): 1}))

    def merge(self, other: Self) -> Self:
        sums, calls = dict(self.sums), dict(self.calls)
        for text, weights in other.sums.items():
            sums[text] = sums[text] + weights.to(sums[text].device) if text in sums else weights
            calls[text] = calls.get(text, 0) + other.calls[text]
        return type(self)(sums, calls)

    def compute(self) -> dict[int, Tensor]:
        """Return the weights of each text, [heads, queries, keys], averaged over calls."""
        return {text: (x / self.calls[text]).cpu().float() for text, x in self.sums.items()}

    def state(self) -> dict[str, Tensor]:
        calls = {f"calls.{text}": torch.tensor(count) for text, count in self.calls.items()}
        return {**{f"sums.{text}": x for text, x in self.sums.items()}, **calls}

    def with_state(self, state: Mapping[str, Tensor]) -> Self:
        def part(prefix: str) -> Iterable[tuple[int, Tensor]]:
            return ((int(name.removeprefix(prefix)), x) for name, x in state.items() if name.startswith(prefix))

        return type(self)(dict(part("sums.")), {text: int(x) for text, x in part("calls.")})


def example_batches(reader: Reader, documents: int = DOCUMENTS, tokens: int = TOKENS) -> list[Batch]:
    """Return the excerpts as batches of one, so that none is padded."""
    after = special_tokens(reader.loaded.tokenizer).after
    first: dict[int, Context] = {}
    for context in reader.contexts:
        first.setdefault(context.document, context)
    excerpts = []
    for context in list(first.values())[:documents]:
        if len(context.ids) > tokens:
            kept = max(1, tokens - len(after))
            ids, special = [*context.ids[:kept], *after], [*context.special[:kept], *(True for _ in after)]
            context = Context(context.document, context.piece, ids, special)
        excerpts += list(batches([context], reader.loaded.tokenizer))
    return excerpts


def examples_of(reader: Reader, excerpts: Sequence[Batch], observations: Observations) -> tuple[Example, ...]:
    """Return the examples that `ExampleWeights` collected, without cross-attention, whose keys are other tokens."""
    states = states_of(observations.collected, "examples", SiteWeights)
    weights = {site: state.compute() for site, state in states.items()}
    examples = []
    for batch in excerpts:
        documents = reader.metadata(batch).documents
        assert documents is not None
        number, texts = int(documents[0]), token_texts(reader.loaded.tokenizer, batch.ids[0].tolist())
        shape = (len(texts), len(texts))
        by_site = {site: x[number] for site, x in weights.items() if number in x and x[number].shape[1:] == shape}
        if by_site:
            examples.append(Example(reader.text.documents[int(batch.documents[0])], texts, texts, by_site))
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
