"""The formula, written so that it reads like one: the oracle every other backend is tested against.

softmax(softcap(scale * Q K^T) + bias) V over the visible keys, one logit a head for a learned sink, in float32 or
better. It materialises the weights, so memory grows with queries x keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyhead.functional.dropout import draw_seed, keep_tile
from polyhead.functional.guard import over_heads, without_broken
from polyhead.functional.request import AttentionOutput, AttentionRequest


def unsupported_reasons(request: AttentionRequest) -> list[str]:
    return []


def run(request: AttentionRequest) -> AttentionOutput:
    batch, heads, _, queries, keys = request.sizes
    dtype = request.accumulation_dtype
    everything = (0, queries), (0, keys)
    visibility = request.visibility
    allowed = None if visibility is None else visibility.allowed_tile(*everything)
    bias = None if visibility is None else visibility.bias_tile(*everything, dtype)

    query, key, value = (x.to(dtype) for x in (request.query, request.key, request.value))
    poison = None
    filled = None  # rows that see a key; what stands in the others is selected away, in the gradient as well
    if allowed is not None:
        if not request.finite:
            key, value, poison = without_broken(key, value)
        filled = allowed.any(-1, keepdim=True)
        query = torch.where(filled, query, 0.0)

    logits = _by_group(query, key.transpose(-1, -2))  # [batch, heads, queries, keys]
    scale = request.scale
    logits = logits * (scale.to(dtype)[:, None, None] if isinstance(scale, Tensor) else scale)
    if request.softcap is not None:
        logits = request.softcap * torch.tanh(logits / request.softcap)
    if bias is not None:
        logits = logits + bias
    if poison is not None:
        logits = logits + over_heads(poison, heads)[:, :, None]
    if allowed is not None:
        logits = torch.where(allowed, logits, -torch.inf)

    weights, logsumexp = _softmax(logits, None if request.sinks is None else request.sinks.to(dtype)[:, None, None])
    kept = weights
    if request.dropout:
        seed = draw_seed(query.device) if request.seed is None else request.seed
        keep = keep_tile(seed, request.dropout, batch, heads, *everything)
        kept = torch.where(keep, weights / (1 - request.dropout), 0.0)
    output = _by_group(kept, value)
    if filled is not None:
        output = torch.where(filled, output, 0.0)
    return AttentionOutput(
        output=output.to(request.query.dtype),
        logsumexp=logsumexp,
        weights=weights if request.weights else None,
        backend="reference",
    )


def _softmax(logits: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weights over real keys and log-sum-exp, sink included; a row with nothing to attend to has weights 0 and -inf."""
    largest = (
        logits.detach().amax(-1, keepdim=True)
        if logits.shape[-1]
        else logits.new_full((*logits.shape[:-1], 1), -torch.inf)
    )
    if sinks is not None:
        largest = torch.maximum(largest, sinks.detach())
    empty = largest == -torch.inf
    largest = torch.where(empty, 0.0, largest)
    exponentials = torch.exp(logits - largest)
    total = exponentials.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks - largest)
    total = torch.where(empty, 1.0, total)
    logsumexp = torch.where(empty, -torch.inf, largest + torch.log(total))
    return exponentials / total, logsumexp.squeeze(-1)


def _by_group(left: Tensor, right: Tensor) -> Tensor:
    """[batch, heads, rows, k] @ [batch, kv_heads, k, columns]: the query heads of a group share one right-hand side."""
    batch, heads, rows, width = left.shape
    kv_heads = right.shape[1]
    if heads == kv_heads:
        return left @ right
    folded = left.reshape(batch, kv_heads, (heads // kv_heads) * rows, width)
    return (folded @ right).view(batch, heads, rows, right.shape[3])
