"""Whether merging heads pays, held against pruning as many with repair: `python -m benchmarks.merging --help`.

Of every layer the pairs that write most alike, and those of the head that can best go with the heads most like it, are
made one, by their mean (`MergeHeads`) and in closed form (`FuseHeads`), and W_O is repaired; beside it the better one
of the two is pruned, and the head that can best go. What is lost is a share of what the layer writes, on that text.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyhead.lab.surgery_quality.sentences import Pairs
from polyhead.sources import load_model
from polyhead.surgery import (
    AttentionLayer,
    HeadWeights,
    MergeHeads,
    find_key_forms,
    find_layers,
    fuse,
    gather_moments,
    pruning_order,
    read_heads,
)
from polyhead.surgery.anatomy.head_weights import pack_heads
from polyhead.surgery.calibration.input_moments import gather_inputs
from polyhead.surgery.calibration.streams import pieces_of
from polyhead.surgery.repair.least_squares import Problem
from polyhead.surgery.repair.targets import gather_targets

RIDGE = 1e-3


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    loaded = load_model(options.model, dtype=torch.float32)
    sentences = Pairs.read(options.stsb / "sts-train.csv").sentences
    random.Random(0).shuffle(sentences)
    chosen = sorted(sentences[: options.sentences], key=len)
    batches = [
        dict(loaded.tokenizer(chosen[at : at + 64], padding=True, truncation=True, max_length=128, return_tensors="pt"))
        for at in range(0, len(chosen), 64)
    ]
    for row in judged(loaded.model, batches, options.pairs):
        print(json.dumps(row), flush=True)
    return 0


def judged(model: Any, batches: list[dict[str, Tensor]], pairs: int) -> Iterator[dict[str, Any]]:
    """A row for each pair: what is lost when its two heads become one, or when one is taken out."""
    moments, forms = gather_moments(model, batches), find_key_forms(model, batches[0])
    for layer in find_layers(model):
        heads, found = read_heads(model, layer), moments[layer.path]
        problem = Problem.of(found, heads, RIDGE)
        energy = float((problem.matrix * problem.cross).sum())
        alike = _cosines(problem, heads.num_heads)
        every = sorted(combinations(range(heads.num_heads), 2), key=lambda pair: -float(alike[pair]))
        inputs = gather_inputs(model, layer, pieces_of(batches))
        order = pruning_order(found, heads, ridge=RIDGE)
        with_best = [pair for pair in every if order.heads[0] in pair]
        for pair in dict.fromkeys((*every[:pairs], *with_best[:pairs])):
            row = {"layer": layer.path, "pair": pair, "cosine": float(alike[pair]), "has_best": order.heads[0] in pair}
            row["best_pruned"] = order.losses[0] / energy
            row["pruned"] = min(
                _lost(problem, [x for x in range(heads.num_heads) if x != gone], energy) for gone in pair
            )
            ways = {
                "merged": MergeHeads(layer.number, pair).change(heads),
                "fused": fuse(heads, pair, forms[layer.path], inputs),
            }
            for name, made in ways.items():
                row[name] = _lost_as_one(model, layer, heads, made, pair, batches, energy)
            yield row


def _cosines(problem: Problem, heads: int) -> Tensor:
    """Of what any two heads write, [heads, heads]."""
    matrix = problem.matrix.unflatten(0, (heads, -1))
    products = problem.products.unflatten(0, (heads, -1)).unflatten(2, (heads, -1))
    together = torch.einsum("hae,hakb,kbe->hk", matrix, products, matrix)
    sizes = together.diagonal().sqrt()
    return together / torch.outer(sizes, sizes)


def _lost_as_one(
    model: Any,
    layer: AttentionLayer,
    heads: HeadWeights,
    made: HeadWeights,
    pair: tuple[int, int],
    batches: list[dict[str, Tensor]],
    energy: float,
) -> float:
    """With the one head at the place of the first, and the second silent, so that every shape stays."""
    kept = [head for head in range(heads.num_heads) if head != pair[1]]
    held: dict[str, Any] = {}
    for name in ("query", "key", "value", "output", "query_bias", "key_bias", "value_bias"):
        x = getattr(heads, name)
        held[name] = None if x is None else x.clone()
        if x is not None:
            held[name][kept] = getattr(made, name)
    held["output"][pair[1]] = 0
    spread = replace(heads, **held, output_bias=made.output_bias)
    targets = gather_targets(model, layer, pieces_of(batches), pack_heads(model, layer, spread))
    return _lost(targets.problem(spread, RIDGE, layer.path), kept, energy)


def _lost(problem: Problem, kept: list[int], energy: float) -> float:
    """The mean square of what is missing after repair, as a share of what is written."""
    matrix, _ = problem.solve(kept)
    channels = problem.channels(kept)
    products, cross = problem.products[channels][:, channels], problem.cross[channels]
    return (energy - 2 * float((matrix * cross).sum()) + float((matrix * (products @ matrix)).sum())) / energy


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.merging", description=__doc__)
    parser.add_argument("model", nargs="?", default="minilm", help="an encoder in which every head has its own keys")
    parser.add_argument("--stsb", type=Path, required=True, help="a folder with sts-train.csv")
    parser.add_argument("--sentences", type=int, default=300)
    parser.add_argument("--pairs", type=int, default=3, help="of each layer")
    return parser


if __name__ == "__main__":
    sys.exit(main())
