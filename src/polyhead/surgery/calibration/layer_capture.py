"""Run a model with temporary changes, and capture the activations of one attention layer up to its W_O."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
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


class StopForward(Exception):
    """Raised in a hook to end a forward pass early."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerCapture:
    """Activations of one layer in one call, each [batch, tokens, channels]."""

    inputs: Mapping[Part, Tensor]  # of the projections
    heads: Tensor  # input of W_O: the concatenated head outputs
    written: Tensor  # output of W_O
    stream: Tensor | None  # input of the block around the layer: the residual stream


def capture_layer(model: nn.Module, layer: AttentionLayer, batch: Mapping[str, Any]) -> LayerCapture | None:
    """Run the model up to a layer's W_O and return its activations; None if the layer is not called."""
    inputs: dict[Part, Tensor] = {}
    streams: list[Tensor] = []
    captures: list[LayerCapture] = []

    def record_input(parts: tuple[Part, ...]) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            inputs.update(dict.fromkeys(parts, args[0].detach()))

        return hook

    def end(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        stream = streams[-1].detach() if streams else None
        captures.append(LayerCapture(dict(inputs), args[0].detach(), output.detach(), stream))
        raise StopForward

    with ExitStack() as hooks, torch.no_grad():
        for source in layer.sources:
            hooks.callback(
                model.get_submodule(source.path).register_forward_pre_hook(record_input(source.holds)).remove
            )
        record_stream(model, layer, streams, hooks)
        hooks.callback(model.get_submodule(layer.output).register_forward_hook(end).remove)
        with suppress(StopForward):
            model(**batch)
    return captures[0] if captures else None


def record_stream(model: nn.Module, layer: AttentionLayer, streams: list[Tensor], undo: ExitStack) -> None:
    """Append the input of the block around a layer to `streams` at every call, until `undo` closes."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stream = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point()), None)
        if stream is not None:
            streams.append(stream)

    block = model.get_submodule(layer.path.rpartition(".")[0])
    undo.callback(block.register_forward_pre_hook(hook, with_kwargs=True).remove)


@dataclass(eq=False)
class AttentionRecorder:
    """Collector of the first attention call of one layer: `observe(model, collect=[recorder])`."""

    name: str  # `AttentionLayer.site` of the layer
    attended: Attended | None = None
    non_padding: Tensor | None = None  # [batch or 1, queries]

    def empty(self, site: AttentionSite, device: torch.device) -> AttentionRecorder | None:
        return self if site.name == self.name else None

    def update(self, attended: Attended, non_padding: Tensor | None, metadata: BatchMetadata) -> AttentionRecorder:
        if self.attended is None:
            self.attended, self.non_padding = attended, non_padding
        return self

    def merge(self, other: AttentionRecorder) -> AttentionRecorder:
        return self

    def state(self) -> dict[str, Tensor]:
        return {}

    def with_state(self, state: Mapping[str, Tensor]) -> AttentionRecorder:
        return self


def attention_weights(attended: Attended) -> Tensor:
    """Return the attention weights [batch, heads, queries, keys]."""
    weights = attention(
        attended.query,
        attended.key,
        attended.value,
        mask=attended.mask,
        scale=attended.scale,
        softcap=attended.softcap,
        weights=True,
    ).weights
    assert weights is not None
    return weights


def non_padding_mask(model: nn.Module, layer: AttentionLayer, batch: Mapping[str, Any], rows: Tensor) -> Tensor | None:
    """Return the mask of non-padding tokens, [batch, tokens]; None if there is no padding mask."""
    in_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False) and "decoder" in layer.path
    mask = batch.get("decoder_attention_mask" if in_decoder else "attention_mask")
    if not isinstance(mask, Tensor) or tuple(mask.shape) != tuple(rows.shape[:-1]):
        return None
    return mask.to(rows.device) != 0


def unpadded_rows(model: nn.Module, layer: AttentionLayer, batch: Mapping[str, Any], x: Tensor) -> Tensor:
    """Return the non-padding rows of x [batch, tokens, channels] as [rows, channels]."""
    non_padding = non_padding_mask(model, layer, batch, x)
    mask = batch.get("attention_mask")
    if non_padding is None and isinstance(mask, Tensor) and tuple(mask.shape) == tuple(x.shape[:-1]):
        non_padding = mask.to(x.device) != 0  # the source of a cross-attention
    return rows_of(x, non_padding)


def rows_of(x: Tensor, non_padding: Tensor | None) -> Tensor:
    """Return the rows of x [batch, tokens, channels] that a mask selects, or all, as [rows, channels]."""
    return x.flatten(0, -2) if non_padding is None else x[non_padding]
