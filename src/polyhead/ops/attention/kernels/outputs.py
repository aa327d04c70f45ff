"""Allocation of attention outputs. Importing this module does not import Triton."""

from __future__ import annotations

import torch
from torch import Tensor


def output_like(query: Tensor, value_dim: int) -> Tensor:
    """Allocate an output [batch, heads, queries, value_dim].

    The axes have the memory order of the query's, as in PyTorch's kernels; if value_dim differs from head_dim, tokens
    come before heads, so that a layer flattens the heads without a copy.
    """
    batch, heads, queries, head_dim = query.shape
    if value_dim == head_dim:
        output = torch.empty_like(query)
        if output.stride(-1) == 1:
            return output
    return query.new_empty(batch, queries, heads, value_dim).transpose(1, 2)
