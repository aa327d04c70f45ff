"""Token metadata of a batch, independent of heads: repeated, similar, rare and punctuation tokens.

Computed once for all layers on the CPU, where the token ids are, and copied to the device asynchronously.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from polyhead.errors import OptionError, ShapeError
from polyhead.observation.collectors import BatchMetadata

# Principal components of a token embedding. The three vectors of a token (`TokenVectors`) and a flag, concatenated, are
# one value vector of an attention call: 3 * 40 + 1 channels, which fit into a value_dim of 128.
MEANING_DIMS = 40
NEAREST = 4  # maximum number of other occurrences that a token is paired with, per direction
NEAR = 64  # offsets up to this distance have their own bin
BINS = 2 * NEAR + 3  # all farther earlier tokens, offsets -NEAR to NEAR, all farther later tokens
_ROWS = 128  # tokens that `_mean_cosines` compares at a time, to limit memory
SPECIAL, PUNCTUATION = 0, (5, 8)  # values of `sources.TokenClass`; newlines (8) count as punctuation
KEY_SETS = ("special", "punctuation", "delimiter", "rare")  # a delimiter is special or punctuation
# From token ids [batch, tokens] to the word and sentence index of each token, -1 for none.
Segmenter = Callable[[Tensor], tuple[Tensor, Tensor]]
# "rows": statistics of the whole row of each query; "pairs": weight on other occurrences of its token, and after them.
EvidenceKind = Literal["rows", "pairs"]


@dataclass(frozen=True, slots=True, eq=False)
class TokenVectors:
    """A unit vector per token of the vocabulary, and the same vectors in two random permutations as controls."""

    vectors: Tensor  # [vocabulary, 3, dims]: the token's own vector and two permuted ones

    @classmethod
    def of(cls, embedding: Tensor, *, dims: int = MEANING_DIMS, seed: int = 0) -> TokenVectors:
        """Return the leading principal components of token embeddings [vocabulary, width], normalised.

        Embeddings are centred first: their common component carries no information about a token.
        """
        if embedding.ndim != 2 or len(embedding) < 2:
            raise ShapeError(f"embeddings must be [vocabulary, width], got shape {list(embedding.shape)}")
        rows = embedding.detach().to(torch.float32)
        rows = rows - rows.mean(0)
        _, axes = torch.linalg.eigh((rows.T @ rows).to(torch.float64))
        rows = rows @ axes[:, -dims:].to(rows.dtype)
        rows = rows / rows.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny)
        generator = torch.Generator().manual_seed(seed)
        orders = [torch.randperm(len(rows), generator=generator).to(rows.device) for _ in range(2)]
        return cls(torch.stack([rows, *(rows[order] for order in orders)], 1))


def rare_tokens(counts: Tensor, share: float = 0.1) -> Tensor:
    """Return the rare tokens, boolean [vocabulary]: the least frequent ones, up to a total `share` of a text.

    >>> rare_tokens(torch.tensor([0, 1, 50, 3, 46]), 0.05)
    tensor([ True,  True, False,  True, False])
    """
    if counts.ndim != 1 or not 0 < share < 1:
        raise OptionError(f"counts must be [vocabulary] and share in (0, 1), got {list(counts.shape)} and {share}")
    ordered, order = counts.to(torch.float64).sort(stable=True)
    rare = torch.zeros(len(counts), dtype=torch.bool)
    rare[order] = ordered.cumsum(0) <= share * ordered.sum()
    return rare


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """(query, key) pairs of each text, padded to the same number; `valid` is False for padding."""

    positions: Tensor  # int64 [batch, pairs, 2]
    valid: Tensor  # bool [batch, pairs]

    def to(self, device: torch.device) -> Pairs:
        return Pairs(*(x.to(device, non_blocking=True) for x in (self.positions, self.valid)))


@dataclass(frozen=True, slots=True, eq=False)
class TokenSegments:
    """Words or sentences: the index of each token's segment, and the tokens that enter the statistics."""

    indices: Tensor  # int64 [batch, tokens], -1 for special tokens and padding
    counted: Tensor  # bool [batch, tokens]
    inside_by_offset: Tensor  # float64 [batch, bins]: share of the token pairs at each offset within one segment


