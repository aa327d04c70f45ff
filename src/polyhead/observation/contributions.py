"""`Contributions`: collect second moments of a layer's head outputs, from which head similarities are derived."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from polyhead.observation.collectors import BatchMetadata, counted_rows, exclude_padding
from polyhead.observation.head_moments import HeadMoments
from polyhead.observation.statistics import AttentionSite
from polyhead.ops.attended import Attended


@dataclass(frozen=True, slots=True)
class Contributions:
    """Collector of `HeadMoments` of the head outputs before the output projection, over non-padding tokens."""

    @property
    def name(self) -> str:
        return "contributions"

    def empty(self, site: AttentionSite, device: torch.device) -> SiteContributions:
        """Return an empty state for a site.

        Args:
            site: the attention site.
            device: device of the state.
        """
        return SiteContributions(None)


@dataclass(frozen=True, slots=True, eq=False)
class SiteContributions:
    """State of `Contributions` at one site; None until the first update, which determines the width."""

    moments: HeadMoments | None

    def update(self, attended: Attended, non_padding: Tensor | None, metadata: BatchMetadata) -> Self:
        output = attended.result.output.detach()
        batch, heads, queries, dim = output.shape
        if not dim:
            return self  # only the weights are available (via_weights)
        counted = counted_rows(exclude_padding(attended, non_padding))  # rows without visible keys have no output
        moments = HeadMoments.empty(heads, dim, output.device) if self.moments is None else self.moments
        samples = output.transpose(1, 2).reshape(batch * queries, heads, dim)
        return type(self)(moments.update(samples, counted.expand(batch, -1).reshape(-1)))

    def merge(self, other: Self) -> Self:
        if self.moments is None or other.moments is None:
            return other if self.moments is None else self
        return type(self)(self.moments.merge(other.moments))

    def state(self) -> dict[str, Tensor]:
        return {} if self.moments is None else self.moments.state()

    def with_state(self, state: Mapping[str, Tensor]) -> Self:
        return type(self)(HeadMoments(**state) if len(state) else None)
