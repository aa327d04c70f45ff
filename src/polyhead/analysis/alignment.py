"""Alignment of a model's tokens with the words of a treebank."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from polyhead.errors import OptionError
from polyhead.observation.collectors import BatchMetadata, Collector
from polyhead.observation.observations import Observations
from polyhead.observation.run_folder import check_origin, remove_leftovers
from polyhead.observation.saving import load, read_facts, save
from polyhead.observation.session import observe
from polyhead.observation.word_attention import MAX_TOKENS, WordMap
from polyhead.sources import Context, LoadedModel, batches, special_tokens
from polyhead.sources.batching import digest_of
from polyhead.sources.fingerprint import model_digest
from polyhead.sources.treebank import Sentence, Span

SAVE_SECONDS = 30.0


@dataclass(frozen=True, slots=True, eq=False)
class Aligned:
    """Tokenised texts with the word of each token; `contexts[i]` and `maps[i]` belong to one text."""

    contexts: tuple[Context, ...]
    maps: tuple[WordMap, ...]
    sentences: int  # in these texts
    too_long: int  # sentences excluded because their text has too many tokens
    unreadable: int  # sentences excluded because no token of the text belongs to any of their words
    words: int  # in these texts
    wordless: int  # of them, words without a token of their own: they are excluded from accuracies

    def __len__(self) -> int:
        return len(self.contexts)

    @property
    def digest(self) -> str:
        """Fingerprint of the word maps, which the tokens alone do not determine."""
        return hashlib.blake2b(repr(self.maps).encode(), digest_size=16).hexdigest()

    def __str__(self) -> str:
        excluded = f"; excluded: {self.too_long} too long, {self.unreadable} without words that have tokens"
        return (
            f"{self.sentences:,} sentences, {self.words:,} words ({self.wordless:,} without a token of their own)"
            + (excluded if self.too_long or self.unreadable else "")
        )


def align(sentences: Iterable[Sentence], tokenizer: Any, *, together: int = 1, longest: int | None = None) -> Aligned:
    """Tokenise sentences with a fast tokenizer, and assign each token to a word.

    The raw text is tokenised, with special tokens. A token belongs to the word with which it shares the most
    characters, the first of several; a word may end up without a token. `together` consecutive sentences form one text.
    Texts of more than `longest` tokens (at most 512) are excluded and counted.
    """
    if together < 1:
        raise OptionError(f"together must be at least 1 sentence, got {together}")
    limit = MAX_TOKENS if longest is None else min(longest, MAX_TOKENS)
    contexts: list[Context] = []
    maps: list[WordMap] = []
    aligned = too_long = unreadable = 0
    special_ids = special_tokens(tokenizer).ids
    remaining = iter(sentences)
    while group := list(itertools.islice(remaining, together)):
        text, spans = _joined(group)
        ids, special, offsets = cut(text, tokenizer, special_ids)
        if len(ids) > limit:
            too_long += len(group)
            continue
        tokens = pieces_of(offsets, special, spans)
        if all(word < 0 for word in tokens):
            unreadable += len(group)
            continue
        contexts.append(Context(len(contexts), 0, ids, special))
        maps.append(_word_map(group, tokens))
        aligned += len(group)
    return Aligned(
        contexts=tuple(contexts),
        maps=tuple(maps),
        sentences=aligned,
        too_long=too_long,
        unreadable=unreadable,
        words=sum(len(word_map) for word_map in maps),
        wordless=sum(word_map.pieces().count(0) for word_map in maps),
    )


def cut(text: str, tokenizer: Any, special_ids: Collection[int]) -> tuple[list[int], list[bool], list[Span]]:
    """Return the token ids of a text, a mask of special tokens, and the character span of each token.

    `special_ids` are the tokenizer's (`polyhead.sources.special_tokens`), to be computed once for many texts.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise OptionError(
            "aligning words needs a fast tokenizer with offsets (one with a tokenizer.json), "
            f"got {type(tokenizer).__name__}"
        )
    encoding = tokenizer(
        text, return_offsets_mapping=True, return_special_tokens_mask=True, return_attention_mask=False, verbose=False
    )
    ids = list(encoding["input_ids"])
    # The mask marks those around the text; special tokens spelled out in it are not words either.
    special = [
        bool(mark) or token in special_ids for token, mark in zip(ids, encoding["special_tokens_mask"], strict=True)
    ]
    return ids, special, [(int(start), int(end)) for start, end in encoding["offset_mapping"]]