@dataclass(frozen=True, slots=True, eq=False)
class TokenMetadata:
    """Token metadata of a batch, on the device of its attention."""

    key_sets: Tensor | None = None  # float64 [batch, sets, keys], in the order of `KEY_SETS`
    duplicates: Pairs | None = None  # a query and a key with the same token
    inductions: Pairs | None = None  # a query and the key after another occurrence of its token
    meaning: Tensor | None = None  # [batch, keys, 3, dims]; 0 for special tokens and padding
    ordinary_ids: Tensor | None = None  # int64 [batch, keys]: token ids, -1 for special tokens and padding
    mean_cosines: Tensor | None = None  # [batch, 3, bins]: mean cosine similarity of different tokens by offset
    words: TokenSegments | None = None
    sentences: TokenSegments | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TokenTables:
    """Properties of the vocabulary, from which the token metadata of a batch is computed."""

    rare: Tensor | None  # bool [vocabulary]
    meaning: TokenVectors | None
    segments: Segmenter | None = None
    only: EvidenceKind | None = None  # the evidence to collect, by default all

    def metadata_of(
        self, metadata: BatchMetadata, non_padding: Tensor | None, *, causal: bool, device: torch.device
    ) -> TokenMetadata:
        """Return the token metadata of one batch; `non_padding` is [batch or 1, tokens], on any device."""
        tokens, classes = metadata.tokens, metadata.classes
        if tokens is None:
            return TokenMetadata()
        for name, tensor in (("tokens", tokens), ("classes", classes)):
            if tensor is not None and tensor.device.type != "cpu":
                raise OptionError(
                    f"batch metadata must be on the CPU, to avoid device synchronisation, got {name} on {tensor.device}"
                )
        if classes is not None and classes.shape != tokens.shape:
            raise ShapeError(
                f"tokens and classes must have the same shape, got {list(tokens.shape)} and {list(classes.shape)}"
            )
        special = torch.zeros_like(tokens, dtype=torch.bool)
        punctuation = special
        if classes is not None:
            special, punctuation = classes == SPECIAL, torch.isin(classes, classes.new_tensor(PUNCTUATION))
        result = TokenMetadata()
        if self.only != "rows":
            duplicates, inductions = _occurrences(tokens, ~special, both_ways=not causal)
            result = TokenMetadata(duplicates=duplicates.to(device), inductions=inductions.to(device))
        if self.only == "pairs":
            return result
        rare = torch.zeros_like(special) if self.rare is None else self.rare[tokens] & ~special
        sets = torch.stack([special, punctuation, special | punctuation, rare], 1)
        result = replace(result, key_sets=sets.to(device, torch.float64, non_blocking=True))
        if self.segments is not None:
            words, sentences = (x.to(device, non_blocking=True) for x in self.segments(tokens))
            present = torch.ones_like(words, dtype=torch.bool) if non_padding is None else non_padding.expand_as(words)
            words, sentences = torch.where(present, words, -1), torch.where(present, sentences, -1)
            result = replace(
                result, words=_word_segments(words, present), sentences=_sentence_segments(sentences, present)
            )
        if self.meaning is None:
            return result
        ordinary = (~special).to(device, non_blocking=True)
        if non_padding is not None:
            ordinary = ordinary & non_padding
        on_device = tokens.to(device, non_blocking=True)
        vectors = self.meaning.vectors.to(device, non_blocking=True)[on_device] * ordinary[..., None, None]
        cosines = _mean_cosines(vectors, on_device, ordinary)
        return replace(result, meaning=vectors, ordinary_ids=torch.where(ordinary, on_device, -1), mean_cosines=cosines)


