"""Request type of `ragged_attention`, as its backends take it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polyhead.ops.common.request import AttentionRequest
from polyhead.ops.selected_rows.rows import SelectedRows


@dataclass(frozen=True, slots=True, eq=False)
class RaggedRequest:
    """One validated call of `ragged_attention`."""

    query: Tensor  # [total, head_dim]
    rows: SelectedRows
    # The attention of all rows: keys, values, mask and options; its query has the right shape but no content.
    full_request: AttentionRequest

    @property
    def needs_grad(self) -> bool:
        return self.full_request.needs_grad or (torch.is_grad_enabled() and self.query.requires_grad)

    def pair(self, index: int) -> tuple[int, int]:
        """Return the batch index and the head of a pair."""
        batch, heads, *_ = self.full_request.sizes
        return (index % batch, index // batch) if self.rows.by_head else (index // heads, index % heads)
