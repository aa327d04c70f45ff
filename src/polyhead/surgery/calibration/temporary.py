"""Context managers that change a model temporarily: its parameters, or its training mode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn


@contextmanager
def swapped_parameters(model: nn.Module, parameters: Mapping[str, Tensor]) -> Iterator[None]:
    """Swap in parameters of the same shapes within the context; restored on exit, also on errors."""
    with ExitStack() as stack:
        for name, value in parameters.items():
            parameter = model.get_parameter(name)
            stack.callback(setattr, parameter, "data", parameter.data)
            parameter.data = value.to(parameter.device, parameter.dtype)
        yield


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode within the context."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
