"""One attention layer watched in a running model, as far as its W_O; and weights lent to a model for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polyhead.functional import Attended
from polyhead.observatory import AttentionSite
from polyhead.observatory.gathering import Notes
from polyhead.surgery.anatomy import AttentionLayer
from polyhead.surgery.forms import Part
from polyhead.surgery.moments import real_tokens


class _Enough(Exception):
    """Ends a forward behind the layer that is looked at."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerLook:
    """What passed through one layer in one call, each [batch, tokens, channels]."""

    inputs: Mapping[Part, Tensor]  # of the projections
    heads: Tensor  # what W_O was given
    written: Tensor  # what it gave


def look_at(model: nn.Module, layer: AttentionLayer, batch: Mapping[str, Any]) -> LayerLook | None:
    """Call the model and stop behind the layer; None where it is not called."""
    inputs: dict[Part, Tensor] = {}
    looks: list[LayerLook] = []

    def keep(parts: tuple[Part, ...]) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def note(module: nn.Module, given: tuple[Tensor, ...]) -> None:
            inputs.update(dict.fromkeys(parts, given[0].detach()))

        return note

    def end(module: nn.Module, given: tuple[Tensor, ...], gave: Tensor) -> None:
        looks.append(LayerLook(dict(inputs), given[0].detach(), gave.detach()))
        raise _Enough

    with ExitStack() as undo, torch.no_grad():
        for source in layer.sources:
            undo.callback(model.get_submodule(source.path).register_forward_pre_hook(keep(source.holds)).remove)
        undo.callback(model.get_submodule(layer.output).register_forward_hook(end).remove)
        try:
            model(**batch)
        except _Enough:
            return looks[0]
    return None


@dataclass(eq=False)
class Caught:
    """Notes the first attention of one layer: `observe(model, gather=[caught])`."""

    path: str
    name: str = "caught"
    attended: Attended | None = None
    real: Tensor | None = None  # [batch or 1, queries], False for padding

    def empty(self, site: AttentionSite, device: torch.device) -> Caught | None:
        return self if site.name == self.path else None

    def update(self, attended: Attended, real: Tensor | None, notes: Notes) -> Caught:
        if self.attended is None:
            self.attended, self.real = attended, real
        return self

    def merge(self, other: Caught) -> Caught:
        return self

    def state(self) -> dict[str, Tensor]:
        return {}

    def with_state(self, state: Mapping[str, Tensor]) -> Caught:
        return self


def rows_of(model: nn.Module, layer: AttentionLayer, batch: Mapping[str, Any], x: Tensor) -> Tensor:
    """The rows of x [batch, tokens, channels] that are no padding, [rows, channels]."""
    real = real_tokens(model, layer, batch, x)
    mask = batch.get("attention_mask")
    if real is None and isinstance(mask, Tensor) and tuple(mask.shape) == tuple(x.shape[:-1]):
        real = mask.to(x.device) != 0  # the source of a cross-attention
    return x.flatten(0, -2) if real is None else x[real]


@contextmanager
def lent(model: nn.Module, parameters: Mapping[str, Tensor]) -> Iterator[None]:
    """Within, the model computes with these parameters, of the shapes that it has; then with its own again."""
    with ExitStack() as back:
        for name, value in parameters.items():
            held = model.get_parameter(name)
            back.callback(setattr, held, "data", held.data)
            held.data = value.to(held.device, held.dtype)
        yield
