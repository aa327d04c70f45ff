"""Routed heads as the formula has them, one head of one sequence at a time, for tests of the layer."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from polyhead.layers.variants.routed.layer import RoutedHeads
from polyhead.layers.variants.routed.router import Routing


def routed_formula(
    layer: RoutedHeads,
    x: Tensor,
    routing: Routing,
    *,
    visible: Tensor | None = None,
    source: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """output = sum of w_i head_i Wo_i over the chosen heads, and the weights of every row [batch, rows, queries, keys].

    `visible` is [queries, keys] or [batch, queries, keys]. Rows that nobody chose have weights of zero.
    """
    source = x if source is None else source
    layout = layer.layout
    kv_heads, per_head = layout.num_kv_heads, layer.rows_per_head
    keys = (layer.k_proj(source)).unflatten(-1, (kv_heads, layout.head_dim))
    values = (layer.v_proj(source)).unflatten(-1, (kv_heads, layout.value_dim))
    gate = x.new_zeros(*x.shape[:2], layer.num_heads)
    gate = gate.scatter_add(2, routing.heads, routing.weights)  # [batch, queries, heads]
    output = torch.zeros_like(x)
    maps = {}
    for head in range(layer.num_heads):
        query = x @ layer.query_weight[head] + (0.0 if layer.query_bias is None else layer.query_bias[head])
        outcome = []
        for row in range(per_head):
            shared = row if layer.shape == "shared" else head // layout.group_size
            q = query.unflatten(-1, (per_head, layout.head_dim))[:, :, row]
            logits = q @ keys[:, :, shared].mT / math.sqrt(layout.head_dim)
            if visible is not None:
                logits = logits.masked_fill(~visible, -torch.inf)
            weights = torch.softmax(logits, -1).nan_to_num(0.0)
            maps[row * layer.num_heads + head] = weights * routing.is_chosen[:, :, head, None]
            outcome.append(weights @ values[:, :, shared])
        output = output + gate[:, :, head, None] * (torch.cat(outcome, -1) @ layer.output_weight[head])
    output = output if layer.output_bias is None else output + layer.output_bias
    return output, torch.stack([maps[i] for i in range(len(maps))], 1)


def scramble(layer: RoutedHeads) -> RoutedHeads:
    """Biases and all, so that nothing is zero by accident."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4)
    return layer
