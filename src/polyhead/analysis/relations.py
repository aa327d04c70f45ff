"""How the heads of a layer relate: from the second moments of their outputs, and the matrices that write them.

Head i writes x_i = o_i W_i into the residual stream, o_i its output and W_i its rows of the output projection. With
C_ij the covariance of o_i and o_j, the covariance of two contributions is W_i^T C_ij W_j, and every quantity here is
made of such products; the contributions themselves, as wide as the model, are never formed. All of it is centred over
tokens: two heads that only add a constant have nothing in common.

Before the output projection the heads of a key/value group look alike whatever they do, because they read the same
values; compare contributions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyhead.errors import OptionError, ShapeError
from polyhead.observation.head_moments import HeadMoments

_SAME = 1 - 1e-9  # a correlation from here on is that of the same signal, up to rounding


def cosine(moments: HeadMoments, output_weights: Tensor) -> Tensor:
    """The correlation of contributions, [heads, heads]: sum of <x_i, x_j> over that of both norms, centred.

    1 for heads that write the same, -1 for heads that undo each other, NaN for a head that writes nothing.

    Args:
        output_weights: [heads, dim, embed_dim], each head's rows of the output projection.
    """
    together = inner_products(moments, output_weights)
    return together / _outer_root(together.diagonal())


def inner_products(moments: HeadMoments, output_weights: Tensor) -> Tensor:
    """The mean of <x_i - mean, x_j - mean> over tokens, [heads, heads]; on the diagonal the variance a head writes."""
    weights = _checked(moments, output_weights)
    gram = torch.einsum("iae,jbe->iajb", weights, weights)
    return (moments.covariance * gram).sum((1, 3))


def contribution_norm(moments: HeadMoments, output_weights: Tensor) -> Tensor:
    """The root of the mean of |x_i|^2 over tokens, mean included, [heads]."""
    weights = _checked(moments, output_weights)
    mean = torch.einsum("ia,iae->ie", moments.mean, weights)
    spread = inner_products(moments, output_weights).diagonal() * (moments.count - 1) / moments.count
    return (spread + mean.square().sum(-1)).sqrt()


def cka(moments: HeadMoments, output_weights: Tensor) -> Tensor:
    """Linear centred kernel alignment of contributions, [heads, heads], from 0 to 1.

    ||X_i^T X_j||^2 / (||X_i^T X_i|| ||X_j^T X_j||): 1 where one is a rotation and scaling of the other.
    """
    weights = _checked(moments, output_weights)
    roots = _roots(torch.einsum("iae,ibe->iab", weights, weights))
    seen = torch.einsum("iac,iajb,jbd->ijcd", roots, moments.covariance, roots)
    together = seen.square().sum((2, 3))
    return together / _outer_root(together.diagonal())


def effective_rank(moments: HeadMoments, output_weights: Tensor) -> Tensor:
    """In how many directions a head writes, [heads]: exp of the entropy of the shares of variance; NaN for none."""
    weights = _checked(moments, output_weights)
    roots = _roots(torch.einsum("iae,ibe->iab", weights, weights))
    own = torch.einsum("iac,iaib,ibd->icd", roots, moments.covariance, roots)
    variances = torch.linalg.eigvalsh(own).clamp_min(0.0)
    shares = variances / variances.sum(-1, keepdim=True)
    return torch.special.entr(shares).sum(-1).exp()


def mutual_information(moments: HeadMoments, *, corrected: bool = True) -> Tensor:
    """Between the outputs of two heads as if they were Gaussian, in nats, [heads, heads].

    -1/2 sum of log(1 - r^2) over their canonical correlations r; inf between heads one of which follows from the other,
    and on the diagonal. Sampled correlations are too large: with p and q dimensions and n tokens the estimate is too
    high by 1/2 [A(p) + A(q) - A(p + q)], A(m) the sum of digamma((n - 1 - k) / 2) for k < m, whatever the true
    covariance is. That is taken off (`corrected`), so that independent heads have 0 on average, and a little less or
    more in a sample.
    """
    heads, ranks, whitened = _whitened(moments)
    samples = _samples(moments, 2 * moments.dim, "the mutual information of two heads")
    result = torch.full((heads, heads), torch.inf, dtype=torch.float64, device=whitened.device)
    for i in range(heads):
        for j in range(i):
            correlations = torch.linalg.svdvals(whitened[i, :, j])
            if correlations.max() < _SAME:
                information = -0.5 * torch.log1p(-correlations.square()).sum()
                if corrected:
                    information = information - _surplus(samples, [ranks[i], ranks[j]])
                result[i, j] = result[j, i] = information
    return result


def total_correlation(moments: HeadMoments, *, corrected: bool = True) -> Tensor:
    """How much less all heads together say than each for itself, as if they were Gaussian, in nats; 0 if independent.

    The sum of their entropies less that of all of them; corrected as `mutual_information` is. inf where a head follows
    from the others.
    """
    heads, ranks, whitened = _whitened(moments)
    samples = _samples(moments, heads * moments.dim, "the total correlation of a layer")
    size = heads * moments.dim
    joint = whitened.reshape(size, size)
    # Directions in which a head says nothing at all are left out; they would count as what follows from the rest.
    kept = joint.diagonal() > 0.5
    root, failed = torch.linalg.cholesky_ex(joint[kept][:, kept])
    # The square of each entry is what is left of a direction's variance, 1, when those before it are known.
    left = root.diagonal()
    if bool(failed) or left.square().min() < 1 - _SAME:
        return torch.full((), torch.inf, dtype=torch.float64, device=joint.device)
    information = -left.log().sum()
    return information - _surplus(samples, ranks) if corrected else information


def principal_cosines(bases: Tensor) -> Tensor:
    """Cosines of the principal angles between the row spaces of matrices, [heads, heads, rows], the largest first.

    Args:
        bases: [heads, rows, width], such as each head's rows of the output projection, or its query matrix turned.

    Spaces that are the same have ones, spaces at right angles zeros. A matrix of lower rank has fewer angles; the rest
    are zeros.
    """
    if bases.ndim != 3:
        raise ShapeError(f"bases must be [heads, rows, width], got shape {list(bases.shape)}")
    _, values, spans = torch.linalg.svd(bases.to(torch.float64), full_matrices=False)
    there = values > values.amax(-1, keepdim=True) * max(bases.shape[1:]) * torch.finfo(bases.dtype).eps
    spans = spans * there[..., None]
    return torch.linalg.svdvals(torch.einsum("iae,jbe->ijab", spans, spans)).clamp(0.0, 1.0)


def subspace_overlap(bases: Tensor) -> Tensor:
    """The mean squared cosine of the principal angles, [heads, heads], 1 for the same space and 0 at right angles.

    Two random spaces of r of w dimensions have r / w: that is the null.
    """
    squares = principal_cosines(bases).square().sum(-1)
    ranks = squares.diagonal()
    return squares / torch.minimum(ranks[:, None], ranks)


# ---- what they share


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
    """Matrices R with R R^T = the given ones, which have no negative eigenvalue."""
    values, vectors = torch.linalg.eigh(symmetric)
    return vectors * values.clamp_min(0.0).sqrt()[..., None, :]


def _whitened(moments: HeadMoments) -> tuple[int, list[int], Tensor]:
    """The covariance where each head is turned and scaled to have none of its own, [heads, dim, heads, dim].

    Directions in which a head does not vary are zeros; the ranks say how many are left.
    """
    heads, dim = moments.num_heads, moments.dim
    covariance = moments.covariance
    own = torch.stack([covariance[i, :, i] for i in range(heads)])
    values, vectors = torch.linalg.eigh(own)
    there = values > values.amax(-1, keepdim=True).clamp_min(0.0) * dim * torch.finfo(torch.float32).eps
    scale = torch.where(there, values.clamp_min(torch.finfo(torch.float64).tiny).rsqrt(), 0.0)
    turn = vectors * scale[:, None, :]
    return heads, there.sum(-1).tolist(), torch.einsum("iac,iajb,jbd->icjd", turn, covariance, turn)


def _samples(moments: HeadMoments, dims: int, what: str) -> float:
    samples = float(moments.count)
    if samples < dims + 2:
        raise OptionError(f"{what} needs more tokens than dimensions, got {samples:g} tokens for {dims} dimensions")
    return samples


def _surplus(samples: float, ranks: list[int]) -> float:
    """By how much the estimate is too high, for Gaussian parts of such dimensions; see Wishart's log-determinant."""

    def expected(dims: int) -> float:
        steps = torch.arange(dims, dtype=torch.float64)
        return float(torch.special.digamma((samples - 1 - steps) / 2).sum())

    return 0.5 * (sum(expected(rank) for rank in ranks) - expected(sum(ranks)))
