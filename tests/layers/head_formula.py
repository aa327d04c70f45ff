"""The heads of multi-head attention as the formula has them, for tests of what is made of them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from polyhead import Mask, MultiHeadAttention
from tests.error_budget import token_orders


def project(layer: MultiHeadAttention, name: str, x: Tensor) -> Tensor:
    """x W + b of one of the layer's projections."""
    parameters = dict(layer.named_parameters())
    return x @ parameters[f"{name}.weight"].T + parameters.get(f"{name}.bias", 0.0)


def heads_of(
    layer: MultiHeadAttention, query: Tensor, key: Tensor | None = None, *, visible: Tensor | None = None
) -> list[Tensor]:
    """head_i = softmax((X Wq_i)(X Wk_i)^T / sqrt(d)) X Wv_i for every i, each [batch, queries, value_dim].

    `visible` is [queries, keys] or [batch, queries, keys], True where a query may attend; a row without any is zero.
    """
    layout = layer.layout
    key = query if key is None else key
    queries = project(layer, "q_proj", query)
    keys, values = project(layer, "k_proj", key), project(layer, "v_proj", key)
    heads = []
    for h in range(layout.num_heads):
        shared = h * layout.num_kv_heads // layout.num_heads
        q = queries[..., h * layout.head_dim : (h + 1) * layout.head_dim]
        k = keys[..., shared * layout.head_dim : (shared + 1) * layout.head_dim]
        v = values[..., shared * layout.value_dim : (shared + 1) * layout.value_dim]
        logits = q @ k.mT / math.sqrt(layout.head_dim)
        if visible is not None:
            logits = logits.masked_fill(~visible, -torch.inf)
        weights = torch.softmax(logits, -1)
        heads.append(torch.where(weights.isnan(), 0.0, weights) @ v)
    return heads


def causal_orders(x: Tensor) -> list[tuple[Tensor, Tensor, Mask]]:
    """Tokens, who sees whom and the mask that says so: in the order of the tokens, and in several others at once."""
    others, visible = token_orders(x, earlier(x.shape[1]))
    return [(x, earlier(x.shape[1]), Mask.causal()), (others, visible, Mask.dense(visible[:, None]))]


def earlier(length: int) -> Tensor:
    """Which keys a causal query may see, [length, length]."""
    return torch.arange(length)[:, None] >= torch.arange(length)
