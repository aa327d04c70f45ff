"""Collectors of word-to-word attention in short texts with known word boundaries.

A word may have several tokens: attention to a word is the sum over its tokens, attention from a word the mean over its
tokens (Clark et al., 2019). Special tokens are excluded without renormalisation, which does not change the ranking of
words. The attention weights of a batch are materialised, so texts are limited to 512 tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from polyhead.errors import OptionError, ShapeError
from polyhead.observation.collectors import BatchMetadata
from polyhead.observation.rows import MASKING_BIAS
from polyhead.observation.statistics import AttentionSite
from polyhead.ops.attended import Attended
from polyhead.ops.common.visibility import resolve
from polyhead.ops.profile import BlockMap

MAX_TOKENS = 512  # tokens
# Nested spans around a word; each is only defined for some words:
#   word      the word's own tokens, for words of at least two tokens
#   phrase    the smallest dependency subtree with at least two words that contains the word: its own if it has
#             dependents, else its governor's; for words where that is not the whole sentence
#   sentence  the words of its sentence, in contexts with more than one sentence
SPANS = ("word", "phrase", "sentence")


@dataclass(frozen=True, slots=True, eq=False)
class WordMap:
    """Words of the tokens of a text, and the dependency tree of the words; indices start at 0."""

    tokens: tuple[int, ...]  # the word of each token, -1 for special tokens and white space
    governors: tuple[int, ...]  # of each word, -1 for a root
    relations: tuple[str, ...]  # of each word to its governor
    sentences: tuple[int, ...]  # the sentence of each word

    def __post_init__(self) -> None:
        words = len(self.governors)
        if not words == len(self.relations) == len(self.sentences):
            raise ShapeError(
                "governors, relations and sentences must have one entry per word, "
                f"got {words}, {len(self.relations)} and {len(self.sentences)}"
            )
        for name, indices in (("tokens", self.tokens), ("governors", self.governors)):
            invalid = [index for index in indices if not -1 <= index < words]
            if invalid:
                raise OptionError(f"{name} must be indices of {words} words or -1, got {invalid[0]}")

    def __len__(self) -> int:
        return len(self.governors)

    def pieces(self) -> list[int]:
        """Return the number of tokens of each word."""
        counts = [0] * len(self)
        for word in self.tokens:
            if word >= 0:
                counts[word] += 1
        return counts

    def spans(self) -> Tensor:
        """Return the words in each of the `SPANS` around a word, bool [3, words, words]; empty where undefined."""
        words = len(self)
        subtree = torch.eye(words, dtype=torch.bool)  # [governor, word]
        has_dependents = [False] * words
        for word in range(words):
            ancestor = self.governors[word]
            if ancestor >= 0:
                has_dependents[ancestor] = True
            for _ in range(words):
                if ancestor < 0:
                    break
                subtree[ancestor, word] = True
                ancestor = self.governors[ancestor]
        spans = torch.zeros(3, words, words, dtype=torch.bool)
        sentences = torch.tensor(self.sentences)
        same_sentence = sentences[:, None] == sentences
        has_several = len(set(self.sentences)) > 1
        for word, pieces in enumerate(self.pieces()):
            if not pieces:
                continue
            spans[0, word, word] = pieces > 1
            root = word if has_dependents[word] else self.governors[word]
            if root >= 0 and self.governors[root] >= 0:
                spans[1, word] = subtree[root]
            if has_several:
                spans[2, word] = same_sentence[word]
        return spans


class ContextCollector(ABC):
    """Collector of self-attention whose state tensors have a known number of rows per context."""

    name: str

    def empty(self, site: AttentionSite, device: torch.device) -> ByContext | None:
        return None if site.kind == "cross" else ByContext(self, site.num_heads)

    def rows(self, tensor: str, context: int) -> int:
        """Return the number of rows of a tensor for a context."""
        return 1

    @abstractmethod
    def empty_tensors(self, num_heads: int) -> dict[str, Tensor]:
        """Return each tensor with zero rows."""

    @abstractmethod
    def measure(self, attended: Attended, non_padding: Tensor | None, contexts: Sequence[int]) -> dict[str, Tensor]:
        """Return the tensors of some contexts, concatenated."""


@dataclass(frozen=True, slots=True, eq=False)
class ByContext:
    """Measurements of one site by context; a context that occurs again replaces the earlier measurement."""

    collector: ContextCollector
    num_heads: int
    parts: tuple[Mapping[str, Tensor], ...] = ()  # `contexts` and the tensors of each call or saved state

    def update(self, attended: Attended, non_padding: Tensor | None, metadata: BatchMetadata) -> Self:
        if metadata.documents is None or metadata.documents.device.type != "cpu":
            raise OptionError(
                f"{self.collector.name} need the text index of each row of a batch; before each call of the model set "
                "session.metadata = BatchMetadata(documents=...), [batch] on the CPU"
            )
        batch = attended.query.shape[0]
        if metadata.documents.shape != (batch,):
            raise ShapeError(
                f"metadata.documents must have one index per row, [{batch}], got shape {list(metadata.documents.shape)}"
            )
        measured = self.collector.measure(attended, non_padding, metadata.documents.tolist())
        return replace(self, parts=(*self.parts, {"contexts": metadata.documents, **measured}))

    def merge(self, other: Self) -> Self:
        return replace(self, parts=(*self.parts, *other.parts))

    def state(self) -> dict[str, Tensor]:
        """Return all tensors sorted by context, on the CPU; `contexts` are the context indices."""
        empty_tensors = self.collector.empty_tensors(self.num_heads)
        by_context: dict[int, list[Tensor]] = {}
        for part in self.parts:
            contexts = part["contexts"].tolist()
            columns = [
                part[name].cpu().split([self.collector.rows(name, context) for context in contexts])
                for name in empty_tensors
            ]
            for index, context in enumerate(contexts):
                by_context[context] = [column[index] for column in columns]
        order = sorted(by_context)
        state = {"contexts": torch.tensor(order, dtype=torch.int64)}
        for index, (name, empty) in enumerate(empty_tensors.items()):
            state[name] = torch.cat([empty, *(by_context[context][index] for context in order)])
        return state

    def with_state(self, state: Mapping[str, Tensor]) -> Self:
        if absent := self.collector.empty_tensors(self.num_heads).keys() - state.keys():
            raise OptionError(
                f"{self.collector.name} need the tensors {', '.join(sorted(absent))} to be resumed, which another "
                "version did not save; start again in another folder"
            )
        return replace(self, parts=(dict(state),))


class WordAttention(ContextCollector):
    """Collector of each word's most attended word and of the attention inside its word, phrase and sentence.

    `metadata.documents` is the index in `maps` of each row of a batch. State (`ByContext.state`):

        looks     [words, heads] int16     index of the most attended other word in the text; the first of ties; -1
                                           without other visible words
        visible   [words, 2] bool          whether the governor is visible to the word, and the word to its governor
        shares    [contexts, heads, 3]     attention to other tokens within each of the `SPANS`, summed over the words
                                           that have it
        expected  [contexts, heads, 3]     the same if attention at each offset were inside as often as tokens of all
                                           texts at that offset are: what the head's distances alone give
        totals    [contexts, heads, 3]     attention of the same words to other tokens, special tokens included
        counts    [contexts, 3]            number of these words
    """

    def __init__(self, maps: Sequence[WordMap], name: str = "words") -> None:
        self.name = name
        self.maps = tuple(maps)
        self._latest: tuple[tuple[int, ...], _WordBatch] | None = None

    def rows(self, tensor: str, context: int) -> int:
        return len(self.maps[context]) if tensor in ("looks", "visible") else 1

    def empty_tensors(self, num_heads: int) -> dict[str, Tensor]:
        return {
            "looks": torch.zeros(0, num_heads, dtype=torch.int16),
            "visible": torch.zeros(0, 2, dtype=torch.bool),
            **{name: torch.zeros(0, num_heads, 3, dtype=torch.float64) for name in ("shares", "expected", "totals")},
            "counts": torch.zeros(0, 3, dtype=torch.int64),
        }

    def measure(self, attended: Attended, non_padding: Tensor | None, contexts: Sequence[int]) -> dict[str, Tensor]:
        words = self._words(tuple(contexts))
        device = attended.query.device
        pieces = _membership(words.tokens, words.governors.shape[1], attended, non_padding)
        governors, spans = words.governors.to(device, non_blocking=True), words.spans.to(device, non_blocking=True)
        rows = words.row_indices.to(device, non_blocking=True)
        weights = _weights(attended).to(torch.float64)
        weights.diagonal(dim1=-2, dim2=-1).zero_()  # attention of a token to itself
        to_others = weights.sum(-1) @ _mean_over_pieces(pieces)  # [batch, heads, words]
        index = torch.arange(weights.shape[-1], device=device)
        inside = self.inside_by_offset.to(device, non_blocking=True)
        middle = inside.shape[1] // 2
        expected = torch.einsum(
            "bhqk,cqk->bhqc", weights, inside[:, (index - index[:, None]).clamp(-middle, middle) + middle]
        )
        expected = torch.einsum("bhqc,bqw,bcw->bhc", expected, _mean_over_pieces(pieces), spans.amax(-1))
        weights = between_words(weights, pieces)  # [batch, heads, words, words]
        visible = (pieces.transpose(1, 2) @ _visible_tokens(attended) @ pieces) > 0  # [batch, words, words]
        safe_governors = governors.clamp_min(0)[..., None]
        upward = visible.gather(2, safe_governors)[..., 0] & (governors >= 0)
        downward = visible.transpose(1, 2).gather(2, safe_governors)[..., 0] & (governors >= 0)
        return {
            "looks": _most_attended(weights).flatten(0, 1)[rows],
            "visible": torch.stack([upward, downward], -1).flatten(0, 1)[rows],
            "shares": torch.einsum("bhqk,bcqk->bhc", weights, spans),
            "expected": expected,
            "totals": torch.einsum("bhq,bcq->bhc", to_others, spans.amax(-1)),
            "counts": words.counts,
        }

    @cached_property
    def inside_by_offset(self) -> Tensor:
        """Share of the tokens at each offset from a token that are in its span, [3, offsets], over all texts.

        The offset 0 is in the middle. As in `shares`, a word counts once, however many tokens it has.
        """
        middle = max(len(word_map.tokens) for word_map in self.maps) - 1
        inside, pairs = torch.zeros(2, 3, 2 * middle + 1, dtype=torch.float64)
        for word_map in self.maps:
            spans, tokens = word_map.spans().to(torch.float64), torch.tensor(word_map.tokens)
            pieces = (tokens[:, None] == torch.arange(len(word_map))).to(torch.float64)
            rows = spans.amax(-1) @ _mean_over_pieces(pieces[None])[0].T  # [3, tokens]
            index = torch.arange(len(tokens))
            offsets = (index - index[:, None] + middle).flatten()
            pairs.index_add_(1, offsets, rows[..., None].expand(-1, -1, len(tokens)).flatten(1))
            inside.index_add_(1, offsets, (rows[..., None] * (pieces @ spans @ pieces.T)).flatten(1))
        return inside / pairs.clamp_min(torch.finfo(torch.float64).tiny)

    def _words(self, contexts: tuple[int, ...]) -> _WordBatch:
        """Return the stacked word maps of a batch, cached across layers."""
        if self._latest is None or self._latest[0] != contexts:
            for context in contexts:
                if not 0 <= context < len(self.maps):
                    raise OptionError(
                        f"metadata.documents must index the {len(self.maps)} texts of {self.name}, got {context}"
                    )
            self._latest = contexts, _WordBatch.of([self.maps[context] for context in contexts])
        return self._latest[1]


class SpanAttention(ContextCollector):
    """Collector of the attention from the query span of each text to its other spans.

    `labels` has one list per text: for each token 0 if it is in the query span, 1, 2, ... if it is in one of the
    `others` key spans, else -1. State: `weights` [contexts, heads, others] float64, and `expected` [contexts, others]
    for uniform attention over the visible tokens.
    """

    def __init__(self, labels: Sequence[Sequence[int]], others: int, name: str = "spans") -> None:
        self.name = name
        self.labels = tuple(tuple(row) for row in labels)
        self.others = others

    def empty_tensors(self, num_heads: int) -> dict[str, Tensor]:
        return {
            "weights": torch.zeros(0, num_heads, self.others, dtype=torch.float64),
            "expected": torch.zeros(0, self.others, dtype=torch.float64),
        }

    def measure(self, attended: Attended, non_padding: Tensor | None, contexts: Sequence[int]) -> dict[str, Tensor]:
        tokens = _pad_rows([self.labels[context] for context in contexts])
        pieces = _membership(tokens, self.others + 1, attended, non_padding)
        return {
            "weights": between_words(_weights(attended), pieces)[:, :, 0, 1:],
            "expected": between_words(_uniform_weights(attended), pieces)[:, 0, 0, 1:],
        }


# ---- from tokens to words


def between_words(weights: Tensor, pieces: Tensor) -> Tensor:
    """Aggregate token attention to word attention, [batch, heads, words, words].

    Takes weights [batch, heads, tokens, tokens] and word membership [batch, tokens, words]. Sums over the tokens of the
    attended word and averages over the tokens of the attending word.

    >>> weights = torch.tensor([[0.5, 0.25, 0.25], [0.0, 1.0, 0.0], [0.5, 0.5, 0.0]])
    >>> two_words = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    >>> between_words(weights[None, None], two_words[None])[0, 0]
    tensor([[0.8750, 0.1250],
            [1.0000, 0.0000]])
    """
    mean = _mean_over_pieces(pieces)
    return mean.transpose(1, 2)[:, None] @ (weights.to(pieces.dtype) @ pieces[:, None])


def _mean_over_pieces(pieces: Tensor) -> Tensor:
    return pieces / pieces.sum(1, keepdim=True).clamp_min(1.0)


def _weights(attended: Attended) -> Tensor:
    """Return all attention weights of a batch of short texts, [batch, heads, tokens, tokens]."""
    weights = attended.profile(block_map=BlockMap(block=(1, 1))).block_map
    assert weights is not None
    return weights


def _membership(tokens: Tensor, words: int, attended: Attended, non_padding: Tensor | None) -> Tensor:
    """Return the word membership of the tokens of each row, float64 [batch, tokens, words].

    `tokens` [batch, longest] starts at each text's first token, i.e. after the left padding of its row.
    """
    batch, _, queries, _ = attended.query.shape
    keys = attended.key.shape[2]
    if queries != keys:
        raise ShapeError(
            f"word attention needs complete texts, got {queries} queries for {keys} keys; run without a cache"
        )
    if queries > MAX_TOKENS:
        raise OptionError(
            f"word attention materialises the weights of a text and is limited to {MAX_TOKENS} tokens, got {queries}; "
            "split the text into sentences and leave out longer ones"
        )
    longest = tokens.shape[1]
    if longest > queries:
        raise ShapeError(f"each row must contain its complete text, got {longest} tokens in a row of {queries}")
    device = attended.query.device
    position = torch.arange(queries, device=device).expand(batch, -1)
    if non_padding is not None:
        position = position - non_padding.to(torch.uint8).argmax(-1, keepdim=True)
    word_index = tokens.to(device, non_blocking=True).gather(1, position.clamp(0, longest - 1))
    word_index = torch.where((position >= 0) & (position < longest), word_index, -1)
    return (word_index[..., None] == torch.arange(words, device=device)).to(torch.float64)


def _visible_tokens(attended: Attended) -> Tensor:
    """Return the tokens visible to each token in any head, float64 [batch, tokens, tokens]."""
    batch, heads, queries, _ = attended.query.shape
    keys, device, mask = attended.key.shape[2], attended.query.device, attended.mask
    visible = torch.ones(batch, queries, keys, dtype=torch.bool, device=device)
    if mask is not None:
        visibility = resolve(mask, batch=batch, heads=heads, queries=queries, keys=keys, device=device)
        allowed = None if visibility is None else visibility.allowed_tile((0, queries), (0, keys))
        if allowed is not None:
            visible = visible & allowed.any(1)
        for bias in mask.biases:
            # transformers masks with the minimum of a dtype as well as with -inf.
            visible = visible & (bias.detach() > MASKING_BIAS).any(1)
    return visible.to(torch.float64)


def _uniform_weights(attended: Attended) -> Tensor:
    """Return uniform attention weights over the visible tokens, [batch, 1, tokens, tokens]."""
    visible = _visible_tokens(attended)
    return (visible / visible.sum(-1, keepdim=True).clamp_min(1.0))[:, None]


def _most_attended(weights: Tensor) -> Tensor:
    """Return the most attended other word, int16 [batch, words, heads]; the first of ties."""
    words = weights.shape[-1]
    index = torch.arange(words, device=weights.device)
    others = torch.where(index == index[:, None], 0.0, weights)
    maximum = others.amax(-1, keepdim=True)
    first = torch.where((others == maximum) & (maximum > 0), index, words).amin(-1)
    return torch.where(first < words, first, -1).to(torch.int16).transpose(1, 2)


def _pad_rows(rows: Sequence[Sequence[int]]) -> Tensor:
    """Return the rows as int64 [rows, longest], right-padded with -1."""
    longest = max(len(row) for row in rows)
    return torch.tensor([[*row, *([-1] * (longest - len(row)))] for row in rows], dtype=torch.int64)


@dataclass(frozen=True, slots=True, eq=False)
class _WordBatch:
    """Stacked word maps of one batch, on the CPU."""

    tokens: Tensor  # [batch, longest]
    governors: Tensor  # [batch, words], -1 for a root and after the last word
    spans: Tensor  # [batch, 3, words, words] float64
    counts: Tensor  # [batch, 3]
    row_indices: Tensor  # indices of the words of all texts in [batch * words]

    @classmethod
    def of(cls, maps: Sequence[WordMap]) -> _WordBatch:
        governors = _pad_rows([word_map.governors for word_map in maps])
        words = governors.shape[1]
        spans = torch.zeros(len(maps), 3, words, words, dtype=torch.float64)
        for row, word_map in enumerate(maps):
            spans[row, :, : len(word_map), : len(word_map)] = word_map.spans().to(torch.float64)
        row_indices = torch.cat([torch.arange(len(word_map)) + row * words for row, word_map in enumerate(maps)])
        counts = spans.any(-1).sum(-1)
        return cls(_pad_rows([word_map.tokens for word_map in maps]), governors, spans, counts, row_indices)
