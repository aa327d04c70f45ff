"""Moments of a layer's head outputs and of the output that it should have: that of the unedited model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from polyhead.errors import OptionError
from polyhead.surgery.adapters.attention_layer import AttentionLayer
from polyhead.surgery.adapters.head_weights import HeadWeights
from polyhead.surgery.calibration.moments import OutputMoments
from polyhead.surgery.calibration.streams import Piece, non_padding_mask, rows_of
from polyhead.surgery.compensation.least_squares import OutputRegression


def collect_targets(
    model: nn.Module, layer: AttentionLayer, text: Iterable[Piece], swapped: Mapping[str, Tensor]
) -> TargetMoments:
    """Collect the moments of a layer's head outputs, and of its outputs in the unedited model.

    Head outputs are those of the model with the parameters `swapped`, by name, in place.
    """
    moments: TargetMoments | None = None
    for piece in text:
        current = piece.capture(model, layer, swapped=swapped)
        original = piece.capture(model, layer, swapped=None)
        if current is None or original is None:
            continue
        mask = non_padding_mask(model, layer, piece.batch, current.heads)
        rows, target = rows_of(current.heads, mask), rows_of(original.written, mask)
        if moments is None:
            moments = TargetMoments.empty(rows.shape[-1], target.shape[-1], rows.device)
        moments = moments.update(rows, target)
    if moments is None:
        raise OptionError("calibration needs some text, got no batch, or batches for which the layer was not called")
    return moments


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

    def update(self, rows: Tensor, targets: Tensor) -> TargetMoments:
        """Return the moments with rows [tokens, channels] and targets [tokens, embed_dim] added."""
        rows, targets = rows.to(torch.float64), targets.to(torch.float64)
        return TargetMoments(self.outputs.update(rows), self.total + targets.sum(0), self.cross + rows.T @ targets)

    def regression(self, heads: HeadWeights, ridge: float, path: str) -> OutputRegression:
        """Return the least-squares problem of these targets for these heads."""
        target = self.total / self.outputs.count, self.cross / self.outputs.count
        return OutputRegression.of(self.outputs, heads, ridge, path, target=target)
