"""A model for a while as it is not: with other weights, or in evaluation mode; then as it was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn


@contextmanager
def lent(model: nn.Module, parameters: Mapping[str, Tensor]) -> Iterator[None]:
    """Within, the model computes with these parameters, of the shapes that it has; then with its own again."""
    with ExitStack() as back:
        for name, value in parameters.items():
            held = model.get_parameter(name)
            back.callback(setattr, held, "data", held.data)
            held.data = value.to(held.device, held.dtype)
        yield


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within, the model is in evaluation mode; then as it was, training or not."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
