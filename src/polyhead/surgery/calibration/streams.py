"""Run a model up to one attention layer and capture its activations, on text with cached block outputs.

Compensating or converting layer k runs the model several times, and all blocks before it would repeat their work; with
the cached output of the last of them they can be skipped. Whether a model can be entered this way is checked
numerically on the first batch at each block; otherwise it runs from the start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from polyhead.observation import observe
from polyhead.observation.collectors import CallRecorder
from polyhead.ops.attended import Attended
from polyhead.ops.attention import attention
from polyhead.surgery.adapters.attention_layer import AttentionLayer
from polyhead.surgery.adapters.projection_formats import Part

MAX_CACHE_BYTES = 2 << 30  # of cached block outputs; for a longer text the model runs from the start


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
def in_float32(model: nn.Module) -> Iterator[None]:
    """Compute in float32 on a CPU, where 16-bit arithmetic is slow; weights are restored bit for bit on exit."""
    with ExitStack() as stack:
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.device.type == "cpu" and tensor.dtype in (torch.bfloat16, torch.float16):
                stack.callback(_set_dtype, tensor, tensor.dtype)
                _set_dtype(tensor, torch.float32)
        yield


def _set_dtype(tensor: Tensor, dtype: torch.dtype) -> None:
    tensor.data = tensor.data.to(dtype)


class StopForward(Exception):
    """Raised in a hook to end a forward pass early."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerCapture:
    """Activations of one layer in one call, each [batch, tokens, channels]."""

    inputs: Mapping[Part, Tensor]  # of the projections
    heads: Tensor  # input of W_O: the concatenated head outputs
    written: Tensor  # output of W_O


