"""`Contributions`: collect second moments of a layer's head outputs, from which head similarities are derived."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from polyhead.observation.accumulators import with_prefix
from polyhead.observation.collectors import BatchMetadata, counted_rows, exclude_padding
from polyhead.observation.head_moments import HeadMoments
from polyhead.observation.statistics import AttentionSite
from polyhead.ops.attended import Attended


@dataclass(frozen=True, slots=True)
class Contributions:
    """Collector of `HeadMoments` of the head outputs before the output projection, over non-padding tokens.

    With `session.metadata.documents`, the moments of two halves of the documents are kept apart, so that what is fitted
    on one half can be evaluated on the other.
    """

    name: ClassVar[str] = "contributions"

    def empty(self, site: AttentionSite, device: torch.device) -> SiteContributions:
        """Return an empty state for a site.

        Args:
            site: the attention site.
            device: device of the state.
        """
        return SiteContributions()


@dataclass(frozen=True, slots=True, eq=False)
class SiteContributions:
    """State of `Contributions` at one site; a half without tokens, whose width is not known yet, is None."""

    halves: tuple[HeadMoments | None, HeadMoments | None] = (None, None)

    @property
    def moments(self) -> HeadMoments | None:
        """Moments over all tokens; None without any."""
        return _merged(*self.halves)

    def update(self, attended: Attended, non_padding: Tensor | None, metadata: BatchMetadata) -> Self:
        output = attended.result.output.detach()
        batch, heads, queries, dim = output.shape
        if not dim:
            return self  # only the weights are available
        counted = counted_rows(exclude_padding(attended, non_padding)).expand(batch, -1)  # others have no output
        documents = metadata.documents
        if documents is None or documents.shape != (batch,):
            documents = torch.zeros(batch, dtype=torch.int64)
        half_of = documents.remainder(2).tolist()
        halves = []
        for number, moments in enumerate(self.halves):
            texts = [text for text, half in enumerate(half_of) if half == number]
            if len(texts):
                samples = output[texts].transpose(1, 2).reshape(len(texts) * queries, heads, dim)
                moments = HeadMoments.empty(heads, dim, output.device) if moments is None else moments
                moments = moments.update(samples, counted[texts].reshape(-1))
            halves.append(moments)
        return type(self)((halves[0], halves[1]))

    def merge(self, other: Self) -> Self:
        return type(self)((_merged(self.halves[0], other.halves[0]), _merged(self.halves[1], other.halves[1])))

    def state(self) -> dict[str, Tensor]:
        states = zip(_PREFIXES, self.halves, strict=True)
        return {f"{prefix}{name}": x for prefix, half in states if half is not None for name, x in half.state().items()}

    def with_state(self, state: Mapping[str, Tensor]) -> Self:
        first = {name: x for name, x in state.items() if "." not in name}
        second = with_prefix(state, _PREFIXES[1])
        return type(self)((HeadMoments(**first) if first else None, HeadMoments(**second) if second else None))


_PREFIXES = ("", "held_out.")  # earlier versions saved one set of moments, which is read as the first half


def _merged(one: HeadMoments | None, other: HeadMoments | None) -> HeadMoments | None:
    return (one or other) if one is None or other is None else one.merge(other)
