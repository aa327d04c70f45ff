"""Numbers of attention weights by the definitions in the documentation, row by row; no code of polyhead."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

WINDOW = 8  # a key up to so far away is near
NEAR = 64  # offsets up to this one can be that of a positional head
COPY_ROWS = 64  # rows of a text that are compared with each other
COPY_WEIGHT = 0.1  # a row with less on every ordinary token attends to none
# Statistics of single rows, of which the table also has the standard deviation and the maximum.
ROW_STATISTICS = (
    "entropy", "normalized_entropy", "confidence", "max_logit", "mean_distance", "sink_mass", "self_mass",
    "previous_mass", "next_mass", "window_mass",
)  # fmt: skip
Measures = dict[str, tuple[Tensor, Tensor]]  # values [heads, rows], and their weights in a mean, [heads or 1, rows]


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of one text."""

    ids: Tensor
    special: Tensor  # bool [tokens], as all below
    punctuation: Tensor
    rare: Tensor
    words: Tensor  # index of each token's word, -1 for special tokens
    sentences: Tensor


def uniform(visible: Tensor) -> Tensor:
    """Return the weights of a head that attends to all visible keys alike, [1, queries, keys]."""
    return (visible / visible.sum(-1, keepdim=True))[None].double()


def offsets_of(visible: Tensor) -> Tensor:
    """Return the position of each key from its query, [queries, keys]."""
    position = torch.arange(len(visible))
    return position - position[:, None]


def row_measures(weights: Tensor, visible: Tensor, tokens: Tokens) -> Measures:
    """Return all measures of a text that are means over its rows, for weights [heads, queries, keys]."""
    offset, count, everywhere = offsets_of(visible), visible.sum(-1), torch.ones(1, len(visible), dtype=torch.bool)
    entropy, (confidence, best) = torch.special.entr(weights).sum(-1), weights.max(-1)
    several = (count > 1)[None]
    distance = best - torch.arange(len(visible))
    far = visible & (offset.abs() > WINDOW) & (torch.arange(len(visible)) > 0)

    def mass(keys: Tensor) -> tuple[Tensor, Tensor]:
        return (weights * keys).sum(-1), everywhere

    found = {
        "entropy": (entropy, everywhere),
        "normalized_entropy": (entropy / count.clamp_min(2).log(), several),
        "confidence": (confidence, everywhere),
        "mean_distance": ((weights * offset.abs()).sum(-1), everywhere),
        "sink_mass": (weights[..., 0], everywhere),
        "self_mass": mass(offset == 0),
        "previous_mass": mass(offset == -1),
        "next_mass": mass(offset == 1),
        "window_mass": mass(offset.abs() <= WINDOW),
        "special_mass": mass(tokens.special),
        "punctuation_mass": mass(tokens.punctuation),
        "delimiter": mass(tokens.special | tokens.punctuation),
        "rare-token": mass(tokens.rare),
        "long-range": (
            (confidence > 0.5) & (distance.abs() > WINDOW) & (best > 0),
            far.any(-1)[None],
        ),
    }
    found |= {"broad": found["normalized_entropy"], "sink": found["sink_mass"], "local": found["window_mass"]}
    for role, step in (("previous", -1), ("self", 0), ("next", 1)):
        found[role] = distance == step, (visible & (offset == step)).any(-1)[None]
    for name, groups in (("word", tokens.words), ("sentence", tokens.sentences)):
        inside = (groups[:, None] == groups) & (groups >= 0) & (offset != 0)
        # Words of several tokens; sentences of texts with several.
        counted = inside.any(-1) if name == "word" else (groups >= 0) & (len(groups[groups >= 0].unique()) > 1)
        others = (weights * (offset != 0)).sum(-1) * counted
        found[f"{name}_share"] = (weights * inside).sum(-1) / others.clamp_min(1e-300), others
        found[f"{name}_share_chance"] = _at_same_distances(weights, inside, visible, counted), others
    return found