def capture_layer(model: nn.Module, layer: AttentionLayer, batch: Mapping[str, Any]) -> LayerCapture | None:
    """Run the model up to a layer's W_O and return its activations; None if the layer is not called."""
    inputs: dict[Part, Tensor] = {}
    captures: list[LayerCapture] = []

    def record_input(parts: tuple[Part, ...]) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            inputs.update(dict.fromkeys(parts, args[0].detach()))

        return hook

    def end(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        captures.append(LayerCapture(dict(inputs), args[0].detach(), output.detach()))
        raise StopForward

    with ExitStack() as hooks, torch.no_grad():
        for source in layer.sources:
            hooks.callback(
                model.get_submodule(source.path).register_forward_pre_hook(record_input(source.holds)).remove
            )
        hooks.callback(model.get_submodule(layer.output).register_forward_hook(end).remove)
        with suppress(StopForward):
            model(**batch)
    return captures[0] if captures else None


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


@dataclass(frozen=True, slots=True, eq=False)
class CachedBlocks:
    """Blocks that can be skipped, and the cached output of the last of them."""

    blocks: tuple[nn.Module, ...]
    output: Tensor
    in_tuple: bool

    @contextmanager
    def skipping(self) -> Iterator[None]:
        """Replace the forwards of these blocks so that the last returns the cached output."""
        with ExitStack() as stack:
            for number, block in enumerate(self.blocks):
                is_last = number == len(self.blocks) - 1
                stack.callback(_restore_forward, block, vars(block).get("forward"))
                block.forward = _constant_forward(self.output if is_last else None, self.in_tuple)
            yield


@contextmanager
def recording_blocks(model: nn.Module, layer: AttentionLayer) -> Iterator[list[CachedBlocks]]:
    """Record the output of the last block of a layer's stack in each call of the model within the context.

    The list has fewer entries than calls where a block returns more than one tensor, or `MAX_CACHE_BYTES` are exceeded.
    """
    recorded: list[CachedBlocks] = []
    place = _block_of(model, layer)
    blocks = () if place is None else tuple(model.get_submodule(place[0]).children())

    def record(module: nn.Module, args: object, output: Any) -> None:
        single = _single_tensor(output)
        if single is not None and sum(x.output.nbytes for x in recorded) + single[0].nbytes <= MAX_CACHE_BYTES:
            recorded.append(CachedBlocks(blocks, *single))

    with ExitStack() as hooks:
        for block in blocks[-1:]:
            hooks.callback(block.register_forward_hook(record).remove)
        yield recorded


def _restore_forward(block: nn.Module, forward: Any) -> None:
    """Restore a block's class forward, or the instance attribute it had."""
    del block.forward
    if forward is not None:
        block.forward = forward


def _constant_forward(output: Tensor | None, in_tuple: bool) -> Any:
    def forward(*args: Any, **kwargs: Any) -> Any:
        result = output if output is not None else args[0] if args else kwargs["hidden_states"]
        return (result,) if in_tuple else result

    return forward


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCapture:
    """Activations and attention of one layer in one call."""

    capture: LayerCapture
    attended: Attended
    non_padding: Tensor | None  # [batch or 1, queries]


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """One calibration batch with its cached blocks.

    `now` are those of the model with swapped parameters, `before` those of the original model.
    """

    batch: Mapping[str, Any]
    now: CachedBlocks | None = None
    before: CachedBlocks | None = None

    def capture(
        self, model: nn.Module, layer: AttentionLayer, *, swapped: Mapping[str, Tensor] | None
    ) -> LayerCapture | None:
        """Capture a layer of the model with the `swapped` parameters in place, or of the original if None."""
        cached = self.before if swapped is None else self.now
        with ExitStack() as stack:
            if swapped is not None:
                stack.enter_context(swapped_parameters(model, swapped))
            if cached is not None:
                stack.enter_context(cached.skipping())
            return capture_layer(model, layer, self.batch)

    def first_row(self) -> Piece:
        """Return the first row alone, if every tensor of the batch has the same number of rows."""
        tensors = [x for x in self.batch.values() if isinstance(x, Tensor)]
        caches = [cached for cached in (self.now, self.before) if cached is not None]
        if len({len(x) if x.ndim else 0 for x in (*tensors, *(cached.output for cached in caches))}) != 1:
            return self
        batch = {name: x[:1] if isinstance(x, Tensor) else x for name, x in self.batch.items()}
        now, before = (cached and replace(cached, output=cached.output[:1]) for cached in (self.now, self.before))
        return Piece(batch, now, before)

    def capture_attention(
        self, model: nn.Module, layer: AttentionLayer, *, swapped: Mapping[str, Tensor] | None
    ) -> AttentionCapture | None:
        """Capture a layer and its attention; None if it is not called or its attention is not observed."""
        calls: list[tuple[Attended, Tensor | None]] = []
        recorder = CallRecorder(lambda site, attended, non_padding, metadata: calls.append((attended, non_padding)))
        with observe(model, layers=[layer.site], statistics=False, collect=[recorder]):
            capture = self.capture(model, layer, swapped=swapped)
        return AttentionCapture(capture, *calls[0]) if capture is not None and calls else None


@dataclass(eq=False)
class Streams:
    """Calibration batches with cached inputs of the current layer's block.

    Layers are requested in order by `before`.
    """

    model: nn.Module
    batches: Sequence[Mapping[str, Any]]
    _place: tuple[str, int] = ("", 0)  # path of the block list, and how many of its blocks are cached
    _cached: list[tuple[Tensor, ...]] = field(default_factory=list)  # per batch: edited, and original
    _in_tuple: bool = False

    def before(self, layer: AttentionLayer, swapped: Mapping[str, Tensor]) -> list[Piece]:
        """Return every batch, entered at this layer's block if that reproduces the full forward."""
        plain = uncached_pieces(self.batches)
        block = _block_of(self.model, layer)
        if block is None or block[1] == 0 or not plain:
            self._place, self._cached = ("", 0), []
            return plain
        path, number = block
        if self._place[0] != path:
            self._place, self._cached = (path, 0), []
        if self._place[1] < number and not self._advance(path, number, swapped):
            self._place, self._cached = ("", 0), []
            return plain
        blocks = tuple(self.model.get_submodule(path).children())[:number]
        pieces = [
            Piece(batch, *(CachedBlocks(blocks, output, self._in_tuple) for output in outputs))
            for batch, outputs in zip(self.batches, self._cached, strict=True)
        ]
        return pieces if self._agrees(pieces[0].first_row(), plain[0].first_row(), layer, swapped) else plain

    def _advance(self, path: str, number: int, swapped: Mapping[str, Tensor]) -> bool:
        """Cache the output of block number - 1; False if it is not a single tensor or too large."""
        blocks = tuple(self.model.get_submodule(path).children())
        num_cached, cached_outputs, size = self._place[1], [], 0
        for index, batch in enumerate(self.batches):
            outputs = []
            for side, parameters in enumerate((swapped, {})):
                with ExitStack() as stack:
                    stack.enter_context(swapped_parameters(self.model, parameters))
                    if num_cached:
                        cached = CachedBlocks(blocks[:num_cached], self._cached[index][side], self._in_tuple)
                        stack.enter_context(cached.skipping())
                    outputs.append(_block_output(self.model, blocks[number - 1], batch))
            results = [output for output in outputs if output is not None]
            if len(results) < len(outputs):
                return False
            cached_outputs.append(tuple(output for output, _ in results))
            size += sum(output.nbytes for output, _ in results)
            self._in_tuple = results[0][1]
            if size > MAX_CACHE_BYTES:
                return False
        self._place, self._cached = (path, number), cached_outputs
        return True

    def _agrees(self, piece: Piece, plain: Piece, layer: AttentionLayer, swapped: Mapping[str, Tensor]) -> bool:
        for parameters in (swapped, None):
            actual, expected = (x.capture(self.model, layer, swapped=parameters) for x in (piece, plain))
            if actual is None or expected is None or actual.heads.shape != expected.heads.shape:
                return False
            scale = float(expected.heads.abs().max())
            if not math.isfinite(scale) or not torch.allclose(
                actual.heads, expected.heads, rtol=1e-4, atol=1e-5 * scale
            ):
                return False
        return True


@torch.no_grad()
def _block_output(model: nn.Module, block: nn.Module, batch: Mapping[str, Any]) -> tuple[Tensor, bool] | None:
    """Return a block's output tensor and whether it came in a tuple; None if it is not a single tensor."""
    outputs: list[Any] = []

    def end(module: nn.Module, args: object, output: Any) -> None:
        outputs.append(output)
        raise StopForward

    hook = block.register_forward_hook(end)
    try:
        with suppress(StopForward):
            model(**batch)
    finally:
        hook.remove()
    return _single_tensor(outputs[0]) if outputs else None


def _single_tensor(output: Any) -> tuple[Tensor, bool] | None:
    """Return a block's output without its gradient and whether it came in a tuple; None if it is not one tensor."""
    in_tuple = isinstance(output, tuple) and len(output) == 1
    tensor = output[0] if in_tuple else output
    return (tensor.detach(), in_tuple) if isinstance(tensor, Tensor) else None


def _block_of(model: nn.Module, layer: AttentionLayer) -> tuple[str, int] | None:
    """Return the path of the module list that contains a layer, and the index of its block."""
    parts = layer.path.split(".")
    for place, part in enumerate(parts):
        path = ".".join(parts[:place])
        if part.isdecimal() and place and isinstance(model.get_submodule(path), nn.ModuleList):
            return path, int(part)
    return None


def uncached_pieces(batches: Iterable[Mapping[str, Any]]) -> list[Piece]:
    """Wrap batches that are run from the start."""
    return [Piece(batch) for batch in batches]
