"""Where a forward writes. Importing this imports no Triton."""

from __future__ import annotations

import torch
from torch import Tensor


def output_like(query: Tensor, value_dim: int) -> Tensor:
    """Fresh memory [batch, heads, queries, value_dim] with the axes in the order of the query's, as PyTorch's kernels
    have it; tokens before heads, as a layer flattens them without a copy, where values have a width of their own."""
    batch, heads, queries, head_dim = query.shape
    if value_dim == head_dim:
        output = torch.empty_like(query)
        if output.stride(-1) == 1:
            return output
    return query.new_empty(batch, queries, heads, value_dim).transpose(1, 2)
