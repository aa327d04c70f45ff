"""Fewer KV heads for a trained model, in closed form: grouped by likeness, shared, and W_O solved for what is lost.

Layer by layer, each on what the converted layers before it feed it: the moments of its inputs say which KV heads are
alike and which keys and values serve a group best (`shared_keys`), on request both are refitted by alternating least
squares on a sample of tokens (`refine_logits`, `refine_values`), and W_O is solved over the whole text for what the
layer wrote in the model as it was. No gradient is taken and nothing is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import Tensor, nn

from polyhead.errors import OptionError
from polyhead.surgery.adapters.attention_layer import AttentionLayer
from polyhead.surgery.adapters.discovery import find_layers
from polyhead.surgery.adapters.head_weights import HeadWeights, pack_heads, read_heads
from polyhead.surgery.calibration.input_moments import collect_inputs
from polyhead.surgery.calibration.key_transforms import KeyForm, find_key_forms
from polyhead.surgery.calibration.streams import Streams
from polyhead.surgery.calibration.temporary import evaluating
from polyhead.surgery.compensation.least_squares import check_ridge, with_output
from polyhead.surgery.compensation.targets import collect_targets
from polyhead.surgery.edits.applying import apply, changed
from polyhead.surgery.edits.records import EditRecord
from polyhead.surgery.kv_sharing.grouping import Groups, neighbours, similar_groups
from polyhead.surgery.kv_sharing.refine_logits import refined_logits, sample_logits
from polyhead.surgery.kv_sharing.refine_values import refined, sample_attended
from polyhead.surgery.kv_sharing.shared_keys import ShareKeys, share, sort_by_group

Grouping = Literal["similar", "neighbours"]
GROUPINGS: tuple[Grouping, ...] = get_args(Grouping)
Batches = Callable[[], Iterable[Mapping[str, Any]]]
RIDGE = 1e-3


def convert_groups(
    model: nn.Module,
    num_kv_heads: int,
    batches: Batches,
    *,
    stack: str | None = None,
    grouping: Grouping = "similar",
    ridge: float = RIDGE,
    rounds: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> EditRecord:
    """Give every attention layer `num_kv_heads` KV heads, so that it writes what it wrote as nearly as can be.

    Multi-head attention becomes grouped-query attention, or multi-query attention with 1. `undo(model, record)` takes
    it back bit for bit; `record.edits` are the `ShareKeys` that say who shares with whom.

    Args:
        batches: gives calibration text: what the model is called with, as `model(**batch)`. At least as many tokens as
            a layer's heads have channels.
        stack: only the layers of this stack; of all whose heads can be edited by default.
        grouping: KV heads that are alike share, or neighbours.
        ridge: how near W_O stays to what the shared values make of it, as in `OutputCompensation`.
        rounds: of alternating least squares on a sample of the text, queries and keys to the logits that there were and
            values to what was written; 0 leaves them as singular vectors make them.
        progress: called after each layer with how many are done and how many there are.
    """
    check_ridge(ridge)
    if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 0:
        raise OptionError(f"rounds must be an integer of at least 0, got {rounds!r}")
    if grouping not in GROUPINGS:
        raise OptionError(f"grouping must be one of {', '.join(GROUPINGS)}, got {grouping!r}")
    layers = layers_to_convert(model, num_kv_heads, stack)
    text = list(batches())
    if not text:
        raise OptionError("calibration needs some text, got no batch")
    forms = find_key_forms(model, text[0])
    missing = [layer.path for layer in layers if layer.path not in forms]
    if missing:
        raise OptionError(f"calibration text must pass every layer that is converted, got none through {missing[0]!r}")
    found: dict[str, Converted] = {}
    streams = Streams(model, text)
    with evaluating(model):
        for place, layer in enumerate(layers):
            found[layer.path] = _convert(
                model, layer, num_kv_heads, forms[layer.path], streams, found, grouping, ridge, rounds
            )
            if progress is not None:
                progress(place + 1, len(layers))
    edits = [
        ShareKeys(layer.number, found[layer.path].groups, forms[layer.path], stack=layer.stack) for layer in layers
    ]
    return apply(model, edits, compensation=_Precomputed(found))


def layers_to_convert(model: nn.Module, num_kv_heads: int, stack: str | None = None) -> list[AttentionLayer]:
    """The layers that would have fewer KV heads; refused where one of them cannot."""
    layers = [layer for layer in find_layers(model) if stack is None or layer.stack == stack]
    if not layers:
        stacks = list(dict.fromkeys(layer.stack for layer in find_layers(model)))
        raise OptionError(
            f"stack must be one of {', '.join(stacks)}, got {stack!r}" if len(stacks) else "got a model without heads"
        )
    refused = next((layer for layer in layers if layer.refusals), None)
    if refused is not None:
        raise OptionError(f"the heads of {refused.path!r} cannot be edited: {'; '.join(refused.refusals)}")
    wanted = []
    for layer in layers:
        assert layer.layout is not None
        edit = ShareKeys(layer.number, neighbours(layer.layout.num_kv_heads, num_kv_heads), stack=layer.stack)
        changed(layer, read_heads(model, layer, device="meta"), [edit])
        if layer.layout.num_kv_heads != num_kv_heads:
            wanted.append(layer)
    if not wanted:
        raise OptionError(f"every layer has {num_kv_heads} KV heads already; give a smaller number")
    return wanted


@dataclass(frozen=True, slots=True, eq=False)
class Converted:
    """A layer's heads with shared keys, query heads at their places; and the same in the shapes of the model."""

    groups: Groups
    heads: HeadWeights
    parameters: Mapping[str, Tensor]

    @classmethod
    def of(cls, model: nn.Module, layer: AttentionLayer, groups: Groups, heads: HeadWeights) -> Converted:
        before = read_heads(model, layer, device="meta")
        return cls(groups, heads, pack_heads(model, layer, spread(heads, groups, before)))


