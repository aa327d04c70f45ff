"""Documents cut into contexts: which tokens a model reads together, by a rule that can be said in one sentence.

Each document is tokenised whole and without special tokens, cut into consecutive pieces of the context's length less
the tokenizer's own special tokens, and each piece is wrapped in those; two documents are never joined, the last piece
of a document is shorter, and a piece of fewer than `minimum` tokens is dropped and counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from polyhead.errors import OptionError
from polyhead.sources.texts import Document

MINIMUM_TOKENS = 8
_RARE_CHARACTER = "\U0001242b"  # a cuneiform number sign: a letter to every normaliser, and in no vocabulary


@dataclass(frozen=True, slots=True)
class Context:
    """What the model reads at once: piece number `piece` of document number `document`, special tokens included.

    `special` marks the tokens that stand for no text: those around the piece, and those spelled out in the text itself.
    """

    document: int
    piece: int
    ids: list[int]
    special: list[bool]


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """What the tokenizer puts before and after a text, and every id that stands for no text wherever it occurs."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    ids: frozenset[int]


class Contexts:
    """The contexts of a stream of documents; made by `cut_into_contexts`, cut anew by each loop over it.

    The counts are those of the latest loop so far: `documents` read, `tokens` of text kept, `dropped_pieces` shorter
    than the minimum and the `dropped_tokens` in them.
    """

    def __init__(self, documents: Iterable[Document], tokenizer: Any, length: int, minimum: int) -> None:
        self.length = length
        self.minimum = minimum
        self.special_tokens = special_tokens(tokenizer)
        self.documents = self.tokens = self.dropped_pieces = self.dropped_tokens = 0
        self._source = documents
        self._tokenizer = tokenizer
        wrapping = len(self.special_tokens.before) + len(self.special_tokens.after)
        if minimum < 1:
            raise OptionError(f"the shortest piece must have at least 1 token, got {minimum}")
        if length < wrapping + minimum:
            raise OptionError(
                f"a context must have room for {minimum} tokens of text and {wrapping} special tokens, got {length}"
            )
        self._room = length - wrapping

    def __iter__(self) -> Iterator[Context]:
        self.documents = self.tokens = self.dropped_pieces = self.dropped_tokens = 0
        before, after, special_ids = self.special_tokens.before, self.special_tokens.after, self.special_tokens.ids
        for number, document in enumerate(self._source):
            self.documents = number + 1
            text_ids = tokenise(self._tokenizer, document.text)
            for piece, start in enumerate(range(0, len(text_ids), self._room)):
                ids = text_ids[start : start + self._room]
                if len(ids) < self.minimum:
                    self.dropped_pieces += 1
                    self.dropped_tokens += len(ids)
                    continue
                self.tokens += len(ids)
                special = [True] * len(before) + [token in special_ids for token in ids] + [True] * len(after)
                yield Context(number, piece, [*before, *ids, *after], special)


def cut_into_contexts(
    documents: Iterable[Document], tokenizer: Any, length: int, *, minimum: int = MINIMUM_TOKENS
) -> Contexts:
    """Cut documents into contexts of at most `length` tokens, by the rule that this module begins with.

    Documents are numbered from 0 in the order they come. The whole of one document's tokens is held at a time.
    """
    return Contexts(documents, tokenizer, length, minimum)


def tokenise(tokenizer: Any, text: str, *, special: bool = False) -> list[int]:
    """The whole text's token ids. What a tokenizer's file says of truncation and padding is not followed."""
    encoded = tokenizer(
        text, add_special_tokens=special, truncation=False, padding=False, return_attention_mask=False, verbose=False
    )
    return list(encoded["input_ids"])


def special_tokens(tokenizer: Any) -> SpecialTokens:
    """What the tokenizer adds around a text, found by giving it one: transformers 5 has no call that tells.

    The token for unknown text stands for text, so it is not special, unless the vocabulary can spell every text in
    bytes: then the name is only a name, and the token marks the end of a text or nothing.
    """
    ids = set(tokenizer.all_special_ids)
    ids |= {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    ids.discard(unknown_token(tokenizer))
    plain, wrapped = tokenise(tokenizer, "a 0"), tokenise(tokenizer, "a 0", special=True)
    for start in range(len(wrapped) - len(plain) + 1):
        if wrapped[start : start + len(plain)] == plain:
            return SpecialTokens(tuple(wrapped[:start]), tuple(wrapped[start + len(plain) :]), frozenset(ids))
    raise OptionError(
        "a tokenizer must put its special tokens before and after a text without changing the text's own tokens, "
        f"got {wrapped} for a text of tokens {plain} from {type(tokenizer).__name__}"
    )


def unknown_token(tokenizer: Any) -> int | None:
    """The id that text becomes where the vocabulary lacks it; None where that never happens."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    return unknown if unknown in tokenise(tokenizer, _RARE_CHARACTER) else None
