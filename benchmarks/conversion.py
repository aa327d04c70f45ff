"""Fewer KV heads in trained models, compared with pooling: `python -m benchmarks conversion --help`.

Sentences: an encoder on STS-B, calibrated on train sentences; Spearman's correlation and the mean cosine of embeddings
to those of the model as it was. Language: perplexity of a causal model on the splits of one text, 60% to calibrate on,
20% to choose on, 20% to report. Several options are tried on the choosing split; with --report the best of them is
measured once on the reporting split.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from polyhead.surgery import (
    EditRecord,
    GroupQueries,
    KeyTransform,
    apply,
    find_key_transforms,
    find_layers,
    fingerprint,
    undo,
)
from polyhead.surgery.kv_sharing.align import AlignHeads
from polyhead.surgery.kv_sharing.conversion import convert_groups
from polyhead.surgery.kv_sharing.grouping import neighbours
from polyhead.surgery.kv_sharing.shared_keys import ShareKeys

Way = Callable[[Any, int, dict[str, Any]], EditRecord]


def pooled(task: Any, count: int, options: dict[str, Any]) -> EditRecord:
    """Replace neighbouring KV heads by their mean."""
    return apply(task.model, _neighbours(task.model, count, GroupQueries))


def aligned(task: Any, count: int, options: dict[str, Any]) -> EditRecord:
    """Replace them by their mean, after exact symmetries have aligned them."""
    layers, edits = _transforms(task), []
    for edit in _neighbours(task.model, count, GroupQueries):
        transform = layers[edit.layer, edit.stack]
        edits += [AlignHeads(edit.layer, edit.groups, transform, stack=edit.stack), edit]
    return apply(task.model, edits)


def weights_alone(task: Any, count: int, options: dict[str, Any]) -> EditRecord:
    """Share KV heads in closed form by the weights alone, without any text."""
    layers = _transforms(task)
    plain = _neighbours(task.model, count, ShareKeys)
    return apply(task.model, [ShareKeys(x.layer, x.groups, layers[x.layer, x.stack], stack=x.stack) for x in plain])


def converted(task: Any, count: int, options: dict[str, Any]) -> EditRecord:
    """Call `convert_groups`, all of it in closed form."""

    def show(done: int, total: int) -> None:
        print(f"  {done} of {total} layers", file=sys.stderr, flush=True)

    return convert_groups(task.model, count, lambda: task.calibration, progress=show, **options)


METHODS: dict[str, Way] = {"pooled": pooled, "aligned": aligned, "weights": weights_alone, "converted": converted}


def converted_rows(
    task: Any, counts: Sequence[int], ways: Sequence[str], tried: Sequence[dict[str, Any]], *, report: bool
) -> Iterator[dict[str, Any]]:
    """Yield a row of the whole model, then one for each count and way; `tried` are options of `convert_groups`.

    With `report`, the options that are best on the choosing split are measured on both splits.
    """
    before = fingerprint(task.model)
    yield {"way": "whole", "key_heads": None, **_figures(task, ("choose", "report") if report else ("choose",))}

    def measured(name: str, count: int, given: dict[str, Any], splits: Sequence[Any]) -> dict[str, Any]:
        began = time.perf_counter()
        record = METHODS[name](task, count, given)
        seconds = round(time.perf_counter() - began, 1)
        row = {"way": name, "key_heads": count, "options": given, "seconds": seconds, **_figures(task, splits)}
        undo(task.model, record)
        assert fingerprint(task.model) == before
        return row

    for count in counts:
        for name in ways:
            every = tried if name == "converted" else [{}]
            best = every[0]
            if len(every) > 1 or not report:
                rows = []
                for given in every:
                    rows.append(measured(name, count, given, ("choose",)))
                    yield rows[-1]
                best = min(rows, key=_loss)["options"]
            if report:  # once, with what was best on the choosing split
                yield measured(name, count, best, ("choose", "report"))


def _loss(row: dict[str, Any]) -> float:
    """Selection metric: cosine similarity of embeddings, or perplexity."""
    figures = row["choose"]
    return float(-figures["cosine"][0] if "cosine" in figures else figures["perplexity"][0])


def _figures(task: Any, splits: Sequence[Any]) -> dict[str, Any]:
    return {
        split: {name: [round(x.value, 5), round(x.error, 5)] for name, x in task.figures(split).items()}
        for split in splits
    }


def _transforms(task: Any) -> dict[tuple[int, str], KeyTransform]:
    """Return the changes of basis that keys allow, by the number and the stack of a layer."""
    forms = find_key_transforms(task.model, task.calibration[0])
    return {(layer.number, layer.stack): forms[layer.path] for layer in find_layers(task.model)}


def _neighbours(model: nn.Module, count: int, edit: Any) -> list[Any]:
    return [
        edit(layer.number, neighbours(layer.layout.num_kv_heads, count), stack=layer.stack)
        for layer in find_layers(model)
        if layer.layout is not None
    ]