def pieces_of(offsets: Sequence[Span], special: Sequence[bool], spans: Sequence[Span | None]) -> list[int]:
    """Return for each token the index of the span with the largest overlap, the first of several; -1 if none.

    `spans` are in the order of the text and do not overlap; None is a word without a span.

    >>> pieces_of([(0, 0), (0, 4), (4, 5), (5, 6)], [True, False, False, False], [(0, 3), (3, 6)])  # didn't
    [-1, 0, 1, 1]
    """
    places = [(*span, index) for index, span in enumerate(spans) if span is not None]
    pieces = []
    first = 0
    for (start, end), is_special in zip(offsets, special, strict=True):
        if is_special or end <= start:
            pieces.append(-1)
            continue
        # Spans may repeat: the byte tokens of one character all have the span of that character.
        while first and places[first - 1][1] > start:
            first -= 1
        while first < len(places) and places[first][1] <= start:
            first += 1
        best, largest = -1, 0
        for place_start, place_end, index in places[first:]:
            if place_start >= end:
                break
            overlap = min(end, place_end) - max(start, place_start)
            if overlap > largest:
                best, largest = index, overlap
        pieces.append(best)
    return pieces


def observe_contexts(
    loaded: LoadedModel,
    contexts: Sequence[Context],
    collect: Sequence[Collector],
    *,
    batch_tokens: int = 2048,
    progress: Callable[[int], object] | None = None,
    file: Path | None = None,
    origin: Mapping[str, Any] | None = None,
) -> Observations:
    """Run a model over contexts with collectors; `progress` is called with the number of contexts of each batch.

    `metadata.documents` are the contexts' document numbers. Of an encoder-decoder only the encoder runs. The
    collected data of complete batches is saved to `file`, periodically and at the end, also after an error. If the file
    exists, the run is resumed from it, provided that the model, the contexts and `origin` are the same.
    """
    if loaded.main_input != "input_ids" and loaded.kind != "encoder-decoder":
        raise OptionError(
            f"word attention needs a model of text, got {loaded.name}, whose input is {loaded.main_input}"
        )
    model = loaded.model.get_encoder() if loaded.kind == "encoder-decoder" else loaded.model
    device = next(model.parameters()).device
    session = observe(model, statistics=False, collect=collect)
    read = _Read(session.observations)
    facts: dict[str, Any] = {}
    if file is not None:
        facts = {"model": model_digest(model), "text": digest_of(contexts), "batch": batch_tokens, **(origin or {})}
        remove_leftovers(file.parent, file.name)
        if file.exists():
            saved_facts = read_facts(file)
            done, digest = saved_facts.pop("batches", None), saved_facts.pop("digest", None)
            check_origin(file, saved_facts, facts)
            session.resume_from(load(file, collect))
            read = _Read(session.observations, done, digest)

    def keep(read: _Read) -> None:
        assert file is not None
        save(file, read.observations, {**facts, "batches": read.batches, "digest": read.digest})

    saved = time.monotonic()
    try:
        with torch.no_grad(), session:
            remaining = batches(
                contexts, loaded.tokenizer, batch_tokens=batch_tokens, start=read.batches, digest=read.digest
            )
            if progress is not None:
                progress(len(contexts) - sum(len(batch.documents) for batch in remaining) if read.batches else 0)
            for batch in remaining:
                session.metadata = BatchMetadata(documents=batch.documents)
                model(input_ids=batch.ids.to(device), attention_mask=batch.mask.to(device))
                read = _Read(session.observations, batch.index + 1, batch.digest)
                if progress is not None:
                    progress(len(batch.documents))
                if file is not None and time.monotonic() - saved >= SAVE_SECONDS:
                    keep(read)
                    saved = time.monotonic()
    finally:
        if file is not None and read.batches:
            keep(read)
    return read.observations


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    """Observations of the complete batches so far; one immutable value, so that an interrupt never splits it."""

    observations: Observations
    batches: int = 0
    digest: str | None = None


def _joined(group: Sequence[Sentence]) -> tuple[str, list[Span | None]]:
    """Return the text of several sentences, and the span of each word in it."""
    text = ""
    spans: list[Span | None] = []
    for index, sentence in enumerate(group):
        spans += [None if span is None else (span[0] + len(text), span[1] + len(text)) for span in sentence.spans]
        text += sentence.text
        if index + 1 < len(group) and sentence.spaces[-1]:
            text += " "
    return text, spans


def _word_map(group: Sequence[Sentence], tokens: Sequence[int]) -> WordMap:
    governors: list[int] = []
    for sentence in group:
        before = len(governors)
        governors += [head + before if head >= 0 else -1 for head in sentence.heads]
    return WordMap(
        tokens=tuple(tokens),
        governors=tuple(governors),
        relations=tuple(relation for sentence in group for relation in sentence.relations),
        sentences=tuple(index for index, sentence in enumerate(group) for _ in sentence.words),
    )
