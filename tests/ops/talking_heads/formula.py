"""The formula of talking heads, with every intermediate in the dtype of the inputs; exact with float64."""

from __future__ import annotations

import torch
from torch import Tensor

from polyhead import Mask
from polyhead.ops.common.visibility import resolve


def visible(mask: Mask | None, query: Tensor, key: Tensor) -> Tensor:
    """Return the visibility of keys, boolean [batch or 1, 1, queries, keys]."""
    queries, keys = query.shape[2], key.shape[2]
    sizes = {"batch": query.shape[0], "heads": query.shape[1], "queries": queries, "keys": keys}
    seen = None if mask is None else resolve(mask, **sizes, device=query.device)
    tile = None if seen is None else seen.allowed_tile((0, queries), (0, keys))
    return torch.ones(1, 1, queries, keys, dtype=torch.bool, device=query.device) if tile is None else tile


def talking_maps(
    query: Tensor, key: Tensor, logits_mix: Tensor, *, mask: Mask | None = None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return the mixed logits, 0 where masked, and the weights of every softmax, 0 in rows without visible keys."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = product(query, key.transpose(-1, -2)) * (query.shape[-1] ** -0.5 if scale is None else scale)
    seen = visible(mask, query, key)
    logits = torch.where(seen, mixed(scores, logits_mix), 0.0)
    largest = torch.where(seen, logits.detach(), -torch.inf).amax(-1, keepdim=True)
    exponentials = torch.where(seen, torch.exp(logits - torch.where(largest.isinf(), 0.0, largest)), 0.0)
    total = exponentials.sum(-1, keepdim=True)
    return logits, exponentials / torch.where(total == 0, 1.0, total)


def plain_talking(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    logits_mix: Tensor,
    weights_mix: Tensor,
    *,
    mask: Mask | None = None,
    scale: float | None = None,
) -> Tensor:
    _, weights = talking_maps(query, key, logits_mix, mask=mask, scale=scale)
    value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    return product(mixed(weights, weights_mix), value)


def mixed(maps: Tensor, matrix: Tensor) -> Tensor:
    """Return sum_h matrix[h, g] maps_h."""
    return product(maps.permute(0, 2, 3, 1), matrix).permute(0, 3, 1, 2)


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return a matrix product rounded once, with wide accumulation as on tensor cores."""
    if left.dtype in (torch.bfloat16, torch.float16):
        return (left.float() @ right.float()).to(left.dtype)
    return left @ right
