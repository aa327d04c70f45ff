"""Latent attention as its paper writes it, head by head, in the dtype of what it is given."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from polyhead.layers.latent.layer import LatentAttention
from polyhead.layers.positions import Rotary
from tests.error_budget import product

EMBED, HEADS, RANK, QUERY_RANK, NOPE, ROPE, VALUE = 23, 5, 11, 7, 13, 6, 9
SIZES = {"kv_lora_rank": RANK, "qk_nope_head_dim": NOPE, "value_head_dim": VALUE}
DOUBLE = torch.float64


def make(**options: Any) -> LatentAttention:
    """A layer of awkward sizes in which no parameter, bias or norm has its neutral value."""
    defaults: dict[str, Any] = {"dtype": DOUBLE, **SIZES, "positions": Rotary(ROPE, interleaved=True)}
    layer = LatentAttention(EMBED, HEADS, **{**defaults, **options})
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return layer


def rotated(x: Tensor, positions: Tensor, *, base: float = 10000.0) -> Tensor:
    """Channels (2 i, 2 i + 1) of x [batch, sequence, channels] rotated by position * base ** (-2 i / channels)."""
    even, odd = x[..., 0::2], x[..., 1::2]
    pairs = torch.arange(even.shape[-1], dtype=DOUBLE)
    angle = positions.to(DOUBLE)[..., None] * base ** (-pairs / even.shape[-1])
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)


def formula(
    layer: LatentAttention,
    x: Tensor,
    source: Tensor | None = None,
    *,
    visible: Tensor | None = None,  # [batch or 1, queries, keys], True = may attend
    positions: Tensor | None = None,  # [sequence] or [batch, sequence]
    gate: Tensor | None = None,  # [heads]
    softcap: float | None = None,
    scale: float | None = None,
    absorbed: bool = False,  # the same numbers, rounded where the absorbed form rounds
) -> tuple[Tensor, Tensor]:
    """The output [batch, queries, embed_dim] and the weights [batch, heads, queries, keys], every step rounded."""
    held = dict(layer.named_parameters())
    layout = layer.layout
    rank, nope, value_dim = layout.kv_lora_rank, layout.qk_nope_head_dim, layout.value_head_dim
    source = x if source is None else source

    def project(name: str, y: Tensor) -> Tensor:
        return product(y, held[f"{name}.weight"].T) + held.get(f"{name}.bias", 0.0)

    def norm(name: str, y: Tensor) -> Tensor:
        return y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * held[f"{name}.weight"]

    def turn(y: Tensor) -> Tensor:
        return rotated(y, torch.arange(y.shape[1]) if positions is None else positions)

    if layout.q_lora_rank:
        queries = project("q_b_proj", norm("q_a_norm", project("q_a_proj", x)))
    else:
        queries = project("q_proj", x)
    compressed = project("kv_a_proj", source)
    latent, shared = norm("kv_a_norm", compressed[..., :rank]), compressed[..., rank:]
    if layout.qk_rope_head_dim:
        shared = turn(shared)
    factor = 1 / math.sqrt(layout.head_dim) if scale is None else scale
    heads, maps = [], []
    for i in range(layout.num_heads):
        query = queries[..., i * layout.head_dim : (i + 1) * layout.head_dim]
        if layout.qk_rope_head_dim:
            query = torch.cat((query[..., :nope], turn(query[..., nope:])), -1)
        up = held["kv_b_proj.weight"][i * (nope + value_dim) : (i + 1) * (nope + value_dim)]
        if absorbed:
            query = torch.cat((product(query[..., :nope], up[:nope]), query[..., nope:]), -1)
            key, value = torch.cat((latent, shared), -1), latent
        else:
            key = torch.cat((product(latent, up[:nope].T), shared), -1)
            value = product(latent, up[nope:].T)
        logits = product(query, key.transpose(-1, -2)) * factor
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        numerators = torch.exp(logits - logits.detach().amax(-1, keepdim=True))
        if visible is not None:
            numerators = torch.where(visible, numerators, 0.0)
        total = numerators.sum(-1, keepdim=True)
        if "sinks" in held:
            total = total + torch.exp(held["sinks"][i] - logits.detach().amax(-1, keepdim=True))
        weights = numerators / torch.where(total == 0, 1.0, total)
        maps.append(weights)
        head = product(weights, value)
        head = product(head, up[nope:].T) if absorbed else head
        heads.append(head * (1.0 if gate is None else gate[i]))
    return project("out_proj", torch.cat(heads, -1)), torch.stack(maps, 1)
