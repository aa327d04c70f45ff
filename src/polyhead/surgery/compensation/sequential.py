"""Layer-by-layer compensation, each layer calibrated on the outputs of the edited layers before it.

The target of a layer (`aim`) is one of three. "layer": its output with all heads, for its input in the model whose
earlier layers are edited. "output": its output in the unedited model. "stream": the output that restores the residual
stream after it to that of the unedited model, so that a layer compensates for the losses of those before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from polyhead.errors import OptionError
from polyhead.observation.evaluation_mode import evaluating
from polyhead.sources.fingerprint import fingerprint
from polyhead.surgery.adapters.attention_layer import AttentionLayer
from polyhead.surgery.adapters.discovery import find_layers
from polyhead.surgery.adapters.head_weights import HeadWeights, read_heads
from polyhead.surgery.calibration.moments import OutputMoments
from polyhead.surgery.calibration.streams import (
    Piece,
    StopForward,
    Streams,
    in_float32,
    non_padding_mask,
    record_stream,
    rows_of,
)
from polyhead.surgery.compensation.least_squares import (
    RIDGE,
    OutputProjection,
    OutputRegression,
    PrecomputedProjections,
    check_ridge,
    projection_parameters,
    remaining_heads,
)
from polyhead.surgery.edits.applying import apply, changed, check_expected, edits_by_layer
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
    """Edit and compensate layer by layer, each on the outputs of the edited layers before it.

    Args:
        batches: returns the calibration text as `collect_moments` takes it.
        aim: the target output of a layer: "layer", "output" or "stream", as described in this module.
        ridge, expect: as in `OutputCompensation` and `apply`.
        progress: called after each layer with the number of layers done and their total.
        model: the model.
        edits: edits, one per layer at most.

    Returns:
        A record that undoes all edits.

    Returns:
        One record that undoes all edits.
    """
    if expect is not None:
        check_expected(expect, fingerprint(model))
    pruned = {}
    for layer, layer_edits in edits_by_layer(find_layers(model), checked_edits(edits)):
        heads = read_heads(model, layer, device="meta")
        remaining = remaining_heads(layer.path, changed(layer, heads, layer_edits))
        pruned[layer.path] = tuple(head for head in range(heads.num_heads) if head not in remaining)
    projections = solve_in_order(model, pruned, batches, aim=aim, ridge=ridge, progress=progress)
    return apply(model, edits, compensation=PrecomputedProjections(projections))


@torch.no_grad()
def solve_in_order(
    model: nn.Module,
    removed: Mapping[str, Sequence[int]],
    batches: Batches,
    *,
    aim: Aim = "layer",
    ridge: float = RIDGE,
    weights: Mapping[str, Sequence[Tensor]] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, OutputProjection]:
    """Return the W_O of each pruned layer that best produces its target, by path; the model is unchanged.

    `removed` are the pruned heads by path; `weights` are token weights by path and batch, from `token_weights`.
    """
    check_ridge(ridge)
    if aim not in AIMS:
        raise OptionError(f"aim must be one of {', '.join(AIMS)}, got {aim!r}")
    layers = {layer.path: layer for layer in find_layers(model)}
    solved: dict[str, OutputProjection] = {}
    edited = [path for path in layers if path in removed]
    with in_float32(model), evaluating(model):
        streams = Streams(model, list(batches()), needs_original=aim != "layer")
        for index, path in enumerate(edited):
            layer, swapped = layers[path], projection_parameters(model, layers, solved)
            text, layer_weights = streams.before(layer, swapped), None if weights is None else weights[path]
            moments = collect_targets(model, layer, text, swapped, aim=aim, weights=layer_weights)
            solved[path] = moments.regression(read_heads(model, layer), ridge, path).without(removed[path])
            if progress is not None:
                progress(index + 1, len(edited))
    return solved


def collect_targets(
    model: nn.Module,
    layer: AttentionLayer,
    text: Iterable[Piece],
    swapped: Mapping[str, Tensor],
    *,
    aim: Aim = "output",
    weights: Sequence[Tensor] | None = None,
) -> TargetMoments:
    """Collect the moments of a layer's head outputs and of its target outputs, which are given by `aim`.

    Head outputs are those of the model with the parameters `swapped`, by name, in place. `weights` are the weights of
    tokens, one tensor per batch.
    """
    moments: TargetMoments | None = None
    has_stream: bool | None = None
    for index, piece in enumerate(text):
        current = piece.capture(model, layer, swapped=swapped)
        original = current if aim == "layer" else piece.capture(model, layer, swapped=None)
        if current is None or original is None:
            continue
        if has_stream is None:
            has_stream = aim == "stream" and adds_to_stream(model, layer, piece)
        target = original.written
        if has_stream and original.stream is not None and current.stream is not None:
            target = target + original.stream - current.stream
        mask = non_padding_mask(model, layer, piece.batch, current.heads)
        rows, target = rows_of(current.heads, mask), rows_of(target, mask)
        token_weights = None
        if weights is not None:
            token_weights = weights[index].flatten() if mask is None else weights[index][mask]
        if moments is None:
            moments = TargetMoments.empty(rows.shape[-1], target.shape[-1], rows.device)
        moments = moments.update(rows, target, token_weights)
    if moments is None:
        raise OptionError("calibration needs some text, got no batch, or batches for which the layer was not called")
    return moments


@torch.no_grad()
def adds_to_stream(model: nn.Module, layer: AttentionLayer, piece: Piece) -> bool:
    """Return whether a layer's output is added to its block's input, the residual stream.

    This is so if some module of the block, such as the next norm, receives their sum, up to rounding.
    """
    streams: list[Tensor] = []
    written: list[Tensor] = []
    matches: list[bool] = []

    def compare(module: nn.Module, args: tuple[Any, ...]) -> None:
        if not streams or not written or not args or not isinstance(args[0], Tensor):
            return
        stream, added, x = streams[-1], written[-1], args[0]
        if stream.shape == added.shape == x.shape:
            error = (x - (stream + added)).abs().max()
            matches.append(bool(error <= 1e-3 * added.abs().max()))

    def end(module: nn.Module, args: object, output: object) -> None:
        raise StopForward

    block = model.get_submodule(layer.path.rpartition(".")[0])
    with ExitStack() as hooks:
        if piece.before is not None:
            hooks.enter_context(piece.before.skipping())
        hooks.callback(block.register_forward_hook(end).remove)
        record_stream(model, layer, streams, hooks)
        linear = model.get_submodule(layer.output)
        hooks.callback(linear.register_forward_hook(lambda _, __, y: written.append(y)).remove)
        for module in block.modules():
            if module is not block and module is not linear:
                hooks.callback(module.register_forward_pre_hook(compare).remove)
        with suppress(StopForward):
            model(**piece.batch)
    return any(matches)


@dataclass(frozen=True, slots=True, eq=False)
class TargetMoments:
    """Sums over tokens of head outputs, target outputs and their products."""

    outputs: OutputMoments
    total: Tensor  # [embed_dim], sum of the targets
    cross: Tensor  # [channels, embed_dim]

    @classmethod
    def empty(cls, channels: int, width: int, device: torch.device) -> TargetMoments:
        zeros = torch.zeros(channels, width, dtype=torch.float64, device=device)
        return cls(OutputMoments.empty(channels, device), zeros[0].clone(), zeros)

    def update(self, rows: Tensor, targets: Tensor, weights: Tensor | None = None) -> TargetMoments:
        """Return the moments with rows [tokens, channels] and targets [tokens, embed_dim] added.

        `weights`, [tokens], weight the tokens in all sums, but not in the count: they should be 1 on average.
        """
        rows, targets = rows.to(torch.float64), targets.to(torch.float64)
        if weights is not None:
            root = weights.to(rows).sqrt()[:, None]
            sums = OutputMoments(len(rows), (root.square() * rows).sum(0), (root * rows).T @ (root * rows))
            total, cross = (root.square() * targets).sum(0), (root * rows).T @ (root * targets)
            return TargetMoments(self.outputs.merge(sums), self.total + total, self.cross + cross)
        return TargetMoments(self.outputs.update(rows), self.total + targets.sum(0), self.cross + rows.T @ targets)

    def regression(self, heads: HeadWeights, ridge: float, path: str) -> OutputRegression:
        """Return the least-squares problem of these targets for these heads."""
        target = self.total / self.outputs.count, self.cross / self.outputs.count
        return OutputRegression.of(self.outputs, heads, ridge, path, target=target)
