"""Contexts of a sample that is spread evenly over a text that is longer than needed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from typing import Any

from polyhead.sources.contexts import MINIMUM_TOKENS, Context, cut_into_contexts
from polyhead.sources.texts import Document

MAX_CHARACTERS = 1 << 26  # read of a text, or enough for the requested tokens if that is more
CHARACTERS_PER_TOKEN = 16  # more than in any language, so that a sample in characters has enough tokens
NEIGHBOURS = 4  # contexts of one document with fewer pieces between their starts may be in one group
_MIN_CHARACTERS = 64  # that a document counts for, since it takes memory even if it is short
_SPACE = re.compile(r"\s+")
_GOLDEN_RATIO = (5**0.5 - 1) / 2


def sample_contexts(
    documents: Iterable[Document], tokenizer: Any, length: int, tokens: int
) -> tuple[list[str], list[Context]]:
    """Return names of documents and contexts of at most `tokens` tokens, evenly spaced over the documents.

    If all contexts have at most `tokens` tokens, they are those of `cut_into_contexts`. Of a text with more than 16
    characters per requested token, evenly spaced stretches of that many characters in total are tokenised. Stretches
    begin after white space if there is some; their last, incomplete context is dropped unless the document ends there.

    Args:
        documents: documents; reading stops at about 64 million characters, or 16 per requested token if that is more.
        tokenizer: tokenizer of the model.
        length: most tokens per context, including special tokens.
        tokens: most tokens in total, except that there is always one context.
    """
    characters = CHARACTERS_PER_TOKEN * max(tokens, length)
    read = _first_documents(documents, max(MAX_CHARACTERS, characters))
    available = sum(len(document.text) for document in read)
    contexts: list[Context] = []
    while available > characters and count_tokens(contexts) <= tokens:
        contexts = list(_cut_stretches(read, tokenizer, length, characters))
        characters *= 4  # if not enough: the text has more characters per token than any language, such as white space
    if count_tokens(contexts) <= tokens:
        contexts = list(cut_into_contexts(read, tokenizer, length))
    if count_tokens(contexts) <= tokens:
        return [document.name for document in read], contexts
    contexts = [contexts[index] for index in evenly_spaced([len(context.ids) for context in contexts], tokens)]
    numbers = {number: rank for rank, number in enumerate(sorted({context.document for context in contexts}))}
    return (
        [read[number].name for number in numbers],
        [replace(context, document=numbers[context.document]) for context in contexts],
    )


def evenly_spaced(sizes: Sequence[int], limit: int) -> list[int]:
    """Return indices, spaced evenly and at least one, of sizes with a sum of at most `limit`.

    Multiples of the golden ratio modulo 1 are evenly spaced for any number of them, and have no period in common with
    the text, such as two alternating languages.

    >>> evenly_spaced([1] * 20, 5)
    [0, 5, 10, 13, 18]
    """
    chosen: list[int] = []
    total = 0
    for index in sorted(range(len(sizes)), key=lambda index: index * _GOLDEN_RATIO % 1):
        total += sizes[index]
        if chosen and total > limit:
            break
        chosen.append(index)
    return sorted(chosen)


def count_tokens(contexts: Iterable[Context]) -> int:
    return sum(len(context.ids) for context in contexts)


def _first_documents(documents: Iterable[Document], characters: int) -> list[Document]:
    read: list[Document] = []
    for document in documents:
        read.append(document)
        characters -= max(len(document.text), _MIN_CHARACTERS)
        if characters <= 0:
            break
    return read


def _cut_stretches(documents: Sequence[Document], tokenizer: Any, length: int, characters: int) -> Iterator[Context]:
    """Yield contexts of evenly spaced stretches with at most so many characters, numbered by their documents."""
    size = CHARACTERS_PER_TOKEN * length
    places = [
        (number, start, end)
        for number, document in enumerate(documents)
        for start, end in pairwise(_boundaries(document.text, size))
    ]
    places = [places[index] for index in evenly_spaced([end - start for _, start, end in places], characters)]
    stretches = (Document("", documents[number].text[start:end]) for number, start, end in places)
    piece = 0
    for stretch, group in groupby(cut_into_contexts(stretches, tokenizer, length), key=lambda x: x.document):
        contexts = list(group)
        number, _, end = places[stretch]
        if end < len(documents[number].text):
            contexts = contexts[:-1] or contexts
        for context in contexts:
            yield replace(context, document=number, piece=piece + context.piece)
        piece += len(contexts) + NEIGHBOURS


def _boundaries(text: str, size: int) -> Iterator[int]:
    """Yield where stretches of about `size` characters begin, and the end of the text."""
    yield 0
    # The last stretch has room for a context that is not dropped.
    for start in range(size, len(text) - MINIMUM_TOKENS * CHARACTERS_PER_TOKEN, size):
        space = _SPACE.search(text, start, start + size // 2)
        yield space.end() if space else start
    yield len(text)
