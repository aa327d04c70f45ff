"""`RoutingLoad`: collect the load of routed heads, their mean gate weights and their co-selection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from polyhead.errors import ShapeError
from polyhead.layers.variants.routed.layer import RoutedAttended
from polyhead.layers.variants.routed.router import Routing
from polyhead.observation.accumulators import MeanAndStd, Moments, Sums
from polyhead.observation.collectors import BatchMetadata
from polyhead.observation.statistics import AttentionSite
from polyhead.ops.attended import Attended


@dataclass(frozen=True, slots=True)
class RoutingLoad:
    """Collector of routing statistics where heads are routed: `observe(model, collect=[RoutingLoad()])`."""

    name: ClassVar[str] = "routing"

    def empty(self, site: AttentionSite, device: torch.device) -> SiteRouting:
        """Return an empty state for a site.

        Args:
            site: the attention site.
            device: device of the state.
        """
        return SiteRouting(None)


@dataclass(frozen=True, slots=True, eq=False)
class SiteRouting:
    """State of `RoutingLoad` at one site; None without routed heads or before the first update."""

    counts: RoutingCounts | None

    def update(self, attended: Attended, non_padding: Tensor | None, metadata: BatchMetadata) -> Self:
        routing = attended.routing if isinstance(attended, RoutedAttended) else None
        if routing is None:
            return self
        counts = self.counts or RoutingCounts.empty(routing.num_heads, routing.heads.device)
        return type(self)(counts.update(routing, non_padding))

    def merge(self, other: Self) -> Self:
        if self.counts is None or other.counts is None:
            return other if self.counts is None else self
        return type(self)(self.counts.merge(other.counts))

    def state(self) -> dict[str, Tensor]:
        return {} if self.counts is None else self.counts.state()

    def with_state(self, state: Mapping[str, Tensor]) -> Self:
        return type(self)(RoutingCounts.empty(len(state["weight"])).with_state(state) if len(state) else None)


@dataclass(frozen=True, slots=True, eq=False)
class RoutingCounts(Sums):
    """Sums over non-padding tokens, in float64; any split of the data, merged in any order, equals one pass.

    >>> import torch
    >>> routing = Routing(torch.tensor([[[0, 2], [2, 1]]]), torch.ones(1, 2, 2), num_heads=3)
    >>> counts = RoutingCounts.empty(3).update(routing)
    >>> counts.load.tolist(), counts.co_selection[2].tolist()
    ([0.25, 0.25, 0.5], [0.5, 0.5, 1.0])
    """

    tokens: Tensor  # []
    together: Tensor  # [heads, heads]: tokens routed to both heads; the diagonal counts those of one head
    weight: Tensor  # [heads]: sum of the gate weights of the tokens routed to a head
    taken: MeanAndStd  # heads per token, []
    entropy: MeanAndStd  # of the gate's probabilities, [], in nats; empty without gate logits

    @classmethod
    def empty(cls, num_heads: int, device: torch.device | str | None = None) -> Self:
        """Return counts of no tokens.

        Args:
            num_heads: heads of the layer.
            device: device of the counts.
        """
        moments = MeanAndStd.empty((), device)
        zeros = torch.zeros(num_heads, num_heads, dtype=moments.count.dtype, device=device)
        return cls(zeros.new_zeros(()), zeros, zeros.new_zeros(num_heads), moments, moments)

    def update(self, routing: Routing, non_padding: Tensor | None = None) -> Self:
        """Add one routing; `non_padding` is [batch or 1, tokens]. Does not synchronise with the device.

        Args:
            routing: routing of one call.
            non_padding: tokens to count; all by default.

        Returns:
            The new counts.
        """
        if routing.num_heads != self.weight.shape[0]:
            raise ShapeError(f"the routing must have {self.weight.shape[0]} heads, got {routing.num_heads}")
        sum_dtype, shape = self.together.dtype, routing.heads.shape
        counted = torch.ones(shape[:2], dtype=torch.bool, device=routing.heads.device)
        for token_mask in (non_padding, routing.real):
            counted = counted if token_mask is None else counted & token_mask
        counted = counted.flatten()
        chosen = (routing.is_chosen.flatten(0, 1) & counted[:, None]).to(sum_dtype)  # [tokens, heads]
        by_head = torch.zeros(*shape[:2], routing.num_heads, dtype=sum_dtype, device=chosen.device)
        by_head = by_head.scatter_add(2, routing.heads, routing.weights.detach().to(sum_dtype)).flatten(0, 1)
        entropy = self.entropy
        if routing.logits is not None:
            entropy = entropy.update(routing.entropy.detach().flatten(), counted)
        added = type(self)(
            counted.sum(dtype=sum_dtype),
            chosen.mT @ chosen,
            torch.where(counted[:, None], by_head, 0.0).sum(0),
            MeanAndStd.empty((), chosen.device).update(chosen.sum(-1), counted),
            MeanAndStd.empty((), chosen.device),
        )
        return type(self)(self.tokens, self.together, self.weight, self.taken, entropy).merge(added)

    def merge(self, other: Self) -> Self:
        """Return the counts of both.

        Args:
            other: counts of the same layer.
        """
        if self.weight.shape != other.weight.shape:
            raise ShapeError(
                "only counts with the same number of heads can be merged, "
                f"got {self.weight.shape[0]} and {other.weight.shape[0]}"
            )
        return Sums.merge(self, other)

    @property
    def load(self) -> Tensor:
        """Each head's share of all selections, [heads]; 1 / heads if balanced, NaN without data."""
        return self.together.diagonal() / self.together.diagonal().sum()

    @property
    def mean_weight(self) -> Tensor:
        """Mean gate weight over the tokens routed to a head, [heads]; NaN for a head without tokens."""
        return self.weight / self.together.diagonal()

    @property
    def co_selection(self) -> Tensor:
        """[i, j]: fraction of the tokens routed to head i that are also routed to head j; NaN without tokens."""
        return self.together / self.together.diagonal()[:, None]

    @property
    def gate_entropy(self) -> Moments:
        """Mean and standard deviation of the entropy of the gate's probabilities, in nats."""
        return self.entropy.compute()

    @property
    def heads_per_token(self) -> Moments:
        return self.taken.compute()
