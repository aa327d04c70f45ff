"""Factors by which the outputs of heads are multiplied before they are mixed."""

from __future__ import annotations

from torch import Tensor

from polyhead.errors import ShapeError


def gate_factors(gate: Tensor, batch: int, heads: int, queries: int) -> Tensor:
    """A gate [heads], [batch, heads] or [batch, heads, queries] as [batch or 1, heads, queries or 1, 1]."""
    shapes = ((heads,), (batch, heads), (batch, heads, queries))
    got = list(gate.shape) if isinstance(gate, Tensor) else type(gate).__name__
    if not isinstance(gate, Tensor) or tuple(gate.shape) not in shapes:
        raise ShapeError(
            "a gate has a factor for each head, for each head of each row, or for each of those at each query: "
            f"[{heads}], [{batch}, {heads}] or [{batch}, {heads}, {queries}] here, got {got}"
        )
    if gate.ndim == 1:
        return gate[None, :, None, None]
    return gate[:, :, None, None] if gate.ndim == 2 else gate[..., None]
