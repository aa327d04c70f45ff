"""Copying scores of heads from the weights alone, with a standard error over words and a null of random heads.

The score is the eigenvalue summary statistic of Elhage et al. (2021), "A Mathematical Framework for Transformer
Circuits".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polyhead.analysis.circuits import eigenvalue_share
from polyhead.errors import ShapeError

MIN_WORDS = 8192  # drawn from a larger vocabulary at least
MAX_PRODUCTS = 1 << 34  # multiplications of U^T E, which limit the words beyond them: all of 49,152 at a width of 576
GROUPS = 10
RANDOM_HEADS = 32
_NEGLIGIBLE = 1e-5  # of the product of the norms: a circuit this small is rounding error


@dataclass(frozen=True, slots=True, eq=False)
class Copying:
    """Copying scores [heads]: 1 if the OV circuits map tokens to higher logits of themselves, -1 if to lower ones."""

    score: Tensor
    error: Tensor  # standard error over words, by a delete-a-group jackknife
    null: float  # |mean| plus 1.96 standard deviations of random heads


class Words:
    """The embeddings of a vocabulary in and out, prepared once for the heads of all layers.

    Args:
        embedding, unembedding: [vocabulary, embed_dim].
        seed: of the words that are drawn from a large vocabulary, and of random heads.
    """

    def __init__(self, embedding: Tensor, unembedding: Tensor, *, seed: int = 0) -> None:
        if embedding.ndim != 2 or embedding.shape != unembedding.shape:
            raise ShapeError(
                "embedding and unembedding must be [vocabulary, embed_dim], "
                f"got shapes {list(embedding.shape)} and {list(unembedding.shape)}"
            )
        self.width = embedding.shape[1]
        # Products in float32 take half the time; they change the scores of SmolLM2 by less than 1e-6.
        self._dtype = torch.promote_types(embedding.dtype, torch.float32)
        generator = torch.Generator().manual_seed(seed)
        count = max(MIN_WORDS, MAX_PRODUCTS // self.width**2)
        drawn = torch.randperm(len(embedding), generator=generator)[:count]
        groups = [drawn[start::GROUPS] for start in range(GROUPS)]

        def rows(x: Tensor, group: Tensor) -> Tensor:
            return x.detach()[group.to(x.device)].cpu().double()

        # The mean embedding identifies no word, and adding one constant to all logits changes no probability.
        means = [sum(rows(x, group).sum(0) for group in groups) / len(drawn) for x in (embedding, unembedding)]

        def centred(group: Tensor) -> list[Tensor]:
            pairs = zip((unembedding, embedding), reversed(means), strict=True)
            return [(rows(x, group) - mean).to(self._dtype) for x, mean in pairs]

        squares = torch.stack([torch.stack([x.double().square().sum() for x in centred(group)]) for group in groups])
        self.norm = squares.sum(0).sqrt().prod()
        self._groups: list[list[Tensor]] = []
        self._products: Tensor | None = None
        if self.width * GROUPS < 2 * len(drawn):  # then U^T E of each group is smaller than U and E
            self._products = torch.stack([u.T @ e for u, e in map(centred, groups)])
        else:
            self._groups = list(map(centred, groups))
        self._generator_state, self._nulls = generator.get_state(), dict[int, float]()

    def circuits(self, value: Tensor, output: Tensor) -> Tensor:
        """Return W_O U^T E W_V, float64 [groups, heads, value_dim, value_dim].

        It has the nonzero eigenvalues of E W_V W_O U^T. Heads that share a value matrix share the larger product.
        """
        sharing = len(output) // len(value)
        value, output = (x.to(self._dtype).contiguous() for x in (value, output))
        if self._products is not None:
            parts = [output @ (product @ value).repeat_interleave(sharing, 0) for product in self._products]
        else:
            parts = [(output @ u.T) @ (e @ value).repeat_interleave(sharing, 0) for u, e in self._groups]
        return torch.stack(parts).double()

    def null(self, dim: int) -> float:
        """Return |mean| plus 1.96 standard deviations of the scores of random heads of `dim` channels."""
        if dim not in self._nulls:
            generator = torch.Generator()
            generator.set_state(self._generator_state)
            value, output = (
                torch.randn(RANDOM_HEADS, *shape, generator=generator, dtype=torch.float64)
                for shape in ((self.width, dim), (dim, self.width))
            )
            scores = eigenvalue_share(self.circuits(value, output).sum(0))
            self._nulls[dim] = float(scores.mean().abs() + 1.96 * scores.std())
        return self._nulls[dim]


def copying_scores(value: Tensor, output: Tensor, words: Words) -> Copying:
    """Return the sum of the eigenvalues of E W_V W_O U^T over the sum of their magnitudes.

    They are 1 if attending to a token raises its own logit most, -1 if it lowers it, and around 0, within about
    1 / sqrt(rank), for random heads.

    Args:
        value: [kv_heads, embed_dim, value_dim].
        output: [heads, value_dim, embed_dim].
        words: the embeddings E and U.
    """
    if value.shape[1] != words.width:
        raise ShapeError(
            f"value must be [kv_heads, {words.width}, value_dim], as wide as the embeddings, got {value.shape}"
        )
    value, output = (x.detach().cpu().double() for x in (value, output))
    parts = words.circuits(value, output)
    circuit = parts.sum(0)
    norms = torch.linalg.matrix_norm(value).repeat_interleave(len(output) // len(value))
    upper_bound = norms * torch.linalg.matrix_norm(output) * words.norm
    is_negligible = torch.linalg.matrix_norm(circuit) <= _NEGLIGIBLE * upper_bound  # not if NaN
    score = torch.where(is_negligible, 0.0, eigenvalue_share(circuit))
    without = torch.stack([eigenvalue_share(circuit - part) for part in parts])
    error = (without - without.mean(0)).square().sum(0).mul((GROUPS - 1) / GROUPS).sqrt()
    return Copying(score, torch.where(is_negligible, 0.0, error), words.null(value.shape[2]))
