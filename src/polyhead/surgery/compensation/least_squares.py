"""Pruning with least-squares compensation: W_O of the remaining heads reconstructs the output.

Closed form over the moments of calibration text. With X the concatenated outputs of all heads, T the target output
(X W for the full output matrix W, unless `collect_targets` sets another) and S the channels that remain, the new matrix
minimises |T - X_S W_S|² + λ |W_S - old W_S|². For λ = 0 and T = X W this is the block form of the weight update of
the Optimal Brain Surgeon (Hassibi & Stork 1992), with the Hessian XᵀX of the layer-wise reconstruction error. λ is
`ridge` times the mean square of a channel, which keeps W_S near its old value where the data leave it undetermined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from polyhead.errors import NonFiniteError, OptionError, ShapeError
from polyhead.surgery.adapters.attention_layer import AttentionLayer, linear_axis
from polyhead.surgery.adapters.head_weights import HeadWeights, oriented, read_heads
from polyhead.surgery.calibration.moments import OutputMoments, output_signature, same_layer
from polyhead.surgery.calibration.streams import swapped_parameters

RIDGE = 1e-2


@dataclass(frozen=True, slots=True, eq=False)
class OutputCompensation:
    """Compensates edited layers: `apply(model, edits, compensation=OutputCompensation(moments))`.

    The output bias is solved as well where a layer has one. A layer without a bias gets none, since the
    model's config has no option for it.
    """

    moments: Mapping[str, OutputMoments]
    ridge: float = RIDGE

    def __post_init__(self) -> None:
        check_ridge(self.ridge)

    def __call__(self, path: str, before: HeadWeights, after: HeadWeights) -> HeadWeights:
        if path not in self.moments:
            raise OptionError(f"compensation needs the moments of every edited layer, got none of {path!r}")
        regression = OutputRegression.of(self.moments[path], before, self.ridge, path)
        return with_output(after, *regression.solve(remaining_heads(path, after)))


@dataclass(frozen=True, slots=True, eq=False)
class OutputProjection:
    """W_O of one layer's remaining heads, with its bias."""

    heads: tuple[int, ...]  # the remaining heads, in order
    matrix: Tensor  # [their channels, embed_dim]
    bias: Tensor  # [embed_dim], zero where the layer has none

    @classmethod
    def unchanged(cls, heads: HeadWeights, pruned: Sequence[int]) -> OutputProjection:
        """Return the rows of the remaining heads as they are."""
        matrix, bias = output_projection(heads)
        remaining = tuple(head for head in range(heads.num_heads) if head not in pruned)
        return cls(remaining, matrix.unflatten(0, (heads.num_heads, -1))[list(remaining)].flatten(0, 1), bias)

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the fields as tensors, to be stored."""
        return {"heads": torch.tensor(self.heads), "matrix": self.matrix, "bias": self.bias}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> OutputProjection:
        """Return the projection that `to_tensors` was called on."""
        return cls(tuple(tensors["heads"].tolist()), tensors["matrix"], tensors["bias"])


@dataclass(frozen=True, slots=True, eq=False)
class OutputRegression:
    """Least-squares problem of one layer's W_O, in float64, on the device of its moments."""

    products: Tensor  # [channels, channels], centred where a bias can absorb the mean
    mean: Tensor  # [channels]
    matrix: Tensor  # [channels, embed_dim], the current W_O
    cross: Tensor  # [channels, embed_dim], products with the target output, centred likewise
    target_mean: Tensor  # [embed_dim]
    bias: Tensor  # [embed_dim], zero where there is none
    head_width: int
    ridge: float
    centred: bool

    @classmethod
    def of(
        cls,
        moments: OutputMoments,
        heads: HeadWeights,
        ridge: float = RIDGE,
        path: str = "the layer",
        *,
        target: tuple[Tensor, Tensor] | None = None,
    ) -> OutputRegression:
        """Return the problem of reconstructing the output of the full W_O from fewer heads.

        `target` is another output to reconstruct: its mean, and the mean products of head outputs with it.
        """
        check_moments(moments, heads, path)
        centred = heads.output_bias is not None
        mean, products = (x.to(moments.total.device) for x in moments.compute(centred=centred))
        matrix, bias = (x.to(mean.device) for x in output_projection(heads))
        if target is None:
            target_mean, cross = mean @ matrix + bias, products @ matrix
        else:
            target_mean, cross = target
            cross = cross - torch.outer(mean, target_mean) if centred else cross
        return cls(products, mean, matrix, cross, target_mean, bias, heads.output.shape[1], ridge, centred)

    @property
    def scale(self) -> float:
        """Mean square of a channel, the unit of `ridge`."""
        return float(self.products.diagonal().mean())

    def channels(self, heads: Sequence[int]) -> Tensor:
        """Return the channels of these heads, in their order."""
        index = torch.tensor(heads)[:, None] * self.head_width + torch.arange(self.head_width)
        return index.flatten().to(self.mean.device)

    def factor(self, channels: Tensor) -> Tensor:
        """Return the Cholesky factor of the ridge-regularised system over these channels."""
        ridge = self.ridge * self.scale * torch.eye(len(channels), dtype=torch.float64, device=channels.device)
        factor, failed = torch.linalg.cholesky_ex(self.products[channels][:, channels] + ridge)
        if int(failed):
            raise OptionError(
                f"the outputs of the heads must be linearly independent, got a singular system with ridge "
                f"{self.ridge}; pass more text or a larger ridge"
            )
        return factor

    def solve(self, heads: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return W_O of the remaining heads, [their channels, embed_dim], and the output bias."""
        channels = self.channels(heads)
        old, ridge = self.matrix[channels], self.ridge * self.scale
        if self.scale == 0:  # all head outputs are zero: nothing to compensate
            return old, self.bias
        new = torch.cholesky_solve(self.cross[channels] + ridge * old, self.factor(channels))
        return new, (self.target_mean - self.mean[channels] @ new if self.centred else self.bias)

    def without(self, pruned: Sequence[int]) -> OutputProjection:
        """Return W_O of the other heads, which compensates for the pruned ones."""
        remaining = tuple(head for head in range(len(self.mean) // self.head_width) if head not in pruned)
        return OutputProjection(remaining, *self.solve(remaining))


@dataclass(frozen=True, slots=True, eq=False)
class PrecomputedProjections:
    """Compensates edited layers by precomputed output projections, as `OutputCompensation` does by moments."""

    projections: Mapping[str, OutputProjection]

    def __call__(self, path: str, before: HeadWeights, after: HeadWeights) -> HeadWeights:
        projection = self.projections[path]
        blocks = projection.matrix.unflatten(0, (len(projection.heads), -1))
        ordered = blocks[[projection.heads.index(head) for head in remaining_heads(path, after)]].flatten(0, 1)
        return with_output(after, ordered, projection.bias)


def swapped_projections(
    model: nn.Module, layers: Mapping[str, AttentionLayer], projections: Mapping[str, OutputProjection]
) -> AbstractContextManager[None]:
    """Replace the output projections within the context, as if heads were pruned; restored bit for bit on exit.

    Equivalent to the pruned model, but no module is rebuilt and every shape is unchanged, so that a search can
    evaluate hundreds of candidates.
    """
    return swapped_parameters(model, projection_parameters(model, layers, projections))


def projection_parameters(
    model: nn.Module, layers: Mapping[str, AttentionLayer], projections: Mapping[str, OutputProjection]
) -> dict[str, Tensor]:
    """Return W_O and bias of each layer by parameter name, with zeros for pruned heads, for `swapped_parameters`."""
    parameters: dict[str, Tensor] = {}
    for path, projection in projections.items():
        layer = layers[path]
        linear = model.get_submodule(layer.output)
        weight = linear.get_parameter("weight")
        assert layer.layout is not None
        blocks = projection.matrix.new_zeros(layer.layout.num_heads, layer.layout.value_dim, projection.matrix.shape[1])
        blocks[list(projection.heads)] = projection.matrix.unflatten(0, (len(projection.heads), -1))
        rows = blocks.flatten(0, 1).to(weight.device, weight.dtype)
        parameters[f"{layer.output}.weight"] = oriented(rows, linear_axis(linear, outputs=False))
        if isinstance(linear.bias, Tensor):
            parameters[f"{layer.output}.bias"] = projection.bias
    return parameters


def unchanged_projections(
    model: nn.Module, layers: Mapping[str, AttentionLayer], removed: Mapping[str, Sequence[int]]
) -> dict[str, OutputProjection]:
    """Return the output projections of layers without these heads, not compensated."""
    return {
        path: OutputProjection.unchanged(read_heads(model, layers[path]), heads)
        for path, heads in removed.items()
        if len(heads)
    }


def remaining_heads(path: str, after: HeadWeights) -> list[int]:
    """Return the original heads that an edited layer consists of; raises if it has changed or new heads."""
    if None in after.origins:
        raise OptionError(
            "compensation needs heads whose outputs are unchanged, got heads of "
            f"{path!r} that were merged, regrouped or added"
        )
    return [head for head in after.origins if head is not None]


def with_output(after: HeadWeights, matrix: Tensor, bias: Tensor) -> HeadWeights:
    """Return heads with this output matrix, [channels, embed_dim], and this bias if the layer has one."""
    return replace(
        after,
        output=matrix.view(after.output.shape).to(after.output),
        output_bias=None if after.output_bias is None else bias.to(after.output_bias),
    )


def output_projection(heads: HeadWeights) -> tuple[Tensor, Tensor]:
    """Return W_O [channels, embed_dim] and its bias (or zeros), in float64 on the CPU."""
    matrix = heads.output.flatten(0, 1).to("cpu", torch.float64)
    zero = matrix.new_zeros(matrix.shape[1])
    return matrix, zero if heads.output_bias is None else heads.output_bias.to("cpu", torch.float64)


def in_metric(matrix: Tensor, root: Tensor | None) -> Tensor:
    """Return the matrix times `root`, so that squared norms are in that metric."""
    if root is None:
        return matrix.clone()
    if root.ndim != 2 or root.shape[0] != matrix.shape[1]:
        raise ShapeError(f"root must be [{matrix.shape[1]}, any], a row for each output, got {list(root.shape)}")
    return matrix @ root.to(matrix)


def check_moments(moments: OutputMoments, heads: HeadWeights, path: str) -> None:
    """Raise `OptionError` unless the moments are of this layer and of enough tokens."""
    channels = heads.output.shape[0] * heads.output.shape[1]
    if len(moments.total) != channels:
        raise OptionError(
            f"the heads of {path} have {channels} channels, got moments of {len(moments.total)} channels; "
            "collect them again"
        )
    if not same_layer(moments.signature, output_signature(heads.output)):
        raise OptionError(
            f"compensation needs moments of the layer it changes, got moments of a layer with another output matrix "
            f"than {path}; collect them from this model"
        )
    if not bool(moments.total.isfinite().all()):
        raise NonFiniteError(
            f"the outputs of the heads of {path} must be finite on the calibration text, got NaN or Inf from the "
            "weights or the text; polyhead inspect names the heads"
        )
    if moments.count < channels:
        raise OptionError(
            f"calibration text must have at least as many tokens as the heads of {path} have channels, {channels}, "
            f"got {moments.count}"
        )


def check_ridge(ridge: object) -> None:
    if isinstance(ridge, bool) or not isinstance(ridge, int | float) or not 0 <= ridge < float("inf"):
        raise OptionError(f"ridge must be a number of at least 0, got {ridge!r}")
