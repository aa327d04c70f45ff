"""A few short pieces of the text, with every weight of every head on them: what a person can read word by word.

The rule: of each of the first three documents, the first piece, cut after 32 tokens, special ones included.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from polyhead.inspection.reading import Reader
from polyhead.observation import AttentionSite, BatchMetadata, Observations
from polyhead.ops.attended import Attended
from polyhead.sources import Batch, Context, batches, special_tokens

DOCUMENTS = 3
TOKENS = 32


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """One piece of text and how every head attends to it."""

    title: str  # the document that it is from
    queries: tuple[str, ...]  # the text of each token that looks
    keys: tuple[str, ...]  # and of each that is looked at
    weights: Mapping[AttentionSite, Tensor]  # [heads, queries, keys] float32 each


@dataclass(frozen=True, slots=True)
class ExampleWeights:
    """Gathers every weight of short texts; `metadata.documents` must number them, one text a call."""

    name: str = "examples"

    def empty(self, site: AttentionSite, device: torch.device) -> SiteWeights:
        return SiteWeights()


@dataclass(frozen=True, slots=True, eq=False)
class SiteWeights:
    """The weights of one site, summed over its calls by text: a module that serves several layers is called often."""

    sums: Mapping[int, Tensor] = field(default_factory=dict)  # [heads, queries, keys] each
    calls: Mapping[int, int] = field(default_factory=dict)

    def update(self, attended: Attended, real: Tensor | None, metadata: BatchMetadata) -> Self:
        assert metadata.documents is not None
        weights = attended.profile(block_map=(1, 1)).block_map
        assert weights is not None and weights.shape[0] == 1
        return self.merge(type(self)({int(metadata.documents[0]): weights[0]}, {int(metadata.documents[0]): 1}))

    def merge(self, other: Self) -> Self:
        sums, calls = dict(self.sums), dict(self.calls)
        for text, weights in other.sums.items():
            sums[text] = sums[text] + weights.to(sums[text].device) if text in sums else weights
            calls[text] = calls.get(text, 0) + other.calls[text]
        return type(self)(sums, calls)

    def compute(self) -> dict[int, Tensor]:
        """The weights of each text, [heads, queries, keys], the mean over calls."""
        return {text: (x / self.calls[text]).cpu().float() for text, x in self.sums.items()}

    def state(self) -> dict[str, Tensor]:
        calls = {f"calls.{text}": torch.tensor(count) for text, count in self.calls.items()}
        return {**{f"sums.{text}": x for text, x in self.sums.items()}, **calls}

    def with_state(self, state: Mapping[str, Tensor]) -> Self:
        def part(prefix: str) -> Iterable[tuple[int, Tensor]]:
            return ((int(name.removeprefix(prefix)), x) for name, x in state.items() if name.startswith(prefix))

        return type(self)(dict(part("sums.")), {text: int(x) for text, x in part("calls.")})


def example_batches(reader: Reader, documents: int = DOCUMENTS, tokens: int = TOKENS) -> list[Batch]:
    """The pieces by the rule of this module, each a batch of its own, so that none is padded."""
    after = special_tokens(reader.loaded.tokenizer).after
    first: dict[int, Context] = {}
    for context in reader.contexts:
        first.setdefault(context.document, context)
    found = []
    for context in list(first.values())[:documents]:
        if len(context.ids) > tokens:
            kept = max(1, tokens - len(after))
            ids, special = [*context.ids[:kept], *after], [*context.special[:kept], *(True for _ in after)]
            context = Context(context.document, context.piece, ids, special)
        found += list(batches([context], reader.loaded.tokenizer))
    return found


def examples_of(reader: Reader, read: Sequence[Batch], observations: Observations) -> tuple[Example, ...]:
    """What `ExampleWeights` gathered of these pieces; a site whose keys are no tokens of the piece is left out."""
    by_site = {site: values.get("examples") for site, values in observations.collected.items()}
    weights = {site: value.compute() for site, value in by_site.items() if isinstance(value, SiteWeights)}
    found = []
    for batch in read:
        noted = reader.metadata(batch).documents
        assert noted is not None
        number, texts = int(noted[0]), token_texts(reader.loaded.tokenizer, batch.ids[0].tolist())
        shape = (len(texts), len(texts))
        here = {site: x[number] for site, x in weights.items() if number in x and x[number].shape[1:] == shape}
        if here:
            found.append(Example(reader.documents[int(batch.documents[0])], texts, texts, here))
    return tuple(found)


def token_texts(tokenizer: Any, ids: Sequence[int]) -> tuple[str, ...]:
    """What each token stands for, one by one; a piece of a character, which no text shows, by its vocabulary's name."""
    found = []
    for token in ids:
        text = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if not text or "\ufffd" in text:
            text = tokenizer.convert_ids_to_tokens(int(token)) or text
        found.append(text)
    return tuple(found)
