"""Moments of a layer's head outputs and targets, from which a least-squares problem is built."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from polyhead.errors import OptionError
from polyhead.surgery.adapters.attention_layer import AttentionLayer
from polyhead.surgery.adapters.head_weights import HeadWeights
from polyhead.surgery.calibration.layer_capture import unpadded_rows
from polyhead.surgery.calibration.moments import OutputMoments
from polyhead.surgery.calibration.streams import Piece
from polyhead.surgery.compensation.least_squares import Problem, check_moments, output_projection


@dataclass(frozen=True, slots=True, eq=False)
class TargetMoments:
    """Sums over tokens of head outputs, target outputs and their products."""

    outputs: OutputMoments
    total: Tensor  # [embed_dim], sum of the targets
    cross: Tensor  # [channels, embed_dim]

    @classmethod
    def empty(cls, channels: int, width: int, device: torch.device) -> TargetMoments:
        zeros = torch.zeros(channels, width, dtype=torch.float64, device=device)
        return cls(OutputMoments.empty(channels, device), zeros[0].clone(), zeros)

    def update(self, rows: Tensor, targets: Tensor, weights: Tensor | None = None) -> TargetMoments:
        """Return the moments with rows [tokens, channels] and targets [tokens, embed_dim] added.

        `weights`, [tokens], are the token weights.
        """
        rows, targets = rows.to(torch.float64), targets.to(torch.float64)
        if weights is not None:
            root = weights.to(rows).sqrt()[:, None]
            sums = OutputMoments(len(rows), (root.square() * rows).sum(0), (root * rows).T @ (root * rows))
            total, cross = (root.square() * targets).sum(0), (root * rows).T @ (root * targets)
            return TargetMoments(self.outputs.merge(sums), self.total + total, self.cross + cross)
        return TargetMoments(self.outputs.update(rows), self.total + targets.sum(0), self.cross + rows.T @ targets)

    def problem(self, heads: HeadWeights, ridge: float, path: str) -> Problem:
        """Return the least-squares problem for these heads."""
        check_moments(self.outputs, heads, path)
        centred = heads.output_bias is not None
        mean, products = (x.to(self.total.device) for x in self.outputs.compute(centred=centred))
        target_mean, cross = self.total / self.outputs.count, self.cross / self.outputs.count
        matrix, bias = (x.to(mean.device) for x in output_projection(heads))
        cross = cross - torch.outer(mean, target_mean) if centred else cross
        return Problem(products, mean, matrix, cross, target_mean, bias, heads.output.shape[1], ridge, centred)


def collect_targets(
    model: nn.Module,
    layer: AttentionLayer,
    text: Iterable[Piece],
    now: Mapping[str, Tensor],
) -> TargetMoments:
    """Collect a layer's head outputs with parameters `now`, and its original outputs as targets."""
    moments: TargetMoments | None = None
    for piece in text:
        current, original = (piece.capture(model, layer, lending=lending) for lending in (now, None))
        if current is None or original is None:
            continue
        rows, targets = (unpadded_rows(model, layer, piece.batch, x) for x in (current.heads, original.written))
        if moments is None:
            moments = TargetMoments.empty(rows.shape[-1], targets.shape[-1], rows.device)
        moments = moments.update(rows, targets)
    if moments is None:
        raise OptionError("calibration needs some text, got no batch, or batches for which the layer was not called")
    return moments
