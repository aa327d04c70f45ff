"""Whether heads of a layer pull the loss the same way at the same tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from polyhead.errors import ShapeError


@dataclass(frozen=True, slots=True, eq=False)
class GradientOverlap:
    """The cosine, over tokens, of the effects that the heads of a layer have on the loss.

    The effect of a head at a token is dL/dgate, the gate being a factor of what the head writes at that token alone.
    1 for heads that help and harm together, -1 for heads that undo each other, about 1 / sqrt(tokens) by chance, NaN
    for a head without any effect. Not centred: an effect of 0 is none.

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
        """With the effects of some tokens, [batch, heads, tokens]; those of padding are 0."""
        heads = self.products.shape[0]
        if effects.ndim != 3 or effects.shape[1] != heads:
            raise ShapeError(f"effects must be [batch, {heads} heads, tokens], got shape {list(effects.shape)}")
        columns = effects.detach().to(torch.float64).transpose(0, 1).flatten(1)
        return type(self)(self.products + columns @ columns.T)

    def merge(self, other: Self) -> Self:
        if other.products.shape != self.products.shape:
            raise ShapeError(
                "overlaps of layers of as many heads can be merged, "
                f"got {self.products.shape[0]} and {other.products.shape[0]} heads"
            )
        return type(self)(self.products + other.products.to(self.products.device))

    def compute(self) -> Tensor:
        """[heads, heads]."""
        sizes = self.products.diagonal()
        both = torch.outer(sizes, sizes).sqrt()
        return self.products / torch.where(both > 0, both, torch.nan)

    def state(self) -> dict[str, Tensor]:
        return {"products": self.products}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> Self:
        return cls(state["products"])
