"""Jensen-Shannon divergence between the attention rows of two heads, of the same or different layers and texts.

Both heads must have equally many queries and keys, and the same mask, head_dim and softcap.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from polyhead.masks import Mask
from polyhead.ops.profile import profile
from polyhead.report.viewer.failures import invalid
from polyhead.report.viewer.tiles import strip_height
from polyhead.report.viewer.trace import RecordedAttention


@dataclass(frozen=True, slots=True)
class Distance:
    """Jensen-Shannon divergence and distance of two heads, averaged over the rows with a visible key."""

    divergence: float  # in nats
    distance: float  # mean over rows of the square root of each row's divergence
    rows: int


def distances(one: RecordedAttention, other: RecordedAttention) -> Iterator[Distance]:
    """Yield the running means for two single heads; the last value covers all rows."""
    _check(one, other)
    query, key, logsumexp = (
        torch.cat([getattr(one, name), getattr(other, name)], 1) for name in ("query", "key", "logsumexp")
    )
    scale = torch.cat([_scale(one), _scale(other)])
    sums = torch.zeros(2, dtype=torch.float64)
    count = 0
    step = max(1, strip_height(one, 0, (0, one.keys)) // 4)  # a divergence costs more per pair than a weight
    for start in range(0, one.queries, step):
        rows = start, min(start + step, one.queries)
        result = profile(
            query, key, logsumexp, mask=one.mask, scale=scale, softcap=one.softcap, head_pairs=[(0, 1)], rows=rows
        )
        assert result.head_divergence is not None and result.head_distance is not None
        num_rows = int((logsumexp[0, :, slice(*rows)] != -torch.inf).any(0).sum())  # fully masked rows are excluded
        sums += num_rows * torch.stack([result.head_divergence[0, 0], result.head_distance[0, 0]]).double().cpu()
        count += num_rows
        divergence, distance = (sums / max(1, count)).tolist()
        yield Distance(divergence, distance, count)


def _check(one: RecordedAttention, other: RecordedAttention) -> None:
    if (one.queries, one.keys) != (other.queries, other.keys):
        raise invalid(
            "two heads must have the same number of tokens to be compared, got one over "
            f"{one.queries} x {one.keys} tokens and one over {other.queries} x {other.keys}"
        )
    if one.query.shape[3] != other.query.shape[3] or one.softcap != other.softcap:
        raise invalid(
            "two heads must have the same head_dim and softcap to be compared, "
            f"got head_dim {one.query.shape[3]} and {other.query.shape[3]}, softcap {one.softcap} and {other.softcap}"
        )
    if not _same_mask(one.mask, other.mask):
        raise invalid(f"two heads must have the same mask to be compared, got {one.mask} and {other.mask}")


def _same_mask(one: Mask | None, other: Mask | None) -> bool:
    """Return whether masks are the same object, or bands of the same extent; contents of tensors are not compared."""
    if one is other:
        return True
    if one is None or other is None or not (one.is_band and other.is_band):
        return False
    return (one.left, one.right, one.sinks) == (other.left, other.right, other.sinks)


def _scale(attention: RecordedAttention) -> Tensor:
    scale = attention.scale
    if isinstance(scale, Tensor):
        return scale
    value = attention.query.shape[3] ** -0.5 if scale is None else scale
    return torch.tensor([value], device=attention.query.device)
