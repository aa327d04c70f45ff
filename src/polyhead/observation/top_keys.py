"""`TopKeys`: which tokens a head looks at most, whatever looks at them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from polyhead.errors import OptionError, ShapeError
from polyhead.observation.collectors import BatchMetadata
from polyhead.observation.statistics import AttentionSite
from polyhead.ops.attended import Attended


@dataclass(frozen=True, slots=True, eq=False)
class TopKeys:
    """Gathers, for each head, the weight that every occurrence of a token receives, summed over a text.

    Args:
        tokens: the ids that are told apart, int64 [any] on the CPU, such as the most frequent ones of the text; all
            others together are one more. That bounds the memory: 8 bytes for each of them and each head.

    `session.metadata.tokens` must say what the tokens are. A cross-attention, whose keys are other tokens, has none.
    """

    tokens: Tensor

    def __post_init__(self) -> None:
        if self.tokens.ndim != 1 or self.tokens.is_floating_point() or self.tokens.device.type != "cpu":
            raise ShapeError(
                f"tokens must be ids, [any] integers on the CPU, got {self.tokens.dtype} of {list(self.tokens.shape)}"
            )
        if len(self.tokens.unique()) != len(self.tokens):
            raise OptionError("tokens must be different ids, got some twice")

    @property
    def name(self) -> str:
        return "top_keys"

    def empty(self, site: AttentionSite, device: torch.device) -> SiteTopKeys | None:
        if site.kind != "self":
            return None
        zeros = torch.zeros(site.num_heads, len(self.tokens) + 1, dtype=torch.float64, device=device)
        return SiteTopKeys(self, zeros, torch.zeros((), dtype=torch.float64, device=device))

    def places(self, tokens: Tensor) -> Tensor:
        """Where each token of [batch, tokens] stands among `self.tokens`; one past the last for all others."""
        ordered, order = self.tokens.sort()
        if not len(ordered):
            return torch.zeros_like(tokens)
        found = torch.searchsorted(ordered, tokens).clamp_max(len(ordered) - 1)
        return torch.where(ordered[found] == tokens, order[found], len(ordered))


@dataclass(frozen=True, slots=True, eq=False)
class SiteTopKeys:
    """Sums of one site, which can be added."""

    collector: TopKeys
    received: Tensor  # [heads, tokens + 1]; the last is all others
    rows: Tensor

    def update(self, attended: Attended, real: Tensor | None, metadata: BatchMetadata) -> Self:
        logsumexp, keys = attended.result.logsumexp, attended.key.shape[2]
        assert logsumexp is not None
        if metadata.tokens is None or metadata.tokens.shape != (attended.query.shape[0], keys):
            got = None if metadata.tokens is None else list(metadata.tokens.shape)
            raise OptionError(
                f"top keys are told what the {keys} tokens of each text are; before each call of the model set "
                f"session.notes = Notes(tokens=...), [batch, tokens] on the CPU, got {got}"
            )
        if real is not None:  # a row whose log-sum-exp is -inf sees nothing, and so is in no sum
            logsumexp = torch.where(real[:, None], logsumexp, -torch.inf)
        seen = replace(attended, result=replace(attended.result, logsumexp=logsumexp)).profile(received=True).received
        assert seen is not None
        places = self.collector.places(metadata.tokens).to(seen.device, non_blocking=True)
        heads = seen.shape[1]
        by_token = seen.double().transpose(0, 1).reshape(heads, -1)  # [heads, batch * keys]
        received = self.received.index_add(1, places.flatten(), by_token)
        rows = torch.isfinite(logsumexp).any(1).sum(dtype=torch.float64)
        return replace(self, received=received, rows=self.rows + rows)

    def merge(self, other: Self) -> Self:
        if not torch.equal(self.collector.tokens, other.collector.tokens):
            raise OptionError("top keys of the same tokens can be merged, got others")
        device = self.received.device
        return replace(self, received=self.received + other.received.to(device), rows=self.rows + other.rows.to(device))

    def compute(self, most: int) -> tuple[Tensor, Tensor]:
        """The ids that each head looks at most, [heads, most], and their shares of its attention, in order."""
        shares = (self.received / self.rows.clamp_min(1.0)).cpu()
        values, places = shares[:, :-1].sort(dim=-1, descending=True, stable=True)
        return self.collector.tokens[places[:, :most]], values[:, :most]

    def state(self) -> dict[str, Tensor]:
        return {"received": self.received, "rows": self.rows}

    def with_state(self, state: Mapping[str, Tensor]) -> Self:
        return replace(self, received=state["received"], rows=state["rows"])
