"""One attention layer watched in a running model, as far as its W_O."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polyhead.observation import AttentionSite
from polyhead.observation.collectors import BatchMetadata
from polyhead.ops.attended import Attended
from polyhead.ops.attention import attention
from polyhead.surgery.adapters.attention_layer import AttentionLayer
from polyhead.surgery.adapters.projection_formats import Part


class StopForward(Exception):
    """Ends a forward behind what is looked at."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerCapture:
    """What passed through one layer in one call, each [batch, tokens, channels]."""

    inputs: Mapping[Part, Tensor]  # of the projections
    heads: Tensor  # what W_O was given
    written: Tensor  # what it gave
    stream: Tensor | None  # what the block around the layer was given


def capture_layer(model: nn.Module, layer: AttentionLayer, batch: Mapping[str, Any]) -> LayerCapture | None:
    """Call the model and stop behind the layer; None where it is not called."""
    inputs: dict[Part, Tensor] = {}
    streams: list[Tensor] = []
    looks: list[LayerCapture] = []

    def keep(parts: tuple[Part, ...]) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def note(module: nn.Module, given: tuple[Tensor, ...]) -> None:
            inputs.update(dict.fromkeys(parts, given[0].detach()))

        return note

    def end(module: nn.Module, given: tuple[Tensor, ...], gave: Tensor) -> None:
        stream = streams[-1].detach() if streams else None
        looks.append(LayerCapture(dict(inputs), given[0].detach(), gave.detach(), stream))
        raise StopForward

    with ExitStack() as undo, torch.no_grad():
        for source in layer.sources:
            undo.callback(model.get_submodule(source.path).register_forward_pre_hook(keep(source.holds)).remove)
        record_stream(model, layer, streams, undo)
        undo.callback(model.get_submodule(layer.output).register_forward_hook(end).remove)
        with suppress(StopForward):
            model(**batch)
    return looks[0] if looks else None


def record_stream(model: nn.Module, layer: AttentionLayer, streams: list[Tensor], undo: ExitStack) -> None:
    """Add to a list what the block around a layer is given, at every call until this is undone."""

    def note(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        found = next((x for x in (*given, *named.values()) if isinstance(x, Tensor) and x.is_floating_point()), None)
        if found is not None:
            streams.append(found)

    block = model.get_submodule(layer.path.rpartition(".")[0])
    undo.callback(block.register_forward_pre_hook(note, with_kwargs=True).remove)


@dataclass(eq=False)
class AttentionRecorder:
    """Notes the first attention of one layer: `observe(model, collect=[caught])`."""

    name: str  # of the layer, `AttentionLayer.site`
    attended: Attended | None = None
    real: Tensor | None = None  # [batch or 1, queries], False for padding

    def empty(self, site: AttentionSite, device: torch.device) -> AttentionRecorder | None:
        return self if site.name == self.name else None

    def update(self, attended: Attended, real: Tensor | None, metadata: BatchMetadata) -> AttentionRecorder:
        if self.attended is None:
            self.attended, self.real = attended, real
        return self

    def merge(self, other: AttentionRecorder) -> AttentionRecorder:
        return self

    def state(self) -> dict[str, Tensor]:
        return {}

    def with_state(self, state: Mapping[str, Tensor]) -> AttentionRecorder:
        return self


def attention_weights(seen: Attended) -> Tensor:
    """How much every query attends to every key, [batch, heads, queries, keys]."""
    found = attention(
        seen.query, seen.key, seen.value, mask=seen.mask, scale=seen.scale, softcap=seen.softcap, weights=True
    ).weights
    assert found is not None
    return found


def non_padding_mask(model: nn.Module, layer: AttentionLayer, batch: Mapping[str, Any], rows: Tensor) -> Tensor | None:
    """Which tokens are no padding, [batch, tokens]; None for all."""
    in_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False) and "decoder" in layer.path
    mask = batch.get("decoder_attention_mask" if in_decoder else "attention_mask")
    if not isinstance(mask, Tensor) or tuple(mask.shape) != tuple(rows.shape[:-1]):
        return None
    return mask.to(rows.device) != 0


def unpadded_rows(model: nn.Module, layer: AttentionLayer, batch: Mapping[str, Any], x: Tensor) -> Tensor:
    """The rows of x [batch, tokens, channels] that are no padding, [rows, channels]."""
    real = non_padding_mask(model, layer, batch, x)
    mask = batch.get("attention_mask")
    if real is None and isinstance(mask, Tensor) and tuple(mask.shape) == tuple(x.shape[:-1]):
        real = mask.to(x.device) != 0  # the source of a cross-attention
    return x.flatten(0, -2) if real is None else x[real]
