"""Copying scores of heads from the weights alone, with a standard error over words and a null of random heads.

The score is the eigenvalue summary statistic of Elhage et al. (2021), "A Mathematical Framework for Transformer
Circuits".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polyhead.analysis.circuits import check_embeddings, eigenvalue_share

MAX_WORDS = 8192  # a larger vocabulary is subsampled to so many
GROUPS = 10
RANDOM_HEADS = 32
_NEGLIGIBLE = 1e-5  # of the product of the norms: a circuit this small is rounding error


@dataclass(frozen=True, slots=True, eq=False)
class Copying:
    """Copying scores [heads]: towards 1 a head raises the logits of tokens it attends to, towards -1 it lowers them."""

    score: Tensor
    error: Tensor  # standard error over words, by a delete-a-group jackknife
    null: float  # |mean| plus 1.96 standard deviations of random heads


def copying_scores(value: Tensor, output: Tensor, embedding: Tensor, unembedding: Tensor, *, seed: int = 0) -> Copying:
    """Return the sum of the eigenvalues of E W_V W_O U^T over the sum of their magnitudes, as `circuits.copying` does.

    Args:
        value: [heads, embed_dim, value_dim].
        output: [heads, value_dim, embed_dim].
        embedding, unembedding: [vocabulary, embed_dim].
    """
    check_embeddings(embedding, unembedding, value.shape[1])
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randperm(len(embedding), generator=generator)[:MAX_WORDS]
    words, unwords = (x.detach()[drawn.to(x.device)].cpu().double() for x in (embedding, unembedding))
    # The mean embedding identifies no word, and adding one constant to all logits changes no probability.
    words, unwords = words - words.mean(0), unwords - unwords.mean(0)
    value, output = (x.detach().cpu().double() for x in (value, output))
    groups = [(words[start::GROUPS], unwords[start::GROUPS]) for start in range(GROUPS)]
    # [groups, heads, value_dim, value_dim]: AB and BA have the same nonzero eigenvalues.
    parts = torch.stack([(output @ u.T) @ (e @ value) for e, u in groups])
    circuit = parts.sum(0)
    norms = torch.linalg.matrix_norm(circuit)
    upper_bound = torch.linalg.matrix_norm(value) * torch.linalg.matrix_norm(output) * words.norm() * unwords.norm()
    is_significant = norms > _NEGLIGIBLE * upper_bound
    score = torch.where(is_significant, eigenvalue_share(circuit), 0.0)
    without = torch.stack([eigenvalue_share(circuit - part) for part in parts])
    error = (without - without.mean(0)).square().sum(0).mul((GROUPS - 1) / GROUPS).sqrt()

    dim = value.shape[2]
    between = unwords.T @ words
    random = [
        torch.randn(RANDOM_HEADS, *shape, generator=generator, dtype=torch.float64)
        for shape in ((value.shape[1], dim), (dim, value.shape[1]))
    ]
    chance = eigenvalue_share(random[1] @ between @ random[0])
    null = float(chance.mean().abs() + 1.96 * chance.std())
    return Copying(score, torch.where(is_significant, error, 0.0), null)
