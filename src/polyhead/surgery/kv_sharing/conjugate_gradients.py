"""Linear least squares by conjugate gradients, for systems that are as large as the matrix squared."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

TINY = torch.finfo(torch.float32).tiny


def conjugate_gradients(
    matrix: Tensor,
    off: list[Tensor],
    *,
    change: Callable[[Tensor], list[Tensor]],
    energy: Callable[[list[Tensor]], Tensor],
    gradient: Callable[[list[Tensor]], Tensor],
    scaled: Callable[[Tensor], Tensor],
    steps: int,
) -> Tensor:
    """A matrix with which less is off, after so many steps from this one.

    Args:
        off: what is missing with the matrix as it is, batch by batch.
        change: what of it a matrix brings; linear.
        energy: the square of such a change, as heavy as each number counts.
        gradient: where the energy of what is off falls.
        scaled: a gradient in the metric that steps are taken in.
    """
    falling = gradient(off)
    step = scaled(falling)
    direction, size = step, (falling * step).sum()
    for _ in range(steps):
        brought = change(direction)
        length = size / energy(brought).clamp_min(TINY)
        matrix = matrix + length * direction
        off = [x - length * y for x, y in zip(off, brought, strict=True)]
        falling = gradient(off)
        step = scaled(falling)
        new = (falling * step).sum()
        direction, size = step + new / size.clamp_min(TINY) * direction, new
    return matrix
