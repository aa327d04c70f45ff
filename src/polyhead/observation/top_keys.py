"""`TopKeys`: collect the attention that each vocabulary entry receives from each head."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from polyhead.errors import OptionError, ShapeError
from polyhead.observation.accumulators import Sums
from polyhead.observation.collectors import BatchMetadata, counted_rows, exclude_padding, profile_rows
from polyhead.observation.statistics import AttentionSite
from polyhead.ops.attended import Attended


@dataclass(frozen=True, slots=True, eq=False)
class TopKeys:
    """Collector of the attention weight that each token id receives, per head, summed over a text.

    Args:
        tokens: ids to distinguish, int64 [any] on the CPU, such as the most frequent ones of the text; all others share
            one entry. This bounds the memory: 8 bytes per id and head.

    `session.metadata.tokens` is required. Cross-attention, whose keys are other tokens, is skipped.
    """

    name: ClassVar[str] = "top_keys"
    tokens: Tensor

    def __post_init__(self) -> None:
        if self.tokens.ndim != 1 or self.tokens.is_floating_point() or self.tokens.device.type != "cpu":
            raise ShapeError(
                f"tokens must be ids, [any] integers on the CPU, got {self.tokens.dtype} of {list(self.tokens.shape)}"
            )
        if len(self.tokens.unique()) != len(self.tokens):
            raise OptionError("tokens must be distinct ids, got duplicates")

    def empty(self, site: AttentionSite, device: torch.device) -> SiteTopKeys | None:
        if site.kind != "self":
            return None
        zeros = torch.zeros(site.num_heads, len(self.tokens) + 1, dtype=torch.float64, device=device)
        return SiteTopKeys(self, zeros, torch.zeros((), dtype=torch.float64, device=device))

    def places(self, tokens: Tensor) -> Tensor:
        """Return the index of each token [batch, tokens] in `self.tokens`, or its length for other tokens."""
        ordered, order = self.tokens.sort()
        if not len(ordered):
            return torch.zeros_like(tokens)
        index = torch.searchsorted(ordered, tokens).clamp_max(len(ordered) - 1)
        return torch.where(ordered[index] == tokens, order[index], len(ordered))


@dataclass(frozen=True, slots=True, eq=False)
class SiteTopKeys(Sums):
    """State of `TopKeys` at one site: received weight per token id, and the number of query rows."""

    collector: TopKeys
    received: Tensor  # [heads, tokens + 1]; the last entry is all other ids
    rows: Tensor
    profiled: ClassVar[dict[str, Any]] = {"received": True}

    def update(self, attended: Attended, non_padding: Tensor | None, metadata: BatchMetadata) -> Self:
        keys = attended.key.shape[2]
        if metadata.tokens is None or metadata.tokens.shape != (attended.query.shape[0], keys):
            got = None if metadata.tokens is None else list(metadata.tokens.shape)
            raise OptionError(
                f"top keys need the ids of the {keys} tokens of each text; before each call of the model set "
                f"session.metadata = BatchMetadata(tokens=...), [batch, tokens] on the CPU, got {got}"
            )
        weight = profile_rows(attended, non_padding, self.profiled).received
        assert weight is not None
        places = self.collector.places(metadata.tokens).to(weight.device, non_blocking=True)
        heads = weight.shape[1]
        by_token = weight.double().transpose(0, 1).reshape(heads, -1)  # [heads, batch * keys]
        received = self.received.index_add(1, places.flatten(), by_token)
        rows = counted_rows(exclude_padding(attended, non_padding)).sum(dtype=torch.float64)
        return replace(self, received=received, rows=self.rows + rows)

    def merge(self, other: Self) -> Self:
        if not torch.equal(self.collector.tokens, other.collector.tokens):
            raise OptionError("only top keys of the same token ids can be merged, got different ids")
        return Sums.merge(self, other)

    def compute(self, most: int) -> tuple[Tensor, Tensor]:
        """Return the `most` ids with the largest received weight, [heads, most], and their shares, descending."""
        shares = (self.received / self.rows.clamp_min(1.0)).cpu()
        values, places = shares[:, :-1].sort(dim=-1, descending=True, stable=True)
        return self.collector.tokens[places[:, :most]], values[:, :most]
