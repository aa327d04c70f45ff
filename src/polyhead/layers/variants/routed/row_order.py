"""Rows of chosen heads between their two orders: in slots, as tokens took their heads, and by head, as layers speak."""

from __future__ import annotations

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
    """The rows [batch, tokens, slots] sorted by head, then by sequence, then by token; those not used come last."""

    groups: RowGroups
    ends: Tensor  # int32 [heads * batch]: where the rows of each head in each sequence end
    tokens: int

    @classmethod
    def of(cls, routing: Routing) -> Self:
        sequences, tokens, slots = routing.heads.shape
        batch = max(sequences, 1)  # heads have ends where there is nothing as well
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
        """The same rows, as `ragged_attention` is told of them."""
        positions = (self.groups.order // self.groups.slots) % self.tokens
        heads = self.groups.ends.shape[0]
        return RaggedRows(positions.int(), _offsets(self.ends), self.tokens, by_head=True, num_heads=heads)


def rows_by_slot(routing: Routing, kv_heads: int) -> tuple[Tensor, RaggedRows]:
    """The used rows of each slot as if slots were heads, `slots` of them over each KV head, whichever heads they hold.

    Rows are numbered [batch, tokens, slots, kv_heads]; the first result is the order that puts them so.
    """
    batch, tokens, slots = routing.heads.shape
    pairs = batch * kv_heads * slots
    keys = torch.arange(pairs, device=routing.heads.device).view(batch, 1, kv_heads, slots).transpose(2, 3)
    keys, used = keys.expand(batch, tokens, slots, kv_heads), routing.used
    keys = keys if used is None else torch.where(used[..., None], keys, pairs)
    order, ends = sorted_groups(keys.reshape(-1), pairs)
    positions = (order // (slots * kv_heads)) % tokens
    return order, RaggedRows(positions.int(), _offsets(ends), tokens, num_heads=kv_heads * slots)


def by_head(values: Tensor, routing: Routing, nothing: float) -> Tensor:
    """[batch, kv_heads, slots, tokens, ...] by head, [batch, kv_heads * heads, tokens, ...]; `nothing` elsewhere."""
    heads, used = routing.heads.transpose(1, 2)[:, None], routing.used
    if used is not None:
        heads = torch.where(used.transpose(1, 2)[:, None], heads, routing.num_heads)
    rest = values.shape[4:]
    index = heads.reshape(*heads.shape, *(1,) * len(rest)).expand(values.shape)
    # One place more than there are heads, for the slots that are not used.
    full = values.new_full((*values.shape[:2], routing.num_heads + 1, values.shape[3], *rest), nothing)
    return full.scatter(2, index, values)[:, :, : routing.num_heads].flatten(1, 2)


def factors_of(gate: Tensor, routing: Routing, kv_heads: int) -> Tensor:
    """Factors [batch or 1, kv_heads * heads, tokens or 1, 1] at the chosen heads: [batch, tokens, slots, kv_heads]."""
    batch, tokens, slots = routing.heads.shape
    full = gate.squeeze(-1).unflatten(1, (kv_heads, routing.num_heads)).expand(batch, -1, -1, tokens)
    index = routing.heads.transpose(1, 2)[:, None].expand(batch, kv_heads, slots, tokens)
    return full.gather(2, index).permute(0, 3, 2, 1)


def result_by_head(result: AttentionOutput, routing: Routing) -> AttentionOutput:
    """What is told of each row [batch, kv_heads, slots, tokens], by head; heads that did not look saw nothing."""

    def told(x: Tensor | None, nothing: float = 0.0) -> Tensor | None:
        return None if x is None else by_head(x, routing, nothing)

    statistics = None
    if result.statistics is not None:
        rows = {name: told(x, -torch.inf if name == "max_logit" else 0.0) for name, x in result.statistics.items()}
        statistics = RowStatistics(**rows)
    return AttentionOutput(
        result.output, told(result.logsumexp, -torch.inf), told(result.weights), statistics, result.backend
    )


def reshaped(result: AttentionOutput, shape: tuple[int, int, int, int], order: Tensor | None = None) -> AttentionOutput:
    """Rows as [batch, kv_heads, slots, tokens], `shape` being those sizes.

    They come as [batch, kv_heads * slots, tokens], or in the `order` of rows [batch, tokens, slots, kv_heads].
    """
    batch, kv_heads, slots, tokens = shape
    places = None
    if order is not None:
        places = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))

    def put(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        if places is None:
            return x.unflatten(1, (kv_heads, slots))
        rows = x[places].view(batch, tokens, slots, kv_heads, *x.shape[1:])
        return rows.permute(0, 3, 2, 1, *range(4, rows.ndim))

    statistics = result.statistics
    if statistics is not None:
        statistics = RowStatistics(**{name: put(x) for name, x in statistics.items()})
    output = put(result.output)
    assert output is not None
    return AttentionOutput(output, put(result.logsumexp), put(result.weights), statistics, result.backend)


def _offsets(ends: Tensor) -> Tensor:
    return torch.cat((ends.new_zeros(1), ends))
