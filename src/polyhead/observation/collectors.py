"""What a session gathers beside the statistics of rows: whatever a second look at each attention can tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from polyhead.observation.statistics import AttentionSite
from polyhead.ops.attended import Attended


@dataclass(frozen=True, slots=True, eq=False)
class BatchMetadata:
    """What is known of a batch beside what the model is told; `session.metadata` holds those of the calls to come."""

    documents: Tensor | None = None  # [batch]: the number of the document that each row is from
    pieces: Tensor | None = None  # [batch]: which piece of its document each row is, where documents were cut
    tokens: Tensor | None = None  # [batch, tokens]: their ids
    classes: Tensor | None = None  # [batch, tokens]: what each token is (a word, punctuation, ...), as small integers


class CollectorState(Protocol):
    """What was gathered at one site: a mergeable value, like those of `accumulators`."""

    def update(self, attended: Attended, real: Tensor | None, metadata: BatchMetadata) -> Self:
        """With one attention; `real` [batch or 1, queries] is False for padding, None where there is none.

        Waits for no device.
        """

    def merge(self, other: Self) -> Self: ...

    def state(self) -> dict[str, Tensor]: ...

    def with_state(self, state: Mapping[str, Tensor]) -> Self:
        """The same value with what was saved of it, on the device on which that lies."""


class Collector(Protocol):
    """What to gather: handed to `observe(collect=...)`, and asked once for every site."""

    @property
    def name(self) -> str: ...

    def empty(self, site: AttentionSite, device: torch.device) -> CollectorState | None:
        """A value that has seen nothing; None where there is nothing to gather at this site."""
