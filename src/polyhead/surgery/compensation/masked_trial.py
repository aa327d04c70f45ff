"""A model as if heads were gone, for a moment: their rows of W_O are zero, and no other weight is touched.

It computes what the model computes whose heads were taken out (tests hold one to the other), costs nothing to set up or
to take back, and leaves every shape as it was: what a search can try by the hundred.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from polyhead.surgery.adapters.attention_layer import AttentionLayer, linear_axis
from polyhead.surgery.adapters.head_weights import HeadWeights, oriented, read_heads
from polyhead.surgery.calibration.temporary import lent
from polyhead.surgery.compensation.least_squares import Problem, output_projection, remaining_heads, with_output


@dataclass(frozen=True, slots=True, eq=False)
class Outputs:
    """W_O of one layer without some of its heads: of those that stay, with the bias that goes with it."""

    heads: tuple[int, ...]  # that stay, in their order
    matrix: Tensor  # [their channels, embed_dim]
    bias: Tensor  # [embed_dim], zero where the layer has none

    @classmethod
    def plain(cls, heads: HeadWeights, gone: Sequence[int]) -> Outputs:
        """The matrices that stay as they are."""
        matrix, bias = output_projection(heads)
        kept = tuple(head for head in range(heads.num_heads) if head not in gone)
        return cls(kept, matrix.unflatten(0, (heads.num_heads, -1))[list(kept)].flatten(0, 1), bias)

    @classmethod
    def solved(cls, problem: Problem, gone: Sequence[int]) -> Outputs:
        """The matrices that repair gives."""
        kept = tuple(head for head in range(len(problem.mean) // problem.head_width) if head not in gone)
        return cls(kept, *problem.solve(kept))


@dataclass(frozen=True, slots=True, eq=False)
class GivenOutputs:
    """Writes what was solved before; for `apply(model, edits, compensation=GivenOutputs(outputs))`."""

    outputs: Mapping[str, Outputs]

    def __call__(self, path: str, before: HeadWeights, after: HeadWeights) -> HeadWeights:
        found, kept = self.outputs[path], remaining_heads(path, after)
        blocks = found.matrix.unflatten(0, (len(found.heads), -1))
        ordered = blocks[[found.heads.index(head) for head in kept]].flatten(0, 1)
        return with_output(after, ordered, found.bias)


def output_parameters(
    model: nn.Module, layers: Mapping[str, AttentionLayer], outputs: Mapping[str, Outputs]
) -> dict[str, Tensor]:
    """The parameters with which the model writes these outputs, of the shapes that it has; for `lent`."""
    lending: dict[str, Tensor] = {}
    for path, found in outputs.items():
        layer = layers[path]
        linear = model.get_submodule(layer.output)
        weight = linear.get_parameter("weight")
        assert layer.layout is not None
        blocks = found.matrix.new_zeros(layer.layout.num_heads, layer.layout.value_dim, found.matrix.shape[1])
        blocks[list(found.heads)] = found.matrix.unflatten(0, (len(found.heads), -1))
        rows = blocks.flatten(0, 1).to(weight.device, weight.dtype)
        lending[f"{layer.output}.weight"] = oriented(rows, linear_axis(linear, outputs=False))
        if isinstance(linear.bias, Tensor):
            lending[f"{layer.output}.bias"] = found.bias
    return lending


@contextmanager
def as_if(model: nn.Module, layers: Mapping[str, AttentionLayer], outputs: Mapping[str, Outputs]) -> Iterator[None]:
    """Within, the model computes with these outputs; afterwards it is as it was, bit for bit."""
    with lent(model, output_parameters(model, layers, outputs)):
        yield


def plain_outputs(
    model: nn.Module, layers: Mapping[str, AttentionLayer], gone: Mapping[str, Sequence[int]]
) -> dict[str, Outputs]:
    """Of heads that are taken out without repair."""
    return {path: Outputs.plain(read_heads(model, layers[path]), heads) for path, heads in gone.items() if len(heads)}
