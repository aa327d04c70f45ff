"""Preconditioned conjugate gradients for least squares too large for a direct solver."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

TINY = torch.finfo(torch.float32).tiny


def conjugate_gradients(
    solution: Tensor,
    residual: list[Tensor],
    *,
    forward: Callable[[Tensor], list[Tensor]],
    energy: Callable[[list[Tensor]], Tensor],
    adjoint: Callable[[list[Tensor]], Tensor],
    precondition: Callable[[Tensor], Tensor],
    steps: int,
) -> Tensor:
    """Refine a least-squares solution by CGLS (Hestenes & Stiefel 1952) with a preconditioner.

    Args:
        solution: the initial iterate.
        residual: targets minus `forward(solution)`, batch by batch.
        forward: the linear operator A.
        energy: the (weighted) squared norm of an output of A.
        adjoint: Aᵀ with the weights of `energy`: the negative gradient of half the energy of a residual.
        precondition: multiplies a gradient by the inverse of the preconditioner.
        steps: number of iterations.
    """
    gradient = adjoint(residual)
    preconditioned = precondition(gradient)
    direction, rho = preconditioned, (gradient * preconditioned).sum()
    for _ in range(steps):
        image = forward(direction)
        alpha = rho / energy(image).clamp_min(TINY)
        solution = solution + alpha * direction
        residual = [r - alpha * a for r, a in zip(residual, image, strict=True)]
        gradient = adjoint(residual)
        preconditioned = precondition(gradient)
        new_rho = (gradient * preconditioned).sum()
        direction, rho = preconditioned + new_rho / rho.clamp_min(TINY) * direction, new_rho
    return solution
