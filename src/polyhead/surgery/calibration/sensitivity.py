"""How much a loss in each layer's output matters to the model: gradients of its loss by what the layer writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from polyhead.errors import OptionError
from polyhead.ops.attention.scaled_dot_product import without_cudnn
from polyhead.surgery.adapters.attention_layer import AttentionLayer
from polyhead.surgery.adapters.discovery import find_layers
from polyhead.surgery.adapters.head_weights import read_heads
from polyhead.surgery.calibration.moments import OutputMoments, output_signature, root
from polyhead.surgery.calibration.temporary import evaluating

Loss = Callable[[nn.Module, Mapping[str, Any]], Tensor]


def loss_weights(model: nn.Module, batches: Iterable[Mapping[str, Any]], loss: Loss) -> dict[str, float]:
    """A weight for each attention layer, by path, for `choose_heads(orders, count, weights=...)`.

    It is the mean over tokens and channels of the squared gradient of the loss by what the layer writes: to second
    order, and as if errors pointed in no direction of their own, a mean square error there times this weight is what
    the model loses. Padding, whose gradient is zero, counts as tokens in every layer alike.

    Args:
        loss: of a batch, summed over what it predicts; it calls the model itself, as `loss(model, batch)`.
    """
    squares: dict[str, float] = {}
    numbers: dict[str, int] = {}
    for path, _, gradient in _gradients(model, batches, loss):
        squares[path] = squares.get(path, 0.0) + float(gradient.double().square().sum())
        numbers[path] = numbers.get(path, 0) + gradient.numel()
    return {path: squares[path] / numbers[path] for path in squares}


@dataclass(frozen=True, slots=True, eq=False)
class Sensitivity:
    """The mean over tokens of products of the gradient by what a layer writes: the Fisher information there.

    An error e in what the layer writes costs eᵀ G e, up to a factor that all layers share.
    """

    products: Tensor  # [embed_dim, embed_dim], float64

    @property
    def weight(self) -> float:
        """As if errors pointed in no direction of their own."""
        return float(self.products.diagonal().mean())

    def root(self) -> Tensor:
        """R with R Rᵀ = G."""
        return root(self.products)


def loss_sensitivities(model: nn.Module, batches: Iterable[Mapping[str, Any]], loss: Loss) -> dict[str, Sensitivity]:
    """What an error in each direction of what a layer writes costs, by path; arguments as of `loss_weights`."""
    products: dict[str, Tensor] = {}
    numbers: dict[str, int] = {}
    for path, _, gradient in _gradients(model, batches, loss):
        rows = gradient.flatten(0, -2).double()
        products[path] = products.get(path, 0.0) + rows.T @ rows
        numbers[path] = numbers.get(path, 0) + len(rows)
    return {path: Sensitivity(x / numbers[path]) for path, x in products.items()}


def weighed_moments(model: nn.Module, batches: Iterable[Mapping[str, Any]], loss: Loss) -> dict[str, OutputMoments]:
    """The moments of `collect_moments` where each token counts by its squared gradient, 1 on average; by path.

    Repair over these makes up first for what is missing where the model is sensitive to it. Padding has no gradient
    and counts for nothing; other arguments are as of `loss_weights`.
    """
    layers = {layer.path: layer for layer in find_layers(model)}
    sums: dict[str, OutputMoments] = {}
    weights: dict[str, float] = {}
    for path, given, gradient in _gradients(model, batches, loss):
        own = gradient.double().square().sum(-1).flatten()
        held = sums.get(path)
        if held is None:
            signature = output_signature(read_heads(model, layers[path]).output)
            held = OutputMoments.empty(given.shape[-1], given.device, signature)
        rows = given.flatten(0, -2).double()
        products = held.products + rows.T @ (rows * own[:, None])
        count = held.count + int((own > 0).sum())
        sums[path] = replace(held, count=count, total=held.total + own @ rows, products=products)
        weights[path] = weights.get(path, 0.0) + float(own.sum())
    return {path: _scaled(held, weights[path]) for path, held in sums.items()}


def token_weights(model: nn.Module, batches: Iterable[Mapping[str, Any]], loss: Loss) -> dict[str, list[Tensor]]:
    """How much each token counts in `weighed_moments`: by path, a tensor for each batch, 1 on average over all."""
    found: dict[str, list[Tensor]] = {}
    for path, _, gradient in _gradients(model, batches, loss):
        found.setdefault(path, []).append(gradient.double().square().sum(-1))
    for path, weights in found.items():
        count, total = (
            sum(float(own) for own in x) for x in ([(w > 0).sum() for w in weights], [w.sum() for w in weights])
        )
        found[path] = [own * (count / total if total else 0.0) for own in weights]
    return found


def _scaled(held: OutputMoments, weight: float) -> OutputMoments:
    """Where the weights have this sum, as if their mean were 1."""
    factor = held.count / weight if weight else 0.0
    return replace(held, total=held.total * factor, products=held.products * factor)


def _gradients(
    model: nn.Module, batches: Iterable[Mapping[str, Any]], loss: Loss
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """What each layer's W_O is given, and the gradient of each batch's loss by what it makes of that."""
    layers = [layer for layer in find_layers(model) if not layer.refusals]
    probes: list[tuple[str, Tensor, Tensor]] = []
    seen = False

    def listen(layer: AttentionLayer) -> Callable[..., Tensor]:
        def add_probe(module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> Tensor:
            probe = torch.zeros_like(output, requires_grad=True)
            probes.append((layer.path, given[0].detach(), probe))
            return output + probe

        return add_probe

    with evaluating(model), ExitStack() as undo:
        for layer in layers:
            undo.callback(model.get_submodule(layer.output).register_forward_hook(listen(layer)).remove)
        for batch in batches:
            probes.clear()
            with torch.enable_grad(), without_cudnn():
                value = loss(model, batch)
            if not probes or value.numel() != 1 or not value.requires_grad:
                raise OptionError(
                    "a loss calls the model and gives one number with a gradient, got "
                    + ("a loss that calls no attention layer" if not probes else f"a tensor {list(value.shape)}")
                )
            with without_cudnn():  # checkpointed activations are computed again
                gradients = torch.autograd.grad(value, [probe for _, _, probe in probes], allow_unused=True)
            for (path, given, probe), gradient in zip(probes, gradients, strict=True):
                yield path, given, torch.zeros_like(probe) if gradient is None else gradient
            seen = True
    if not seen:
        raise OptionError("weights are measured on some text, got no batch")
