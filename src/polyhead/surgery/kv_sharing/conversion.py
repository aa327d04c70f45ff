"""Convert a trained model to fewer KV heads in closed form: group and share KV heads, and solve W_O again.

Layer by layer, each on the outputs of the converted layers before it: the moments of its inputs determine which KV
heads are similar and which keys and values serve a group best (`shared_keys`); optionally both are refitted by
alternating least squares on a sample of tokens (`refine_logits`, `refine_values`); and W_O is solved over the full
text for the layer's original output. Unlike GQA uptraining (Ainslie et al. 2023) nothing is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from polyhead.errors import OptionError
from polyhead.geometry import checked_integer
from polyhead.observation.evaluation_mode import evaluating
from polyhead.surgery.adapters.attention_layer import AttentionLayer
from polyhead.surgery.adapters.discovery import find_layers
from polyhead.surgery.adapters.head_weights import HeadWeights, pack_heads, read_heads
from polyhead.surgery.calibration.key_transforms import KeyTransform, find_key_transforms
from polyhead.surgery.calibration.layer_moments import collect_inputs, collect_targets
from polyhead.surgery.calibration.streams import Streams, in_float32
from polyhead.surgery.compensation.least_squares import OutputRegression, check_ridge, with_output
from polyhead.surgery.edits.applying import apply, changed
from polyhead.surgery.edits.records import EditRecord
from polyhead.surgery.kv_sharing.grouping import Groups, neighbours, similar_groups
from polyhead.surgery.kv_sharing.refine_logits import refined_logits, sample_logits
from polyhead.surgery.kv_sharing.refine_values import refined, sample_attended
from polyhead.surgery.kv_sharing.shared_keys import ShareKeys, share, sort_by_group
from polyhead.surgery.options import Grouping, check_grouping

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
    """Convert every attention layer to `num_kv_heads` KV heads, with least-squares fits to its original output.

    Multi-head attention becomes grouped-query attention, or multi-query attention with 1. `undo(model, record)` undoes
    it bit for bit; `record.edits` are `ShareKeys` edits with the groups.

    Args:
        batches: returns calibration text: keyword arguments of the model, as `model(**batch)`. At least as many tokens
            as a layer's heads have channels.
        stack: convert only the layers of this stack; by default all. Raises if the heads of one cannot be edited.
        grouping: group "similar" KV heads, or "neighbours", which are consecutive.
        ridge: regularisation of W_O towards its value after sharing, as in `OutputCompensation`.
        rounds: rounds of alternating least squares on a sample of the text, refitting queries and keys to the original
            logits, and values to the original output; 0 keeps the closed-form keys and values.
        progress: called after each layer with the number done and the total.
        model: the model, which is edited in place.
        num_kv_heads: KV heads of every layer.

    Returns:
        A record for `undo`.
    """
    check_ridge(ridge)
    checked_integer("rounds", rounds, error=OptionError)
    check_grouping(grouping)
    layers = layers_to_convert(model, num_kv_heads, stack)
    text = list(batches())
    if not text:
        raise OptionError("calibration needs some text, got no batch")
    converted: dict[str, Converted] = {}
    with in_float32(model), evaluating(model):
        forms = find_key_transforms(model, text[0])
        missing = [layer.path for layer in layers if layer.path not in forms]
        if missing:
            raise OptionError(f"calibration text must reach every converted layer, got none through {missing[0]!r}")
        streams = Streams(model, text)
        for index, layer in enumerate(layers):
            converted[layer.path] = _convert(
                model, layer, num_kv_heads, forms[layer.path], streams, converted, grouping, ridge, rounds
            )
            if progress is not None:
                progress(index + 1, len(layers))
    edits = [
        ShareKeys(layer.number, converted[layer.path].groups, forms[layer.path], stack=layer.stack) for layer in layers
    ]
    return apply(
        model, edits, compensation=lambda path, before, after: sort_by_group(converted[path].heads).to(before.query)
    )


def layers_to_convert(model: nn.Module, num_kv_heads: int, stack: str | None = None) -> list[AttentionLayer]:
    """Return the layers that would get fewer KV heads; raises if a layer of the stack cannot be converted."""
    layers = [layer for layer in find_layers(model) if stack is None or layer.stack == stack]
    if not layers:
        stacks = list(dict.fromkeys(layer.stack for layer in find_layers(model)))
        raise OptionError(
            f"stack must be one of {', '.join(stacks)}, got {stack!r}" if len(stacks) else "got a model without heads"
        )
    refused = next((layer for layer in layers if layer.refusals), None)
    if refused is not None:
        raise OptionError(f"the heads of {refused.path!r} cannot be edited: {'; '.join(refused.refusals)}")
    selected = []
    for layer in layers:
        changed(layer, read_heads(model, layer, device="meta"), [share_neighbours(layer, num_kv_heads)])
        if layer.layout is not None and layer.layout.num_kv_heads != num_kv_heads:
            selected.append(layer)
    if not selected:
        raise OptionError(f"every layer has {num_kv_heads} KV heads already; choose a smaller number")
    return selected


def share_neighbours(layer: AttentionLayer, num_kv_heads: int) -> ShareKeys:
    """Return the edit that shares KV heads between neighbours; the sizes are those of any other grouping."""
    assert layer.layout is not None
    return ShareKeys(layer.number, neighbours(layer.layout.num_kv_heads, num_kv_heads), stack=layer.stack)


@dataclass(frozen=True, slots=True, eq=False)
class Converted:
    """A converted layer: heads with shared KV heads, and the equivalent parameters in the model's shapes."""

    groups: Groups
    heads: HeadWeights
    parameters: Mapping[str, Tensor]

    @classmethod
    def of(cls, model: nn.Module, layer: AttentionLayer, groups: Groups, heads: HeadWeights) -> Converted:
        group_of = {key: index for index, group in enumerate(groups) for key in group}
        before = read_heads(model, layer, device="meta")
        # Shared KV heads are repeated for every original KV head: the same function in the old shapes.
        repeated = heads.with_keys([group_of[key] for key in range(len(group_of))], before.key_heads)
        return cls(groups, heads, pack_heads(model, layer, repeated))


def _convert(
    model: nn.Module,
    layer: AttentionLayer,
    count: int,
    transform: KeyTransform,
    streams: Streams,
    done: Mapping[str, Converted],
    grouping: Grouping,
    ridge: float,
    rounds: int,
) -> Converted:
    heads = read_heads(model, layer)
    swapped = {name: x for layer_done in done.values() for name, x in layer_done.parameters.items()}
    text = streams.before(layer, swapped)
    inputs = collect_inputs(model, layer, text, swapped)
    groups = (
        similar_groups(heads, count, transform, inputs)
        if grouping == "similar"
        else neighbours(heads.key.shape[0], count)
    )
    shared = share(heads, groups, transform, inputs)
    if rounds:
        logits = sample_logits(model, layer, heads, transform, text, swapped)
        shared = refined_logits(shared, transform, logits, rounds=rounds)
        del logits
    converted = Converted.of(model, layer, groups, shared)
    if rounds:
        current = swapped | dict(converted.parameters)
        sample = sample_attended(model, layer, text, current, inputs.tokens)
        shared = refined(shared, sample, ridge=ridge, rounds=rounds)
        converted = Converted.of(model, layer, groups, shared)
    moments = collect_targets(model, layer, text, swapped | dict(converted.parameters))
    regression = OutputRegression.of(moments.outputs, shared, ridge, layer.path, target=moments.target)
    matrix, bias = regression.solve(range(shared.num_heads))
    return Converted.of(model, layer, groups, with_output(shared, matrix, bias))
