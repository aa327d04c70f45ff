"""Distillation of pruned layers: gradient steps on W_O of the remaining heads, towards the unpruned model's outputs.

Least squares restores the output of each layer by itself, for the inputs that the layer has in the unpruned model. It
does not see that errors of earlier layers change the inputs of later ones, nor which errors cancel. These steps do:
they minimise the distance of the whole model's outputs to those of the unpruned model (Hinton et al. 2015), over all
output projections together, starting from the least-squares solution. No labels are used, so that the model is not
adapted to the text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from polyhead.errors import NonFiniteError
from polyhead.observation.evaluation_mode import evaluating, frozen
from polyhead.ops.attention.scaled_dot_product import without_cudnn
from polyhead.surgery.adapters.attention_layer import AttentionLayer, linear_axis
from polyhead.surgery.adapters.head_weights import oriented
from polyhead.surgery.calibration.streams import CachedBlocks, in_float32, swapped_parameters
from polyhead.surgery.compensation.least_squares import OutputProjection, projection_parameters

RATE = 0.006  # largest step of a weight, relative to the root mean square of its matrix
BETAS = (0.9, 0.95)  # of Adam
WARM_UP = 0.1  # share of the steps in which the rate rises; it falls linearly over the others


class Objective(Protocol):
    """The distance that is minimised: of the outputs of a model to those of the unpruned model, on one batch."""

    @staticmethod
    def outputs(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        """Return the outputs of the non-padding tokens, [tokens, channels]."""

    @staticmethod
    def distance(outputs: Tensor, originals: Tensor) -> Tensor:
        """Return the mean distance over tokens, at least 0."""


def distil(
    model: nn.Module,
    layers: Mapping[str, AttentionLayer],
    projections: Mapping[str, OutputProjection],
    batches: Sequence[Mapping[str, Any]],
    objective: Objective,
    *,
    recorded: Sequence[CachedBlocks] = (),
    rate: float = RATE,
    progress: Callable[[int], object] = lambda count: None,
) -> dict[str, OutputProjection]:
    """Return output projections after one step of Adam per batch, by path; the model is unchanged.

    Args:
        model: the unpruned model.
        layers: its attention layers, by path.
        projections: output projections of the pruned layers to start from, such as the least-squares solution.
        batches: calibration text, each batch read once and in order; they should have about equally many tokens.
        objective: the distance to minimise.
        recorded: the last block's output in the unpruned model, for each batch, from `recording_blocks`. The other
            blocks are then skipped to compute the outputs of the unpruned model, if that gives the same on the first.
        rate: largest step, relative to the root mean square of each matrix.
        progress: called with 1 after each batch.
    """
    ones = {
        path: replace(x, matrix=torch.ones_like(x.matrix), bias=torch.ones_like(x.bias))
        for path, x in projections.items()
    }
    with in_float32(model), evaluating(model), frozen(model), ExitStack() as stack:
        # In float32: steps are too small for 16 bits.
        weights = {name: x.float().clone() for name, x in projection_parameters(model, layers, projections).items()}
        masks = projection_parameters(model, layers, ones)  # pruned heads stay zero
        parameters = [model.get_parameter(name) for name in weights]
        for parameter in parameters:
            stack.callback(parameter.requires_grad_, parameter.requires_grad)
            parameter.requires_grad_(True)
        groups = [{"params": [x], "scale": float(x.square().mean().sqrt())} for x in weights.values()]
        adam = torch.optim.Adam(groups, betas=BETAS)
        if recorded and not torch.equal(
            *(_original_outputs(model, batches[0], objective, x) for x in (recorded[0], None))
        ):
            recorded = ()
        for step, batch in enumerate(batches):
            originals = _original_outputs(model, batch, objective, recorded[step] if recorded else None)
            with swapped_parameters(model, weights), torch.enable_grad(), without_cudnn():
                loss = objective.distance(objective.outputs(model, batch), originals)
                del originals  # logits of a large vocabulary
                gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            if not all(bool(x.isfinite().all()) for x in (loss, *gradients) if x is not None):
                raise NonFiniteError(
                    "the outputs of the model on the calibration text and their gradients must be finite, got NaN or "
                    f"Inf (a distance of {float(loss.detach())}); polyhead inspect names heads with NaN or Inf"
                )
            for (name, weight), gradient in zip(weights.items(), gradients, strict=True):
                weight.grad = (
                    torch.zeros_like(weight) if gradient is None else gradient.to(weight) * masks[name].to(weight)
                )
            for group in adam.param_groups:
                group["lr"] = rate * group["scale"] * _schedule(step, len(batches))
            adam.step()
            progress(1)
        return {path: _projection(model, layers[path], projections[path], weights) for path in projections}


@torch.no_grad()
def _original_outputs(
    model: nn.Module, batch: Mapping[str, Any], objective: Objective, recorded: CachedBlocks | None
) -> Tensor:
    with nullcontext() if recorded is None else recorded.skipping():
        return objective.outputs(model, batch)


def _schedule(step: int, steps: int) -> float:
    """Return the factor of the rate: a linear warm-up, then a linear decay to zero."""
    return min(1.0, (step + 1) / (WARM_UP * steps)) * (1 - step / steps)


def _projection(
    model: nn.Module, layer: AttentionLayer, before: OutputProjection, weights: Mapping[str, Tensor]
) -> OutputProjection:
    """Return the rows of the remaining heads, and the bias, of the parameters of W_O, which are given by name."""
    assert layer.layout is not None
    rows = oriented(weights[f"{layer.output}.weight"], linear_axis(model.get_submodule(layer.output), outputs=False))
    matrix = rows.unflatten(0, (layer.layout.num_heads, -1))[list(before.heads)].flatten(0, 1).to(before.matrix)
    bias = weights.get(f"{layer.output}.bias", before.bias)
    return OutputProjection(before.heads, matrix, bias.to(before.bias))
