"""Cosine similarity, over tokens, of the loss gradients of the heads of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from polyhead.errors import ShapeError
from polyhead.observation.accumulators import Sums


@dataclass(frozen=True, slots=True, eq=False)
class GradientOverlap(Sums):
    """Accumulator of the cosine similarity, over tokens, of the effects of a layer's heads on the loss.

    The effect of a head at a token is dL/dgate, where the gate multiplies the head's output at that token only.
    1 for heads with the same effects, -1 for opposite ones, about 1 / sqrt(tokens) by chance, NaN for a head without
    any effect. Not centred, as 0 means no effect.

    >>> effects = torch.tensor([[[1.0, -2.0, 0.0], [2.0, -4.0, 0.0], [0.0, 0.0, 3.0]]])
    >>> halves = [GradientOverlap.empty(3).update(effects[..., part]) for part in (slice(0, 1), slice(1, 3))]
    >>> halves[0].merge(halves[1]).compute()[0].tolist()
    [1.0, 1.0, 0.0]
    """

    products: Tensor  # [heads, heads], float64: the sum over tokens of products of effects

    @classmethod
    def empty(cls, num_heads: int, device: torch.device | str | None = None) -> Self:
        return cls(torch.zeros(num_heads, num_heads, dtype=torch.float64, device=device))

    def update(self, effects: Tensor) -> Self:
        """Add the effects of some tokens, [batch, heads, tokens]; those of padding are 0."""
        heads = self.products.shape[0]
        if effects.ndim != 3 or effects.shape[1] != heads:
            raise ShapeError(f"effects must be [batch, {heads} heads, tokens], got shape {list(effects.shape)}")
        by_head = effects.detach().to(torch.float64).transpose(0, 1).flatten(1)
        return type(self)(self.products + by_head @ by_head.T)

    def merge(self, other: Self) -> Self:
        if other.products.shape != self.products.shape:
            raise ShapeError(
                "merged overlaps must have the same number of heads, "
                f"got {self.products.shape[0]} and {other.products.shape[0]}"
            )
        return Sums.merge(self, other)

    def compute(self) -> Tensor:
        """Return the cosine similarity, [heads, heads]."""
        squared_norms = self.products.diagonal()
        norm_products = torch.outer(squared_norms, squared_norms).sqrt()
        return self.products / torch.where(norm_products > 0, norm_products, torch.nan)