def _word_segments(words: Tensor, present: Tensor) -> TokenSegments:
    """Return words as segments; only tokens of multi-token words count."""
    joined = (words[:, 1:] == words[:, :-1]) & (words[:, 1:] >= 0)  # in one word with the previous token
    pad = torch.nn.functional.pad
    counted = pad(joined, (1, 0)) | pad(joined, (0, 1))
    return TokenSegments(words, counted, _inside_by_offset(words, counted, present))


def _sentence_segments(sentences: Tensor, present: Tensor) -> TokenSegments:
    """Return sentences as segments; only tokens of texts with several sentences count."""
    is_text = sentences >= 0
    last = sentences.amax(-1, keepdim=True)
    first = torch.where(is_text, sentences, last).amin(-1, keepdim=True)
    counted = is_text & (first < last)
    return TokenSegments(sentences, counted, _inside_by_offset(sentences, counted, present))


def _inside_by_offset(indices: Tensor, counted: Tensor, present: Tensor) -> Tensor:
    """Return the probability that the token at an offset from a counted one is in the same segment, [batch, bins].

    `present` are the non-padding tokens. Either all tokens of a segment must be counted, or none.
    """
    batch, length = indices.shape
    inside, pairs = torch.zeros(2, batch, BINS, dtype=torch.float64, device=indices.device)
    center = NEAR + 1
    later_counted, later_present = _following(counted), _following(present)
    same = ((_following(indices) == indices[..., None]) & later_counted).sum(1)
    inside[:, center + 1 : -1], inside[:, 1:center] = same, same.flip(-1)
    pairs[:, center + 1 : -1] = (counted[..., None] & later_present).sum(1)
    pairs[:, 1:center] = (present[..., None] & later_counted).sum(1).flip(-1)
    # Farther pairs: all pairs minus the near ones. A segment of n tokens has n (n - 1) / 2 pairs with the other token
    # before, and as many with it after.
    sizes = torch.zeros(batch, length + 1, dtype=torch.float64, device=indices.device)
    sizes = sizes.scatter_add(1, torch.where(counted, indices + 1, 0), counted.to(torch.float64))[:, 1:]
    before = present.cumsum(-1) - present.to(torch.int64)
    after = present.sum(-1, keepdim=True) - before - present.to(torch.int64)
    for far, side, others in ((0, slice(0, center), before), (-1, slice(center + 1, BINS), after)):
        inside[:, far] = (sizes * (sizes - 1)).sum(-1) / 2 - inside[:, side].sum(-1)
        pairs[:, far] = (others * counted).sum(-1) - pairs[:, side].sum(-1)
    return inside / pairs.clamp_min(1.0)


def _following(values: Tensor) -> Tensor:
    """Return the values of the `NEAR` tokens after each one, [batch, tokens, NEAR]; 0 past the end."""
    return torch.nn.functional.pad(values, (0, NEAR)).unfold(-1, NEAR + 1, 1)[..., 1:]


def _occurrences(tokens: Tensor, counted: Tensor, *, both_ways: bool) -> tuple[Pairs, Pairs]:
    """Return pairs of each token with its nearest other occurrences, and with the tokens after those."""
    length = tokens.shape[1]
    uncounted = torch.iinfo(torch.int64).max  # in place of the ids of tokens that do not count; sorted last
    ordered, order = torch.where(counted, tokens.to(torch.int64), uncounted).sort(stable=True)
    pairs, is_pair = (
        [torch.zeros(len(tokens), 0, 2, dtype=torch.int64)],
        [torch.zeros(len(tokens), 0, dtype=torch.bool)],
    )
    for step in range(1, min(NEAREST, length - 1) + 1):
        equal = (ordered[:, step:] == ordered[:, :-step]) & (ordered[:, step:] != uncounted)
        if not bool(equal.any()):
            break
        matches = torch.stack([order[:, step:], order[:, :-step]], -1)  # a later and an earlier occurrence
        both = (matches, matches.flip(-1)) if both_ways else (matches,)
        pairs.extend(both)
        is_pair.extend([equal] * len(both))
    same, valid = torch.cat(pairs, 1), torch.cat(is_pair, 1)
    after = same + torch.tensor([0, 1])
    # The token after the occurrence directly before the query is the query itself.
    is_other = (after[..., 1] < length) & (after[..., 1] != after[..., 0])
    return _compact_pairs(same, valid), _compact_pairs(after, valid & is_other)


