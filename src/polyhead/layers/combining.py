"""What a layer knows of a module that combines its heads: what it reads, and how wide its output is."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn

from polyhead.errors import ShapeError
from polyhead.geometry import HeadLayout


class CombinesHeads(nn.Module, ABC):
    """Stands between the heads' outputs and the output projection, where plain multi-head attention has Concat.

    A layer given one calls it with the heads after every gate, and its output projection reads `width` channels.
    Each position is combined by itself, so masks and caches need to know nothing of it.
    """

    num_heads: int
    value_dim: int
    width: int

    @abstractmethod
    def forward(self, heads: Tensor) -> Tensor:
        """heads [batch, queries, num_heads, value_dim] to [batch, queries, width]."""

    @abstractmethod
    def reset_parameters(self) -> None:
        """Draw new initial values for every parameter."""

    def check(self, layout: HeadLayout) -> None:
        """Raise a ShapeError if the module was made for other heads than the layer's."""
        if (self.num_heads, self.value_dim) != (layout.num_heads, layout.value_dim):
            raise ShapeError(
                f"{type(self).__name__} must be made for the layer's heads, got {self.num_heads} heads of "
                f"{self.value_dim} for a layer of {layout.num_heads} heads of {layout.value_dim}"
            )
