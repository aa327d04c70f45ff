"""Split documents into contexts, the token sequences that a model reads at once.

Each document is tokenised without special tokens and split into consecutive pieces of the context length minus the
tokenizer's special tokens, which are then added to each piece. Documents are never joined, the last piece of a document
may be shorter, and remainders of fewer than `minimum` tokens are dropped and counted, as are documents of one token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from polyhead.errors import OptionError
from polyhead.sources.texts import Document

MINIMUM_TOKENS = 8  # of a remainder, whose context is cut off
MINIMUM_DOCUMENT = 2  # tokens of a whole document, which is an input as it is
_RARE_CHARACTER = "\U0001242b"  # a cuneiform number sign: kept by every normaliser, and in no vocabulary


@dataclass(frozen=True, slots=True)
class Context:
    """One model input: piece `piece` of document `document`, including special tokens.

    `special` marks special tokens: those added around the piece and those that occur in the text itself.
    """

    document: int
    piece: int
    ids: list[int]
    special: list[bool]


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Special tokens that the tokenizer adds before and after a text, and the ids of all special tokens."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    ids: frozenset[int]


class Contexts:
    """Iterable of the contexts of a stream of documents; created by `cut_into_contexts`, recomputed by each iteration.

    The counts are those of the latest iteration so far: `documents` read, `tokens` of text kept, `dropped_pieces`
    that were too short and the `dropped_tokens` in them.

    Args:
        documents, tokenizer, length, minimum: those of `cut_into_contexts`.
    """

    def __init__(self, documents: Iterable[Document], tokenizer: Any, length: int, minimum: int) -> None:
        self.length = length
        self.minimum = minimum
        self.special_tokens = special_tokens(tokenizer)
        self.documents = self.tokens = self.dropped_pieces = self.dropped_tokens = 0
        self._source = documents
        self._tokenizer = tokenizer
        num_special = len(self.special_tokens.before) + len(self.special_tokens.after)
        if minimum < 1:
            raise OptionError(f"the shortest piece must have at least 1 token, got {minimum}")
        if length < num_special + minimum:
            raise OptionError(
                f"a context must have room for {minimum} tokens of text and {num_special} special tokens, got {length}"
            )
        self._room = length - num_special

    def __iter__(self) -> Iterator[Context]:
        self.documents = self.tokens = self.dropped_pieces = self.dropped_tokens = 0
        before, after, special_ids = self.special_tokens.before, self.special_tokens.after, self.special_tokens.ids
        for number, document in enumerate(self._source):
            self.documents = number + 1
            text_ids = tokenise(self._tokenizer, document.text)
            for piece, start in enumerate(range(0, len(text_ids), self._room)):
                ids = text_ids[start : start + self._room]
                if len(ids) < (self.minimum if piece else min(self.minimum, MINIMUM_DOCUMENT)):
                    self.dropped_pieces += 1
                    self.dropped_tokens += len(ids)
                    continue
                self.tokens += len(ids)
                special = [True] * len(before) + [token in special_ids for token in ids] + [True] * len(after)
                yield Context(number, piece, [*before, *ids, *after], special)


def cut_into_contexts(
    documents: Iterable[Document], tokenizer: Any, length: int, *, minimum: int = MINIMUM_TOKENS
) -> Contexts:
    """Split documents into contexts of at most `length` tokens, as described in the module docstring.

    Documents are numbered from 0 in order. The tokens of one document are in memory at a time.

    Args:
        documents: documents, as `read_texts` returns them.
        tokenizer: tokenizer of the model.
        length: most tokens per context, including special tokens.
        minimum: fewest tokens of the last piece of a document that has several; shorter ones are dropped.

    Returns:
        An iterable of contexts, with counts of what was kept and dropped.
    """
    return Contexts(documents, tokenizer, length, minimum)


def tokenise(tokenizer: Any, text: str, *, special: bool = False) -> list[int]:
    """Return the token ids of a text, ignoring truncation and padding settings in the tokenizer's files."""
    encoded = tokenizer(
        text, add_special_tokens=special, truncation=False, padding=False, return_attention_mask=False, verbose=False
    )
    return list(encoded["input_ids"])


def special_tokens(tokenizer: Any) -> SpecialTokens:
    """Return the special tokens of a tokenizer, found by encoding a text: transformers 5 has no API for it.

    The unknown token represents text, so it is not special, unless the vocabulary can encode any text in bytes: then it
    never represents unknown text and serves as end-of-text token or not at all.

    Args:
        tokenizer: a tokenizer of transformers.
    """
    ids = set(tokenizer.all_special_ids)
    ids |= {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    ids.discard(unknown_token(tokenizer))
    plain, wrapped = tokenise(tokenizer, "a 0"), tokenise(tokenizer, "a 0", special=True)
    for start in range(len(wrapped) - len(plain) + 1):
        if wrapped[start : start + len(plain)] == plain:
            return SpecialTokens(tuple(wrapped[:start]), tuple(wrapped[start + len(plain) :]), frozenset(ids))
    raise OptionError(
        "a tokenizer must add its special tokens before and after a text without changing the tokens of the text, "
        f"got {wrapped} for a text of tokens {plain} from {type(tokenizer).__name__}"
    )


def unknown_token(tokenizer: Any) -> int | None:
    """Return the id of the unknown token; None if the tokenizer can encode any text."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    return unknown if unknown in tokenise(tokenizer, _RARE_CHARACTER) else None
