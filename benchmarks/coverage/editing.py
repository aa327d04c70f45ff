"""The verdict on surgery: a model without some heads, held against the model in which they are masked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.coverage.catalogue import Call
from benchmarks.coverage.judge import output_difference
from polyhead.errors import PolyheadError
from polyhead.surgery import AttentionLayer, PruneHeads, apply, find_layers, fingerprint, trace_layers, undo

TOLERANCE = 1e-5  # of outputs on a fresh batch, relative to the larger of 1 and their largest value
KNOWN, TRACED, PART, REFUSED, WRONG = "known", "traced", "part", "refused", "wrong"


def judge_editing(model: nn.Module, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Prune heads of every layer that can be edited, and undo it.

    Args:
        model: a model, in evaluation mode.
        arguments: its keyword arguments; functions among them make them anew for each run, as a run may change them.

    Returns:
        `surgery`: "known" if all layers were found by their names, "traced" if some had to be traced, "part" if some
        cannot be edited, "refused" if none can, "wrong"; and the reason.
    """
    fresh = other_inputs(model, arguments)
    layers = find_layers(model)
    if not any(layers) or all(x.refusals for x in layers):
        try:
            layers = trace_layers(model, Call(model, dict(arguments)).made(), Call(model, fresh).made())
        except PolyheadError as error:
            return {"surgery": REFUSED, "surgery_reason": str(error)}
    reasons = [reason for x in layers for reason in x.refusals]
    editable = [x for x in layers if not x.refusals]
    if not editable:
        return {"surgery": REFUSED, "surgery_reason": reasons[0] if reasons else "no attention layer was found"}
    heads = {layer.path: _first_group(layer) for layer in editable}
    with _masked(model, editable, heads):
        expected = _run(model, fresh)
    before = fingerprint(model)
    try:
        record = apply(model, [PruneHeads(x.number, heads[x.path], stack=x.stack) for x in editable])
    except PolyheadError as error:
        return {"surgery": REFUSED, "surgery_reason": str(error)}
    try:
        difference = output_difference(expected, _run(model, fresh))
    except Exception as raised:  # noqa: BLE001 - an edited model must run
        return {"surgery": WRONG, "surgery_reason": f"the edited model raises {type(raised).__name__}: {raised}"}
    undo(model, record)
    if not difference <= TOLERANCE:
        reason = f"outputs of the pruned and the masked model differ by {difference:.1e}"
        return {"surgery": WRONG, "surgery_reason": reason}
    if fingerprint(model) != before:
        return {"surgery": WRONG, "surgery_reason": "undo did not restore the weights"}
    if reasons:
        return {"surgery": PART, "surgery_reason": reasons[0]}
    return {"surgery": TRACED if any(x.traced is not None for x in editable) else KNOWN}


def _first_group(layer: AttentionLayer) -> tuple[int, ...]:
    """Return the readers of the first KV head; of a single one, the first head alone."""
    layout = layer.layout
    assert layout is not None
    readers = tuple(head for head in range(layout.num_heads) if layout.key_head(head) == 0)
    return readers if layout.num_kv_heads > 1 else (0,)


@contextmanager
def _masked(model: nn.Module, layers: Sequence[AttentionLayer], heads: Mapping[str, Sequence[int]]) -> Iterator[None]:
    """Mask heads at the input of the output projection."""

    def hook_of(layer: AttentionLayer) -> Any:
        assert layer.layout is not None
        keep = torch.ones(layer.layout.num_heads)
        keep[list(heads[layer.path])] = 0
        columns = keep.repeat_interleave(layer.layout.value_dim)
        return lambda _, args: (args[0] * columns.to(args[0].dtype), *args[1:])

    with ExitStack() as undo_hooks:
        for layer in layers:
            linear = model.get_submodule(layer.output)
            undo_hooks.callback(linear.register_forward_pre_hook(hook_of(layer)).remove)
        yield


def other_inputs(model: nn.Module, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return other inputs of the same shapes: numbers with noise, tokens in another order if the model takes them."""
    generator = torch.Generator().manual_seed(7)

    def noisy(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point() or not bool(x.isfinite().all()):
            return x
        return x + 0.5 * torch.randn(x.shape, generator=generator)

    def reordered(name: str, x: Any) -> Any:
        return x.roll(1, -1) if isinstance(x, Tensor) and name.endswith("ids") and not x.is_floating_point() else x

    others = {name: noisy(x) for name, x in arguments.items()}
    moved = {name: reordered(name, x) for name, x in others.items()}
    for chosen in (moved, others):
        try:
            _run(model, chosen)
        except Exception:  # noqa: BLE001, S112 - such as image tokens in another place
            continue
        return chosen
    return dict(arguments)


def _run(model: nn.Module, arguments: Mapping[str, Any]) -> Any:
    output = Call(model, dict(arguments))()
    if isinstance(output, Mapping):  # attention weights have fewer heads in the edited model
        return {name: x for name, x in output.items() if "attentions" not in name}
    return output
