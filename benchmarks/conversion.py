"""Fewer KV heads in real models, held against pooling: `python -m benchmarks.conversion --help`.

Sentences: an encoder on STS-B, calibrated on train sentences; Spearman's correlation and the mean cosine of embeddings
to those of the model as it was. Language: perplexity of a causal model on the splits of one text, 60% to calibrate on,
20% to choose on, 20% to report. Several options are tried on the choosing split; with --report the best of them is
measured once on the reporting split.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import polyhead.integrations.huggingface
from benchmarks.surgery_quality.language import LanguageTask
from benchmarks.surgery_quality.sentences import SentenceTask
from polyhead.costs.measuring import machine
from polyhead.surgery import EditRecord, GroupQueries, apply, find_key_forms, find_layers, fingerprint, undo
from polyhead.surgery.kv_sharing.align import AlignHeads
from polyhead.surgery.kv_sharing.convert import convert_groups
from polyhead.surgery.kv_sharing.grouping import neighbours
from polyhead.surgery.kv_sharing.shared_keys import ShareKeys
from polyhead.workflows.model_loading import load_model

Way = Callable[[Any, int, dict[str, Any]], EditRecord]


def pooled(task: Any, count: int, options: dict[str, Any]) -> EditRecord:
    """The mean of neighbours, as converters do it."""
    return apply(task.model, _neighbours(task.model, count, GroupQueries))


def aligned(task: Any, count: int, options: dict[str, Any]) -> EditRecord:
    """The same mean after the exact symmetries brought heads as near to each other as they come."""
    forms = find_key_forms(task.model, task.calibration[0])
    layers = {(layer.number, layer.stack): forms[layer.path] for layer in find_layers(task.model)}
    edits = []
    for edit in _neighbours(task.model, count, GroupQueries):
        form = layers[edit.layer, edit.stack]
        edits += [AlignHeads(edit.layer, edit.groups, form, stack=edit.stack), edit]
    return apply(task.model, edits)


def weights_alone(task: Any, count: int, options: dict[str, Any]) -> EditRecord:
    """Shared in closed form by the weights, without any text."""
    forms = find_key_forms(task.model, task.calibration[0])
    layers = {(layer.number, layer.stack): forms[layer.path] for layer in find_layers(task.model)}
    plain = _neighbours(task.model, count, ShareKeys)
    return apply(task.model, [ShareKeys(x.layer, x.groups, layers[x.layer, x.stack], stack=x.stack) for x in plain])


def converted(task: Any, count: int, options: dict[str, Any]) -> EditRecord:
    """`convert_groups`, all of it in closed form."""

    def show(done: int, total: int) -> None:
        print(f"  {done} of {total} layers", file=sys.stderr, flush=True)

    return convert_groups(task.model, count, lambda: task.calibration, progress=show, **options)


WAYS: dict[str, Way] = {"pooled": pooled, "aligned": aligned, "weights": weights_alone, "converted": converted}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    device = torch.device(options.device)
    torch.backends.cuda.matmul.allow_tf32 = False
    loaded = load_model(options.model, device=device, dtype=torch.float32)
    model: Any = loaded.model
    model.set_attn_implementation(polyhead.integrations.huggingface.register())
    if options.stsb is not None:
        task: Any = SentenceTask.read(
            model, loaded.tokenizer, options.stsb, calibration=options.calibration, rows=options.rows
        )
    else:
        task = LanguageTask.read(
            model,
            loaded.tokenizer,
            options.text,
            calibration=options.calibration,
            rows=options.rows,
            batch=options.batch,
        )
    facts = machine.describe(device, None)
    for row in _rows(task, options):
        line = {"model": loaded.name, **row, "machine": facts}
        with options.output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(row), flush=True)
    return 0


def _rows(task: Any, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    before = fingerprint(task.model)
    yield {"way": "whole", "key_heads": None, **_figures(task, ("choose", "report") if options.report else ("choose",))}

    def measured(name: str, count: int, given: dict[str, Any], splits: Sequence[Any]) -> dict[str, Any]:
        began = time.perf_counter()
        record = WAYS[name](task, count, given)
        seconds = round(time.perf_counter() - began, 1)
        row = {"way": name, "key_heads": count, "options": given, "seconds": seconds, **_figures(task, splits)}
        undo(task.model, record)
        assert fingerprint(task.model) == before
        return row

    tried = [json.loads(text) for text in options.options]
    for count in options.key_heads:
        for name in options.ways:
            ways = tried if name == "converted" else [{}]
            best = ways[0]
            if len(ways) > 1 or not options.report:
                rows = []
                for given in ways:
                    rows.append(measured(name, count, given, ("choose",)))
                    yield rows[-1]
                best = min(rows, key=_loss)["options"]
            if options.report:  # once, with what was best on the choosing split
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


def _neighbours(model: nn.Module, count: int, edit: Any) -> list[Any]:
    return [
        edit(layer.number, neighbours(layer.layout.num_kv_heads, count), stack=layer.stack)
        for layer in find_layers(model)
        if layer.layout is not None
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.conversion", description=__doc__)
    parser.add_argument("model", help="minilm, smollm2, or a folder")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--stsb", type=Path, help="a folder with sts-train.csv, sts-dev.csv and sts-test.csv")
    what.add_argument("--text", type=Path, help="a file of plain text, for a causal model")
    parser.add_argument("--key-heads", type=int, nargs="+", required=True)
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=list(WAYS))
    parser.add_argument("--options", nargs="+", default=["{}"], help="of convert_groups, as JSON; each is tried")
    parser.add_argument("--calibration", type=int, help="sentences, or rows of 512 tokens, to calibrate on")
    parser.add_argument("--rows", type=int, help="pairs, or rows of 512 tokens, to measure on; all by default")
    parser.add_argument("--batch", type=int, default=16, help="rows of text at a time")
    parser.add_argument("--report", action="store_true", help="and report the best options on the last split")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, required=True, help="a file of JSON lines, added to")
    return parser


if __name__ == "__main__":
    sys.exit(main())
