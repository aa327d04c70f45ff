"""Interfaces between a session and the hooks that report attention calls to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from polyhead.integrations.huggingface.attention import WatchedCall
from polyhead.masks import Mask
from polyhead.observation.rows import Tokens
from polyhead.observation.statistics import AttentionSite


@dataclass(frozen=True, slots=True)
class OutputSite:
    """Name of a site that is not a module; replaces the module.

    That is a further attention call of a module, e.g. `blocks.3.attn#2`.
    """

    name: str


class ObservedCall(WatchedCall, Protocol):
    """One observed call, with the state that the hooks of a session read and set."""

    site: AttentionSite
    counts: bool
    learned_sinks: bool
    mask: Mask | None
    statistics_mask: Mask | None  # that of the statistics, where it differs from `mask`
    tokens: Tokens | Tensor | None
    sinks_in_view: Tensor | None
    differentiable: bool  # whether statistics are computed with gradients, also in a recomputation

    @property
    def has_listener(self) -> bool: ...


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
    ) -> ObservedCall | None: ...

    def heads_at(self, name: str, *, cross: bool) -> int | None:
        """Return the number of heads of a site; None before its first call."""

    def begin(
        self, module: nn.Module, query: Tensor, key: Tensor, mask: Mask | None, *, learned_sinks: bool
    ) -> WatchedCall | None:
        """Prepare a call of the attention interface of transformers, of which only the tensors are known."""

    def withdraw(self, call: ObservedCall) -> None:
        """Undo `call` for a call that turns out not to be observed."""
