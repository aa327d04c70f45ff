"""Interface of modules that combine the heads' outputs before the output projection."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn

from polyhead.errors import ShapeError
from polyhead.geometry import HeadLayout


class HeadCombiner(nn.Module, ABC):
    """Base class of modules that replace Concat(heads) before the output projection.

    The layer passes it the gated head outputs; the layer's output projection then has `output_dim` input channels. Each
    position is combined independently, so masks and caches are unaffected.
    """

    num_heads: int
    value_dim: int
    output_dim: int

    @abstractmethod
    def forward(self, heads: Tensor) -> Tensor:
        """Map heads [batch, queries, num_heads, value_dim] to [batch, queries, output_dim]."""

    @abstractmethod
    def reset_parameters(self) -> None:
        """Reinitialise every parameter."""

    def check(self, layout: HeadLayout) -> None:
        """Raise a ShapeError unless the module was built for the layer's heads."""
        if (self.num_heads, self.value_dim) != (layout.num_heads, layout.value_dim):
            raise ShapeError(
                f"{type(self).__name__} must be built for the layer's heads, got {self.num_heads} heads of "
                f"{self.value_dim} for a layer of {layout.num_heads} heads of {layout.value_dim}"
            )
