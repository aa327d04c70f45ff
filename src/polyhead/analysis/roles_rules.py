"""The rule of each role: its threshold, its null, and the reason for the threshold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Source = Literal["text", "repeated", "pronouns"]


@dataclass(frozen=True, slots=True)
class Rule:
    """A head has a role if its score reaches the threshold and the entire interval is above the null.

    Where the null is high, as for the weight within 8 tokens of short texts, the threshold rises to halfway between the
    null and 1: the score is then closer to the maximum than to chance.
    """

    threshold: float
    reason: str
    null: str  # description of chance
    source: Source = "text"
    rises: bool = True  # whether the maximum score is 1, so that halfway between null and 1 is meaningful
    unless: str | None = None  # a more specific role: a head that has it does not have this one


_UNIFORM = "uniform attention over the visible keys"
_MAJORITY = "more than all other positions together"

RULES: dict[str, Rule] = {
    "positional": Rule(
        0.9,
        "the max attention weight is at one offset in nine of ten positions, the usual definition (Voita et al., 2019)",
        f"{_UNIFORM}, at the same offset",
    ),
    "previous": Rule(0.5, _MAJORITY, f"{_UNIFORM}, at that offset"),
    "next": Rule(0.5, _MAJORITY, f"{_UNIFORM}, at that offset"),
    "self": Rule(0.5, _MAJORITY, f"{_UNIFORM}, at that offset"),
    "local": Rule(
        0.9,
        "nine tenths of the attention within 8 tokens; a head at one offset is named after that offset",
        _UNIFORM,
        unless="positional",
    ),
    "sink": Rule(
        0.8,
        "matching heads attend to the first token, with up to 0.71 of their attention, wherever there is no match; a "
        "sink head always does",
        _UNIFORM,
    ),
    "delimiter": Rule(
        0.8,
        "as for a sink; special tokens and punctuation together, the first token included if it is one of them",
        _UNIFORM,
        unless="sink",
    ),
    "broad": Rule(
        0.95,
        "of the maximum entropy; unit-variance random logits have 0.88 of it at 60 keys and 0.93 at 1,000",
        "random logits of variance 1: log(n) - (1 - 1/n) / 2 over log(n)",
    ),
    "long-range": Rule(
        0.5,
        "more than half of the attention on a single key more than 8 tokens away that is not the first, in most "
        "positions where such a key is visible; heads that match tokens do so only where there is a match",
        _UNIFORM + ", which never has so much on one key",
    ),
    "rare-token": Rule(
        0.5, "more than on all tokens that are not rare; the rarest make up a tenth of the text", _UNIFORM
    ),
    "duplicate-token": Rule(0.5, _MAJORITY, f"{_UNIFORM}, on the same keys", source="repeated"),
    "induction": Rule(0.5, _MAJORITY, f"{_UNIFORM}, on the same keys", source="repeated"),
    "pronoun": Rule(
        0.75,
        "closer to resolving every pronoun than to a coin toss, where only the meaning decides, in a head that also "
        "reaches it for agreement",
        "one half: both names occur in both positions and as both antecedents",
        source="pronouns",
    ),
    "agreement": Rule(
        0.75,
        "closer to resolving every pronoun than to a coin toss, where gender or number decides, and with at least "
        "twice the weight that uniform attention gives the antecedent",
        "one half: both names occur in both positions and as both antecedents",
        source="pronouns",
        unless="pronoun",
    ),
    "copy": Rule(
        0.75,
        "closer to raising the attended token in every comparison than to a coin toss",
        "one half: the other token is one that the same head attends to in another row",
    ),
    "anti-copy": Rule(
        0.75,
        "closer to lowering the attended token in every comparison than to a coin toss",
        "one half: the other token is one that the same head attends to in another row",
    ),
    "same-meaning": Rule(
        0.1,
        "the cosine similarity between a token and the other tokens it attends to is 0.1 above what the head's offsets "
        "alone explain, and above the same with permuted embeddings",
        "the difference between two permutations",
        rises=False,
    ),
}
