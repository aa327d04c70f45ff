"""Words and sentences of a text that is there as tokens only, by rules that can be said in two sentences.

**A word** is a token that begins with white space and the tokens behind it that go on with letters or digits; in
scripts without spaces every token is a word of its own, and so is every punctuation mark. **A sentence** ends after
. ! ? … or a mark like them in another script, with the closing quotes and brackets behind it, and at an empty line; a
full stop between two numbers ends nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyhead.sources.contexts import tokenise
from polyhead.sources.token_classes import TokenClass, decoded_tokens, token_classes, written_without_spaces

_ENDS = ".!?…。！？｡．‼⁇⁈⁉؟۔।॥።"
_CLOSES = "”’»›)]}」』）】》〉］｝"
_EITHER = "\"'"  # closes where no space stands before it
_WORDLIKE = (TokenClass.WORD, TokenClass.CONTINUATION, TokenClass.NUMBER, TokenClass.FRAGMENT)
# Of three bytes in UTF-8, from punctuation over kana and ideographs to full-width forms: each is a word of its own.
_WITHOUT_SPACES = range(0xE2, 0xF0)
_GPT2_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """What each entry of a vocabulary does to words and sentences, bool [vocabulary] each; made by `Segments.of`."""

    special: Tensor
    carries: Tensor  # a word that the next token may go on with
    goes_on: Tensor  # goes on with such a word
    ends: Tensor  # ends a sentence
    closes: Tensor  # belongs to the sentence before it, if that has ended
    point: Tensor  # a full stop, which may stand in a number
    number: Tensor
    line_end: Tensor
    empty_line: Tensor  # several of them
    spelled: tuple[tuple[tuple[int, ...], bool], ...]  # marks of several tokens, and whether they end a sentence

    @classmethod
    def of(cls, tokenizer: Any) -> Segments:
        classes, texts = token_classes(tokenizer), decoded_tokens(tokenizer)
        names = tokenizer.convert_ids_to_tokens(list(range(len(texts))))

        def table(values: list[bool]) -> Tensor:
            return torch.tensor(values, dtype=torch.bool)

        kinds = [TokenClass(int(kind)) for kind in classes]
        rows = list(zip(texts, kinds, names, strict=True))
        return cls(
            special=classes == TokenClass.SPECIAL,
            carries=table([kind in _WORDLIKE and not _is_whole(text, kind) for text, kind, _ in rows]),
            goes_on=table([_goes_on(*row) for row in rows]),
            ends=table([kind is not TokenClass.SPECIAL and _ends(text) for text, kind, _ in rows]),
            closes=table([kind is TokenClass.PUNCTUATION and _closes(text) for text, kind, _ in rows]),
            point=table([text.strip() == "." for text in texts]),
            number=classes == TokenClass.NUMBER,
            line_end=classes == TokenClass.NEWLINE,
            empty_line=table([text.count("\n") > 1 for text in texts]),
            spelled=tuple(_spelled(tokenizer, classes == TokenClass.FRAGMENT)),
        )

    def __call__(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The number of the word and of the sentence that each token of [batch, tokens] is in, -1 for special ones."""
        special = self.special[tokens]
        before, after = _shifted(tokens, 1), _shifted(tokens, -1)
        goes_on = self.goes_on[tokens] & self.carries[before] & ~self.special[before]
        goes_on[:, 0] = False
        words = (~goes_on).cumsum(-1) - 1

        in_a_number = self.point[tokens] & self.number[before] & self.number[after]
        empty_line = self.line_end[tokens] & self.line_end[before] & (torch.arange(tokens.shape[1]) > 0)
        ends = self.ends[tokens] & ~in_a_number | self.empty_line[tokens] | empty_line
        closes = self.closes[tokens]
        for mark, is_end in self.spelled:
            *before_the_last, last = _places(tokens, mark)
            closes = torch.stack([closes, last, *before_the_last]).any(0)
            ends = ends | last if is_end else ends
        closes = closes & ~ends
        # What closes hangs on the last token before it that does not.
        place = torch.arange(tokens.shape[1]).expand_as(tokens)
        hangs_on = torch.where(closes | special, -1, place).cummax(-1).values
        ended = torch.zeros_like(ends)
        ended[:, 1:] = (ends.gather(1, hangs_on.clamp_min(0)) & (hangs_on >= 0))[:, :-1]
        sentences = (ended & ~ends & ~closes & ~special).cumsum(-1)
        return torch.where(special, -1, words), torch.where(special, -1, sentences)


def _spelled(tokenizer: Any, fragment: Tensor) -> Iterator[tuple[tuple[int, ...], bool]]:
    """The marks that the vocabulary has no token for, as it spells them in bytes."""
    for mark in _ENDS + _CLOSES:
        ids = tokenise(tokenizer, mark)
        pieces = tuple(token for token in ids if fragment[token])
        if len(pieces) > 1:
            yield pieces, mark in _ENDS


def _places(tokens: Tensor, mark: tuple[int, ...]) -> Iterator[Tensor]:
    """Where the first, the second, ... of some tokens in a row stands, bool [batch, tokens] each."""
    length, size = tokens.shape[1], len(mark)
    found = torch.zeros_like(tokens, dtype=torch.bool)
    if length >= size:
        rows = tokens.unfold(1, size, 1) == torch.tensor(mark)
        found[:, : length - size + 1] = rows.all(-1)
    for step in range(size):
        yield torch.nn.functional.pad(found, (step, -step))


def _shifted(x: Tensor, by: int) -> Tensor:
    """Each token's neighbour; that of the first and of the last is the token itself."""
    place = torch.arange(x.shape[1]).add(-by).clamp(0, x.shape[1] - 1)
    return x[:, place]


def _goes_on(text: str, kind: TokenClass, name: str) -> bool:
    if kind is TokenClass.FRAGMENT:
        return _first_byte(name) not in _WITHOUT_SPACES
    return kind in (TokenClass.CONTINUATION, TokenClass.NUMBER) and not text[:1].isspace()


def _is_whole(text: str, kind: TokenClass) -> bool:
    """Whether nothing can go on with it: a word of a script without spaces."""
    return kind is TokenClass.WORD and written_without_spaces(text)


def _ends(text: str) -> bool:
    stripped = text.strip().rstrip(_CLOSES + _EITHER)
    return bool(stripped) and stripped[-1] in _ENDS


def _closes(text: str) -> bool:
    return bool(text.strip()) and not text.strip().strip(_CLOSES + ("" if text[0].isspace() else _EITHER))


def _first_byte(name: str) -> int:
    """Of a token that is some bytes of a character: `<0xE6>`, or the letters that byte-level vocabularies write."""
    spelled = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", name)
    if spelled is not None:
        return int(spelled[1], 16)
    letter = ord(name.lstrip("Ġ")[:1] or "\0")
    if letter in _GPT2_PRINTABLE:
        return letter
    others = [byte for byte in range(256) if byte not in _GPT2_PRINTABLE]
    return others[letter - 256] if 0 <= letter - 256 < len(others) else 0
