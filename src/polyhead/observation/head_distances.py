"""`AttentionDistances`: collect distances between the attention patterns of a layer's heads."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from polyhead.observation.accumulators import Sums
from polyhead.observation.collectors import BatchMetadata, counted_rows, exclude_padding
from polyhead.observation.statistics import AttentionSite
from polyhead.ops.attended import Attended


@dataclass(frozen=True, slots=True)
class AttentionDistances:
    """Collector of the Jensen-Shannon distance between each pair of heads of a layer, averaged over query rows.

    Each pair of heads costs a pass over all attention weights; use a sample of the text.
    """

    name: ClassVar[str] = "distances"

    def empty(self, site: AttentionSite, device: torch.device) -> SiteDistances | None:
        """Return an empty state for a site; None for a site with one head.

        Args:
            site: the attention site.
            device: device of the state.
        """
        if site.num_heads < 2:
            return None
        pairs = site.num_heads * (site.num_heads - 1) // 2
        zeros = torch.zeros(pairs, dtype=torch.float64, device=device)
        return SiteDistances(site.num_heads, zeros, torch.zeros((), dtype=torch.float64, device=device))


@dataclass(frozen=True, slots=True, eq=False)
class SiteDistances(Sums):
    """Sums over rows for the head pairs (0, 1), (0, 2), ... (1, 2), ..."""

    num_heads: int
    distances: Tensor  # [pairs]
    rows: Tensor

    def update(self, attended: Attended, non_padding: Tensor | None, metadata: BatchMetadata) -> Self:
        unpadded = exclude_padding(attended, non_padding)
        pairs = list(itertools.combinations(range(self.num_heads), 2))
        mean_distances = unpadded.profile(head_pairs=pairs).head_distance  # [batch, pairs], over rows with a key
        assert mean_distances is not None
        rows = counted_rows(unpadded).sum(-1, dtype=torch.float64)
        return type(self)(self.num_heads, self.distances + rows @ mean_distances.double(), self.rows + rows.sum())

    def compute(self) -> Tensor:
        """Return distances [heads, heads], from 0 (equal weights) to sqrt(log 2) = 0.83; NaN without data."""
        row, column = torch.triu_indices(self.num_heads, self.num_heads, 1)
        matrix = torch.zeros(self.num_heads, self.num_heads, dtype=torch.float64)
        matrix[row, column] = (self.distances / torch.where(self.rows > 0, self.rows, torch.nan)).cpu()
        return matrix + matrix.T
