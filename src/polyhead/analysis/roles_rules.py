"""The rule of every role: what is counted, from when on a head has it, and why from there on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Source = Literal["text", "repeated", "pronouns", "weights"]


@dataclass(frozen=True, slots=True)
class Rule:
    """A head has a role if its score reaches the threshold and the whole interval lies beyond the null.

    Where the null is high, as the weight within 8 tokens is in short texts, the threshold rises to halfway between the
    null and 1: the head is then closer to doing only this than to chance.
    """

    threshold: float
    reason: str
    null: str  # what chance is, in words
    source: Source = "text"
    rises: bool = True  # whether the score goes up to 1, so that halfway between null and 1 means something
    unless: str | None = None  # a role that says it better: a head of that one does not have this one


_ALIKE = "a head that looks alike at all keys it may see"
_MOST = "more than all other places together"

RULES: dict[str, Rule] = {
    "positional": Rule(
        0.9,
        "the largest weight is at one offset in nine of ten positions, as positional heads are usually defined",
        f"{_ALIKE}, at the same offset",
    ),
    "previous": Rule(0.5, _MOST, f"{_ALIKE}, at that offset"),
    "next": Rule(0.5, _MOST, f"{_ALIKE}, at that offset"),
    "self": Rule(0.5, _MOST, f"{_ALIKE}, at that offset"),
    "local": Rule(
        0.9,
        "nine tenths of the weight within 8 tokens; a head at one offset is called by that offset",
        _ALIKE,
        unless="positional",
    ),
    "sink": Rule(
        0.8,
        "matching heads rest on the first token, with up to 0.71 of their weight, wherever they find no match; a sink "
        "rests there always",
        _ALIKE,
    ),
    "delimiter": Rule(
        0.8,
        "as for a sink; special tokens and punctuation together, the first token included if it is one of them",
        _ALIKE,
        unless="sink",
    ),
    "broad": Rule(
        0.95,
        "of the largest possible entropy; unit-variance random logits have 0.88 of it at 60 keys and 0.93 at 1,000",
        "random logits of variance 1: log(n) - (1 - 1/n) / 2 over log(n)",
    ),
    "long-range": Rule(
        0.5,
        "more than half of the weight on a single key more than 8 tokens away that is not the first, in most positions "
        "that see such a key; heads that match tokens do so only where there is a match",
        _ALIKE + ", which never has so much on one key",
    ),
    "rare-token": Rule(
        0.5, "more than on all tokens that are not rare; the rarest make up a tenth of the text", _ALIKE
    ),
    "duplicate-token": Rule(0.5, _MOST, f"{_ALIKE}, on the same keys", source="repeated"),
    "induction": Rule(0.5, _MOST, f"{_ALIKE}, on the same keys", source="repeated"),
    "pronoun": Rule(
        0.75,
        "nearer to finding what a pronoun stands for every time than to tossing a coin, and with twice the weight that "
        "a head gives it which looks everywhere alike",
        "one half: both names stand in both places and are both meant, so that nothing but the meaning helps",
        source="pronouns",
    ),
    "copy": Rule(
        0.5,
        "three quarters of what the eigenvalues of the OV circuit weigh are positive",
        "the mean and 1.96 deviations of Gaussian heads between the same embedding and unembedding",
        source="weights",
        rises=False,
    ),
    "anti-copy": Rule(
        0.5,
        "three quarters of what the eigenvalues of the OV circuit weigh are negative",
        "the mean and 1.96 deviations of Gaussian heads between the same embedding and unembedding",
        source="weights",
        rises=False,
    ),
    "same-meaning": Rule(
        0.1,
        "the cosine between a token and the other tokens it attends to is a tenth above what the head's offsets alone "
        "would give, and above the same with the meanings of all tokens dealt out anew",
        "the difference between two ways of dealing them out",
        rises=False,
    ),
}
