"""Classify the entries of a vocabulary by their text: start of a word, punctuation, number, ..."""

from __future__ import annotations

import unicodedata
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from polyhead.errors import OptionError
from polyhead.sources.contexts import special_tokens, tokenise, unknown_token


class TokenClass(IntEnum):
    """The classes of `token_classes`; the numbers are written to files and must not change."""

    SPECIAL = 0  # [CLS], <|endoftext|>
    UNKNOWN = 1  # any text that is not in the vocabulary
    WORD = 2  # letters that begin a word, or letters of a script without spaces
    CONTINUATION = 3  # letters that continue a word; in byte-level vocabularies also the first word of a line
    NUMBER = 4  # digits and no letters
    PUNCTUATION = 5
    SYMBOL = 6  # +, €, →
    WHITESPACE = 7
    NEWLINE = 8
    FRAGMENT = 9  # part of the bytes of a character
    OTHER = 10  # control characters, or an unused id


# Scripts without spaces between words: a token without a preceding space may still begin a word.
_WITHOUT_SPACES = ("CJK ", "HIRAGANA ", "KATAKANA ", "THAI ", "LAO ", "KHMER ", "MYANMAR ", "TIBETAN ", "BOPOMOFO ")
# Candidates for a known token; decoding a token after it shows whether a space precedes the token.
_ANCHORS = ("a", "A", "0", "一", "e")


def token_classes(tokenizer: Any) -> Tensor:
    """Return the `TokenClass` of every id of the vocabulary, [ids] int8.

    Each entry is decoded after a token that is known to be a word, so that one rule covers WordPiece, byte-level BPE
    and SentencePiece: the entry begins a word if there is a space between the two. A token with a letter is a word or a
    continuation; otherwise digits take precedence (number), then punctuation, then symbols.

    Args:
        tokenizer: a tokenizer of transformers.
    """
    classes = [class_of_text(text) for text in decoded_tokens(tokenizer)]
    size = len(classes)
    unknown = unknown_token(tokenizer)
    if unknown is not None:
        classes[unknown] = TokenClass.UNKNOWN
    for token in special_tokens(tokenizer).ids:
        if token < size:
            classes[token] = TokenClass.SPECIAL
    return torch.tensor([int(token_class) for token_class in classes], dtype=torch.int8)


def decoded_tokens(tokenizer: Any) -> list[str]:
    """Return the text of every id of the vocabulary when it follows a word, with its leading space if any."""
    size = max(tokenizer.get_vocab().values(), default=-1) + 1
    if size == 0:
        raise OptionError(f"a tokenizer must have a vocabulary, got an empty {type(tokenizer).__name__}")
    anchor, anchor_text = _anchor(tokenizer)
    decoded = _decode(tokenizer, [[anchor, token] for token in range(size)])
    return [text.removeprefix(anchor_text) for text in decoded]


def _anchor(tokenizer: Any) -> tuple[int, str]:
    for text in _ANCHORS:
        for token in tokenise(tokenizer, text)[-1:]:
            decoded = _decode(tokenizer, [[token]])[0]
            if decoded.strip() == text:
                return token, decoded
    raise OptionError(
        f"a vocabulary must contain one of {', '.join(_ANCHORS)} as a token, got {type(tokenizer).__name__}"
    )


def _decode(tokenizer: Any, rows: list[list[int]]) -> list[str]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return list(backend.decode_batch(rows, skip_special_tokens=False))
    return [tokenizer.decode(row, skip_special_tokens=False, clean_up_tokenization_spaces=False) for row in rows]


def class_of_text(text: str) -> TokenClass:
    """Return the class of the text of a token, which may begin with a space.

    >>> [class_of_text(text).name for text in (" river", "ing", "河", " 1968", "?", "'s", "\\n\\n", "→")]
    ['WORD', 'CONTINUATION', 'WORD', 'NUMBER', 'PUNCTUATION', 'CONTINUATION', 'NEWLINE', 'SYMBOL']
    """
    if not text:
        return TokenClass.OTHER
    if "\ufffd" in text:
        return TokenClass.FRAGMENT
    kinds = {unicodedata.category(character)[0] for character in text if not character.isspace()}
    if not kinds:
        return TokenClass.NEWLINE if "\n" in text or "\r" in text else TokenClass.WHITESPACE
    # A combining mark is part of a letter.
    if kinds & {"L", "M"}:
        begins = text[0].isspace() or written_without_spaces(text)
        return TokenClass.WORD if begins else TokenClass.CONTINUATION
    for kind, token_class in (("N", TokenClass.NUMBER), ("P", TokenClass.PUNCTUATION), ("S", TokenClass.SYMBOL)):
        if kind in kinds:
            return token_class
    return TokenClass.OTHER


def written_without_spaces(text: str) -> bool:
    """Return whether the first letter of a text is of a script without spaces; False if it has no letter."""
    first = next((character for character in text if unicodedata.category(character)[0] in "LM"), "")
    return bool(first) and unicodedata.name(first, "").startswith(_WITHOUT_SPACES)
