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


def eigenvalues(left: Tensor, right: Tensor) -> Tensor:
    """Return the eigenvalues of left @ right for each head, complex [heads, rank]; the remaining ones are zero.

    Computed from right @ left, which has the same nonzero eigenvalues.
    """
    left, right = _checked(left, right)
    if left.shape[1] != right.shape[2]:
        raise ShapeError(
            f"only a square product has eigenvalues, got {left.shape[1]} rows and {right.shape[2]} columns"
        )
    product, nan = screened(right @ left)
    return torch.linalg.eigvals(product) + nan[..., None]


def copying(value: Tensor, output: Tensor, embedding: Tensor, unembedding: Tensor) -> Tensor:
    """Return the copying score [heads] of the weights: 1 if tokens raise their own logits, -1 if they lower them.

    The sum of the eigenvalues of E W_V W_O U^T over the sum of their magnitudes: the matrix contains by how much
    attending to one token raises the logit of another, and a copying head has eigenvalues with positive real parts.
    Random heads are around 0, within about 1 / sqrt(rank).

    Args:
        value: [heads, embed_dim, value_dim].
        output: [heads, value_dim, embed_dim].
        embedding, unembedding: [vocabulary, embed_dim].
    """
    check_embeddings(embedding, unembedding, value.shape[1])
    # The mean embedding identifies no word, and adding one constant to all logits changes no probability.
    words, unwords = (x.detach().to(torch.float64) for x in (embedding, unembedding))
    between = (unwords - unwords.mean(0)).T @ (words - words.mean(0))
    value, output = _checked(value, output)
    return eigenvalue_share(output @ between @ value)


def check_embeddings(embedding: Tensor, unembedding: Tensor, width: int) -> None:
    """Raise unless both are [vocabulary, width]."""
    if embedding.ndim != 2 or embedding.shape != unembedding.shape or embedding.shape[1] != width:
        raise ShapeError(
            f"embedding and unembedding must be [vocabulary, {width}], "
            f"got shapes {list(embedding.shape)} and {list(unembedding.shape)}"
        )


def eigenvalue_share(circuits: Tensor) -> Tensor:
    """Return the sum of the eigenvalues of square matrices over the sum of their magnitudes, from -1 to 1."""
    circuits, nan = screened(circuits)
    eigenvalues = torch.linalg.eigvals(circuits)
    magnitudes = eigenvalues.abs().sum(-1)
    return eigenvalues.real.sum(-1) / torch.where(magnitudes > 0, magnitudes, torch.nan) + nan


def composition(write: Tensor, read: Tensor) -> Tensor:
    """Return the composition scores [writers, readers] of heads, from 0 to 1 (Elhage et al., 2021).

    |W R| / (|W| |R|) in the Frobenius norm, with W = W_V W_O of the writer and R the query, key or value matrix of the
    reader. Unrelated heads have about 1 / sqrt(embed_dim), which is the null.

    Args:
        write: [writers, value_dim, embed_dim]: output matrices, or value @ output.
        read: [readers, embed_dim, dim].
    """
    if write.ndim != 3 or read.ndim != 3 or write.shape[2] != read.shape[1]:
        raise ShapeError(
            "write and read must be [heads, any, embed_dim] and [heads, embed_dim, any], "
            f"got shapes {list(write.shape)} and {list(read.shape)}"
        )
    write, read = (x.detach().to(torch.float64) for x in (write, read))
    norms = torch.einsum("wve,red->wrvd", write, read).square().sum((2, 3)).sqrt()
    products = torch.outer(torch.linalg.matrix_norm(write), torch.linalg.matrix_norm(read))
    return norms / torch.where(products > 0, products, torch.nan)


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
