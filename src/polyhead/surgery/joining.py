"""Edits that were made one after the other as one record, which takes them all back at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from polyhead.errors import OptionError
from polyhead.surgery.records import ConfigChange, EditRecord, LayerRecord


def join_records(first: EditRecord, second: EditRecord) -> EditRecord:
    """What undoes the second edits and then the first.

    >>> from polyhead.layers import MultiHeadAttention
    >>> from polyhead.surgery import PruneHeads, apply, undo
    >>> layer = MultiHeadAttention(12, 4)
    >>> both = join_records(apply(layer, [PruneHeads(0, (1,))]), apply(layer, [PruneHeads(0, (0,))]))
    >>> undo(layer, both)
    >>> layer.layout.num_heads
    4
    """
    if second.before != first.after:
        raise OptionError(
            "records are joined of edits that followed each other, got one that ended with the model of fingerprint "
            f"{first.after} and one that began with {second.before}"
        )
    layers = {layer.path: layer for layer in first.layers}
    for layer in second.layers:
        began = layers.get(layer.path, layer).before
        layers[layer.path] = LayerRecord(layer.path, began, layer.after)
    return EditRecord(
        edits=(*first.edits, *second.edits),
        before=first.before,
        after=second.after,
        layers=tuple(layers.values()),
        config=join_changes(first.config, second.config),
        tensors={**second.tensors, **first.tensors},
        shapes={**first.shapes, **second.shapes},
    )


def join_changes(first: Sequence[ConfigChange], second: Sequence[ConfigChange]) -> tuple[ConfigChange, ...]:
    """Changes of a config made one after the other, as one change of each value."""
    joined = {(change.path, change.name): change for change in first}
    for change in second:
        known = joined.get((change.path, change.name), change)
        joined[change.path, change.name] = dataclasses.replace(known, after=change.after)
    return tuple(joined.values())
