"""Similarity of the heads of a layer, from the second moments of their outputs and the output projection.

Head i writes x_i = o_i W_i to the residual stream, with o_i its output and W_i its rows of the output projection. With
C_ij the covariance of o_i and o_j, the covariance of two contributions is W_i^T C_ij W_j. Quantities of contributions
are computed from such products; the contributions themselves, embed_dim wide, are never formed. Mutual information and
total correlation are those of the outputs o_i; subspaces are those of weights alone. All similarities are centred over
tokens: constant outputs have none.

Before the output projection the heads of a KV group are similar in any case, because they read the same values; compare
contributions instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyhead.analysis.circuits import screened
from polyhead.errors import OptionError, ShapeError
from polyhead.observation.head_moments import HeadMoments

_IDENTICAL = 1 - 1e-9  # a correlation of at least this counts as 1, up to rounding
_DISTINCT = 10.0  # nats: no correlation of less information is identical, as -1/2 log(1 - _IDENTICAL^2) is 10.01


def cosine(moments: HeadMoments, output_weights: Tensor) -> Tensor:
    """Return the cosine similarity of centred contributions, [heads, heads].

    1 for identical heads, -1 for heads that cancel, NaN for a head whose output does not vary.

    Args:
        output_weights: [heads, dim, embed_dim], each head's rows of the output projection.
    """
    products = inner_products(moments, output_weights)
    return products / _outer_root(products.diagonal())


def inner_products(moments: HeadMoments, output_weights: Tensor) -> Tensor:
    """Return the sum of <x_i - mean, x_j - mean> over the n tokens, divided by n - 1, [heads, heads].

    The diagonal is the variance of each contribution, summed over its channels.
    """
    weights = _checked(moments, output_weights)
    gram = torch.einsum("iae,jbe->iajb", weights, weights)
    return (moments.covariance * gram).sum((1, 3))


def contribution_norm(moments: HeadMoments, output_weights: Tensor) -> Tensor:
    """Return the root mean square of |x_i| over tokens, not centred, [heads]."""
    weights = _checked(moments, output_weights)
    mean = torch.einsum("ia,iae->ie", moments.mean, weights)
    own = moments.covariance.diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    variance = (own * (weights @ weights.mT)).sum((1, 2)) * (moments.count - 1) / moments.count
    return (variance + mean.square().sum(-1)).sqrt()


def cka(moments: HeadMoments, output_weights: Tensor) -> Tensor:
    """Return the linear centred kernel alignment of contributions, [heads, heads], from 0 to 1.

    ||X_i^T X_j||^2 / (||X_i^T X_i|| ||X_j^T X_j||): 1 if one is a rotation and scaling of the other (Kornblith et al.,
    2019).
    """
    weights = _checked(moments, output_weights)
    roots = _roots(torch.einsum("iae,ibe->iab", weights, weights))
    cross_covariance = torch.einsum("iac,iajb,jbd->ijcd", roots, moments.covariance, roots)
    squared_norms = cross_covariance.square().sum((2, 3))
    return squared_norms / _outer_root(squared_norms.diagonal())


def effective_rank(moments: HeadMoments, output_weights: Tensor) -> Tensor:
    """Return the effective rank of the contributions, [heads]: exp of the entropy of the normalised spectrum.

    Roy and Vetterli (2007), of the covariance; NaN for a head whose output does not vary.
    """
    weights = _checked(moments, output_weights)
    roots = _roots(torch.einsum("iae,ibe->iab", weights, weights))
    covariance = torch.einsum("iac,iaib,ibd->icd", roots, moments.covariance, roots)
    covariance, nan = screened(covariance)
    variances = torch.linalg.eigvalsh(covariance).clamp_min(0.0) + nan[:, None]
    return torch.special.entr(variances / variances.sum(-1, keepdim=True)).sum(-1).exp()


def mutual_information(moments: HeadMoments, *, corrected: bool = True) -> Tensor:
    """Return the mutual information of the outputs of two heads under a Gaussian model, in nats, [heads, heads].

    -1/2 sum of log(1 - r^2) over their canonical correlations r; inf if one of these is 1, that is, if some direction
    of one head is determined by the other, and on the diagonal. The sample estimate is biased: with p and q dimensions
    and n tokens it is too high by 1/2 [A(p) + A(q) - A(p + q)], A(m) the sum of digamma((n - 1 - k) / 2) for k < m,
    whatever the true covariance. The bias is subtracted (`corrected`), so that independent heads have 0 on average.
    """
    heads, ranks, whitened = _whitened(moments)
    samples = _checked_count(moments, 2 * moments.dim, "the mutual information of two heads")
    row, column = torch.tril_indices(heads, heads, -1, device=whitened.device)
    blocks, nan = screened(whitened[row, :, column])
    # The information is -1/2 log det(1 - B B^T), B the cross-covariance. The smallest eigenvalue is no less than the
    # determinant, as none exceeds 1; where that leaves a correlation of 1 possible, the correlations are computed.
    identity = torch.eye(moments.dim, dtype=torch.float64, device=whitened.device)
    root, failed = torch.linalg.cholesky_ex(identity - blocks @ blocks.mT)
    information = -root.diagonal(dim1=1, dim2=2).log().sum(-1)
    for pair in ((failed != 0) | ~(information < _DISTINCT)).nonzero().flatten().tolist():
        correlations = torch.linalg.svdvals(blocks[pair])
        is_identical = bool(correlations.max() >= _IDENTICAL)
        information[pair] = torch.inf if is_identical else -0.5 * torch.log1p(-correlations.square()).sum()
    if corrected:
        biases = [_bias(samples, [ranks[i], ranks[j]]) for i, j in zip(row.tolist(), column.tolist(), strict=True)]
        information = information - torch.tensor(biases, dtype=torch.float64, device=whitened.device)
    result = torch.full((heads, heads), torch.inf, dtype=torch.float64, device=whitened.device)
    result[row, column] = result[column, row] = information + nan
    return result


def total_correlation(moments: HeadMoments, *, corrected: bool = True) -> Tensor:
    """Return the total correlation of all heads under a Gaussian model, in nats; 0 if they are independent.

    The sum of their entropies minus their joint entropy; corrected as `mutual_information` is. inf if some direction of
    a head is determined by the other heads.
    """
    heads, ranks, whitened = _whitened(moments)
    samples = _checked_count(moments, heads * moments.dim, "the total correlation of a layer")
    size = heads * moments.dim
    joint = whitened.reshape(size, size)
    if not bool(joint.isfinite().all()):
        return torch.full((), torch.nan, dtype=torch.float64, device=joint.device)
    # Directions without variance are removed; they would count as determined by the others.
    varying = joint.diagonal() > 0.5
    root, failed = torch.linalg.cholesky_ex(joint[varying][:, varying])
    # The square of each entry is the conditional variance of a direction given those before it.
    conditional = root.diagonal()
    if bool(failed) or conditional.square().min() < 1 - _IDENTICAL:
        return torch.full((), torch.inf, dtype=torch.float64, device=joint.device)
    information = -conditional.log().sum()
    return information - _bias(samples, ranks) if corrected else information


def subspace_overlap(bases: Tensor) -> Tensor:
    """Return the mean squared cosine of the principal angles, [heads, heads]: 1 for identical spaces, 0 for orthogonal.

    For two random r-dimensional subspaces of w dimensions the expected overlap is r / w.
    """
    products, nan = _products_of_spans(bases)
    squares = products.square().sum((2, 3)) + nan  # those of the singular values, the cosines
    ranks = squares.diagonal()
    return squares / torch.minimum(ranks[:, None], ranks)


# ---- helpers


def _checked(moments: HeadMoments, output_weights: Tensor) -> Tensor:
    if output_weights.ndim != 3 or output_weights.shape[:2] != moments.mean.shape:
        raise ShapeError(
            f"output_weights must be [{moments.num_heads} heads, {moments.dim}, embed_dim], "
            f"got shape {list(output_weights.shape)}"
        )
    return output_weights.detach().to(device=moments.mean.device, dtype=torch.float64)


def _outer_root(diagonal: Tensor) -> Tensor:
    root = torch.where(diagonal > 0, diagonal, torch.nan).sqrt()
    return torch.outer(root, root)


def _roots(symmetric: Tensor) -> Tensor:
    """Return matrices R with R R^T equal to the given positive semidefinite ones."""
    symmetric, nan = screened(symmetric)
    values, vectors = torch.linalg.eigh(symmetric)
    return vectors * values.clamp_min(0.0).sqrt()[..., None, :] + nan[..., None, None]


def _products_of_spans(bases: Tensor) -> tuple[Tensor, Tensor]:
    """Return products of orthonormal bases of the row spaces, [heads, heads, rows, rows], and NaN as `screened`."""
    if bases.ndim != 3:
        raise ShapeError(f"bases must be [heads, rows, width], got shape {list(bases.shape)}")
    rows, nan = screened(bases.to(torch.float64))
    basis, triangle = torch.linalg.qr(rows.mT)
    rotation, values, _ = torch.linalg.svd(triangle, full_matrices=False)
    nonzero = values > values.amax(-1, keepdim=True) * max(bases.shape[1:]) * torch.finfo(bases.dtype).eps
    spans = (basis @ (rotation * nonzero[:, None])).mT
    return torch.einsum("iae,jbe->ijab", spans, spans), nan[:, None] + nan


def _whitened(moments: HeadMoments) -> tuple[int, list[int], Tensor]:
    """Return the number of heads, their ranks, and the covariance of whitened heads, [heads, dim, heads, dim].

    Directions in which a head does not vary are zeros; the ranks count the others.
    """
    heads, dim = moments.num_heads, moments.dim
    covariance = moments.covariance
    diagonal_blocks, nan = screened(torch.stack([covariance[i, :, i] for i in range(heads)]))
    values, vectors = torch.linalg.eigh(diagonal_blocks)
    # Variances, so that the rounding error of the outputs is squared.
    nonzero = values > values.amax(-1, keepdim=True).clamp_min(0.0) * (dim * torch.finfo(torch.float32).eps) ** 2
    scale = torch.where(nonzero, values.clamp_min(torch.finfo(torch.float64).tiny).rsqrt(), 0.0)
    whitening = vectors * scale[:, None, :] + nan[:, None, None]
    return heads, nonzero.sum(-1).tolist(), torch.einsum("iac,iajb,jbd->icjd", whitening, covariance, whitening)


def _checked_count(moments: HeadMoments, dims: int, what: str) -> float:
    """Return the number of tokens; raise if it is too small for this many dimensions."""
    samples = float(moments.count)
    if samples < dims + 2:
        raise OptionError(f"{what} needs more tokens than dimensions, got {samples:g} tokens for {dims} dimensions")
    return samples


def _bias(samples: float, ranks: list[int]) -> float:
    """Return the bias of the estimate for Gaussian parts of these ranks, from the expected Wishart log-determinant."""

    def expected(dims: int) -> float:
        steps = torch.arange(dims, dtype=torch.float64)
        return float(torch.special.digamma((samples - 1 - steps) / 2).sum())

    return 0.5 * (sum(expected(rank) for rank in ranks) - expected(sum(ranks)))
