"""Split token sequences into words and sentences by simple rules, without access to the text.

**A word** is a token that begins with white space, plus the following tokens that continue it with letters or digits;
in scripts without spaces every token is a word, as is every punctuation mark. **A sentence** ends after . ! ? … or an
equivalent mark of another script, including closing quotes and brackets after it, and at an empty line; a full stop
between two numbers does not end a sentence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyhead.sources.contexts import tokenise
from polyhead.sources.token_class import TokenClass, decoded_tokens, written_without_spaces

_ENDS = ".!?…。！？｡．‼⁇⁈⁉؟۔।॥።"
_CLOSES = "”’»›)]}」』）】》〉］｝"
_EITHER = "\"'"  # closing unless preceded by a space
_WORDLIKE = (TokenClass.WORD, TokenClass.CONTINUATION, TokenClass.NUMBER, TokenClass.FRAGMENT)
# First bytes of 3-byte UTF-8 characters, from punctuation, kana and ideographs to full-width forms: each is a word.
_WITHOUT_SPACES = range(0xE2, 0xF0)
_GPT2_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Segmentation properties of a vocabulary, bool [vocabulary] each; created by `Segments.of`."""

    special: Tensor
    continuable: Tensor  # part of a word that the next token may continue
    continues: Tensor  # continues a word
    ends: Tensor  # ends a sentence
    closes: Tensor  # closing mark that belongs to a preceding sentence end
    point: Tensor  # a full stop, which may be part of a number
    number: Tensor
    line_end: Tensor
    empty_line: Tensor  # several line ends
    spelled_marks: tuple[tuple[tuple[int, ...], bool], ...]  # marks of several tokens, and whether they end a sentence

    @classmethod
    def of(cls, tokenizer: Any, classes: Tensor) -> Segments:
        """Return the segmentation of a tokenizer, whose `token_classes` are `classes`."""
        texts = decoded_tokens(tokenizer)
        names = tokenizer.convert_ids_to_tokens(list(range(len(texts))))

        def table(values: list[bool]) -> Tensor:
            return torch.tensor(values, dtype=torch.bool)

        kinds = [TokenClass(kind) for kind in classes.tolist()]
        rows = list(zip(texts, kinds, names, strict=True))
        return cls(
            special=classes == TokenClass.SPECIAL,
            continuable=table([kind in _WORDLIKE and not _is_complete(text, kind) for text, kind, _ in rows]),
            continues=table([_continues(*row) for row in rows]),
            ends=table([kind is not TokenClass.SPECIAL and _ends_sentence(text) for text, kind, _ in rows]),
            closes=table([kind is TokenClass.PUNCTUATION and _is_closing(text) for text, kind, _ in rows]),
            point=table([text.strip() == "." for text in texts]),
            number=classes == TokenClass.NUMBER,
            line_end=classes == TokenClass.NEWLINE,
            empty_line=table([text.count("\n") > 1 for text in texts]),
            spelled_marks=tuple(_byte_spelled_marks(tokenizer, classes == TokenClass.FRAGMENT)),
        )

    def __call__(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the word and sentence index of each token [batch, tokens]; -1 for special tokens."""
        special = self.special[tokens]
        before, after = _neighbour(tokens, 1), _neighbour(tokens, -1)
        continues = self.continues[tokens] & self.continuable[before] & ~self.special[before]
        continues[:, 0] = False
        words = (~continues).cumsum(-1) - 1

        in_a_number = self.point[tokens] & self.number[before] & self.number[after]
        empty_line = self.line_end[tokens] & self.line_end[before] & (torch.arange(tokens.shape[1]) > 0)
        ends = self.ends[tokens] & ~in_a_number | self.empty_line[tokens] | empty_line
        closes = self.closes[tokens]
        for mark, is_end in self.spelled_marks:
            *earlier, last = _sequence_positions(tokens, mark)
            closes = torch.stack([closes, last, *earlier]).any(0)
            ends = ends | last if is_end else ends
        closes = closes & ~ends
        # A closing mark belongs to the last token before it that is not one.
        position = torch.arange(tokens.shape[1]).expand_as(tokens)
        anchor = torch.where(closes | special, -1, position).cummax(-1).values
        ended = torch.zeros_like(ends)
        ended[:, 1:] = (ends.gather(1, anchor.clamp_min(0)) & (anchor >= 0))[:, :-1]
        sentences = (ended & ~ends & ~closes & ~special).cumsum(-1)
        return torch.where(special, -1, words), torch.where(special, -1, sentences)


def _byte_spelled_marks(tokenizer: Any, fragment: Tensor) -> Iterator[tuple[tuple[int, ...], bool]]:
    """Yield marks without a token of their own, as their byte tokens, and whether they end a sentence."""
    for mark in _ENDS + _CLOSES:
        ids = tokenise(tokenizer, mark)
        pieces = tuple(token for token in ids if fragment[token])
        if len(pieces) > 1:
            yield pieces, mark in _ENDS


def _sequence_positions(tokens: Tensor, mark: tuple[int, ...]) -> Iterator[Tensor]:
    """Yield the positions of the first, second, ... token of a token sequence, bool [batch, tokens] each."""
    length, size = tokens.shape[1], len(mark)
    starts = torch.zeros_like(tokens, dtype=torch.bool)
    if length >= size:
        rows = tokens.unfold(1, size, 1) == torch.tensor(mark)
        starts[:, : length - size + 1] = rows.all(-1)
    for step in range(size):
        yield torch.nn.functional.pad(starts, (step, -step))


def _neighbour(x: Tensor, distance: int) -> Tensor:
    """Return the token `distance` places before each token, after it if negative; the border tokens are repeated."""
    position = torch.arange(x.shape[1]).add(-distance).clamp(0, x.shape[1] - 1)
    return x[:, position]


def _continues(text: str, kind: TokenClass, name: str) -> bool:
    if kind is TokenClass.FRAGMENT:
        return _first_byte(name) not in _WITHOUT_SPACES
    return kind in (TokenClass.CONTINUATION, TokenClass.NUMBER) and not text[:1].isspace()


def _is_complete(text: str, kind: TokenClass) -> bool:
    """Return whether a token cannot be continued: a word of a script without spaces."""
    return kind is TokenClass.WORD and written_without_spaces(text)


def _ends_sentence(text: str) -> bool:
    stripped = text.strip().rstrip(_CLOSES + _EITHER)
    return bool(stripped) and stripped[-1] in _ENDS


def _is_closing(text: str) -> bool:
    return bool(text.strip()) and not text.strip().strip(_CLOSES + ("" if text[0].isspace() else _EITHER))


def _first_byte(name: str) -> int:
    """Return the first byte of a byte token: `<0xE6>`, or the GPT-2 encoding of bytes as letters."""
    spelled = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", name)
    if spelled is not None:
        return int(spelled[1], 16)
    letter = ord(name.lstrip("Ġ")[:1] or "\0")
    if letter in _GPT2_PRINTABLE:
        return letter
    others = [byte for byte in range(256) if byte not in _GPT2_PRINTABLE]
    return others[letter - 256] if 0 <= letter - 256 < len(others) else 0
