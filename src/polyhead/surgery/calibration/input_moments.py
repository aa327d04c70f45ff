"""What the projections of a layer are given, as far as heads are compared by it: second moments over tokens."""

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


@dataclass(frozen=True, slots=True, eq=False)
class InputMoments:
    """Mean products of what queries, keys and values are made of, each [x, 1] beside itself: [width + 1, width + 1].

    Without text every input counts as white: heads are then compared by their weights alone.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    tokens: int = 0  # that were read

    @classmethod
    def white(cls, heads: HeadWeights) -> InputMoments:
        query, key, value = (
            torch.eye(held.shape[-1] + 1, dtype=torch.float64) for held in (heads.query, heads.key, heads.value)
        )
        return cls(query, key, value)

    @classmethod
    def of(cls, query: OutputMoments, key: OutputMoments, value: OutputMoments) -> InputMoments:
        return cls(_augmented(query), _augmented(key), _augmented(value), query.count)

    def to(self, device: torch.device) -> InputMoments:
        return InputMoments(self.query.to(device), self.key.to(device), self.value.to(device), self.tokens)


def _augmented(moments: OutputMoments) -> Tensor:
    mean, products = moments.compute(centred=False)
    return torch.cat((torch.cat((products, mean[:, None]), 1), torch.cat((mean, mean.new_ones(1)))[None]))


def centred(moments: Tensor) -> Tensor:
    """Moments about the mean; what is the same for all tokens counts nothing."""
    mean = moments[:, -1]
    return moments - torch.outer(mean, mean)


def with_bias(weight: Tensor, bias: Tensor | None) -> Tensor:
    """Matrices [heads, dim, width] with their biases as one more column, zeros where there are none, in float64."""
    column = weight.new_zeros(weight.shape[:2]) if bias is None else bias
    return torch.cat((weight, column[..., None]), -1).to(torch.float64)


def collect_inputs(
    model: nn.Module,
    layer: AttentionLayer,
    text: Iterable[Piece],
    lending: Mapping[str, Tensor] | None = None,
) -> InputMoments:
    """The moments of what a layer's projections are given, in the model or in one with these parameters lent."""
    collected: dict[str, OutputMoments] = {}
    for piece in text:
        look = piece.look(model, layer, lending=lending or {})
        for part, x in {} if look is None else look.inputs.items():
            rows = unpadded_rows(model, layer, piece.batch, x)
            held = collected.get(part)
            held = OutputMoments.empty(rows.shape[-1], rows.device) if held is None else held
            collected[part] = held.update(rows)
    if not collected:
        raise OptionError("calibration needs some text, got no batch, or batches that the layer was not called for")
    return InputMoments.of(collected["query"], collected["key"], collected["value"])
