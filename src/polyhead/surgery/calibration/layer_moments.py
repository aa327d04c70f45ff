"""Moments of one layer in a model that is being converted: of its inputs, its head outputs and its original output."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from polyhead.errors import OptionError
from polyhead.surgery.adapters.attention_layer import AttentionLayer
from polyhead.surgery.adapters.head_weights import HeadWeights
from polyhead.surgery.calibration.moments import OutputMoments
from polyhead.surgery.calibration.streams import Piece, non_padding_mask, rows_of, unpadded_rows

NO_TEXT = "calibration needs some text, got no batch, or batches for which the layer was not called"


@dataclass(frozen=True, slots=True, eq=False)
class InputMoments:
    """Mean products of the query, key and value inputs, each augmented to [x, 1]: [width + 1, width + 1].

    Without calibration text, inputs are assumed to be white (identity matrices): heads are compared by weights alone.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    tokens: int = 0  # number of calibration tokens

    @classmethod
    def white(cls, heads: HeadWeights) -> InputMoments:
        query, key, value = (
            torch.eye(weight.shape[-1] + 1, dtype=torch.float64) for weight in (heads.query, heads.key, heads.value)
        )
        return cls(query, key, value)

    @classmethod
    def of(cls, query: OutputMoments, key: OutputMoments, value: OutputMoments) -> InputMoments:
        return cls(_augmented(query), _augmented(key), _augmented(value), query.count)

    def to(self, device: torch.device) -> InputMoments:
        return InputMoments(self.query.to(device), self.key.to(device), self.value.to(device), self.tokens)


def _augmented(moments: OutputMoments) -> Tensor:
    mean, second = moments.compute(centred=False)
    return torch.cat((torch.cat((second, mean[:, None]), 1), torch.cat((mean, mean.new_ones(1)))[None]))


def centred(moments: Tensor) -> Tensor:
    """Return moments about the mean from augmented ones, in the same shape; the last row and column become 0."""
    mean = moments[:, -1]
    return moments - torch.outer(mean, mean)


def collect_inputs(
    model: nn.Module, layer: AttentionLayer, text: Iterable[Piece], swapped: Mapping[str, Tensor] | None = None
) -> InputMoments:
    """Collect the moments of a layer's projection inputs; `swapped` replaces parameters of the model, by name."""
    collected: dict[str, OutputMoments] = {}
    for piece in text:
        capture = piece.capture(model, layer, swapped=swapped or {})
        if capture is None:
            continue
        for part, x in capture.inputs.items():
            rows = unpadded_rows(model, layer, piece.batch, x)
            moments = collected.get(part)
            moments = OutputMoments.empty(rows.shape[-1], rows.device) if moments is None else moments
            collected[part] = moments.update(rows)
    if not collected:
        raise OptionError(NO_TEXT)
    return InputMoments.of(collected["query"], collected["key"], collected["value"])


def collect_targets(
    model: nn.Module, layer: AttentionLayer, text: Iterable[Piece], swapped: Mapping[str, Tensor]
) -> TargetMoments:
    """Collect the moments of a layer's head outputs in the edited model, and of its outputs in the original model.

    The edited model is `model` with the parameters in `swapped`, by name, in place of its own.
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
        raise OptionError(NO_TEXT)
    return moments


@dataclass(frozen=True, slots=True, eq=False)
class TargetMoments:
    """Sums over tokens of head outputs, of the layer outputs they should give (targets), and of their products."""

    outputs: OutputMoments  # of the head outputs, [channels]
    total: Tensor  # [embed_dim], sum of the targets
    cross: Tensor  # [channels, embed_dim], sum of the products of head outputs and targets

    @classmethod
    def empty(cls, channels: int, width: int, device: torch.device) -> TargetMoments:
        zeros = torch.zeros(channels, width, dtype=torch.float64, device=device)
        return cls(OutputMoments.empty(channels, device), zeros[0].clone(), zeros)

    def update(self, rows: Tensor, targets: Tensor) -> TargetMoments:
        """Return the moments with rows [tokens, channels] and targets [tokens, embed_dim] added."""
        rows, targets = rows.to(torch.float64), targets.to(torch.float64)
        return TargetMoments(self.outputs.update(rows), self.total + targets.sum(0), self.cross + rows.T @ targets)

    @property
    def target(self) -> tuple[Tensor, Tensor]:
        """Mean of the targets, and mean products of head outputs with them, for `OutputRegression.of`."""
        return self.total / self.outputs.count, self.cross / self.outputs.count
