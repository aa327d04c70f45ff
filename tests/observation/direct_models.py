"""Models in the styles of nanoGPT, timm, diffusers and SAM, which call attention functions of PyTorch directly."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as imported_by_name

HEADS, DIM = 3, 5
WIDTH = HEADS * DIM
VOCABULARY = 17


def split_heads(x: Tensor, heads: int = HEADS) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


class CausalSelfAttention(nn.Module):
    """nanoGPT's."""

    def __init__(self, dropout: float = 0.0, kv_heads: int = HEADS):
        super().__init__()
        self.kv_heads, self.dropout = kv_heads, dropout
        self.c_attn, self.c_proj = nn.Linear(WIDTH, (HEADS + 2 * kv_heads) * DIM), nn.Linear(WIDTH, WIDTH)

    def heads(self, x: Tensor) -> list[Tensor]:
        sizes = [HEADS * DIM, self.kv_heads * DIM, self.kv_heads * DIM]
        counts = (HEADS, self.kv_heads, self.kv_heads)
        return [split_heads(part, count) for part, count in zip(self.c_attn(x).split(sizes, -1), counts, strict=True)]

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.heads(x)
        dropout = self.dropout if self.training else 0.0
        grouped = self.kv_heads != HEADS
        y = F.scaled_dot_product_attention(query, key, value, None, dropout, is_causal=True, enable_gqa=grouped)
        return self.c_proj(join_heads(y))


class Block(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp = CausalSelfAttention(**options), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + F.gelu(self.mlp(self.ln_2(x)))


class GPT(nn.Module):
    def __init__(self, layers: int = 2, **options):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(64, WIDTH)
        self.h = nn.ModuleList(Block(**options) for _ in range(layers))
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.checkpointed: str | None = None

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.h:
            if self.checkpointed is None:
                x = block(x)
            else:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=self.checkpointed == "reentrant")
        return self.lm_head(x)


class MaskedAttention(nn.Module):
    """timm's, with any arguments of the attention function."""

    def __init__(self):
        super().__init__()
        self.num_heads = HEADS
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, **options) -> Tensor:
        query, key, value = (split_heads(part) for part in self.qkv(x).chunk(3, -1))
        return self.proj(join_heads(imported_by_name(query, key, value, attn_mask=attn_mask, **options)))


class ContextAttention(nn.Module):
    """diffusers': self-attention, or cross-attention to a context, in one class."""

    def __init__(self, context_width: int = WIDTH):
        super().__init__()
        self.to_q, self.to_out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.to_k, self.to_v = nn.Linear(context_width, WIDTH), nn.Linear(context_width, WIDTH)

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None) -> Tensor:
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        query, key, value = (
            split_heads(self.to_q(hidden_states)),
            *map(split_heads, (self.to_k(source), self.to_v(source))),
        )
        return self.to_out(join_heads(F.scaled_dot_product_attention(query, key, value)))


class DiffusionBlock(nn.Module):
    def __init__(self, context_width: int):
        super().__init__()
        self.attn1, self.attn2 = ContextAttention(), ContextAttention(context_width)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        x = x + self.attn1(x)
        return x + self.attn2(x, encoder_hidden_states=context)


class CachedAttention(nn.Module):
    """A decoder with a cache in the module: preallocated with a mask, or growing without one."""

    def __init__(self, size: int | None = None):
        super().__init__()
        self.qkv, self.size = nn.Linear(WIDTH, 3 * WIDTH), size
        self.past: tuple[Tensor, Tensor] | None = None
        self.seen = 0
        self.padding: Tensor | None = None  # [batch, keys], False for padding

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (split_heads(part) for part in self.qkv(x).chunk(3, -1))
        queries = query.shape[2]
        if self.past is not None:
            key, value = (torch.cat([past, new], 2) for past, new in zip(self.past, (key, value), strict=True))
        self.past, self.seen = (key, value), self.seen + queries
        if self.size is not None:
            key, value = (F.pad(part, (0, 0, 0, self.size - self.seen)) for part in (key, value))
        keys = key.shape[2]
        mask = torch.arange(keys) <= torch.arange(self.seen - queries, self.seen)[:, None]
        if self.padding is not None:
            mask = mask[None, None] & self.padding[:, None, None, :keys]
        is_plain = self.size is None and self.padding is None
        return join_heads(
            F.scaled_dot_product_attention(
                query, key, value, None if is_plain else mask, is_causal=is_plain and queries > 1
            )
        )


def weights_of(query: Tensor, key: Tensor, allowed: Tensor | None = None, scale: float | None = None) -> Tensor:
    """The materialised softmax in float64, [batch, heads, queries, keys]; `allowed` is boolean or added."""
    query, key = query.double(), key.double()
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    logits = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -torch.inf) if allowed.dtype is torch.bool else logits + allowed.double()
    return logits.softmax(-1).nan_to_num(0.0)
