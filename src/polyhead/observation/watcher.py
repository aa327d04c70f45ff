"""What a session and those who tell it of attention know of each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from polyhead.masks import Mask
from polyhead.observation.rows import Tokens
from polyhead.observation.statistics import AttentionSite
from polyhead.ops.attended import Attended
from polyhead.ops.attention import Statistics


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where weights are listed in an output: `attentions.3` is that of the fourth layer. No module stands for it."""

    name: str


def is_recomputed() -> bool:
    """Whether a backward is running, in which a checkpointed layer is computed again."""
    return torch._C._current_graph_task_id() != -1


class WatchedCall(Protocol):
    """One call that is watched: what is to be told of it, whom to tell, and a factor for each head."""

    site: AttentionSite
    requested: Statistics | None
    counts: bool
    whole: bool  # whether somebody takes a second look
    gate: Tensor | None  # [heads], [batch, heads] or [batch, heads, queries]
    learned_sinks: bool
    mask: Mask | None
    tokens: Tokens | Tensor | None
    sinks_in_view: Tensor | None
    differentiable: bool  # whether its statistics are computed with gradients, in a recomputation as well

    def notify(self, attended: Attended) -> None: ...


class Watcher(Protocol):
    """Who watches: asked before every call, None where this one is left alone."""

    def call(
        self,
        module: nn.Module | Place,
        num_heads: int,
        tokens: Tokens | Tensor | None,
        *,
        cross: bool,
        learned_sinks: bool = False,
    ) -> WatchedCall | None: ...
