"""Evaluate a model as if heads were pruned, by swapping W_O with their rows zeroed.

Equivalent to the pruned model (tested), but no module is rebuilt and every shape is unchanged, so that a search can
evaluate hundreds of candidates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from polyhead.surgery.adapters.attention_layer import AttentionLayer, linear_axis
from polyhead.surgery.adapters.head_weights import HeadWeights, oriented, read_heads
from polyhead.surgery.calibration.temporary import swapped_parameters
from polyhead.surgery.compensation.least_squares import Problem, output_projection, remaining_heads, with_output


@dataclass(frozen=True, slots=True, eq=False)
class Outputs:
    """W_O of one layer's remaining heads, with its bias."""

    heads: tuple[int, ...]  # the remaining heads, in order
    matrix: Tensor  # [their channels, embed_dim]
    bias: Tensor  # [embed_dim], zero where the layer has none

    @classmethod
    def plain(cls, heads: HeadWeights, pruned: Sequence[int]) -> Outputs:
        """Return the unchanged rows of the remaining heads."""
        matrix, bias = output_projection(heads)
        remaining = tuple(head for head in range(heads.num_heads) if head not in pruned)
        return cls(remaining, matrix.unflatten(0, (heads.num_heads, -1))[list(remaining)].flatten(0, 1), bias)

    @classmethod
    def solved(cls, problem: Problem, pruned: Sequence[int]) -> Outputs:
        """Return rows of the remaining heads that are compensated by least squares."""
        remaining = tuple(head for head in range(len(problem.mean) // problem.head_width) if head not in pruned)
        return cls(remaining, *problem.solve(remaining))


@dataclass(frozen=True, slots=True, eq=False)
class GivenOutputs:
    """Compensation by precomputed output projections: `apply(model, edits, compensation=GivenOutputs(outputs))`."""

    outputs: Mapping[str, Outputs]

    def __call__(self, path: str, before: HeadWeights, after: HeadWeights) -> HeadWeights:
        outputs, remaining = self.outputs[path], remaining_heads(path, after)
        blocks = outputs.matrix.unflatten(0, (len(outputs.heads), -1))
        ordered = blocks[[outputs.heads.index(head) for head in remaining]].flatten(0, 1)
        return with_output(after, ordered, outputs.bias)


def output_parameters(
    model: nn.Module, layers: Mapping[str, AttentionLayer], outputs: Mapping[str, Outputs]
) -> dict[str, Tensor]:
    """Return W_O and bias of each layer by parameter name, with zeros for pruned heads, for `swapped_parameters`."""
    parameters: dict[str, Tensor] = {}
    for path, layer_outputs in outputs.items():
        layer = layers[path]
        linear = model.get_submodule(layer.output)
        weight = linear.get_parameter("weight")
        assert layer.layout is not None
        blocks = layer_outputs.matrix.new_zeros(
            layer.layout.num_heads, layer.layout.value_dim, layer_outputs.matrix.shape[1]
        )
        blocks[list(layer_outputs.heads)] = layer_outputs.matrix.unflatten(0, (len(layer_outputs.heads), -1))
        rows = blocks.flatten(0, 1).to(weight.device, weight.dtype)
        parameters[f"{layer.output}.weight"] = oriented(rows, linear_axis(linear, outputs=False))
        if isinstance(linear.bias, Tensor):
            parameters[f"{layer.output}.bias"] = layer_outputs.bias
    return parameters


@contextmanager
def with_outputs(
    model: nn.Module, layers: Mapping[str, AttentionLayer], outputs: Mapping[str, Outputs]
) -> Iterator[None]:
    """Replace the output projections within the context; they are restored bit for bit on exit."""
    with swapped_parameters(model, output_parameters(model, layers, outputs)):
        yield


def plain_outputs(
    model: nn.Module, layers: Mapping[str, AttentionLayer], removed: Mapping[str, Sequence[int]]
) -> dict[str, Outputs]:
    """Return the output projections of layers without these heads, not compensated."""
    return {
        path: Outputs.plain(read_heads(model, layers[path]), heads) for path, heads in removed.items() if len(heads)
    }
