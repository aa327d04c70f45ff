"""Reordering of the rows of selected heads between slots (selection order) and heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from polyhead.layers.variants.routed.router import Routing
from polyhead.ops.attention import AttentionOutput, RowStatistics
from polyhead.ops.selected_rows.api import RaggedRows
from polyhead.ops.selected_rows.row_products import RowGroups, sorted_groups


@dataclass(frozen=True, slots=True, eq=False)
class RowsByHead:
    """Rows [batch, tokens, slots] sorted by head, then by sequence, then by token; unused ones come last."""

    groups: RowGroups
    ends: Tensor  # int32 [heads * batch]: end of the rows of each head in each sequence
    tokens: int

    @classmethod
    def of(cls, routing: Routing) -> Self:
        sequences, tokens, slots = routing.heads.shape
        batch = max(sequences, 1)  # every head has an end, also for an empty batch
        pairs = routing.num_heads * batch
        keys = routing.heads
        if batch > 1:
            keys = keys * batch + torch.arange(batch, device=keys.device)[:, None, None]
        used = routing.used
        keys = keys if used is None else torch.where(used, keys, pairs)
        order, ends = sorted_groups(keys.reshape(-1), pairs)
        of_heads = ends[batch - 1 :: batch].contiguous() if batch > 1 else ends
        return cls(RowGroups(order, of_heads, slots, complete=used is None), ends if sequences else ends[:0], tokens)

    def ragged(self) -> RaggedRows:
        """Return the rows in the form that `ragged_attention` takes."""
        positions = (self.groups.order // self.groups.slots) % self.tokens
        heads = self.groups.ends.shape[0]
        return RaggedRows(positions.int(), _offsets(self.ends), self.tokens, by_head=True, num_heads=heads)


def rows_by_slot(routing: Routing, kv_heads: int) -> tuple[Tensor, RaggedRows]:
    """Return the order and ragged rows that treat slots as heads, `slots` of them over each KV head.

    Rows are numbered [batch, tokens, slots, kv_heads]; the order sorts these numbers by slot, unused ones last.
    """
    batch, tokens, slots = routing.heads.shape
    pairs = batch * kv_heads * slots
    keys = torch.arange(pairs, device=routing.heads.device).view(batch, 1, kv_heads, slots).transpose(2, 3)
    keys, used = keys.expand(batch, tokens, slots, kv_heads), routing.used
    keys = keys if used is None else torch.where(used[..., None], keys, pairs)
    order, ends = sorted_groups(keys.reshape(-1), pairs)
    positions = (order // (slots * kv_heads)) % tokens
    return order, RaggedRows(positions.int(), _offsets(ends), tokens, num_heads=kv_heads * slots)


def by_head(values: Tensor, routing: Routing, fill_value: float) -> Tensor:
    """Scatter [batch, kv_heads, slots, tokens, ...] to [batch, kv_heads * heads, tokens, ...]."""
    heads, used = routing.heads.transpose(1, 2)[:, None], routing.used
    if used is not None:
        heads = torch.where(used.transpose(1, 2)[:, None], heads, routing.num_heads)
    rest = values.shape[4:]
    index = heads.reshape(*heads.shape, *(1,) * len(rest)).expand(values.shape)
    # One extra head, for unused slots.
    full = values.new_full((*values.shape[:2], routing.num_heads + 1, values.shape[3], *rest), fill_value)
    return full.scatter(2, index, values)[:, :, : routing.num_heads].flatten(1, 2)


def factors_of(gate: Tensor, routing: Routing, kv_heads: int) -> Tensor:
    """Gather factors [batch, kv_heads * heads, tokens, 1] as [batch, tokens, slots, kv_heads]."""
    batch, tokens, slots = routing.heads.shape
    full = gate.squeeze(-1).unflatten(1, (kv_heads, routing.num_heads)).expand(batch, -1, -1, tokens)
    index = routing.heads.transpose(1, 2)[:, None].expand(batch, kv_heads, slots, tokens)
    return full.gather(2, index).permute(0, 3, 2, 1)


def result_by_head(result: AttentionOutput, routing: Routing) -> AttentionOutput:
    """Scatter row results [batch, kv_heads, slots, tokens] by head; unselected rows are fully masked."""
    fill_values = {"logsumexp": -torch.inf, "max_logit": -torch.inf}
    return _map_rows(result, result.output, lambda name, x: by_head(x, routing, fill_values.get(name, 0.0)))


def reshaped(result: AttentionOutput, shape: tuple[int, int, int, int], order: Tensor | None = None) -> AttentionOutput:
    """Reshape results to [batch, kv_heads, slots, tokens], the sizes in `shape`.

    The input is [batch, kv_heads * slots, tokens], or rows of [batch, tokens, slots, kv_heads] permuted by `order`.
    """
    batch, kv_heads, slots, tokens = shape
    places = None
    if order is not None:
        places = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))

    def reshape(name: str, x: Tensor) -> Tensor:
        if places is None:
            return x.unflatten(1, (kv_heads, slots))
        rows = x[places].view(batch, tokens, slots, kv_heads, *x.shape[1:])
        return rows.permute(0, 3, 2, 1, *range(4, rows.ndim))

    return _map_rows(result, reshape("output", result.output), reshape)


def _map_rows(result: AttentionOutput, output: Tensor, function: Callable[[str, Tensor], Tensor]) -> AttentionOutput:
    """Return `output` with a function of name and tensor applied to log-sum-exp, weights and statistics."""
    logsumexp, weights, statistics = result.logsumexp, result.weights, result.statistics
    if logsumexp is not None:
        logsumexp = function("logsumexp", logsumexp)
    if weights is not None:
        weights = function("weights", weights)
    if statistics is not None:
        statistics = RowStatistics(**{name: function(name, x) for name, x in statistics.items()})
    return AttentionOutput(output, logsumexp, weights, statistics, result.backend)


def _offsets(ends: Tensor) -> Tensor:
    return torch.cat((ends.new_zeros(1), ends))
