"""Interfaces between a session and the hooks that report attention calls to it."""

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
class OutputSite:
    """Name of attention weights in a model output, e.g. `attentions.3` for layer 3; replaces the module."""

    name: str


def is_recomputed() -> bool:
    """Return whether a backward is running, i.e. a checkpointed layer is being recomputed."""
    return torch._C._current_graph_task_id() != -1


class WatchedCall(Protocol):
    """One observed call: the requested statistics, the gates of its heads, and a callback for the result."""

    site: AttentionSite
    requested: Statistics | None
    counts: bool
    has_collectors: bool  # whether collectors receive the full values and the log-sum-exp
    gate: Tensor | None  # [heads], [batch, heads] or [batch, heads, queries]
    learned_sinks: bool
    mask: Mask | None
    tokens: Tokens | Tensor | None
    sinks_in_view: Tensor | None
    differentiable: bool  # whether statistics are computed with gradients, also in a recomputation

    def notify(self, attended: Attended) -> None: ...


class Watcher(Protocol):
    """Observer that is queried before every attention call; None if the call is not observed."""

    def call(
        self,
        module: nn.Module | OutputSite,
        num_heads: int,
        tokens: Tokens | Tensor | None,
        *,
        cross: bool,
        learned_sinks: bool = False,
    ) -> WatchedCall | None: ...
