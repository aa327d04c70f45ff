"""Attention written as a softmax by hand, in the layouts that code in the wild uses."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.observation.direct_models import DIM, HEADS, WIDTH, join_heads, split_heads


def four_axes(q, k, v, m):
    return join_heads((scores(q, k) + m).softmax(-1) @ v)


def scores(q: Tensor, k: Tensor) -> Tensor:
    return torch.matmul(q, k.transpose(-1, -2)) / DIM**0.5


def merged(q, k, v, m):
    batch, _, queries, _ = q.shape
    q, k, v = (x.reshape(-1, x.shape[2], DIM) for x in (q, k, v))
    logits = torch.bmm(q, k.transpose(1, 2)).view(batch, HEADS, queries, -1) / DIM**0.5 + m
    weights = F.softmax(logits.view(batch * HEADS, queries, -1), dim=-1)
    return join_heads(torch.bmm(weights, v).view(batch, HEADS, queries, DIM))


def heads_outside(q, k, v, m):
    batch, _, queries, _ = q.shape
    q, k, v = (x.permute(1, 0, 2, 3).contiguous().view(-1, x.shape[2], DIM) for x in (q, k, v))
    logits = torch.bmm(q, k.transpose(1, 2)) / DIM**0.5 + m[0].repeat(HEADS * batch, 1, 1)
    output = torch.bmm(nn.Softmax(dim=2)(logits), v).view(HEADS, batch, queries, DIM)
    return output.permute(1, 2, 0, 3).flatten(2)


def stacked(q, k, v, m):
    q, k, v = (torch.stack(join_heads(x).split(DIM, dim=2), dim=0) for x in (q, k, v))
    weights = torch.softmax(torch.matmul(q, k.transpose(2, 3)) / DIM**0.5 + m, dim=3)
    return torch.cat(torch.matmul(weights, v).unbind(0), dim=2)


def concatenated(q, k, v, m):
    q, k, v = (torch.cat(join_heads(x).chunk(HEADS, dim=2), dim=0) for x in (q, k, v))
    weights = torch.softmax(torch.matmul(q, k.transpose(1, 2)) / DIM**0.5 + m[0], dim=-1)
    return torch.cat(torch.matmul(weights, v).chunk(HEADS, dim=0), dim=2)


def einsum(q, k, v, m):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k) / DIM**0.5 + m
    return torch.einsum("bhqk,bkhd->bqhd", logits.softmax(dim=-1), v).flatten(2)


def heads_last(q, k, v, m):
    q, k, v = (x.permute(2, 0, 1, 3) for x in (q, k, v))  # [tokens, batch, heads, dim]
    logits = torch.einsum("ibnd,jbnd->ijbn", q, k) / DIM**0.5 + m[0].permute(1, 2, 0)[..., None]
    return torch.einsum("ijbn,jbnd->ibnd", F.softmax(logits, dim=1), v).flatten(2).transpose(0, 1)


def transposed(q, k, v, m):
    weights = (k @ q.mT / DIM**0.5 + m.mT).softmax(-2)
    return join_heads((v.mT @ weights).mT)


def upcast(q, k, v, m):
    weights = nn.functional.softmax((scores(q, k) + m).float(), dim=-1, dtype=torch.float32).type_as(v)
    return join_heads(torch.matmul(F.dropout(weights, 0.3, training=False), v))


def filled(q, k, v, m):
    weights = torch.softmax(scores(q, k).masked_fill(m < 0, torch.finfo(q.dtype).min), -1).masked_fill(m < 0, 0.0)
    return join_heads(weights @ v)


def with_baddbmm(q, k, v, m):
    batch, _, queries, _ = q.shape
    q, k, v = (x.reshape(-1, x.shape[2], DIM) for x in (q, k, v))
    logits = torch.baddbmm(m[0].expand(len(q), -1, -1), q, k.mT, alpha=DIM**-0.5)
    weights = logits.view(batch, HEADS, queries, -1).softmax(-1).view(len(q), queries, -1)
    return join_heads(torch.bmm(weights, v).view(batch, HEADS, queries, DIM))


LAYOUTS = (
    four_axes, merged, heads_outside, stacked, concatenated, einsum, heads_last, transposed, upcast, filled,
    with_baddbmm,
)  # fmt: skip


class ByHand(nn.Module):
    """Self-attention, or cross-attention to a context, with one of these functions."""

    def __init__(self, attend=four_axes):
        super().__init__()
        self.attend, self.num_heads = attend, HEADS
        self.q, self.kv, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mask: Tensor | None = None

    def heads(self, x: Tensor, context: Tensor | None = None) -> list[Tensor]:
        return [split_heads(part) for part in (self.q(x), *self.kv(x if context is None else context).chunk(2, -1))]

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        q, k, v = self.heads(x, context)
        m = x.new_zeros(1, 1, q.shape[2], k.shape[2]) if self.mask is None else self.mask.to(x)
        return self.out(self.attend(q, k, v, m))
