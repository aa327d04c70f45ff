"""QK and OV circuits of heads, from the weights alone and without forming the full matrices.

A head is two low-rank maps of the residual stream: W_Q W_K^T determines where it attends, W_V W_O what it moves (Elhage
et al., 2021, "A Mathematical Framework for Transformer Circuits"). Both are d_model wide and of rank head_dim, so their
spectra are those of a head_dim x head_dim matrix. Norms and layers in between are ignored, as is usual.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyhead.errors import ShapeError


def singular_values(left: Tensor, right: Tensor) -> Tensor:
    """Return the singular values of left @ right for each head, [heads, rank], in decreasing order.

    Args:
        left: [heads, rows, rank], such as the query matrices.
        right: [heads, rank, columns], such as the transposed key matrices.
    """
    left, right = _checked(left, right)
    tall, flat = (torch.linalg.qr(x, mode="r").R for x in (left, right.mT))
    product, nan = screened(tall @ flat.mT)
    return torch.linalg.svdvals(product) + nan[..., None]


def eigenvalue_share(circuits: Tensor) -> Tensor:
    """Return the sum of the eigenvalues of square matrices over the sum of their magnitudes, from -1 to 1."""
    circuits, nan = screened(circuits)
    eigenvalues = torch.linalg.eigvals(circuits)
    magnitudes = eigenvalues.abs().sum(-1)
    return eigenvalues.real.sum(-1) / torch.where(magnitudes > 0, magnitudes, torch.nan) + nan


def screened(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Return matrices [..., rows, columns] with zeros for non-finite ones, and [...] NaN for these, 0 for the others.

    `torch.linalg` raises for a whole batch if one matrix is not finite; add the NaN to what it returns.
    """
    finite = matrices.isfinite().all(-1).all(-1)
    return torch.where(finite[..., None, None], matrices, 0.0), torch.where(finite, 0.0, torch.nan)


def _checked(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    if left.ndim != 3 or right.ndim != 3 or left.shape[0] != right.shape[0] or left.shape[2] != right.shape[1]:
        raise ShapeError(
            "a circuit must be [heads, rows, rank] times [heads, rank, columns], "
            f"got shapes {list(left.shape)} and {list(right.shape)}"
        )
    return left.detach().to(torch.float64), right.detach().to(torch.float64)
