"""Attention from and to one token: a row and a column of every head, exactly, in O(heads · tokens)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyhead.report.packing import packed_floats
from polyhead.report.viewer.tiles import window
from polyhead.report.viewer.trace import RecordedAttention

TOP = 8


def attends(attention: RecordedAttention, token: int) -> Tensor:
    """Return the weights of one query on all keys, [heads, keys] on the CPU."""
    return window(attention, (token, token + 1), (0, attention.keys), 0, "sum")[:, 0]


def attended(attention: RecordedAttention, token: int) -> Tensor:
    """Return the weights of all queries on one key, [heads, queries] on the CPU."""
    return window(attention, (0, attention.queries), (token, token + 1), 0, "sum")[:, :, 0]


def row_message(weights: Tensor, cells: int) -> dict[str, Any]:
    """Return weights [heads, tokens] pooled to at most `cells` maxima of blocks, and the tokens of largest weight."""
    tokens = weights.shape[1]
    block = 1 << max(0, (-(-tokens // cells) - 1).bit_length())
    pooled = torch.nn.functional.pad(weights, (0, -tokens % block)).unflatten(1, (-1, block)).amax(-1)
    values, positions = weights.topk(min(TOP, tokens), -1)
    top = {"tokens": positions.tolist(), "weights": values.tolist()}
    return {"weights": packed_floats(pooled), "block": block, "top": top}
