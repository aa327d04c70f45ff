"""Repair layer by layer, each calibrated on what the edited layers before it feed it.

What a layer should write is one of three things. "layer": what its whole output matrix would write on its present
input. "output": what it wrote in the unedited model. "stream": what brings the stream behind it to where it was in the
unedited model, so that a layer makes up for what those before it lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from polyhead.errors import OptionError
from polyhead.surgery.anatomy import AttentionLayer, find_layers
from polyhead.surgery.apply import apply, changed, edits_by_layer
from polyhead.surgery.as_if import GivenOutputs, Outputs, as_if
from polyhead.surgery.edits import HeadEdit, checked_edits
from polyhead.surgery.fingerprint import fingerprint
from polyhead.surgery.head_weights import HeadWeights, read_heads
from polyhead.surgery.moments import OutputMoments, real_tokens
from polyhead.surgery.records import EditRecord
from polyhead.surgery.repair import RIDGE, Problem, check_moments, check_ridge, heads_that_stay, output_of

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
        batches: called once for each edited layer, gives the calibration text as `gather_moments` takes it.
        aim: what a layer should write, as this module begins with.
        ridge, expect: as in `OutputRepair` and `apply`.
        progress: called after each layer with how many are done and how many there are.
    """
    if expect is not None and expect != (found := fingerprint(model)):
        raise OptionError(f"these edits are for the model with fingerprint {expect}, got one with {found}")
    gone = {}
    for layer, own in edits_by_layer(find_layers(model), checked_edits(edits)):
        heads = read_heads(model, layer, device="meta")
        kept = heads_that_stay(layer.path, changed(layer, heads, own))
        gone[layer.path] = tuple(head for head in range(heads.num_heads) if head not in kept)
    outputs = solve_in_order(model, gone, batches, aim=aim, ridge=ridge, progress=progress)
    return apply(model, edits, repair=GivenOutputs(outputs))


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
    was_training = model.training
    model.eval()
    try:
        for place, path in enumerate(edited):
            heads = read_heads(model, layers[path])
            moments = _gather(
                model, layers, solved, layers[path], batches(), aim, None if weights is None else weights[path]
            )
            solved[path] = Outputs.solved(moments.problem(heads, ridge, path), gone[path])
            if progress is not None:
                progress(place + 1, len(edited))
    finally:
        model.train(was_training)
    return solved


@dataclass(frozen=True, slots=True, eq=False)
class TargetMoments:
    """What a layer's heads give, beside what the layer should write: sums over tokens."""

    outputs: OutputMoments
    total: Tensor  # [embed_dim], of what should be written
    cross: Tensor  # [channels, embed_dim]

    @classmethod
    def empty(cls, channels: int, width: int, device: torch.device) -> TargetMoments:
        zeros = torch.zeros(channels, width, dtype=torch.float64, device=device)
        return cls(OutputMoments.empty(channels, device), zeros[0].clone(), zeros)

    def update(self, rows: Tensor, targets: Tensor, weights: Tensor | None = None) -> TargetMoments:
        """With these rows, [tokens, channels], and what should be written there, [tokens, embed_dim].

        `weights`, [tokens], say how much each counts.
        """
        rows, targets = rows.to(torch.float64), targets.to(torch.float64)
        if weights is not None:
            root = weights.to(rows).sqrt()[:, None]
            sums = OutputMoments(len(rows), (root.square() * rows).sum(0), (root * rows).T @ (root * rows))
            total, cross = (root.square() * targets).sum(0), (root * rows).T @ (root * targets)
            return TargetMoments(self.outputs.merge(sums), self.total + total, self.cross + cross)
        return TargetMoments(self.outputs.update(rows), self.total + targets.sum(0), self.cross + rows.T @ targets)

    def problem(self, heads: HeadWeights, ridge: float, path: str) -> Problem:
        check_moments(self.outputs, heads, path)
        centred = heads.output_bias is not None
        mean, products = (x.to(self.total.device) for x in self.outputs.compute(centred=centred))
        target_mean, cross = self.total / self.outputs.count, self.cross / self.outputs.count
        matrix, bias = (x.to(mean.device) for x in output_of(heads))
        cross = cross - torch.outer(mean, target_mean) if centred else cross
        return Problem(products, mean, matrix, cross, target_mean, bias, heads.output.shape[1], ridge, centred)


class _Enough(Exception):
    """Ends a forward behind the layer that was looked at."""


@dataclass(frozen=True, slots=True, eq=False)
class _Look:
    """What one forward showed of a layer."""

    given: Tensor  # to W_O
    written: Tensor  # by W_O
    stream: Tensor | None  # what the block around the layer was given


def _gather(
    model: nn.Module,
    layers: Mapping[str, AttentionLayer],
    solved: Mapping[str, Outputs],
    layer: AttentionLayer,
    batches: Iterable[Mapping[str, Any]],
    aim: Aim,
    weights: Sequence[Tensor] | None,
) -> TargetMoments:
    held: TargetMoments | None = None
    has_stream: bool | None = None
    for number, batch in enumerate(batches):
        with as_if(model, layers, solved):
            now = _look(model, layer, batch)
        before = now if aim == "layer" else _look(model, layer, batch)
        if now is None or before is None:
            continue
        if has_stream is None:
            has_stream = aim == "stream" and adds_to_stream(model, layer, batch)
        target = before.written
        if has_stream and before.stream is not None and now.stream is not None:
            target = target + before.stream - now.stream
        real = real_tokens(model, layer, batch, now.given)
        rows, target = (x.flatten(0, -2) if real is None else x[real] for x in (now.given, target))
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


def _look(model: nn.Module, layer: AttentionLayer, batch: Mapping[str, Any]) -> _Look | None:
    """Run the model as far as a layer's W_O, and see what is there; None where the layer was not called."""
    streams: list[Tensor] = []
    looks: list[_Look] = []

    def note(module: nn.Module, given: tuple[Tensor, ...], written: Tensor) -> None:
        looks.append(_Look(given[0], written, streams[-1] if streams else None))
        raise _Enough

    with ExitStack() as undo:
        _note_stream(model, layer, streams, undo)
        undo.callback(model.get_submodule(layer.output).register_forward_hook(note).remove)
        try:
            model(**batch)
        except _Enough:
            return looks[0]
    return None


def _note_stream(model: nn.Module, layer: AttentionLayer, streams: list[Tensor], undo: ExitStack) -> None:
    def note(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        found = next((x for x in (*given, *named.values()) if isinstance(x, Tensor) and x.is_floating_point()), None)
        if found is not None:
            streams.append(found)

    block = model.get_submodule(layer.path.rpartition(".")[0])
    undo.callback(block.register_forward_pre_hook(note, with_kwargs=True).remove)


@torch.no_grad()
def adds_to_stream(model: nn.Module, layer: AttentionLayer, batch: Mapping[str, Any]) -> bool:
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

    block = model.get_submodule(layer.path.rpartition(".")[0])
    with ExitStack() as undo:
        _note_stream(model, layer, streams, undo)
        linear = model.get_submodule(layer.output)
        undo.callback(linear.register_forward_hook(lambda _, __, y: written.append(y)).remove)
        for module in block.modules():
            if module is not block and module is not linear:
                undo.callback(module.register_forward_pre_hook(compare).remove)
        model(**batch)
    return any(found)
