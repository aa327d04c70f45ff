"""Second moments of the concatenated head outputs of a layer, as a mergeable accumulator.

Every linear comparison of heads can be computed from them (`polyhead.analysis.relations`): cosine similarity of
contributions, CKA, mutual information, total correlation, effective rank. No head output has to be stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from polyhead.errors import ShapeError
from polyhead.observation.accumulators import NamedTensors


@dataclass(frozen=True, slots=True, eq=False)
class HeadMoments(NamedTensors):
    """Count, mean and scatter matrix of the outputs of all heads of a layer, in float64.

    >>> import torch
    >>> outputs = torch.randn(50, 4, 3, generator=torch.Generator().manual_seed(0))
    >>> one_pass = HeadMoments.empty(4, 3).update(outputs)
    >>> merged = HeadMoments.empty(4, 3).update(outputs[:20]).merge(HeadMoments.empty(4, 3).update(outputs[20:]))
    >>> torch.allclose(merged.covariance, one_pass.covariance), one_pass.covariance.shape
    (True, torch.Size([4, 3, 4, 3]))
    """

    count: Tensor  # the sum of the weights
    mean: Tensor  # [heads, dim]
    scatter: Tensor  # [heads, dim, heads, dim]: weighted sum of outer products of deviations from the mean

    @classmethod
    def empty(cls, num_heads: int, dim: int, device: torch.device | str | None = None) -> Self:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        return cls(zeros(), zeros(num_heads, dim), zeros(num_heads, dim, num_heads, dim))

    @property
    def num_heads(self) -> int:
        return self.mean.shape[0]

    @property
    def dim(self) -> int:
        return self.mean.shape[1]

    @property
    def covariance(self) -> Tensor:
        """Covariance [heads, dim, heads, dim]; NaN for fewer than two tokens."""
        return self.scatter / torch.where(self.count > 1, self.count - 1, torch.nan)

    def update(self, values: Tensor, weights: Tensor | None = None) -> Self:
        """Add head outputs [tokens, heads, dim] with one weight per token.

        A token of weight 0 is ignored, even if it is NaN.
        """
        if values.ndim != 3 or values.shape[1:] != self.mean.shape:
            raise ShapeError(
                f"outputs must be [tokens, {self.num_heads} heads, {self.dim}], got shape {list(values.shape)}"
            )
        rows = values.detach().to(torch.float64).flatten(1)
        if weights is None:
            weights = torch.ones(rows.shape[0], dtype=torch.float64, device=rows.device)
        elif weights.shape != rows.shape[:1]:
            raise ShapeError(f"weights must be one per token, [{rows.shape[0]}], got shape {list(weights.shape)}")
        weights = weights.to(torch.float64)
        count = weights.sum()
        rows = torch.where((weights != 0)[:, None], rows, 0.0)
        mean = (weights @ rows) / torch.where(count > 0, count, 1.0)
        deviation = rows - mean
        scatter = _symmetric_product((deviation * weights[:, None]).T, deviation)
        return self.merge(type(self)(count, mean.view_as(self.mean), scatter.view_as(self.scatter)))

    def merge(self, other: Self) -> Self:
        if other.mean.shape != self.mean.shape:
            raise ShapeError(
                "only moments of the same shape can be merged, "
                f"got {self.num_heads} heads of {self.dim} and {other.num_heads} of {other.dim}"
            )
        other_count, other_mean, other_scatter = (
            x.to(self.count.device) for x in (other.count, other.mean, other.scatter)
        )
        count = self.count + other_count
        divisor = torch.where(count > 0, count, 1.0)
        delta = (other_mean - self.mean).flatten()
        between = torch.outer(delta, delta) * (self.count * other_count / divisor)
        mean = (self.mean * self.count + other_mean * other_count) / divisor
        return type(self)(count, mean, self.scatter + other_scatter + between.view_as(self.scatter))


def _symmetric_product(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right, which is symmetric, from its upper triangle in blocks: 5/8 of the operations."""
    product = left.new_empty(left.shape[0], right.shape[1])
    block = -(-left.shape[0] // 4)
    for start in range(0, left.shape[0], block):
        stop = start + block
        product[start:stop, start:] = left[start:stop] @ right[:, start:]
        product[stop:, start:stop] = product[start:stop, stop:].T
    return product
