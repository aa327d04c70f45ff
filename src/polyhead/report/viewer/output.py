"""Model outputs of the viewer, a token distribution or an embedding, and the difference between two of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from polyhead.report.packing import clipped

OutputKind = Literal["next-token", "masked-token", "vector"]
TOP = 16


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """Log-probabilities [vocabulary] of the token at `position`, or the embedding of the text; on the CPU."""

    kind: OutputKind
    values: Tensor  # float32
    position: int  # of the predicted token; for next-token one past the last
    describe: Callable[[int], str]  # the text of a token at that position
    pooled: Literal["mean", "last"] = "mean"

    @property
    def greedy(self) -> int:
        """The most likely token; the lowest id among ties."""
        return int((self.values == self.values.max()).to(torch.uint8).argmax())

    def probability(self, token: int) -> float | None:
        return finite(self.values[token].exp())

    @property
    def top_ids(self) -> list[int]:
        return [int(x) for x in self.values.topk(min(TOP, len(self.values))).indices]

    def to_dict(self) -> dict[str, Any]:
        if self.kind == "vector":
            return {"kind": self.kind, "size": len(self.values), "of": self.pooled}
        entropy = -(self.values.exp() * self.values.clamp_min(torch.finfo(torch.float32).min)).sum()
        return {
            "kind": self.kind,
            "position": self.position,
            "top": [
                {"id": x, "text": clipped(self.describe(x)), "probability": self.probability(x)} for x in self.top_ids
            ],
            "entropy": finite(entropy),
            "greedy": self.greedy,
        }


def difference(before: Output, after: Output) -> dict[str, Any]:
    """Return the difference between two outputs of the same model.

    For distributions the Kullback-Leibler divergence KL(before || after) in nats, and the most likely tokens of both
    ordered by change in probability; for embeddings their cosine similarity.
    """
    if before.kind == "vector":
        cosine = torch.nn.functional.cosine_similarity(before.values.double(), after.values.double(), dim=0)
        return {"divergence": None, "cosine": finite(cosine), "top": None}
    log_before, log_after = before.values.double(), after.values.double()
    # A token of probability 0 adds nothing; -inf minus -inf would be NaN.
    terms = torch.where(log_before == -torch.inf, 0.0, log_before.exp() * (log_before - log_after))
    ids = list(dict.fromkeys([*before.top_ids, *after.top_ids]))
    change = (after.values[ids].exp() - before.values[ids].exp()).abs()
    order = sorted(range(len(ids)), key=lambda i: -float(change[i]))
    top = [
        {
            "id": ids[i],
            "text": clipped(before.describe(ids[i])),
            "before": before.probability(ids[i]),
            "after": after.probability(ids[i]),
        }
        for i in order
    ]
    return {"divergence": finite(terms.sum().clamp_min(0.0)), "cosine": None, "top": top}


def finite(x: Tensor) -> float | None:
    """Return a float, or None for NaN and infinity, which JSON does not have."""
    number = float(x)
    return number if math.isfinite(number) else None
