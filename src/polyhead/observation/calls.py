"""One observed attention call of a session, and the plan that all calls of a site share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polyhead.masks import Mask
from polyhead.observation.compiled import GradientHook
from polyhead.observation.forward_statistics import ForwardRecorder
from polyhead.observation.recomputation import hidden_operators
from polyhead.observation.rows import Tokens, corrected, hidden_by_bias, non_padding_rows
from polyhead.observation.statistics import AttentionSite
from polyhead.ops.attended import Attended
from polyhead.ops.attention import AttentionOutput, Statistics, attention

if TYPE_CHECKING:
    from polyhead.observation.session import Session


@dataclass(slots=True, eq=False)
class Call:
    """One observed attention call."""

    session: Session
    site: AttentionSite
    columns: tuple[str, ...]
    requested: Statistics | None
    tokens: Tokens | Tensor | None  # source of the padding mask, or the mask itself
    counts: bool = True  # False in recomputations, if `every` or `only_training` skips it, and for a gate alone
    has_collectors: bool = False  # whether collectors receive the full values and the log-sum-exp
    gate: Tensor | None = None  # [heads], [batch, heads] or [batch, heads, queries]
    learned_sinks: bool = False
    mask: Mask | None = None
    statistics_mask: Mask | None = None  # that of the statistics, where it differs from `mask` (`with_documents`)
    sinks_in_view: Tensor | None = None  # [batch]; False where the cache has dropped the first keys of the sequence
    differentiable: bool = False  # whether statistics are computed with gradients, also in a recomputation
    recorder: ForwardRecorder | None = None  # of `session.statistics`
    is_compiled: bool = False  # then the listener sets `gradient_hook` instead of registering it with the output
    half_autocast: bool = False  # whether compiled code is in float16 autocast, which is off where its call is recorded
    gradient_hook: GradientHook | None = None

    @property
    def has_listener(self) -> bool:
        """Whether a listener of the session reads the outputs of heads, also in a recomputation."""
        session = self.session
        return session.listener is not None and (session.model.training or not session.only_training)

    def notify(self, attended: Attended) -> None:
        if self.mask is None:
            self.mask = attended.mask
        with hidden_operators(gradients=self.differentiable):
            self._notify(attended)

    def _notify(self, attended: Attended) -> None:
        if self.statistics_mask is not None and (self.counts or self.has_listener or self.differentiable):
            attended = self._with_own_statistics(attended, self.statistics_mask)
            self.mask = self.statistics_mask
        if self.recorder is not None and attended.result.statistics is not None and len(self.columns):
            heads = self.session.heads_of(self.site)
            self.recorder.add(self, heads, self.columns, attended)
        if self.counts or self.has_listener:
            with torch.no_grad():
                non_padding, rows = non_padding_rows(self.tokens), attended.result.statistics
                if rows is not None and len(self.columns):
                    hidden = hidden_by_bias(self.mask, attended.result.output.shape[:3])
                    rows = corrected(rows, hidden, self.sinks_in_view)
                    attended = replace(attended, result=replace(attended.result, statistics=rows))
                    self.record(attended.result, non_padding)
                if self.counts and self.has_collectors:
                    self.session.collect(self.site, attended, non_padding)

    def _with_own_statistics(self, attended: Attended, mask: Mask) -> Attended:
        """Return the call with statistics computed under another mask; head outputs and weights stay its own."""
        result = attention(
            attended.query,
            attended.key,
            attended.value[..., :1],  # the statistics need no values
            mask=mask,
            scale=attended.scale,
            softcap=attended.softcap,
            sinks=attended.sinks,
            statistics=self.requested,
            logsumexp=self.has_collectors,
            finite=True,
        )
        result = replace(result, output=attended.result.output, weights=attended.result.weights)
        return replace(attended, result=result, mask=mask)

    def record(self, result: AttentionOutput, non_padding: Tensor | None) -> None:
        """Add the corrected row statistics of a result, and pass it to the listener."""
        assert result.statistics is not None
        if self.counts:
            self.session.add(self, result.statistics, non_padding)
        if self.session.listener is not None and self.has_listener:
            self.session.listener(self, result, non_padding)


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Call-independent data of a module: its site and the statistics to compute there."""

    site: AttentionSite
    root: str  # path of the layer stack, whose self-attention and cross-attention share their queries
    columns: tuple[str, ...]
    requested: Statistics | None
    chosen: bool  # whether `layers` and `heads` of the session select the site
