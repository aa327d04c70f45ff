"""Values of a plan over several ranks: what a rank stores and needs, and what it sends."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from polyhead.costs.memory import MemoryEstimate
from polyhead.costs.options import Dimension, Phase, Ranks
from polyhead.costs.phases import Verdict
from polyhead.errors import OptionError


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective of one phase: how often it is called in all layers, and the bytes that a rank sends in all calls.

    `seconds` are the bytes over the bandwidth of the link, None if that was not named.
    """

    name: str
    operation: str
    dimension: Dimension
    is_backward: bool
    calls: int
    bytes: int
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class RankPhase:
    """One phase over ranks, as the rank with most heads sees it.

    `memory` is that of the attention layers, `gathered` the weights, gradients, keys and values of other ranks that are
    stored at the peak. `other_weights` and `optimizer_state` are those of `PhasePlan`, divided evenly by the ranks of
    tensor parallel and FSDP2. `verdict` compares `needed` with the memory of the plan's machine, if it has one.
    """

    phase: Phase
    collectives: tuple[Collective, ...]
    memory: MemoryEstimate
    gathered: int
    other_weights: int
    optimizer_state: int
    verdict: Verdict | None

    @property
    def needed(self) -> int:
        """Peak memory of a rank."""
        return self.memory.total + self.gathered + self.other_weights + self.optimizer_state

    @property
    def sent(self) -> int:
        """Bytes that a rank sends in all collectives."""
        return sum(collective.bytes for collective in self.collectives)


@dataclass(frozen=True, slots=True)
class HeadShare:
    """Heads of one kind of layer on the rank with most of them; `padding` counts the zero heads of all ranks."""

    layers: int
    heads: int
    kv_heads: int | None  # that the rank computes and caches; None for latents
    padding: int


@dataclass(frozen=True, slots=True)
class RanksPlan:
    """Attention layers over ranks: heads, parameters and cache of a rank, and the collectives of each phase."""

    ranks: Ranks
    heads: tuple[HeadShare, ...]
    parameters: int
    cache_bytes_per_token: int
    phases: tuple[RankPhase, ...]
    notes: tuple[str, ...]

    def __getitem__(self, phase: str) -> RankPhase:
        for planned in self.phases:
            if planned.phase == phase:
                return planned
        known = ", ".join(planned.phase for planned in self.phases)
        raise OptionError(f"phase must be one of those that are planned over ranks, {known or 'none'}; got {phase!r}")

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON-serialisable values, including totals."""
        totals = [{"needed": x.needed, "sent": x.sent, "memory": x.memory.to_dict()} for x in self.phases]
        content = dataclasses.asdict(self)
        content["phases"] = [{**x, **more} for x, more in zip(content["phases"], totals, strict=True)]
        return content
