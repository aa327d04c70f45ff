"""Expected results of `observe`, computed in float64 from the weights that eager attention returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from polyhead.observation import HeadProfile
from tests.integrations.huggingface.compare import BOUND

POSITIONAL = ("mean_distance", "self_mass", "previous_mass", "next_mass", "window_mass")


@dataclass
class Expected:
    """Rows of one stack of layers, gathered over calls: [layer][name] is a list of [heads, rows]."""

    cross: bool = False
    sinks: bool = False  # learned ones, which take what the weights lack to one
    layers: list[dict[str, list[Tensor]]] = field(default_factory=list)

    def add(self, attentions: Sequence[Tensor], real: Tensor, first: Tensor, total: int | None = None) -> None:
        """The weights of every layer in one call, [batch, heads, queries, keys].

        `real` [batch, queries] says which rows are tokens, `first` [batch] which key, of all the `total` keys that
        there have been, is the first of its sequence; a windowed cache holds only the last of them.
        """
        for index, weights in enumerate(attentions):
            if index == len(self.layers):
                self.layers.append({})
            rows = self.row_statistics(weights.double(), first, weights.shape[-1] if total is None else total)
            for name, values in rows.items():
                counted = real & (weights.sum(-1) > 0).all(1)
                if name == "normalized_entropy":
                    counted = counted & (rows["visible_keys"] > 1).all(1)
                self.layers[index].setdefault(name, []).append(values.transpose(0, 1)[:, counted])

    def row_statistics(self, weights: Tensor, first: Tensor, total: int) -> dict[str, Tensor]:
        """The formulas of docs/statistics.md."""
        queries, keys = weights.shape[2:]
        entropy, visible = -torch.xlogy(weights, weights).sum(-1), (weights > 0).sum(-1)
        if self.sinks:
            share = (1 - weights.sum(-1)).clamp_min(0)
            entropy, visible = entropy - torch.xlogy(share, share), visible + 1
        index = torch.arange(keys) + (total - keys)
        found = {
            "visible_keys": visible,
            "entropy": entropy,
            "normalized_entropy": entropy / visible.clamp_min(2).log(),
            "confidence": weights.amax(-1),
            "sink_mass": (weights * (index == first[:, None])[:, None, None]).sum(-1),
        }
        if self.cross:
            return found
        distance = torch.arange(keys) - (torch.arange(queries) + keys - queries)[:, None]
        found["mean_distance"] = (weights * distance.abs()).sum(-1)
        found["window_mass"] = (weights * (distance.abs() <= 8)).sum(-1)
        for name, at in (("self_mass", 0), ("previous_mass", -1), ("next_mass", 1)):
            found[name] = (weights * (distance == at)).sum(-1)
        return found


def assert_table(table: HeadProfile, stacks: Mapping[str, Expected]) -> None:
    """Every row of the table against the rows gathered; `stacks` are named "self", "cross", "encoder" or "decoder"."""
    assert len(table)
    seen = set()
    for index, (site, head) in enumerate(zip(table.sites, table.heads, strict=True)):
        stack = site.kind if site.kind in stacks else next(part for part in site.stack.split(".") if part in stacks)
        seen.add((stack, site.layer))
        expected = stacks[stack].layers[site.layer]
        for name in ("entropy", "normalized_entropy", "confidence", "sink_mass", *POSITIONAL):
            if name not in table.names:
                continue
            if stacks[stack].cross and name in POSITIONAL:
                assert table[name][index].isnan(), (site, name)
                continue
            values = torch.cat(expected[name], -1)[head]
            size = max(1.0, float(values.abs().max()))
            for column, value in (
                (name, values.mean()),
                (f"{name}_std", values.std(correction=0)),
                (f"{name}_max", values.max()),
            ):
                error = float((table[column][index] - value).abs())
                assert error <= BOUND * size, f"{site.name} head {head}: {column} is off by {error:.2e}"
            if name == "entropy":
                assert table["tokens"][index] == len(values), (site, table["tokens"][index], len(values))
    assert seen == {(name, layer) for name, stack in stacks.items() for layer in range(len(stack.layers))}


@contextmanager
def largest_logits(found: list[Tensor]) -> Iterator[None]:
    """Note the largest input of every softmax over keys, [batch, heads, queries], in the order of the calls."""
    softmax = F.softmax

    def noting(logits: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        if logits.ndim == 4:
            found.append(logits.double().amax(-1))
        return softmax(logits, *arguments, **keywords)

    F.softmax = noting
    try:
        yield
    finally:
        F.softmax = softmax
