"""Attention from and to one token: a row and a column of every head, exactly, in O(heads · tokens)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyhead.report.packing import packed_floats
from polyhead.report.viewer.trace import RecordedAttention

STRONGEST = 8


@dataclass(frozen=True, slots=True, eq=False)
class WeightRow:
    """Weights between one token and all others, [heads, tokens], on the CPU."""

    weights: Tensor

    def to_dict(self, cells: int) -> dict[str, Any]:
        """Return at most `cells` cells, each the maximum of a block of tokens, and the tokens of largest weight."""
        tokens = self.weights.shape[1]
        block = 1 << max(0, (-(-tokens // cells) - 1).bit_length())
        shown = self.weights
        if block > 1:
            shown = torch.nn.functional.pad(shown, (0, -tokens % block)).unflatten(1, (-1, block)).amax(-1)
        values, positions = self.weights.topk(min(STRONGEST, tokens), -1)
        return {
            "weights": packed_floats(shown),
            "block": block,
            "top": {"tokens": positions.tolist(), "weights": [[float(x) for x in row] for row in values]},
        }


def attends(attention: RecordedAttention, token: int) -> WeightRow:
    """Return the weights of one query on all keys."""
    weights = attention.profile(block_map=(1, 1), rows=(token, token + 1)).block_map
    assert weights is not None
    return WeightRow(weights[0, :, 0].cpu())


def attended(attention: RecordedAttention, token: int) -> WeightRow:
    """Return the weights of all queries on one key."""
    weights = attention.profile(block_map=(1, 1), columns=(token, token + 1)).block_map
    assert weights is not None
    return WeightRow(weights[0, :, :, 0].cpu())
