"""Copy and anti-copy by the weights alone, with an interval over words and a null of random heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polyhead.errors import ShapeError

MOST_WORDS = 8192  # of a larger vocabulary so many are drawn
GROUPS = 10
RANDOM_HEADS = 32
_NOTHING = 1e-5  # of the product of the sizes: a circuit this small is what rounding leaves of none at all


@dataclass(frozen=True, slots=True, eq=False)
class Copying:
    """Whether heads make the tokens they attend to likelier (towards 1) or less likely (towards -1), [heads] each."""

    score: Tensor
    error: Tensor  # standard error over words, by leaving out one group of them after the other
    null: float  # the mean of random heads and 1.96 of their standard deviations, in size


def copying_scores(value: Tensor, output: Tensor, embedding: Tensor, unembedding: Tensor, *, seed: int = 0) -> Copying:
    """The sum of the eigenvalues of E W_V W_O U^T over that of their sizes, as `circuits.copying` has it.

    Args:
        value: [heads, embed_dim, value_dim].
        output: [heads, value_dim, embed_dim].
        embedding, unembedding: [vocabulary, embed_dim].
    """
    if embedding.ndim != 2 or embedding.shape != unembedding.shape or embedding.shape[1] != value.shape[1]:
        raise ShapeError(
            f"embedding and unembedding must be [vocabulary, {value.shape[1]}], "
            f"got shapes {list(embedding.shape)} and {list(unembedding.shape)}"
        )
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randperm(len(embedding), generator=generator)[:MOST_WORDS]
    words, unwords = (x.detach()[drawn.to(x.device)].cpu().double() for x in (embedding, unembedding))
    # What all words have in common copies none of them, and a logit that all words gain changes no probability.
    words, unwords = words - words.mean(0), unwords - unwords.mean(0)
    value, output = (x.detach().cpu().double() for x in (value, output))
    groups = [(words[start::GROUPS], unwords[start::GROUPS]) for start in range(GROUPS)]
    # [groups, heads, value_dim, value_dim]: the eigenvalues of a product are those of its factors in the other order.
    parts = torch.stack([(output @ u.T) @ (e @ value) for e, u in groups])
    whole = parts.sum(0)
    sizes = torch.linalg.matrix_norm(whole)
    most = torch.linalg.matrix_norm(value) * torch.linalg.matrix_norm(output) * words.norm() * unwords.norm()
    says_something = sizes > _NOTHING * most
    score = torch.where(says_something, _share(whole), 0.0)
    without = torch.stack([_share(whole - part) for part in parts])
    error = (without - without.mean(0)).square().sum(0).mul((GROUPS - 1) / GROUPS).sqrt()

    dim = value.shape[2]
    between = unwords.T @ words
    random = [
        torch.randn(RANDOM_HEADS, *shape, generator=generator, dtype=torch.float64)
        for shape in ((value.shape[1], dim), (dim, value.shape[1]))
    ]
    chance = _share(random[1] @ between @ random[0])
    null = float(chance.mean().abs() + 1.96 * chance.std())
    return Copying(score, torch.where(says_something, error, 0.0), null)


def _share(circuits: Tensor) -> Tensor:
    found = torch.linalg.eigvals(circuits)
    sizes = found.abs().sum(-1)
    return found.real.sum(-1) / torch.where(sizes > 0, sizes, torch.nan)
