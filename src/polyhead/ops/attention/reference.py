"""The formula, written so that it reads like one: the oracle every other backend is tested against.

softmax(softcap(scale * Q K^T) + bias) V over the visible keys, one logit a head for a learned sink, in float32 or
better. It materialises the weights, so memory grows with queries x keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyhead.ops.common.dropout import draw_seed, keep_tile
from polyhead.ops.common.nonfinite import over_heads, without_broken
from polyhead.ops.common.request import AttentionOutput, AttentionRequest, StatisticsRequest
from polyhead.ops.common.statistics import POSITIONAL, RowStatistics


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

    sinks = None if request.sinks is None else request.sinks.to(dtype)[:, None, None]
    exponentials, total, shift, empty = _softmax(logits, sinks)
    weights = exponentials / total
    logsumexp = torch.where(empty, -torch.inf, shift + torch.log(total)).squeeze(-1)
    statistics = None
    if request.statistics is not None:
        statistics = _statistics(request.statistics, logits, exponentials, total, shift, sinks, filled)
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
        statistics=statistics,
        backend="reference",
    )


def _softmax(logits: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """exp(logits - shift), their sum with the sink's, the shift, and whether a row has nothing at all to attend to."""
    largest = (
        logits.detach().amax(-1, keepdim=True)
        if logits.shape[-1]
        else logits.new_full((*logits.shape[:-1], 1), -torch.inf)
    )
    if sinks is not None:
        largest = torch.maximum(largest, sinks.detach())
    empty = largest == -torch.inf
    shift = torch.where(empty, 0.0, largest)
    exponentials = torch.exp(logits - shift)
    total = exponentials.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks - shift)
    return exponentials, torch.where(empty, 1.0, total), shift, empty


def _statistics(
    request: StatisticsRequest,
    logits: Tensor,
    exponentials: Tensor,
    total: Tensor,
    shift: Tensor,
    sinks: Tensor | None,
    filled: Tensor | None,
) -> RowStatistics:
    """The statistics of every row by their definitions, on the tape."""
    names, places = request.names, request.places
    everything = (0, logits.shape[2]), (0, logits.shape[3])
    seen = logits != -torch.inf  # a NaN is seen
    weights = exponentials / total
    found: dict[str, Tensor] = {}
    if "max_logit" in names or "confidence" in names:
        largest = _at_lowest(logits, logits.detach())
        found["max_logit"] = largest
        found["confidence"] = torch.exp(largest - shift.squeeze(-1)) / total.squeeze(-1)
    if "max_abs_logit" in names:
        size = torch.where(seen, logits, 0.0).abs()
        found["max_abs_logit"] = _at_lowest(size, torch.where(seen, size.detach(), -1.0)).clamp_min(0.0)
    if "entropy" in names:
        # log-sum-exp less the mean logit, both taken from the shift: neither is of the logits' size.
        spread = (exponentials * torch.where(seen, logits - shift, 0.0)).sum(-1, keepdim=True)
        if sinks is not None:
            # A sink of -inf is none: its term is 0, and not 0 * inf.
            spread = spread + torch.exp(sinks - shift) * torch.where(sinks == -torch.inf, 0.0, sinks - shift)
        found["entropy"] = (torch.log(total) - spread / total).squeeze(-1)
    if "sink_mass" in names:
        first = places.first_tile(everything[1], request.sink_keys)
        found["sink_mass"] = (weights * (first if first.ndim == 1 else first[:, None])).sum(-1)
    if any(name in POSITIONAL for name in names):
        distance = places.distance_tile(*everything)
        distance = distance if distance.ndim == 2 else distance[:, None]
        factors = {
            "mean_distance": distance.abs(),
            "mean_offset": distance,
            "mean_squared_distance": distance * distance,
            "self_mass": distance == 0,
            "previous_mass": distance == -1,
            "next_mass": distance == 1,
            "window_mass": distance.abs() <= request.window,
        }
        found |= {name: (weights * factors[name].to(weights.dtype)).sum(-1) for name in POSITIONAL if name in names}
    if "visible_keys" in names:
        found["visible_keys"] = seen.sum(-1).to(weights.dtype)
    if "learned_sink_mass" in names and sinks is not None:
        found["learned_sink_mass"] = (torch.exp(sinks - shift) / total).squeeze(-1)
    if filled is not None:
        nothing = {"max_logit": -torch.inf}
        found = {
            name: x if name == "learned_sink_mass" else torch.where(filled.squeeze(-1), x, nothing.get(name, 0.0))
            for name, x in found.items()
        }
    return RowStatistics(**{name: x for name, x in found.items() if name in names})


def _at_lowest(values: Tensor, ranked: Tensor) -> Tensor:
    """The value of each row that ranks highest, the lowest key where several do; -inf in a row without keys."""
    if not values.shape[-1]:
        return values.new_full(values.shape[:-1], -torch.inf)
    top = ranked.amax(-1, keepdim=True)
    index = torch.arange(values.shape[-1], device=values.device)
    # A row that holds a NaN has a NaN for its maximum, and must show it.
    place = torch.where((ranked == top) | ranked.isnan(), index, values.shape[-1] - 1).amin(-1, keepdim=True)
    return values.gather(-1, place).squeeze(-1)


def _by_group(left: Tensor, right: Tensor) -> Tensor:
    """[batch, heads, rows, k] @ [batch, kv_heads, k, columns]: the query heads of a group share one right-hand side."""
    batch, heads, rows, width = left.shape
    kv_heads = right.shape[1]
    if heads == kv_heads:
        return left @ right
    if torch.is_grad_enabled() and right.requires_grad:
        # The gradient of the right-hand side is a sum over rows: one for each head loses less than one for the group.
        # One product after the other, so that no copy of the right-hand side is made for each head.
        by_member = left.unflatten(1, (kv_heads, -1)).unbind(2)
        return torch.stack([member @ right for member in by_member], 2).flatten(1, 2)
    folded = left.reshape(batch, kv_heads, (heads // kv_heads) * rows, width)
    return (folded @ right).view(batch, heads, rows, right.shape[3])