def _at_same_distances(weights: Tensor, inside: Tensor, visible: Tensor, counted: Tensor) -> Tensor:
    """Return the share of a text's attention that is inside if it depends on the distance alone, [heads, rows].

    Distances over `NEAR` tokens count as one, on each side.
    """
    offset, size = offsets_of(visible).clamp(-NEAR - 1, NEAR + 1), len(visible)
    index = (offset + NEAR + 1).flatten()
    pairs = (counted[:, None] & (offset != 0)).flatten()
    total = torch.zeros(2 * NEAR + 3, dtype=torch.float64).index_add(0, index, pairs.double())
    share = torch.zeros(2 * NEAR + 3, dtype=torch.float64).index_add(0, index, (pairs & inside.flatten()).double())
    share = (share / total.clamp_min(1))[index].view_as(offset) * pairs.view_as(offset)
    others = (weights * (offset != 0)).sum(-1) * counted
    expected = (weights * share).sum((-1, -2)) / others.sum(-1).clamp_min(1e-300)
    return expected[:, None].expand(-1, size)


def entropy_of_random_logits(visible: Tensor) -> tuple[Tensor, Tensor]:
    """Return the expected share of the maximum entropy if logits are random with variance 1, [1, rows]."""
    count = visible.sum(-1)
    several = count.clamp_min(2)
    return (1 - (1 - 1 / several) / (2 * several.log()))[None].double(), (count > 1)[None]


