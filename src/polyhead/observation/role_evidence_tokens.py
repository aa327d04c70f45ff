"""What the tokens of a batch say before any head is looked at: which are alike, which are rare, which are punctuation.

All of it is worked out on the CPU, where the tokens lie, once for all layers, and handed to the device without waiting.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from polyhead.errors import OptionError, ShapeError
from polyhead.observation.collectors import BatchMetadata

MEANING_DIMS = 40  # of a token's meaning: three of them and one number more are values no wider than 128
NEAREST = 4  # so many other occurrences of its token are looked up for a row, on either side
NEAR = 64  # every offset up to here has a bin of its own, and one more on either side holds all beyond
BINS = 2 * NEAR + 3
KEY_SETS = ("special", "punctuation", "delimiter", "rare")
# From token ids [batch, tokens] to the number of the word and of the sentence that each token is in, -1 for none.
Segments = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class Meaning:
    """A vector of length 1 for each token, and twice the same vectors dealt out anew, which mean nothing any more."""

    vectors: Tensor  # [vocabulary, 3, dims]

    @classmethod
    def of(cls, embedding: Tensor, *, dims: int = MEANING_DIMS, seed: int = 0) -> Meaning:
        """From token embeddings [vocabulary, width]: centred, their leading principal components, to length 1.

        What all embeddings share says nothing of a token, and the rest is wide; the cosine of two tokens is that of
        their leading components.
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
    """Which tokens are rare, [vocabulary]: the least frequent ones that together make up at most `share` of a text.

    >>> rare_tokens(torch.tensor([0, 1, 50, 3, 46]), 0.05)
    tensor([ True,  True, False,  True, False])
    """
    if counts.ndim != 1 or not 0 < share < 1:
        raise OptionError(f"counts must be one a token and share between 0 and 1, got {list(counts.shape)} and {share}")
    ordered, order = counts.to(torch.float64).sort(stable=True)
    rare = torch.zeros(len(counts), dtype=torch.bool)
    rare[order] = ordered.cumsum(0) <= share * ordered.sum()
    return rare


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """Some (query, key) of each text, padded to one number: `there` is False for what was added."""

    places: Tensor  # int64 [batch, pairs, 2]
    there: Tensor  # bool [batch, pairs]

    def to(self, device: torch.device) -> Pairs:
        return Pairs(*(x.to(device, non_blocking=True) for x in (self.places, self.there)))


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Words or sentences: which one each token is in, and which tokens are asked how much of them stays there."""

    numbers: Tensor  # int64 [batch, tokens], -1 for special tokens and padding
    requested: Tensor  # bool [batch, tokens]


@dataclass(frozen=True, slots=True, eq=False)
class TokenMetadata:
    """What is known of the tokens of a batch, on the device of its attention."""

    key_sets: Tensor | None = None  # float64 [batch, sets, keys]; the order is that of `KEY_SETS`
    duplicates: Pairs | None = None  # a query, and a key of the same token
    inductions: Pairs | None = None  # a query, and the key after another occurrence of its token
    meaning: Tensor | None = None  # [batch, keys, 3, dims]; 0 for what stands for no text
    ordinary: Tensor | None = None  # bool [batch, keys]: tokens that stand for text
    alike: Tensor | None = None  # [batch, 3, bins]: the mean cosine of different tokens at each offset
    words: Pieces | None = None
    sentences: Pieces | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TokenTables:
    """What is known of the vocabulary, and which classes of `BatchMetadata.classes` are which."""

    special: tuple[int, ...]
    punctuation: tuple[int, ...]
    rare: Tensor | None  # bool [vocabulary]
    meaning: Meaning | None
    segments: Segments | None = None

    def read(
        self, metadata: BatchMetadata, real: Tensor | None, *, causal: bool, device: torch.device
    ) -> TokenMetadata:
        """Of one batch; `real` [batch or 1, tokens] may lie on the device."""
        tokens, classes = metadata.tokens, metadata.classes
        if tokens is None:
            return TokenMetadata()
        for name, tensor in (("tokens", tokens), ("classes", classes)):
            if tensor is not None and tensor.device.type != "cpu":
                raise OptionError(f"notes lie on the CPU, so that nobody waits for a device; got {name} on a device")
        if classes is not None and classes.shape != tokens.shape:
            raise ShapeError(f"every token has a class, got {list(tokens.shape)} and {list(classes.shape)}")
        special = torch.zeros_like(tokens, dtype=torch.bool)
        punctuation = special
        if classes is not None:
            special, punctuation = (_is_one_of(classes, which) for which in (self.special, self.punctuation))
        rare = torch.zeros_like(special) if self.rare is None else self.rare[tokens] & ~special
        sets = torch.stack([special, punctuation, special | punctuation, rare], 1)
        duplicates, inductions = _occurrences(tokens, ~special, both_ways=not causal)
        found = TokenMetadata(
            sets.to(device, torch.float64, non_blocking=True), duplicates.to(device), inductions.to(device)
        )
        if self.segments is not None:
            words, sentences = (x.to(device, non_blocking=True) for x in self.segments(tokens))
            if real is not None:
                words, sentences = torch.where(real, words, -1), torch.where(real, sentences, -1)
            found = replace(found, words=_of_several_tokens(words), sentences=_beside_others(sentences))
        if self.meaning is None:
            return found
        ordinary = (~special).to(device, non_blocking=True)
        if real is not None:
            ordinary = ordinary & real
        on_device = tokens.to(device, non_blocking=True)
        vectors = self.meaning.vectors.to(device, non_blocking=True)[on_device] * ordinary[..., None, None]
        alike = _alike(vectors, on_device, ordinary)
        return replace(found, meaning=vectors, ordinary=ordinary, alike=alike)


def _is_one_of(classes: Tensor, which: tuple[int, ...]) -> Tensor:
    return torch.isin(classes, torch.tensor(which, dtype=classes.dtype))


def _of_several_tokens(words: Tensor) -> Pieces:
    """A word of one token has nothing to stay in."""
    joined = (words[:, 1:] == words[:, :-1]) & (words[:, 1:] >= 0)  # of a token and the one before it
    pad = torch.nn.functional.pad
    return Pieces(words, pad(joined, (1, 0)) | pad(joined, (0, 1)))


def _beside_others(sentences: Tensor) -> Pieces:
    """A sentence that is all of a text has nothing to stay in."""
    there = sentences >= 0
    last = sentences.amax(-1, keepdim=True)
    first = torch.where(there, sentences, last).amin(-1, keepdim=True)
    return Pieces(sentences, there & (first < last))


def _occurrences(tokens: Tensor, counted: Tensor, *, both_ways: bool) -> tuple[Pairs, Pairs]:
    """Each token with the nearest others like it, and with what follows those."""
    length = tokens.shape[1]
    same, after = [], []
    for row, wanted in zip(tokens, counted, strict=True):
        places = wanted.nonzero().flatten()
        ordered, order = row[places].sort(stable=True)
        places = places[order]
        found = []
        for step in range(1, min(NEAREST, len(places) - 1) + 1):
            equal = ordered[step:] == ordered[:-step]
            later, earlier = places[step:][equal], places[:-step][equal]
            if not len(later):
                break
            found.append(torch.stack([later, earlier], 1))
            if both_ways:
                found.append(torch.stack([earlier, later], 1))
        pairs = torch.cat(found) if len(found) else torch.zeros(0, 2, dtype=torch.int64)
        same.append(pairs)
        followed = pairs + torch.tensor([0, 1])
        # What follows the occurrence just before the query is the query itself.
        after.append(followed[(followed[:, 1] < length) & (followed[:, 1] != followed[:, 0])])
    return _padded(same), _padded(after)


def _padded(rows: list[Tensor]) -> Pairs:
    most = max(len(row) for row in rows)
    places = torch.zeros(len(rows), most, 2, dtype=torch.int64)
    there = torch.zeros(len(rows), most, dtype=torch.bool)
    for index, row in enumerate(rows):
        places[index, : len(row)], there[index, : len(row)] = row, True
    return Pairs(places, there)


def _alike(vectors: Tensor, tokens: Tensor, ordinary: Tensor) -> Tensor:
    """The mean cosine of two different tokens of a text by offset, [batch, 3, bins]; 0 where there are none.

    At every offset up to `NEAR` all pairs are compared. Those beyond are what is left of the sum over all pairs, which
    is the square of the sum of the vectors.
    """
    batch, length = tokens.shape
    vectors = vectors.to(torch.float64)
    sums, counts = vectors.new_zeros(batch, 3, NEAR + 1), vectors.new_zeros(batch, 1, NEAR + 1)
    for offset in range(1, min(NEAR, length - 1) + 1):
        different = ordinary[:, offset:] & ordinary[:, :-offset] & (tokens[:, offset:] != tokens[:, :-offset])
        cosines = (vectors[:, offset:] * vectors[:, :-offset]).sum(-1)
        sums[:, :, offset] = (cosines * different[..., None]).sum(1)
        counts[:, 0, offset] = different.sum(1)
    # How many pairs are of equal tokens, each with itself included: the squares of how often each occurs.
    ordered = torch.where(ordinary, tokens, -1).sort(-1).values
    starts = torch.ones_like(ordered, dtype=torch.bool)
    starts[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    runs = torch.zeros(batch, length, dtype=torch.float64, device=tokens.device)
    runs = runs.scatter_add(1, starts.cumsum(-1) - 1, (ordered >= 0).to(torch.float64))
    equal = runs.square().sum(-1)
    every = ordinary.sum(-1).to(torch.float64).square()
    far_count = (every - equal - 2 * counts[:, 0].sum(-1)).clamp_min(0.0)[:, None]
    far_sum = vectors.sum(1).square().sum(-1) - equal[:, None] * _lengths(vectors, ordinary) - 2 * sums.sum(-1)
    far = torch.where(far_count > 0.5, far_sum / far_count.clamp_min(1.0), 0.0)[..., None]
    near = sums / counts.clamp_min(1.0)
    return torch.cat([far, near.flip(-1)[..., :-1], near, far], -1)


def _lengths(vectors: Tensor, ordinary: Tensor) -> Tensor:
    """The mean squared length of the vectors: 1, but for a token whose embedding is the mean of all."""
    return vectors.square().sum((1, 3)) / ordinary.sum(-1, keepdim=True).clamp_min(1)
