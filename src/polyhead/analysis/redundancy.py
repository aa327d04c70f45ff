"""Redundancy of heads: the share of a head's contribution that the other heads of its layer predict linearly.

This is what least-squares compensation (`polyhead.surgery`) can restore if the head is removed. The prediction is
fitted on one half of the documents and evaluated on the other, both ways, from the second moments of head outputs
alone. The share is R² = 1 - Σ|c - ĉ|² / Σ|c - mean c|² over held-out tokens, with c = o W_O the contribution of the
head and ĉ its ridge regression on the outputs of other heads. The null is 0: what is fitted to unrelated heads does not
hold for other documents, so that their share is not positive on average, whatever the number of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polyhead.errors import OptionError, ShapeError
from polyhead.observation.head_moments import HeadMoments

PREDICTABLE = "predictable_share"  # the column of the table of heads, and the matrix of a layer
ALONE = "predictable_alone"  # by the best other head alone: values on the halves of a text
THRESHOLD = 0.75  # of the share: what the others cannot restore is at most half as large, in root mean square


@dataclass(frozen=True, slots=True, eq=False)
class PredictableShares:
    """Share of each head's contribution that other heads of its layer predict linearly, on held-out tokens.

    NaN for a head whose output does not vary or is not finite; negative if a prediction is worse than the mean.
    """

    by_others: Tensor  # [heads]: by all other heads together
    by_head: Tensor  # [heads, heads]: of the row's head, by the column's head alone
    halves: Tensor  # [2, heads]: by all other heads, on the tokens of each half
    alone_halves: Tensor  # [2, heads]: by the `best_other` alone


def predictable_shares(one: HeadMoments, other: HeadMoments, output_weights: Tensor) -> PredictableShares:
    """Return the shares of contributions that other heads predict, fitted on each half and evaluated on the other.

    Args:
        one: moments of the head outputs of a layer over one half of the documents.
        other: moments over the other half.
        output_weights: [heads, dim, embed_dim], each head's rows of the output projection.

    Raises:
        OptionError: a half has too few tokens for a regression on all other heads.

    >>> outputs = torch.randn(400, 3, 2, generator=torch.Generator().manual_seed(0))
    >>> outputs[:, 2] = -outputs[:, 0]  # head 2 is the opposite of head 0
    >>> halves = [HeadMoments.empty(3, 2).update(half) for half in outputs.split(200)]
    >>> shares = predictable_shares(*halves, torch.eye(2).expand(3, 2, 2))
    >>> [round(share, 1) + 0.0 for share in shares.by_others.tolist()]
    [1.0, 0.0, 1.0]
    """
    if one.mean.shape != other.mean.shape or output_weights.shape[:-1] != one.mean.shape:
        raise ShapeError(
            "moments and output_weights must be of the same heads, got "
            f"{list(one.mean.shape)}, {list(other.mean.shape)} and {list(output_weights.shape)}"
        )
    least = tokens_needed(one)
    if not min(float(one.count), float(other.count)) >= least:
        raise OptionError(
            f"a regression on the other heads of a layer needs {least:,} tokens in each half of the documents, got "
            f"{float(one.count):,g} and {float(other.count):,g}"
        )
    weights = output_weights.detach().to(one.mean.device, torch.float64)
    gram = torch.einsum("hae,hbe->hab", weights, weights)
    # Each head in units of its own deviation. Heads that do not vary, or are not finite, predict nothing.
    pooled = one.merge(other)
    variance = torch.einsum("hdhd->h", pooled.scatter) / (pooled.count * pooled.dim)
    varies = variance.isfinite() & (variance > 0)
    scale = torch.where(varies, variance, torch.inf).rsqrt()
    one, other = _scaled(one, scale), _scaled(other, scale)
    sums = _squared_errors(other, one, gram), _squared_errors(one, other, gram)  # on the tokens of `one`, of `other`
    # [3, ...] each: on all tokens, and on each half.
    by_others, by_head, total = (torch.stack((x + y, x, y)) for x, y in zip(*sums, strict=True))
    total = torch.where(varies & (total > 0), total, torch.nan)
    by_others, by_head = 1 - by_others / total, 1 - torch.where(varies, by_head, torch.nan) / total[..., None]
    heads = torch.arange(len(varies), device=varies.device)
    alone = by_head[1:, heads, best_other(by_head[0])]
    return PredictableShares(by_others[0], by_head[0], by_others[1:], alone)


def best_other(by_head: Tensor) -> Tensor:
    """Return the other head that predicts most of each head alone, [heads], given `PredictableShares.by_head`."""
    itself = torch.eye(len(by_head), dtype=torch.bool, device=by_head.device)
    return by_head.nan_to_num(nan=-torch.inf).masked_fill(itself, -torch.inf).argmax(-1)


def tokens_needed(moments: HeadMoments) -> int:
    """Return how many tokens each half of the documents must have: with fewer, shares are far too low."""
    return 4 * (moments.num_heads - 1) * moments.dim


def _scaled(moments: HeadMoments, scale: Tensor) -> HeadMoments:
    factors = torch.outer(scale, scale)[:, None, :, None]
    mean = torch.where(scale[:, None] > 0, moments.mean * scale[:, None], 0.0)
    return HeadMoments(moments.count, mean, torch.where(factors > 0, moments.scatter * factors, 0.0))


def _squared_errors(train: HeadMoments, test: HeadMoments, gram: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return sums over the test tokens: errors of the prediction by the others, by each head, and by the mean."""
    heads, dim = train.mean.shape
    width = heads * dim
    covariance = train.scatter / train.count
    shift = (test.mean - train.mean).flatten()
    scatter = test.scatter.view(width, width) + test.count * torch.outer(shift, shift)  # about the mean of training
    # A ridge of predictors per token, in units of a head's mean variance, vanishes as the text grows.
    ridge = torch.eye(width, dtype=torch.float64, device=gram.device) * dim / train.count
    # With P the inverse covariance, the error of predicting head h by the others is (P_hh⁻¹ P_h) o.
    precision = torch.cholesky_inverse(torch.linalg.cholesky(covariance.view(width, width) + (heads - 1) * ridge))
    blocks = _diagonal_blocks(precision.view_as(covariance))
    errors = torch.einsum("xha,hab->xhb", precision.view(width, heads, dim), torch.linalg.inv(blocks))
    by_others = torch.einsum("xha,xhb,hab->h", errors, (scatter @ errors.flatten(1)).view_as(errors), gram)
    # Coefficients of head b for head a: (C_bb + ridge)⁻¹ C_ba.
    alone = torch.linalg.inv(_diagonal_blocks(covariance) + ridge[:dim, :dim])
    fitted = torch.einsum("bij,bjac->biac", alone, covariance)
    written = torch.einsum("biac,acd->biad", fitted, gram)
    blocks = _diagonal_blocks(scatter.view_as(covariance))
    predicted = (torch.einsum("bij,bjac->biac", blocks, fitted) - 2 * scatter.view_as(covariance)) * written
    by_head = (blocks * gram).sum((1, 2))[:, None] + predicted.sum((1, 3)).T
    return by_others, by_head, (_diagonal_blocks(test.scatter) * gram).sum((1, 2))


def _diagonal_blocks(matrix: Tensor) -> Tensor:
    """Return the blocks [heads, dim, dim] on the diagonal of a matrix [heads, dim, heads, dim]."""
    return matrix.diagonal(dim1=0, dim2=2).permute(2, 0, 1)