def hits_by_offset(weights: Tensor, visible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return by offset from -NEAR to NEAR: rows whose largest weight is there, [heads, offsets], rows with a visible
    key there, and the weight there of uniform attention."""
    distance = weights.argmax(-1) - torch.arange(len(visible))
    steps = torch.arange(-NEAR, NEAR + 1)
    hits = torch.stack([(distance == step).sum(-1) for step in steps], -1).double()
    chance = [uniform(visible)[0].diagonal(int(step)).sum() for step in steps]
    rows = torch.stack([visible.diagonal(int(step)).sum() for step in steps])
    return hits, rows.double(), torch.stack(chance)


def repeated_measures(weights: Tensor, visible: Tensor, tokens: Tokens) -> Measures:
    """Return duplicate-token and induction, over rows with another visible occurrence of their token."""
    same = (tokens.ids[:, None] == tokens.ids) & ~tokens.special & ~tokens.special[:, None] & (offsets_of(visible) != 0)
    after = torch.zeros_like(same)
    after[:, 1:] = same[:, :-1]
    if bool((visible == visible.tril()).all()):  # a causal head knows the occurrences before its token alone
        after[:, 1:] &= visible[:, :-1]
    found = {}
    for role, keys in (
        ("duplicate-token", same & visible),
        ("induction", after & visible & (offsets_of(visible) != 0)),
    ):
        found[role] = (weights * keys).sum(-1), keys.any(-1)[None]
    return found


def copied(weights: Tensor, written: Tensor, directions: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor]:
    """Return pairs of rows in which the attended token wins, all pairs, and rows in a pair, [heads] each.

    `written` [heads, rows, width] is what heads add to the stream, `directions` [rows, width] raise the logits of the
    text's tokens.
    """
    size = len(tokens.ids)
    rows = (torch.arange(COPY_ROWS) * size // COPY_ROWS).unique()
    ordinary = ~tokens.special & (torch.arange(size) > 0)
    allowed = ordinary & (rows[:, None] != torch.arange(size))
    weight, keys = torch.where(allowed, weights[:, rows], 0.0).max(-1)
    attends, ids = weight >= COPY_WEIGHT, tokens.ids[keys]
    effect = written[:, rows] @ directions[keys].mT
    own = effect.diagonal(dim1=1, dim2=2)[..., None]
    compared = attends[..., None] & attends[:, None] & (ids[..., None] != ids[:, None])
    wins = ((own > effect).double() + (own == effect).double() / 2) * compared
    return wins.sum((1, 2)), compared.sum((1, 2)).double(), compared.any(-1).sum(-1).double()


def similarity(weights: Tensor, vectors: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Return the cosine to attended tokens above that of the same offsets, weighted by attention, and the weight.

    `vectors` are unit vectors of the tokens, [tokens, dims]. Pairs of equal tokens and special tokens are left out.
    """
    size = len(tokens.ids)
    ordinary = ~tokens.special
    pairs = (tokens.ids[:, None] != tokens.ids) & ordinary & ordinary[:, None]
    cosines, offset = vectors @ vectors.T, offsets_of(pairs)
    index = (offset + size).flatten()
    zeros = torch.zeros(2 * size, dtype=torch.float64)
    total = zeros.index_add(0, index, pairs.flatten().double()).clamp_min(1)
    mean = zeros.index_add(0, index, (cosines * pairs).flatten()) / total
    above = (cosines - mean[index].view_as(cosines)) * pairs
    return (weights * above).sum((1, 2)), (weights * pairs).sum((1, 2))


def unit_vectors(embedding: Tensor, dims: int = 40) -> Tensor:
    """Return the leading principal components of token embeddings, at unit length."""
    rows = embedding.detach().double()
    rows = rows - rows.mean(0)
    _, axes = torch.linalg.eigh(rows.T @ rows)
    rows = rows @ axes[:, -dims:]
    return rows / rows.norm(dim=-1, keepdim=True).clamp_min(1e-30)


def predictable(outputs: Tensor, output_weights: Tensor, half: Tensor) -> tuple[Tensor, Tensor]:
    """Return the shares of each head's contribution that other heads predict linearly on held-out tokens.

    Ridge regressions are fitted on the tokens of one half and evaluated on the other, both ways. The penalty is the
    number of predictors per token, in units of a head's mean variance.

    Args:
        outputs: [tokens, heads, dim] of one layer.
        output_weights: [heads, dim, width].
        half: 0 or 1 for each token.

    Returns:
        On all tokens, on those of the first and of the second half: by all others [3, heads], by one [3, heads, heads].
    """
    outputs = outputs.double()
    outputs = outputs / (outputs - outputs.mean(0)).square().mean((0, 2)).sqrt()[:, None]
    heads = outputs.shape[1]
    lost, lost_alone, total = torch.zeros(2, heads), torch.zeros(2, heads, heads), torch.zeros(2, heads)
    for test in (0, 1):
        fit, held = outputs[half != test], outputs[half == test]
        mean, count = fit.mean(0), len(fit)
        for head in range(heads):
            target = (held[:, head] - mean[head]) @ output_weights[head]
            centred = (held[:, head] - held[:, head].mean(0)) @ output_weights[head]
            total[test, head] = centred.square().sum()
            others = [x for x in range(heads) if x != head]
            for known, place in [(others, None), *(([x], x) for x in others)]:
                x, y = (fit[:, known] - mean[known]).flatten(1), fit[:, head] - mean[head]
                penalty = torch.eye(x.shape[1], dtype=torch.float64) * x.shape[1] / count
                solved = torch.linalg.solve(x.T @ x / count + penalty, x.T @ y / count)
                error = target - (held[:, known] - mean[known]).flatten(1) @ solved @ output_weights[head]
                (lost if place is None else lost_alone[:, :, place])[test, head] = error.square().sum()
    both = [torch.stack((x.sum(0), *x)) for x in (lost, lost_alone, total)]
    return 1 - both[0] / both[2], 1 - both[1] / both[2][..., None]


def eigenvalue_share(circuit: Tensor) -> float:
    """Return the sum of the eigenvalues over the sum of their magnitudes."""
    values = torch.linalg.eigvals(circuit)
    return float(values.real.sum() / values.abs().sum().clamp_min(1e-300))


def effective_rank(outputs: Tensor, output_weights: Tensor) -> float:
    """Return exp of the entropy of the spectrum of a head's contributions o W, outputs o [tokens, dim].

    The nonzero eigenvalues of their covariance W^T C W are those of C W W^T.
    """
    covariance = torch.cov(outputs.double().T)
    spectrum = torch.linalg.eigvals(covariance @ output_weights @ output_weights.T).real.clamp_min(0)
    return math.exp(float(torch.special.entr(spectrum / spectrum.sum()).sum()))


def top_share(left: Tensor, right: Tensor) -> Tensor:
    """Return the share of the largest squared singular value of A B, [heads, width, dim] and [heads, dim, width].

    The squared singular values are the eigenvalues of A^T A B B^T.
    """
    squares = torch.linalg.eigvals(left.mT @ left @ right @ right.mT).real
    return squares.amax(-1) / squares.sum(-1)
