"""Sets of tokens that sentences speak of: punctuation, rare tokens, words, sentences; no code of polyhead."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ENDS = ".!?…。！？｡．‼⁇⁈⁉؟۔।॥።"
CLOSES = "”’»›)]}」』）】》〉］｝"
UNSPACED = ("CJK ", "HIRAGANA ", "KATAKANA ", "THAI ", "LAO ", "KHMER ", "MYANMAR ", "TIBETAN ", "BOPOMOFO ")


class Vocabulary:
    """The text of each token id as it follows a word: a leading space shows that it begins one."""

    def __init__(self, tokenizer: Any, special: frozenset[int]) -> None:
        self.tokenizer, self.special, self.texts = tokenizer, special, dict[int, str]()
        self.word = next(
            x for x in (tokenizer(text, add_special_tokens=False)["input_ids"] for text in "aA0e") if len(x) == 1
        )
        self.before = self._decode(self.word)

    def text(self, token: int) -> str:
        if token not in self.texts:
            self.texts[token] = self._decode([*self.word, token]).removeprefix(self.before)
        return self.texts[token]

    def is_punctuation(self, token: int) -> bool:
        """Return whether a token is made of punctuation, or of line ends."""
        text, kinds = self.text(token), self._kinds(token)
        if token in self.special or token == self.tokenizer.unk_token_id or "\ufffd" in text:
            return False
        return ("P" in kinds and not kinds & {"L", "M", "N"}) or (not kinds and any(x in text for x in "\r\n"))

    def words(self, ids: Tensor) -> Tensor:
        """Return the index of each token's word, -1 for special tokens.

        A token continues the word before it if it has letters or digits, no leading space, and a script with spaces.
        """
        index, numbers, open_word = -1, [], False
        for token in ids.tolist():
            text, wordlike = self.text(token), self._is_wordlike(token)
            continues = wordlike and open_word and not text[:1].isspace() and not self._is_unspaced(text)
            index += not continues
            open_word = wordlike and not self._is_unspaced(text)
            numbers.append(-1 if token in self.special else index)
        return torch.tensor(numbers)

    def sentences(self, ids: Tensor) -> Tensor:
        """Return the index of each token's sentence, -1 for special tokens."""
        tokens = ids.tolist()
        texts = [self.text(token) for token in tokens]
        ends = []
        for i, text in enumerate(texts):
            bare = text.strip().rstrip(CLOSES + "\"'")
            decimal = text.strip() == "." and 0 < i < len(texts) - 1 and self._digits(i - 1, texts, i + 1)
            newlines = text.count("\n") + (texts[i - 1].count("\n") if i and not texts[i - 1].strip() else 0)
            empty_line = text.count("\n") > 1 or (bool(text) and not text.strip() and "\n" in text and newlines > 1)
            ends.append(tokens[i] not in self.special and (empty_line or (bare[-1:] in tuple(ENDS) and not decimal)))
        closes = [
            bool(x.strip()) and not x.strip().strip(CLOSES + ("" if x[0].isspace() else "\"'")) and not end
            for x, end in zip(texts, ends, strict=True)
        ]
        number, ended, result = 0, False, []
        for token, end, close in zip(tokens, ends, closes, strict=True):
            if token in self.special:
                result.append(-1)
                continue
            if ended and not end and not close:
                number, ended = number + 1, False
            result.append(number)
            ended = end or (ended and close)
        return torch.tensor(result)

    def _digits(self, before: int, texts: list[str], after: int) -> bool:
        return all(x.strip() and not x.strip().strip("0123456789") for x in (texts[before], texts[after]))

    def _is_wordlike(self, token: int) -> bool:
        return token not in self.special and (
            bool(self._kinds(token) & {"L", "M", "N"}) or "\ufffd" in self.text(token)
        )

    def _is_unspaced(self, text: str) -> bool:
        first = next((x for x in text if unicodedata.category(x)[0] in "LM"), "")
        return bool(first) and unicodedata.name(first, "").startswith(UNSPACED)

    def _kinds(self, token: int) -> set[str]:
        return {unicodedata.category(x)[0] for x in self.text(token) if not x.isspace()}

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def rarest(texts: list[Tensor], share: float = 0.1) -> set[int]:
    """Return the rarest tokens of all texts, which together make up at most a share of them."""
    ids, counts = torch.cat(texts).unique(return_counts=True)
    order = counts.argsort(stable=True)
    few = counts[order].cumsum(0) <= share * counts.sum()
    return set(ids[order][few].tolist())


@dataclass(frozen=True, eq=False)
class Pronoun:
    """A sentence as token ids, with the tokens of its pronoun, antecedent and distractor."""

    ids: Tensor
    spans: tuple[Tensor, Tensor, Tensor]  # bool [tokens] each
    template: int
    cue: str


def pronouns(tokenizer: Any, sentences: list[Any], longest: int) -> list[Pronoun]:
    """Return the sentences of templates that a tokenizer can represent; `spans` of a sentence are characters."""
    found, excluded = [], set()
    for sentence in sentences:
        encoded = tokenizer(sentence.text, return_offsets_mapping=True)
        ids = torch.tensor(encoded["input_ids"])
        spans = tuple(
            torch.tensor([start < last and end > first for start, end in encoded["offset_mapping"]])
            for first, last in (sentence.pronoun, sentence.antecedent, sentence.distractor)
        )
        unknown = tokenizer.unk_token_id is not None and bool((ids == tokenizer.unk_token_id).any())
        if unknown or len(ids) > longest or not all(bool(span.any()) for span in spans):
            excluded.add(sentence.frame)
        found.append(Pronoun(ids, spans, sentence.frame, sentence.cue))  # type: ignore[arg-type]
    return [x for x in found if x.template not in excluded]
