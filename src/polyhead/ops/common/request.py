"""Requests to attention backends, and their output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyhead.ops.common.statistics import RowStatistics
from polyhead.ops.common.visibility import Visibility


@dataclass(frozen=True, slots=True, eq=False)
class AttentionOutput:
    """Result of `polyhead.attention` and of every layer.

    `output` is [batch, heads, queries, value_dim] from the function and [batch, queries, embed_dim] from a layer.
    `logsumexp` is [batch, heads, queries] in the accumulation dtype (float32; float64 for float64 input), and None if
    it was not requested and the backend does not compute it anyway. `weights` is [batch, heads, queries, keys] in the
    accumulation dtype, before dropout, and None unless requested, like the row `statistics`. `backend` is the name of
    the backend that ran.
    """

    output: Tensor
    logsumexp: Tensor | None = None
    weights: Tensor | None = None
    statistics: RowStatistics | None = None
    backend: str = ""


torch.export.register_dataclass(AttentionOutput, serialized_type_name="polyhead.AttentionOutput")


def as_output(results: Sequence[Tensor], names: Sequence[str], backend: str = "fused") -> AttentionOutput:
    """Return output, log-sum-exp and the named statistics as a result; the number of visible keys has no gradient."""
    output, logsumexp, *rows = results
    if not len(names):
        return AttentionOutput(output, logsumexp, backend=backend)
    statistics = dict(zip(names, rows, strict=True))
    if "visible_keys" in statistics and statistics["visible_keys"].requires_grad:
        statistics["visible_keys"] = statistics["visible_keys"].detach()
    return AttentionOutput(output, logsumexp, None, RowStatistics(**statistics), backend)


@dataclass(frozen=True, slots=True, eq=False)
class StatisticsRequest:
    """Row statistics to compute, and the positions of queries and keys."""

    names: tuple[str, ...]  # in the order of `statistics.NAMES`
    sink_keys: int
    window: int
    places: Visibility  # of queries and keys; only its positions, offset and ordinals are read


@dataclass(slots=True, eq=False)  # not frozen, which would double the time to create it
class AttentionRequest:
    """One validated call of `attention`, the only input of every backend. Not to be changed."""

    query: Tensor  # [batch, heads, queries, head_dim]
    key: Tensor  # [batch, kv_heads, keys, head_dim]
    value: Tensor  # [batch, kv_heads, keys, value_dim]
    visibility: Visibility | None  # None: every query sees every key
    scale: float | Tensor  # a number, or one per head [heads]
    softcap: float | None
    sinks: Tensor | None  # [heads]
    dropout: float
    seed: Tensor | None  # int64, one element; None: the backend draws random numbers itself
    weights: bool
    logsumexp: bool
    finite: bool  # the caller guarantees that keys and values contain no NaN or Inf
    statistics: StatisticsRequest | None = None

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """(batch, heads, kv_heads, queries, keys)."""
        batch, heads, queries, _ = self.query.shape
        return batch, heads, self.key.shape[1], queries, self.key.shape[2]

    @property
    def needs_grad(self) -> bool:
        """True if autograd records this call: some input requires a gradient, and gradients are enabled."""
        if not torch.is_grad_enabled():
            return False
        tensors = [self.query, self.key, self.value]
        tensors += [x for x in (self.sinks, self.scale) if isinstance(x, Tensor)]
        tensors += [] if self.visibility is None else self.visibility.bias_tensors
        return any(x.requires_grad for x in tensors)

    @property
    def accumulation_dtype(self) -> torch.dtype:
        return torch.float64 if self.query.dtype is torch.float64 else torch.float32