def _compact_pairs(positions: Tensor, valid: Tensor) -> Pairs:
    """Move the valid pairs [batch, pairs, 2] of each row to the front, in order, and trim the padding."""
    counts = valid.sum(-1)
    is_valid = torch.arange(int(counts.max())) < counts[:, None]
    compact = torch.zeros(*is_valid.shape, 2, dtype=torch.int64)
    compact[is_valid] = positions[valid]
    return Pairs(compact, is_valid)


def _mean_cosines(vectors: Tensor, tokens: Tensor, ordinary: Tensor) -> Tensor:
    """Return the mean cosine similarity of different tokens by offset, [batch, 3, bins]; 0 where there are none.

    Up to an offset of `NEAR` all pairs are compared. The sum over farther pairs is the remainder of the sum over all
    pairs, which equals the squared norm of the sum of the vectors.
    """
    batch, length = tokens.shape
    vectors = vectors.to(torch.float64)
    sums, counts = vectors.new_zeros(batch, 3, NEAR + 1), vectors.new_zeros(batch, 1, NEAR + 1)
    different = ordinary[..., None] & _following(ordinary) & (_following(tokens) != tokens[..., None])
    counts[:, 0, 1:] = different.sum(1)
    followed = torch.nn.functional.pad(vectors.transpose(1, 2), (0, 0, 0, NEAR))  # [batch, 3, tokens + NEAR, dims]
    for start in range(0, length, _ROWS):
        rows = min(_ROWS, length - start)
        products = followed[:, :, start : start + rows] @ followed[:, :, start + 1 : start + rows + NEAR].mT
        # The `NEAR` tokens after each one: row i from column i on.
        (*outer, stride, _) = products.stride()
        near = products.as_strided((batch, 3, rows, NEAR), (*outer, stride + 1, 1))
        sums[..., 1:] += (near * different[:, None, start : start + rows]).sum(2)
    # Number of pairs of equal tokens, including each with itself: the sum of squared token counts.
    ordered = torch.where(ordinary, tokens, -1).sort(-1).values
    starts = torch.ones_like(ordered, dtype=torch.bool)
    starts[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    token_counts = torch.zeros(batch, length, dtype=torch.float64, device=tokens.device)
    token_counts = token_counts.scatter_add(1, starts.cumsum(-1) - 1, (ordered >= 0).to(torch.float64))
    equal = token_counts.square().sum(-1)
    total_pairs = ordinary.sum(-1).to(torch.float64).square()
    far_count = (total_pairs - equal - 2 * counts[:, 0].sum(-1)).clamp_min(0.0)[:, None]
    far_sum = (
        vectors.sum(1).square().sum(-1) - equal[:, None] * _mean_squared_norm(vectors, ordinary) - 2 * sums.sum(-1)
    )
    far = torch.where(far_count > 0.5, far_sum / far_count.clamp_min(1.0), 0.0)[..., None]
    near = sums / counts.clamp_min(1.0)
    return torch.cat([far, near.flip(-1)[..., :-1], near, far], -1)


def _mean_squared_norm(vectors: Tensor, ordinary: Tensor) -> Tensor:
    """Return the mean squared norm of the vectors: 1, except for a token whose embedding is the mean embedding."""
    return vectors.square().sum((1, 3)) / ordinary.sum(-1, keepdim=True).clamp_min(1)
