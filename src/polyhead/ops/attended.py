"""`Attended`: inputs and outputs of one attention call, from which its weights can be recomputed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from polyhead.masks import Mask
from polyhead.ops.common.request import AttentionOutput
from polyhead.ops.profile.api import profile
from polyhead.ops.profile.request import AttentionProfile


@dataclass(frozen=True, slots=True, eq=False)
class Attended:
    """Inputs and outputs of one `attention` call, from which every weight can be recomputed.

    `result.logsumexp` is set.
    """

    query: Tensor  # [batch, heads, queries, head_dim]
    key: Tensor  # [batch, kv_heads, keys, head_dim]
    value: Tensor  # [batch, kv_heads, keys, value_dim]
    result: AttentionOutput  # of the heads: output is [batch, heads, queries, value_dim]
    mask: Mask | None = None
    scale: float | Tensor | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    def profile(self, **requested: Any) -> AttentionProfile:
        """Return `polyhead.profile` of this attention, with the requested results."""
        assert self.result.logsumexp is not None
        return profile(
            self.query.detach(),
            self.key.detach(),
            self.result.logsumexp.detach(),
            mask=self.mask,
            scale=self.scale,
            softcap=self.softcap,
            **requested,
        )
