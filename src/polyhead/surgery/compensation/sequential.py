"""Repair layer by layer, each calibrated on what the edited layers before it feed it.

What a layer should write is one of three things. "layer": what its whole output matrix would write on its present
input. "output": what it wrote in the unedited model. "stream": what brings the stream behind it to where it was in the
unedited model, so that a layer makes up for what those before it lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from polyhead.errors import OptionError
from polyhead.surgery.adapters.attention_layer import AttentionLayer
from polyhead.surgery.adapters.discovery import find_layers
from polyhead.surgery.adapters.fingerprint import check_expected, fingerprint
from polyhead.surgery.adapters.head_weights import read_heads
from polyhead.surgery.calibration.layer_capture import StopForward, non_padding_mask, record_stream
from polyhead.surgery.calibration.streams import Piece, Streams
from polyhead.surgery.calibration.temporary import evaluating
from polyhead.surgery.compensation.least_squares import RIDGE, check_ridge, remaining_heads
from polyhead.surgery.compensation.masked_trial import GivenOutputs, Outputs, output_parameters
from polyhead.surgery.compensation.targets import TargetMoments
from polyhead.surgery.edits.applying import apply, changed, edits_by_layer
from polyhead.surgery.edits.head_edits import HeadEdit, checked_edits
from polyhead.surgery.edits.records import EditRecord

Aim = Literal["layer", "output", "stream"]
AIMS: tuple[Aim, ...] = get_args(Aim)
Batches = Callable[[], Iterable[Mapping[str, Any]]]


def apply_in_order(
    model: nn.Module,
    edits: Sequence[HeadEdit],
    batches: Batches,
    *,
    aim: Aim = "layer",
    ridge: float = RIDGE,
    expect: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> EditRecord:
    """Edit layer by layer, each repaired on what the edited layers before it feed it; one record undoes all.

    Args:
        batches: gives the calibration text as `collect_moments` takes it; each layer goes on where the last stopped.
        aim: what a layer should write, as this module begins with.
        ridge, expect: as in `OutputCompensation` and `apply`.
        progress: called after each layer with how many are done and how many there are.
    """
    if expect is not None:
        check_expected(expect, fingerprint(model))
    gone = {}
    for layer, own in edits_by_layer(find_layers(model), checked_edits(edits)):
        heads = read_heads(model, layer, device="meta")
        kept = remaining_heads(layer.path, changed(layer, heads, own))
        gone[layer.path] = tuple(head for head in range(heads.num_heads) if head not in kept)
    outputs = solve_in_order(model, gone, batches, aim=aim, ridge=ridge, progress=progress)
    return apply(model, edits, compensation=GivenOutputs(outputs))


@torch.no_grad()
def solve_in_order(
    model: nn.Module,
    gone: Mapping[str, Sequence[int]],
    batches: Batches,
    *,
    aim: Aim = "layer",
    ridge: float = RIDGE,
    weights: Mapping[str, Sequence[Tensor]] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Outputs]:
    """The output matrices of layers without some heads, by path, for `as_if` or `GivenOutputs`; the model stays.

    `weights` say how much each token of each batch counts, by path, as `token_weights` gives them.
    """
    check_ridge(ridge)
    if aim not in AIMS:
        raise OptionError(f"aim must be one of {', '.join(AIMS)}, got {aim!r}")
    layers = {layer.path: layer for layer in find_layers(model)}
    solved: dict[str, Outputs] = {}
    edited = [path for path in layers if path in gone]
    streams = Streams(model, list(batches()), needs_original=aim != "layer")
    with evaluating(model):
        for place, path in enumerate(edited):
            layer, lending = layers[path], output_parameters(model, layers, solved)
            heads, text = read_heads(model, layer), streams.before(layer, lending)
            moments = _collect(model, layer, text, lending, aim, None if weights is None else weights[path])
            solved[path] = Outputs.solved(moments.problem(heads, ridge, path), gone[path])
            if progress is not None:
                progress(place + 1, len(edited))
    return solved


def _collect(
    model: nn.Module,
    layer: AttentionLayer,
    text: Sequence[Piece],
    lending: Mapping[str, Tensor],
    aim: Aim,
    weights: Sequence[Tensor] | None,
) -> TargetMoments:
    held: TargetMoments | None = None
    has_stream: bool | None = None
    for number, piece in enumerate(text):
        batch = piece.batch
        now = piece.look(model, layer, lending=lending)
        before = now if aim == "layer" else piece.look(model, layer, lending=None)
        if now is None or before is None:
            continue
        if has_stream is None:
            has_stream = aim == "stream" and adds_to_stream(model, layer, piece)
        target = before.written
        if has_stream and before.stream is not None and now.stream is not None:
            target = target + before.stream - now.stream
        real = non_padding_mask(model, layer, batch, now.heads)
        rows, target = (x.flatten(0, -2) if real is None else x[real] for x in (now.heads, target))
        if held is None:
            held = TargetMoments.empty(rows.shape[-1], target.shape[-1], rows.device)
        counts = None if weights is None else weights[number]
        counts = counts if counts is None else counts.flatten() if real is None else counts[real]
        held = held.update(rows, target, counts)
    if held is None:
        raise OptionError(
            "calibration needs some text, got no batch, or batches that no attention layer was called for"
        )
    return held


@torch.no_grad()
def adds_to_stream(model: nn.Module, layer: AttentionLayer, piece: Piece) -> bool:
    """Whether what a layer writes is added to what its block was given: seen by a module that is given their sum."""
    streams: list[Tensor] = []
    written: list[Tensor] = []
    found: list[bool] = []

    def compare(module: nn.Module, given: tuple[Any, ...]) -> None:
        if not streams or not written or not given or not isinstance(given[0], Tensor):
            return
        stream, added, x = streams[-1], written[-1], given[0]
        if stream.shape == added.shape == x.shape:
            off = (x - (stream + added)).abs().max()
            found.append(bool(off <= 1e-3 * added.abs().max()))

    def end(module: nn.Module, given: object, gave: object) -> None:
        raise StopForward

    block = model.get_submodule(layer.path.rpartition(".")[0])
    with ExitStack() as undo:
        if piece.before is not None:
            undo.enter_context(piece.before.skipping())
        undo.callback(block.register_forward_hook(end).remove)
        record_stream(model, layer, streams, undo)
        linear = model.get_submodule(layer.output)
        undo.callback(linear.register_forward_hook(lambda _, __, y: written.append(y)).remove)
        for module in block.modules():
            if module is not block and module is not linear:
                undo.callback(module.register_forward_pre_hook(compare).remove)
        with suppress(StopForward):
            model(**piece.batch)
    return any(found)