def spread(heads: HeadWeights, groups: Sequence[Sequence[int]], before: HeadWeights) -> HeadWeights:
    """Shared keys and values once for every KV head that there was before: the same function in the old shapes."""
    place = {key: index for index, group in enumerate(groups) for key in group}
    at = [place[key] for key in range(len(place))]
    return heads.with_keys(at, before.key_heads)


@dataclass(frozen=True, slots=True, eq=False)
class _Precomputed:
    """Writes what was found, query heads in the order of their groups; for `apply(..., compensation=...)`."""

    found: Mapping[str, Converted]

    def __call__(self, path: str, before: HeadWeights, after: HeadWeights) -> HeadWeights:
        return sort_by_group(self.found[path].heads)


def _convert(
    model: nn.Module,
    layer: AttentionLayer,
    count: int,
    form: KeyForm,
    streams: Streams,
    done: Mapping[str, Converted],
    grouping: Grouping,
    ridge: float,
    rounds: int,
) -> Converted:
    heads = read_heads(model, layer)
    lending = {name: x for one in done.values() for name, x in one.parameters.items()}
    text = streams.before(layer, lending)
    inputs = collect_inputs(model, layer, text, lending)
    groups = (
        similar_groups(heads, count, form, inputs) if grouping == "similar" else neighbours(heads.key.shape[0], count)
    )
    shared = share(heads, groups, form, inputs)
    if rounds:
        seen = sample_logits(model, layer, heads, form, text, lending)
        shared = refined_logits(shared, form, seen, rounds=rounds)
        del seen
    converted = Converted.of(model, layer, groups, shared)
    if rounds:
        now = lending | dict(converted.parameters)
        sample = sample_attended(model, layer, text, now, inputs.tokens)
        shared = refined(shared, sample, ridge=ridge, rounds=rounds)
        converted = Converted.of(model, layer, groups, shared)
    moments = collect_targets(model, layer, text, lending | dict(converted.parameters))
    problem = moments.problem(shared, ridge, layer.path)
    matrix, bias = problem.solve(range(shared.num_heads))
    return Converted.of(model, layer, groups, with_output(shared, matrix, bias))
