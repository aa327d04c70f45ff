"""Pruning that compensates: W_O of the heads that stay is solved for what the whole layer wrote before.

Least squares over the moments of calibration text, in closed form. With X the outputs of all heads side by side, T
what the layer should write (X W, what its whole output matrix makes of them, unless `in_order` says otherwise) and S
the channels that stay, the new matrix minimises |T - X_S W_S|² + λ |W_S - W_S before|², λ being `ridge` times the mean
square of a channel: the weaker the evidence, the nearer W_S stays to what it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from polyhead.errors import OptionError
from polyhead.surgery.adapters.head_weights import HeadWeights
from polyhead.surgery.calibration.moments import OutputMoments, output_signature, same_layer

RIDGE = 1e-4


@dataclass(frozen=True, slots=True, eq=False)
class OutputCompensation:
    """Solves the output matrices of edited layers; for `apply(model, edits, compensation=OutputCompensation(moments))`.

    The output bias takes its part where a layer has one; a layer without is given none, since no config could say it.
    """

    moments: Mapping[str, OutputMoments]
    ridge: float = RIDGE

    def __post_init__(self) -> None:
        check_ridge(self.ridge)

    def __call__(self, path: str, before: HeadWeights, after: HeadWeights) -> HeadWeights:
        if path not in self.moments:
            raise OptionError(f"repair needs the moments of every edited layer, got none of {path!r}")
        problem = Problem.of(self.moments[path], before, self.ridge, path)
        return with_output(after, *problem.solve(remaining_heads(path, after)))


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """The least squares of one layer, in float64, where its moments lie."""

    products: Tensor  # [channels, channels], centred where a bias can take the mean
    mean: Tensor  # [channels]
    matrix: Tensor  # [channels, embed_dim], W_O as it is
    cross: Tensor  # [channels, embed_dim]: products with what is to be written, centred likewise
    target_mean: Tensor  # [embed_dim]
    bias: Tensor  # [embed_dim], zero where there is none
    head_width: int
    ridge: float
    centred: bool

    @classmethod
    def of(cls, moments: OutputMoments, heads: HeadWeights, ridge: float, path: str = "the layer") -> Problem:
        """Where the layer should write what its whole output matrix makes of the same outputs of its heads."""
        check_moments(moments, heads, path)
        centred = heads.output_bias is not None
        mean, products = (x.to(moments.total.device) for x in moments.compute(centred=centred))
        matrix, bias = (x.to(mean.device) for x in output_projection(heads))
        return cls(
            products,
            mean,
            matrix,
            products @ matrix,
            mean @ matrix + bias,
            bias,
            heads.output.shape[1],
            ridge,
            centred,
        )

    @property
    def scale(self) -> float:
        """What `ridge` is multiplied by: the mean square of a channel."""
        return float(self.products.diagonal().mean())

    def channels(self, heads: Sequence[int]) -> Tensor:
        """The channels of these heads, in their order."""
        found = torch.tensor(heads)[:, None] * self.head_width + torch.arange(self.head_width)
        return found.flatten().to(self.mean.device)

    def factor(self, channels: Tensor) -> Tensor:
        """The Cholesky factor of the system over these channels, ridge included."""
        ridge = self.ridge * self.scale * torch.eye(len(channels), dtype=torch.float64, device=channels.device)
        factor, failed = torch.linalg.cholesky_ex(self.products[channels][:, channels] + ridge)
        if int(failed):
            raise OptionError(
                f"the outputs of the heads must not be linear in each other, got a singular system with ridge "
                f"{self.ridge}; give more text or a larger ridge"
            )
        return factor

    def solve(self, heads: Sequence[int]) -> tuple[Tensor, Tensor]:
        """W_O of the heads that stay, [their channels, embed_dim], and the output bias."""
        kept = self.channels(heads)
        old, ridge = self.matrix[kept], self.ridge * self.scale
        if self.scale == 0:  # heads that write nothing have nothing to be repaired
            return old, self.bias
        new = torch.cholesky_solve(self.cross[kept] + ridge * old, self.factor(kept))
        return new, self.target_mean - self.mean[kept] @ new if self.centred else self.bias


def remaining_heads(path: str, after: HeadWeights) -> list[int]:
    """The heads of the unedited layer that an edited one consists of; refused where it has others."""
    if None in after.origins:
        raise OptionError(
            "repair solves for heads that give what they gave before, got heads of "
            f"{path!r} that were merged, regrouped or new"
        )
    return [head for head in after.origins if head is not None]


def with_output(after: HeadWeights, matrix: Tensor, bias: Tensor) -> HeadWeights:
    """Heads with this output matrix, [channels, embed_dim], and, where there is one, this output bias."""
    return replace(
        after,
        output=matrix.view(after.output.shape).to(after.output),
        output_bias=None if after.output_bias is None else bias.to(after.output_bias),
    )


def output_projection(heads: HeadWeights) -> tuple[Tensor, Tensor]:
    """W_O, [channels, embed_dim], and its bias, zero where there is none, in float64 on the CPU."""
    matrix = heads.output.flatten(0, 1).to("cpu", torch.float64)
    zero = matrix.new_zeros(matrix.shape[1])
    return matrix, zero if heads.output_bias is None else heads.output_bias.to("cpu", torch.float64)


def check_moments(moments: OutputMoments, heads: HeadWeights, path: str) -> None:
    """That moments are of this layer, and of enough text."""
    channels = heads.output.shape[0] * heads.output.shape[1]
    if len(moments.total) != channels:
        raise OptionError(
            f"the heads of {path} have {channels} channels, got moments of {len(moments.total)}; gather them anew"
        )
    if not same_layer(moments.signature, output_signature(heads.output)):
        raise OptionError(
            f"repair needs moments of the layer that is repaired, got moments of a layer with another output matrix "
            f"than {path}; gather them from this model"
        )
    if moments.count < channels:
        raise OptionError(
            f"calibration text must have at least as many tokens as the heads of {path} have channels, {channels}, "
            f"got {moments.count}"
        )


def check_ridge(ridge: object) -> None:
    if isinstance(ridge, bool) or not isinstance(ridge, int | float) or not 0 <= ridge < float("inf"):
        raise OptionError(f"ridge must be a number of at least 0, got {ridge!r}")
