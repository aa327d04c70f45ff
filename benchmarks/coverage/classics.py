"""Attention as it is written by hand in widely copied code: five models in those styles."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, LAYERS = 24, 3, 2


class NanoGPTAttention(nn.Module):
    """A joint projection and `F.scaled_dot_product_attention`, as in nanoGPT."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.n_head = HEADS

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.size()
        parts = self.c_attn(x).split(width, dim=2)
        q, k, v = (part.view(batch, tokens, self.n_head, -1).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.0, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(batch, tokens, width))


class MinGPTAttention(nn.Module):
    """A triangular buffer, `masked_fill` and a softmax by hand, as in minGPT."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.key, self.query, self.value, self.proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.n_head = HEADS
        self.register_buffer("mask", torch.tril(torch.ones(64, 64))[None, None])

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.size()
        q, k, v = (
            layer(x).view(batch, tokens, self.n_head, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = F.softmax(att.masked_fill(self.mask[:, :, :tokens, :tokens] == 0, float("-inf")), dim=-1)
        return self.proj((att @ v).transpose(1, 2).contiguous().view(batch, tokens, width))


def _annotated(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(query.size(-1))
    p_attn = scores.softmax(dim=-1)
    return torch.matmul(p_attn, value), p_attn


class AnnotatedAttention(nn.Module):
    """A function that returns weights too, kept in an attribute, as in The Annotated Transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.h = HEADS
        self.attn: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        batch = x.size(0)
        q, k, v = (lin(x).view(batch, -1, self.h, WIDTH // HEADS).transpose(1, 2) for lin in [*self.linears][:3])
        y, self.attn = _annotated(q, k, v)
        return self.linears[-1](y.transpose(1, 2).contiguous().view(batch, -1, WIDTH))


class ViTPytorchAttention(nn.Module):
    """A softmax that is a module, as in vit-pytorch."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.attend = HEADS, nn.Softmax(dim=-1)
        self.to_qkv, self.to_out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.to_qkv(x).chunk(3, dim=-1))
        attn = self.attend(torch.matmul(q, k.transpose(-1, -2)) * (WIDTH // HEADS) ** -0.5)
        return self.to_out(torch.matmul(attn, v).transpose(1, 2).flatten(2))


class EinsumAttention(nn.Module):
    """Einsums over [batch, tokens, heads, head_dim] and an additive bias, as in code that comes from JAX."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.bias = nn.Parameter(torch.zeros(HEADS, 64, 64))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (HEADS, -1)) for layer in (self.query, self.key, self.value))
        tokens = x.shape[1]
        logits = torch.einsum("bqhd,bkhd->bhqk", q / math.sqrt(q.shape[-1]), k) + self.bias[:, :tokens, :tokens]
        return self.out(torch.einsum("bhqk,bkhd->bqhd", torch.softmax(logits, -1), v).flatten(2))


CLASSICS = {
    "nanoGPT": NanoGPTAttention,
    "minGPT": MinGPTAttention,
    "The Annotated Transformer": AnnotatedAttention,
    "vit-pytorch": ViTPytorchAttention,
    "einsum": EinsumAttention,
}


class Block(nn.Module):
    """A layer of a transformer around one of these attentions."""

    def __init__(self, attention: type[nn.Module]) -> None:
        super().__init__()
        self.attn, self.norm = attention(), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(self.norm(x))


def classic(name: str) -> nn.Module:
    """Return a model of two layers; its input is [batch, tokens, 24]."""
    return nn.Sequential(*(Block(CLASSICS[name]) for _ in range(LAYERS)))
