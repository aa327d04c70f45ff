"""What is asked of the backends of `ragged_attention`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polyhead.ops.common.request import AttentionRequest


@dataclass(frozen=True, slots=True, eq=False)
class RaggedRequest:
    """One validated call of `ragged_attention`."""

    query: Tensor  # [total, head_dim]
    positions: Tensor  # int32 [total]
    offsets: Tensor  # int32 [pairs + 1]
    by_head: bool  # pair i is head * batch + batch index, and not batch index * heads + head
    # The attention of all rows, whose query has the right shape and no content: keys, values, mask and options.
    whole: AttentionRequest

    @property
    def needs_grad(self) -> bool:
        return self.whole.needs_grad or (torch.is_grad_enabled() and self.query.requires_grad)

    def pair(self, index: int) -> tuple[int, int]:
        """Which sequence and which head a pair is."""
        batch, heads, *_ = self.whole.sizes
        return (index % batch, index // batch) if self.by_head else (index // heads, index % heads)
