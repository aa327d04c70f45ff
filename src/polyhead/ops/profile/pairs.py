"""Weights of single (query, key) pairs, each from its own dot product.

Used by the evidence for induction and duplicate-token heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyhead.ops.common.visibility import Visibility
from polyhead.ops.profile.request import ProfileRequest

_PAIR_ELEMENTS = 1 << 22  # elements of the queries gathered for one chunk of pairs, over all heads


def pair_weights(request: ProfileRequest, pairs: Tensor) -> Tensor:
    """Return the weights of (query, key) pairs, [batch, heads, pairs], computed in chunks of pairs."""
    batch, heads, _, head_dim = request.query.shape
    step = max(1, _PAIR_ELEMENTS // max(batch * heads * head_dim, 1))
    chunks = [_pair_chunk(request, pairs[:, start : start + step]) for start in range(0, pairs.shape[1], step)]
    empty = request.query.new_zeros(batch, heads, 0, dtype=request.accumulation_dtype)
    return torch.cat([empty, *chunks], -1)


def _pair_chunk(request: ProfileRequest, pairs: Tensor) -> Tensor:
    query, key, dtype = request.query, request.key, request.accumulation_dtype
    heads, head_dim, kv_heads = query.shape[1], query.shape[3], key.shape[1]
    i, j = pairs.unbind(-1)  # [batch, pairs]
    (top, bottom), (left, right) = request.rows, request.columns
    inside = (i >= top) & (i < bottom) & (j >= left) & (j < right)
    # Indices on a GPU are not checked, to avoid a synchronisation. Those outside the window are replaced by its first
    # row and column, and their weight is 0.
    i, j = torch.where(inside, i, top), torch.where(inside, j, left)
    query_rows = query.gather(2, i[:, None, :, None].expand(-1, heads, -1, head_dim)).to(dtype)
    key_rows = key.gather(2, j[:, None, :, None].expand(-1, kv_heads, -1, head_dim)).to(dtype)
    query_rows = query_rows.unflatten(1, (kv_heads, heads // kv_heads))
    logits = (query_rows * key_rows[:, :, None]).sum(-1).flatten(1, 2)  # [batch, heads, pairs]
    scale = request.scale
    logits = logits * (scale.to(dtype)[:, None] if isinstance(scale, Tensor) else scale)
    if request.softcap is not None:
        logits = request.softcap * torch.tanh(logits / request.softcap)
    logsumexp = request.logsumexp.to(dtype).gather(2, i[:, None].expand(-1, heads, -1))
    allowed = (inside[:, None]) & (logsumexp != -torch.inf)
    if request.visibility is not None:
        allowed, logits = _pair_visibility(request.visibility, i, j, allowed, logits)
    return torch.where(allowed, torch.exp(logits - logsumexp), 0.0)


def _pair_visibility(
    visibility: Visibility, i: Tensor, j: Tensor, allowed: Tensor, logits: Tensor
) -> tuple[Tensor, Tensor]:
    """Restrict `allowed` to the visible pairs and add the biases to `logits`; return both, [batch, heads, pairs]."""
    batch, heads, _ = logits.shape

    def gather_rows(rows: Tensor, index: Tensor) -> Tensor:
        """Return the elements of [batch or 1, tokens] at `index` [batch, pairs]."""
        return rows.expand(batch, -1).gather(1, index)

    def gather_dense(tensor: Tensor) -> Tensor:
        """Return the elements of [batch or 1, heads or 1, queries or 1, keys] at the pairs."""
        tensor_batch, tensor_heads, tensor_queries, _ = tensor.shape
        b = torch.arange(batch, device=i.device)[:, None, None] if tensor_batch > 1 else 0
        h = torch.arange(heads, device=i.device)[:, None] if tensor_heads > 1 else 0
        return tensor[b, h, i[:, None] if tensor_queries > 1 else 0, j[:, None]].expand(batch, heads, -1)

    if visibility.query_positions is not None and visibility.key_positions is not None:
        distance = gather_rows(visibility.key_positions, j) - gather_rows(visibility.query_positions, i)
    else:
        distance = j - i - visibility.offset
    if visibility.left is not None:
        in_window = distance >= -visibility.left
        if visibility.sinks:
            ordinal = j if visibility.key_ordinals is None else gather_rows(visibility.key_ordinals, j)
            in_window = in_window | (ordinal < visibility.sinks)
        allowed = allowed & in_window[:, None]
    if visibility.right is not None:
        allowed = allowed & (distance <= visibility.right)[:, None]
    for real, index in ((visibility.query_real, i), (visibility.key_real, j)):
        if real is not None:
            allowed = allowed & gather_rows(real, index)[:, None]
    for query_ids, key_ids in visibility.documents:
        allowed = allowed & (gather_rows(query_ids, i) == gather_rows(key_ids, j))[:, None]
    if visibility.allowed is not None:
        allowed = allowed & gather_dense(visibility.allowed)
    for bias in visibility.biases:
        added = gather_dense(bias).to(logits.dtype)
        allowed, logits = allowed & (added != -torch.inf), logits + added
    for term in visibility.relative_biases:
        column = (distance + term.zero).clamp(0, term.table.shape[1] - 1)
        logits = logits + term.table.to(logits.dtype)[:, column].transpose(0, 1)
    return allowed, logits
