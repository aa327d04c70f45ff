"""Attention between words: what the heads of a model look at in short texts whose words are known.

A word may be several tokens. Its attention to another word is the sum over that word's tokens, and the mean over its
own. Special tokens are no words: their share is left out and the rest is not scaled up, which changes no word's order.
The weights of one batch are held while it is read, so a text has at most 512 tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self

import torch
from torch import Tensor

from polyhead.errors import OptionError, ShapeError
from polyhead.observation.collectors import BatchMetadata
from polyhead.observation.statistics import AttentionSite
from polyhead.ops.attended import Attended
from polyhead.ops.common.visibility import resolve
from polyhead.ops.profile import BlockMap

LONGEST = 512  # tokens
# Each lies within the next, though a word may have the one and not the other:
#   word      the word's own tokens, of words that are two tokens or more
#   phrase    the words of the smallest dependency subtree of two words or more that the word is in: its own where it
#             has dependents, else its governor's; of words for which that is not the whole sentence
#   sentence  the words of its sentence, of contexts that hold more than one
CIRCLES = ("word", "phrase", "sentence")


@dataclass(frozen=True, slots=True, eq=False)
class WordMap:
    """Which word each token of a text is a piece of, and how the words hang together; indices count from 0."""

    tokens: tuple[int, ...]  # the word of each token, -1 for a special token and for white space
    governors: tuple[int, ...]  # of each word, -1 for a root
    relations: tuple[str, ...]  # of each word to its governor
    sentences: tuple[int, ...]  # the sentence of each word

    def __post_init__(self) -> None:
        words = len(self.governors)
        if not words == len(self.relations) == len(self.sentences):
            raise ShapeError(
                "governors, relations and sentences must be one a word, "
                f"got {words}, {len(self.relations)} and {len(self.sentences)}"
            )
        for name, indices in (("tokens", self.tokens), ("governors", self.governors)):
            wrong = [index for index in indices if not -1 <= index < words]
            if wrong:
                raise OptionError(f"{name} are indices of {words} words or -1, got {wrong[0]}")

    def __len__(self) -> int:
        return len(self.governors)

    def pieces(self) -> list[int]:
        """How many tokens each word has."""
        counts = [0] * len(self)
        for word in self.tokens:
            if word >= 0:
                counts[word] += 1
        return counts

    def circles(self) -> Tensor:
        """Which words lie in each of the `CIRCLES` around a word, bool [3, words, words]; none where it has none."""
        words = len(self)
        under = torch.eye(words, dtype=torch.bool)  # [governor, word]
        has_dependents = [False] * words
        for word in range(words):
            above = self.governors[word]
            if above >= 0:
                has_dependents[above] = True
            for _ in range(words):
                if above < 0:
                    break
                under[above, word] = True
                above = self.governors[above]
        circles = torch.zeros(3, words, words, dtype=torch.bool)
        sentences = torch.tensor(self.sentences)
        together = sentences[:, None] == sentences
        several = len(set(self.sentences)) > 1
        for word, pieces in enumerate(self.pieces()):
            if not pieces:
                continue
            circles[0, word, word] = pieces > 1
            top = word if has_dependents[word] else self.governors[word]
            if top >= 0 and self.governors[top] >= 0:
                circles[1, word] = under[top]
            if several:
                circles[2, word] = together[word]
        return circles


class _Measures(Protocol):
    """A gatherer whose numbers belong to contexts: so many rows of each tensor a context."""

    name: str

    def rows(self, tensor: str, context: int) -> int: ...

    def nothing(self, num_heads: int) -> dict[str, Tensor]:
        """Each tensor without rows."""

    def measured(self, attended: Attended, real: Tensor | None, contexts: Sequence[int]) -> dict[str, Tensor]:
        """The tensors of some contexts, one after the other."""


@dataclass(frozen=True, slots=True, eq=False)
class ByContext:
    """What was measured at one site, context by context; a context seen again replaces what was known of it."""

    collector: _Measures
    num_heads: int
    parts: tuple[Mapping[str, Tensor], ...] = ()  # each of one call or one saved state: contexts, and the tensors

    def update(self, attended: Attended, real: Tensor | None, metadata: BatchMetadata) -> Self:
        if metadata.documents is None or metadata.documents.device.type != "cpu":
            raise OptionError(
                f"{self.collector.name} are told which text each row of a batch is; before each call of the model set "
                "session.notes = Notes(documents=...), [batch] on the CPU"
            )
        batch = attended.query.shape[0]
        if metadata.documents.shape != (batch,):
            raise ShapeError(
                f"notes.documents must be one number a row, [{batch}], got shape {list(metadata.documents.shape)}"
            )
        measured = self.collector.measured(attended, real, metadata.documents.tolist())
        return replace(self, parts=(*self.parts, {"contexts": metadata.documents, **measured}))

    def merge(self, other: Self) -> Self:
        return replace(self, parts=(*self.parts, *other.parts))

    def state(self) -> dict[str, Tensor]:
        """Everything in the order of the contexts, on the CPU: `contexts` are their numbers."""
        nothing = self.collector.nothing(self.num_heads)
        found: dict[int, list[Tensor]] = {}
        for part in self.parts:
            contexts = part["contexts"].tolist()
            columns = [
                part[name].cpu().split([self.collector.rows(name, context) for context in contexts]) for name in nothing
            ]
            for index, context in enumerate(contexts):
                found[context] = [column[index] for column in columns]
        order = sorted(found)
        state = {"contexts": torch.tensor(order, dtype=torch.int64)}
        for index, (name, empty) in enumerate(nothing.items()):
            state[name] = torch.cat([empty, *(found[context][index] for context in order)])
        return state

    def with_state(self, state: Mapping[str, Tensor]) -> Self:
        return replace(self, parts=(dict(state),))


class WordAttention:
    """Gathers, of texts whose words are known, which word each word looks at and how much stays in its circles.

    `metadata.documents` says which of the `maps` each row of a batch is. What is gathered (`ByContext.state`):

        looks     [words, heads] int16     the word looked at most, itself left out, by its index in the text; ties go
                                           to the first; -1 where it sees no other
        visible   [words, 2] bool          whether the word may see its governor, and its governor the word
        shares    [contexts, heads, 3]     the weight within each of the `CIRCLES`, summed over the words that have it
        expected  [contexts, 3]            the same for attention that is even over the visible tokens
        counts    [contexts, 3]            how many words have it
    """

    def __init__(self, maps: Sequence[WordMap], name: str = "words") -> None:
        self.name = name
        self.maps = tuple(maps)
        self._latest: tuple[tuple[int, ...], _Words] | None = None

    def empty(self, site: AttentionSite, device: torch.device) -> ByContext | None:
        return None if site.kind == "cross" else ByContext(self, site.num_heads)

    def rows(self, tensor: str, context: int) -> int:
        return len(self.maps[context]) if tensor in ("looks", "visible") else 1

    def nothing(self, num_heads: int) -> dict[str, Tensor]:
        return {
            "looks": torch.zeros(0, num_heads, dtype=torch.int16),
            "visible": torch.zeros(0, 2, dtype=torch.bool),
            "shares": torch.zeros(0, num_heads, 3, dtype=torch.float64),
            "expected": torch.zeros(0, 3, dtype=torch.float64),
            "counts": torch.zeros(0, 3, dtype=torch.int64),
        }

    def measured(self, attended: Attended, real: Tensor | None, contexts: Sequence[int]) -> dict[str, Tensor]:
        words = self._words(tuple(contexts))
        device = attended.query.device
        pieces = _pieces(words.tokens, words.governors.shape[1], attended, real)
        governors, circles = words.governors.to(device, non_blocking=True), words.circles.to(device, non_blocking=True)
        there = words.there.to(device, non_blocking=True)
        weights = between_words(_weights(attended), pieces)  # [batch, heads, words, words]
        seen = (pieces.transpose(1, 2) @ _visible(attended) @ pieces) > 0  # [batch, words, words]
        by_chance = between_words(_even(attended), pieces)[:, 0]
        known = governors.clamp_min(0)[..., None]
        upward = seen.gather(2, known)[..., 0] & (governors >= 0)
        downward = seen.transpose(1, 2).gather(2, known)[..., 0] & (governors >= 0)
        return {
            "looks": _looks(weights).flatten(0, 1)[there],
            "visible": torch.stack([upward, downward], -1).flatten(0, 1)[there],
            "shares": torch.einsum("bhqk,bcqk->bhc", weights, circles),
            "expected": torch.einsum("bqk,bcqk->bc", by_chance, circles),
            "counts": words.counts,
        }

    def _words(self, contexts: tuple[int, ...]) -> _Words:
        """The same for every layer that reads a batch, and made once."""
        if self._latest is None or self._latest[0] != contexts:
            for context in contexts:
                if not 0 <= context < len(self.maps):
                    raise OptionError(f"notes.documents count the {len(self.maps)} texts of {self.name}, got {context}")
            self._latest = contexts, _Words.of([self.maps[context] for context in contexts])
        return self._latest[1]


class SpanAttention:
    """Gathers how much the first span of each text gives to each of its other spans.

    `labels` has one list a text: for each token -1, 0 if it is of the span that looks, 1, 2, ... if it is of one of the
    `others` spans that are looked at. The state's `weights` are [contexts, heads, others] float64, and `expected`
    [contexts, others] are those of attention that is even over the visible tokens.
    """

    def __init__(self, labels: Sequence[Sequence[int]], others: int, name: str = "spans") -> None:
        self.name = name
        self.labels = tuple(tuple(row) for row in labels)
        self.others = others

    def empty(self, site: AttentionSite, device: torch.device) -> ByContext | None:
        return None if site.kind == "cross" else ByContext(self, site.num_heads)

    def rows(self, tensor: str, context: int) -> int:
        return 1

    def nothing(self, num_heads: int) -> dict[str, Tensor]:
        return {
            "weights": torch.zeros(0, num_heads, self.others, dtype=torch.float64),
            "expected": torch.zeros(0, self.others, dtype=torch.float64),
        }

    def measured(self, attended: Attended, real: Tensor | None, contexts: Sequence[int]) -> dict[str, Tensor]:
        tokens = _side_by_side([self.labels[context] for context in contexts])
        pieces = _pieces(tokens, self.others + 1, attended, real)
        return {
            "weights": between_words(_weights(attended), pieces)[:, :, 0, 1:],
            "expected": between_words(_even(attended), pieces)[:, 0, 0, 1:],
        }


# ---- from tokens to words


def between_words(weights: Tensor, pieces: Tensor) -> Tensor:
    """[batch, heads, tokens, tokens] and [batch, tokens, words] to [batch, heads, words, words].

    The sum over the tokens of the word that is looked at, the mean over those of the word that looks.

    >>> weights = torch.tensor([[0.5, 0.25, 0.25], [0.0, 1.0, 0.0], [0.5, 0.5, 0.0]])
    >>> two_words = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    >>> between_words(weights[None, None], two_words[None])[0, 0]
    tensor([[0.8750, 0.1250],
            [1.0000, 0.0000]])
    """
    mean = pieces / pieces.sum(1, keepdim=True).clamp_min(1.0)
    return mean.transpose(1, 2)[:, None] @ (weights.to(pieces.dtype) @ pieces[:, None])


def _weights(attended: Attended) -> Tensor:
    """All weights of a batch of short texts, [batch, heads, tokens, tokens]."""
    weights = attended.profile(block_map=BlockMap(block=(1, 1))).block_map
    assert weights is not None
    return weights


def _pieces(tokens: Tensor, words: int, attended: Attended, real: Tensor | None) -> Tensor:
    """Which tokens of each row are pieces of which word, float64 [batch, tokens, words].

    `tokens` [batch, longest] begins with each text's first token, which stands after the padding of its row.
    """
    batch, _, queries, _ = attended.query.shape
    keys = attended.key.shape[2]
    if queries != keys:
        raise ShapeError(f"words are read from whole texts, got {queries} queries for {keys} keys; run without a cache")
    if queries > LONGEST:
        raise OptionError(
            f"attention between words holds the weights of a text, of at most {LONGEST} tokens, got {queries}; "
            "cut it into its sentences, and leave out the longer ones"
        )
    longest = tokens.shape[1]
    if longest > queries:
        raise ShapeError(f"a text must be in its row from start to end, got {longest} tokens in a row of {queries}")
    device = attended.query.device
    place = torch.arange(queries, device=device).expand(batch, -1)
    if real is not None:
        place = place - real.to(torch.uint8).argmax(-1, keepdim=True)
    of_word = tokens.to(device, non_blocking=True).gather(1, place.clamp(0, longest - 1))
    of_word = torch.where((place >= 0) & (place < longest), of_word, -1)
    return (of_word[..., None] == torch.arange(words, device=device)).to(torch.float64)


def _visible(attended: Attended) -> Tensor:
    """Which tokens each token may see with some head, float64 [batch, tokens, tokens]."""
    batch, heads, queries, _ = attended.query.shape
    keys, device, mask = attended.key.shape[2], attended.query.device, attended.mask
    visible = torch.ones(batch, queries, keys, dtype=torch.bool, device=device)
    if mask is not None:
        visibility = resolve(mask, batch=batch, heads=heads, queries=queries, keys=keys, device=device)
        allowed = None if visibility is None else visibility.allowed_tile((0, queries), (0, keys))
        if allowed is not None:
            visible = visible & allowed.any(1)
        for bias in mask.biases:
            # transformers hides with the least number of a dtype as well as with -inf.
            visible = visible & (bias.detach() > torch.finfo(bias.dtype).min / 2).any(1)
    return visible.to(torch.float64)


def _even(attended: Attended) -> Tensor:
    """The weights of a head that looks alike at all tokens it may see, [batch, 1, tokens, tokens]."""
    visible = _visible(attended)
    return (visible / visible.sum(-1, keepdim=True).clamp_min(1.0))[:, None]


def _looks(weights: Tensor) -> Tensor:
    """The other word with the most weight, int16 [batch, words, heads], the first of several."""
    words = weights.shape[-1]
    index = torch.arange(words, device=weights.device)
    others = torch.where(index == index[:, None], 0.0, weights)
    most = others.amax(-1, keepdim=True)
    first = torch.where((others == most) & (most > 0), index, words).amin(-1)
    return torch.where(first < words, first, -1).to(torch.int16).transpose(1, 2)


def _side_by_side(rows: Sequence[Sequence[int]]) -> Tensor:
    """[rows, longest] int64, -1 after the end of each."""
    longest = max(len(row) for row in rows)
    return torch.tensor([[*row, *([-1] * (longest - len(row)))] for row in rows], dtype=torch.int64)


@dataclass(frozen=True, slots=True, eq=False)
class _Words:
    """The maps of one batch side by side, on the CPU."""

    tokens: Tensor  # [batch, longest]
    governors: Tensor  # [batch, words], -1 for a root and after the last word
    circles: Tensor  # [batch, 3, words, words] float64
    counts: Tensor  # [batch, 3]
    there: Tensor  # where the words of all texts stand in [batch * words]

    @classmethod
    def of(cls, maps: Sequence[WordMap]) -> _Words:
        governors = _side_by_side([found.governors for found in maps])
        words = governors.shape[1]
        circles = torch.zeros(len(maps), 3, words, words, dtype=torch.float64)
        for row, found in enumerate(maps):
            circles[row, :, : len(found), : len(found)] = found.circles().to(torch.float64)
        there = torch.cat([torch.arange(len(found)) + row * words for row, found in enumerate(maps)])
        counts = circles.any(-1).sum(-1)
        return cls(_side_by_side([found.tokens for found in maps]), governors, circles, counts, there)
