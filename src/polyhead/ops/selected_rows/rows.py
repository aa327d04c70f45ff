"""Selected query rows as the kernels' host code takes them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class SelectedRows(NamedTuple):
    """Rows of all (batch, head) pairs, packed without gaps; see `RaggedRows`."""

    positions: Tensor  # int32 [total]
    offsets: Tensor  # int32 [pairs + 1]
    num_queries: int  # of the full attention
    by_head: bool  # pair i is head * batch + batch index instead of batch index * heads + head
