"""Which rows of an attention are tokens: a mask says it of the keys, and in self-attention a query is one of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from polyhead.masks import Mask
from polyhead.ops.attention import RowStatistics


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """The queries of one self-attention: its mask and its sizes, held until somebody asks which rows are real."""

    mask: Mask | None
    batch: int
    queries: int
    keys: int
    device: torch.device

    @classmethod
    def of(cls, mask: Mask | None, query: Tensor, key: Tensor) -> Tokens:
        return cls(mask, query.shape[0], query.shape[2], key.shape[2], query.device)

    def real(self) -> Tensor | None:
        """[batch or 1, queries], False for padding; None where the mask knows of none. Waits for no device.

        A padded token need not be hidden as a query: an encoder's still look at the real tokens. It is told by its
        key, which nobody may see. A mask given pair by pair, over keys of which the queries are only some, does not say
        which keys these are: there every row counts that sees a key.
        """
        mask = self.mask
        if mask is None or self.keys < self.queries:
            return None
        terms = []
        for padding in mask.padding:
            if padding.side == "left" or self.queries == self.keys:
                terms.append(self._at_queries(_within(padding.keys, self.keys, padding.side, self.device)))
            if padding.queries is not None:
                terms.append(_within(padding.queries, self.queries, padding.side, self.device))
        terms += [documents.queries.to(self.device, non_blocking=True) >= 0 for documents in mask.packed]
        if mask.placed is not None:
            terms.append(self._at_queries(mask.placed[1].to(self.device, non_blocking=True) >= 0))
        # transformers hides with the least number of a dtype as well as with -inf. Padding is the same for every head.
        hides = [bias.detach()[:, :1] > torch.finfo(bias.dtype).min / 2 for bias in mask.biases]
        for allowed in (*mask.allowed, *hides):
            if allowed.shape[2] == 1 or self.queries == self.keys:
                terms.append(self._at_queries(allowed.any(1).any(1)))
        result = None
        for term in terms:
            result = term if result is None else result & term
        return result

    def first_real(self) -> Tensor:
        """The index of the first key that is no padding, [batch or 1]."""
        first = torch.zeros(1, dtype=torch.int64, device=self.device)
        if self.mask is None:
            return first
        for padding in self.mask.padding:
            if padding.side == "left":
                first = torch.maximum(first, self.keys - padding.keys.to(self.device, non_blocking=True))
        seen = [] if self.mask.placed is None else [self.mask.placed[1].to(self.device, non_blocking=True) >= 0]
        seen += [allowed.any(1).any(1) for allowed in self.mask.allowed]
        for keys in seen:
            first = torch.maximum(first, keys.to(torch.uint8).argmax(-1))
        return first

    def _at_queries(self, of_keys: Tensor) -> Tensor:
        """What is known of each key [batch or 1, keys], for the keys that are the queries themselves."""
        mask, keys = self.mask, self.keys
        if mask is None or mask.placed is None:
            return of_keys[:, keys - self.queries :]
        placed = [x.to(self.device, non_blocking=True) for x in mask.placed]
        rows = max(of_keys.shape[0], *(x.shape[0] for x in placed))
        # Keys stand at consecutive places, so their places modulo their number are different; -1 has a slot of its own.
        query_slots, key_slots = (torch.where(x >= 0, x % keys, keys).expand(rows, -1) for x in placed)
        found = torch.zeros(rows, keys + 1, dtype=torch.bool, device=self.device)
        found = found.scatter(1, key_slots, of_keys.expand(rows, -1))
        found[:, keys:].zero_()
        return found.gather(1, query_slots)


def hidden_by_bias(mask: Mask | None) -> Tensor | None:
    """How many keys each row is kept from by the least number of a dtype, [batch or 1, 1, queries or 1].

    Added to a logit it leaves a weight of zero, but the key still counts as one that is seen.
    """
    count = None
    for bias in () if mask is None else mask.biases:
        least = torch.finfo(bias.dtype).min
        hidden = (bias.detach()[:, :1] <= least / 2) & (bias.detach()[:, :1] >= least)
        count = hidden.sum(-1) if count is None else count + hidden.sum(-1)
    return count


def corrected(rows: RowStatistics, hidden: Tensor | None, sinks_in_view: Tensor | None) -> RowStatistics:
    """The rows without the keys that a bias hides (`hidden_by_bias`), nor sinks where [batch] says they are gone."""
    if sinks_in_view is not None and rows.sink_mass is not None:
        rows = replace(rows, sink_mass=torch.where(sinks_in_view[:, None, None], rows.sink_mass, 0.0))
    if hidden is not None and rows.visible_keys is not None:
        rows = replace(rows, visible_keys=rows.visible_keys - hidden)
    return rows


def _within(lengths: Tensor, size: int, side: str, device: torch.device) -> Tensor:
    lengths = lengths.to(device, non_blocking=True)[:, None]
    index = torch.arange(size, device=device)
    return index < lengths if side == "right" else index >= size - lengths
