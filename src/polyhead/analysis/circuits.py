"""What a head can do by its weights alone: the matrices it multiplies by, without ever forming them.

A head is two low-rank maps of the residual stream. By W_Q W_K^T it decides where to look, by W_V W_O what to move.
Both are as wide as the model and of the rank of a head, so their spectra are those of a matrix of a head's size. Norms
and layers in between are left out, as is usual: it is what the head would do to a stream that reached it unchanged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyhead.errors import ShapeError


def singular_values(left: Tensor, right: Tensor) -> Tensor:
    """Of left @ right for each head, [heads, rank], the largest first.

    Args:
        left: [heads, rows, rank], such as the query matrices.
        right: [heads, rank, columns], such as the key matrices turned.
    """
    left, right = _checked(left, right)
    tall, flat = (torch.linalg.qr(x, mode="r").R for x in (left, right.mT))
    return torch.linalg.svdvals(tall @ flat.mT)


def eigenvalues(left: Tensor, right: Tensor) -> Tensor:
    """Of left @ right for each head where that is square, complex [heads, rank]; all others are zero.

    They are those of right @ left: a product in the other order has the same eigenvalues.
    """
    left, right = _checked(left, right)
    if left.shape[1] != right.shape[2]:
        raise ShapeError(
            f"only a square product has eigenvalues, got {left.shape[1]} rows and {right.shape[2]} columns"
        )
    return torch.linalg.eigvals(right @ left)


def copying(value: Tensor, output: Tensor, embedding: Tensor, unembedding: Tensor) -> Tensor:
    """Whether a head makes the tokens it attends to more likely (towards 1) or less (towards -1), [heads].

    The sum of the eigenvalues of E W_V W_O U^T over that of their sizes: that matrix says by how much attending to one
    token raises the logit of another, and one that copies has eigenvalues with positive real parts. Random heads lie
    around 0, by about 1 / sqrt(rank).

    Args:
        value: [heads, embed_dim, value_dim].
        output: [heads, value_dim, embed_dim].
        embedding, unembedding: [vocabulary, embed_dim].
    """
    if embedding.ndim != 2 or embedding.shape != unembedding.shape or embedding.shape[1] != value.shape[1]:
        raise ShapeError(
            f"embedding and unembedding must be [vocabulary, {value.shape[1]}], "
            f"got shapes {list(embedding.shape)} and {list(unembedding.shape)}"
        )
    # What all words have in common copies none of them, and a logit that all words gain changes no probability.
    words, unwords = (x.detach().to(torch.float64) for x in (embedding, unembedding))
    between = (unwords - unwords.mean(0)).T @ (words - words.mean(0))
    value, output = _checked(value, output)
    found = torch.linalg.eigvals(output @ between @ value)
    sizes = found.abs().sum(-1)
    return found.real.sum(-1) / torch.where(sizes > 0, sizes, torch.nan)


def composition(write: Tensor, read: Tensor) -> Tensor:
    """How much of what one head writes another reads, [writers, readers], from 0 to 1.

    |W R| / (|W| |R|) by Frobenius's norm, W = W_V W_O of the writer and R what the reader multiplies the stream by: its
    query, key or value matrix. Unrelated heads have about 1 / sqrt(embed_dim): that is the null.

    Args:
        write: [writers, value_dim, embed_dim]: output matrices, or value @ output.
        read: [readers, embed_dim, dim].
    """
    if write.ndim != 3 or read.ndim != 3 or write.shape[2] != read.shape[1]:
        raise ShapeError(
            "what is written and read must be [heads, any, embed_dim] and [heads, embed_dim, any], "
            f"got shapes {list(write.shape)} and {list(read.shape)}"
        )
    write, read = (x.detach().to(torch.float64) for x in (write, read))
    together = torch.einsum("wve,red->wrvd", write, read).square().sum((2, 3)).sqrt()
    sizes = torch.outer(torch.linalg.matrix_norm(write), torch.linalg.matrix_norm(read))
    return together / torch.where(sizes > 0, sizes, torch.nan)


def _checked(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    if left.ndim != 3 or right.ndim != 3 or left.shape[0] != right.shape[0] or left.shape[2] != right.shape[1]:
        raise ShapeError(
            "a circuit is [heads, rows, rank] times [heads, rank, columns], "
            f"got shapes {list(left.shape)} and {list(right.shape)}"
        )
    return left.detach().to(torch.float64), right.detach().to(torch.float64)
