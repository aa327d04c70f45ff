"""Gates: factors that multiply the heads' outputs before the output projection."""

from __future__ import annotations

from torch import Tensor

from polyhead.errors import ShapeError


def gate_factors(gate: Tensor, batch: int, heads: int, queries: int) -> Tensor:
    """Reshape a gate to [batch or 1, heads, queries or 1, 1], to multiply outputs [batch, heads, queries, value_dim].

    Accepted shapes are [heads], [batch, heads] and [batch, heads, queries].
    """
    shapes = ((heads,), (batch, heads), (batch, heads, queries))
    got = list(gate.shape) if isinstance(gate, Tensor) else type(gate).__name__
    if not isinstance(gate, Tensor) or tuple(gate.shape) not in shapes:
        raise ShapeError(
            "a gate must have one factor per head, optionally per sequence and per query: "
            f"[{heads}], [{batch}, {heads}] or [{batch}, {heads}, {queries}], got {got}"
        )
    if gate.ndim == 1:
        return gate[None, :, None, None]
    return gate[:, :, None, None] if gate.ndim == 2 else gate[..., None]
