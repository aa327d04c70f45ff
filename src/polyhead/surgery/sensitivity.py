"""How much a loss in each layer's output matters to the model: the squared gradient of its loss, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from polyhead.errors import OptionError
from polyhead.surgery.anatomy import AttentionLayer, find_layers


def loss_weights(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    loss: Callable[[nn.Module, Mapping[str, Any]], Tensor],
) -> dict[str, float]:
    """A weight for each attention layer, by path, for `choose_heads(orders, count, weights=...)`.

    It is the mean over tokens and channels of the squared gradient of the loss by what the layer writes: to second
    order, and as if errors pointed in no direction of their own, a mean square error there times this weight is what
    the model loses. Padding, whose gradient is zero, counts as tokens in every layer alike.

    Args:
        loss: of a batch, summed over what it predicts; it calls the model itself, as `loss(model, batch)`.
    """
    layers = [layer for layer in find_layers(model) if not layer.refusals]
    squares: dict[str, float] = {}
    numbers: dict[str, int] = {}
    probes: list[tuple[str, Tensor]] = []

    def listen(layer: AttentionLayer) -> Callable[..., Tensor]:
        def add_probe(module: nn.Module, given: object, output: Tensor) -> Tensor:
            probe = torch.zeros_like(output, requires_grad=True)
            probes.append((layer.path, probe))
            return output + probe

        return add_probe

    was_training = model.training
    model.eval()
    with ExitStack() as undo, torch.enable_grad():
        undo.callback(model.train, was_training)
        for layer in layers:
            undo.callback(model.get_submodule(layer.output).register_forward_hook(listen(layer)).remove)
        for batch in batches:
            probes.clear()
            value = loss(model, batch)
            if not probes or value.numel() != 1 or not value.requires_grad:
                raise OptionError(
                    "a loss calls the model and gives one number with a gradient, got "
                    + ("a loss that calls no attention layer" if not probes else f"a tensor {list(value.shape)}")
                )
            gradients = torch.autograd.grad(value, [probe for _, probe in probes], allow_unused=True)
            for (path, probe), gradient in zip(probes, gradients, strict=True):
                size = 0.0 if gradient is None else float(gradient.double().square().sum())
                squares[path] = squares.get(path, 0.0) + size
                numbers[path] = numbers.get(path, 0) + probe.numel()
    if not squares:
        raise OptionError("weights are measured on some text, got no batch")
    return {path: squares[path] / numbers[path] for path in squares}
