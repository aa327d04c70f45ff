"""Reference backend: the attention formula, against which every other backend is tested.

softmax(softcap(scale * Q K^T) + bias) V over the visible keys, with one more logit per head for a learned sink, in
float32 or float64. It materialises the weights, so memory grows with queries x keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyhead.ops.common.dropout import draw_seed, keep_tile
from polyhead.ops.common.nonfinite import over_heads, without_nonfinite
from polyhead.ops.common.request import AttentionOutput, AttentionRequest, StatisticsRequest
from polyhead.ops.common.statistics import POSITIONAL, RowStatistics


def unsupported_reasons(request: AttentionRequest) -> list[str]:
    return []


def run(request: AttentionRequest) -> AttentionOutput:
    batch, heads, _, queries, keys = request.sizes
    dtype = request.accumulation_dtype
    all_pairs = (0, queries), (0, keys)
    visibility = request.visibility
    allowed = None if visibility is None else visibility.allowed_tile(*all_pairs)
    bias = None if visibility is None else visibility.bias_tile(*all_pairs, dtype)

    query, key, value = (x.to(dtype) for x in (request.query, request.key, request.value))
    poison = None
    has_keys = None  # rows with a visible key; the others are set to 0 by `where`, and so is their gradient
    if allowed is not None:
        if not request.finite:
            key, value, poison = without_nonfinite(key, value)
        has_keys = allowed.any(-1, keepdim=True)
        query = torch.where(has_keys, query, 0.0)

    logits = _grouped_matmul(query, key.transpose(-1, -2))  # [batch, heads, queries, keys]
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
    exponentials, row_sum, row_max, empty = _softmax(logits, sinks)
    weights = exponentials / row_sum
    logsumexp = torch.where(empty, -torch.inf, row_max + torch.log(row_sum)).squeeze(-1)
    statistics = None
    if request.statistics is not None:
        statistics = _statistics(request.statistics, logits, exponentials, row_sum, row_max, sinks, has_keys)
    dropped_weights = weights
    if request.dropout:
        seed = draw_seed(query.device) if request.seed is None else request.seed
        keep = keep_tile(seed, request.dropout, batch, heads, *all_pairs)
        dropped_weights = torch.where(keep, weights / (1 - request.dropout), 0.0)
    output = _grouped_matmul(dropped_weights, value)
    if has_keys is not None:
        output = torch.where(has_keys, output, 0.0)
    return AttentionOutput(
        output=output.to(request.query.dtype),
        logsumexp=logsumexp,
        weights=weights if request.weights else None,
        statistics=statistics,
        backend="reference",
    )


def _softmax(logits: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return exp(logits - row max), row sums including the sink, row max and the mask of empty rows."""
    largest = (
        logits.detach().amax(-1, keepdim=True)
        if logits.shape[-1]
        else logits.new_full((*logits.shape[:-1], 1), -torch.inf)
    )
    if sinks is not None:
        largest = torch.maximum(largest, sinks.detach())
    empty = largest == -torch.inf
    row_max = torch.where(empty, 0.0, largest)
    exponentials = torch.exp(logits - row_max)
    row_sum = exponentials.sum(-1, keepdim=True)
    if sinks is not None:
        row_sum = row_sum + torch.exp(sinks - row_max)
    return exponentials, torch.where(empty, 1.0, row_sum), row_max, empty


def _statistics(
    request: StatisticsRequest,
    logits: Tensor,
    exponentials: Tensor,
    row_sum: Tensor,
    row_max: Tensor,
    sinks: Tensor | None,
    has_keys: Tensor | None,
) -> RowStatistics:
    """Compute the row statistics by their definitions, under autograd."""
    names, places = request.names, request.places
    all_pairs = (0, logits.shape[2]), (0, logits.shape[3])
    visible = logits != -torch.inf  # NaN counts as visible
    weights = exponentials / row_sum
    statistics: dict[str, Tensor] = {}
    if "max_logit" in names or "confidence" in names:
        largest = _value_at_argmax(logits, logits.detach())
        statistics["max_logit"] = largest
        statistics["confidence"] = torch.exp(largest - row_max.squeeze(-1)) / row_sum.squeeze(-1)
    if "max_abs_logit" in names:
        size = torch.where(visible, logits, 0.0).abs()
        statistics["max_abs_logit"] = _value_at_argmax(size, torch.where(visible, size.detach(), -1.0)).clamp_min(0.0)
    if "entropy" in names:
        # Log-sum-exp minus the mean logit, both relative to the row max, so that neither is as large as the logits.
        entropy_sum = (exponentials * torch.where(visible, logits - row_max, 0.0)).sum(-1, keepdim=True)
        if sinks is not None:
            # A sink of -inf is absent: its term is 0, not 0 * inf.
            entropy_sum = entropy_sum + torch.exp(sinks - row_max) * torch.where(
                sinks == -torch.inf, 0.0, sinks - row_max
            )
        statistics["entropy"] = (torch.log(row_sum) - entropy_sum / row_sum).squeeze(-1)
    if "sink_mass" in names:
        first = places.first_tile(all_pairs[1], request.sink_keys)
        statistics["sink_mass"] = (weights * (first if first.ndim == 1 else first[:, None])).sum(-1)
    if any(name in POSITIONAL for name in names):
        distance = places.distance_tile(*all_pairs)
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
        statistics |= {
            name: (weights * factors[name].to(weights.dtype)).sum(-1) for name in POSITIONAL if name in names
        }
    if "visible_keys" in names:
        statistics["visible_keys"] = visible.sum(-1).to(weights.dtype)
    if "learned_sink_mass" in names and sinks is not None:
        statistics["learned_sink_mass"] = (torch.exp(sinks - row_max) / row_sum).squeeze(-1)
    if has_keys is not None:
        empty_row_values = {"max_logit": -torch.inf}
        statistics = {
            name: x
            if name == "learned_sink_mass"
            else torch.where(has_keys.squeeze(-1), x, empty_row_values.get(name, 0.0))
            for name, x in statistics.items()
        }
    return RowStatistics(**{name: x for name, x in statistics.items() if name in names})


def _value_at_argmax(values: Tensor, ranks: Tensor) -> Tensor:
    """Return the value at each row's highest rank, at the lowest key among ties; -inf without keys."""
    if not values.shape[-1]:
        return values.new_full(values.shape[:-1], -torch.inf)
    max_rank = ranks.amax(-1, keepdim=True)
    index = torch.arange(values.shape[-1], device=values.device)
    # The maximum of a row with a NaN is NaN, so pick the NaN.
    i_max = torch.where((ranks == max_rank) | ranks.isnan(), index, values.shape[-1] - 1).amin(-1, keepdim=True)
    return values.gather(-1, i_max).squeeze(-1)


def _grouped_matmul(left: Tensor, right: Tensor) -> Tensor:
    """Return [batch, heads, rows, k] @ [batch, kv_heads, k, columns] for groups of heads."""
    batch, heads, rows, width = left.shape
    kv_heads = right.shape[1]
    if heads == kv_heads:
        return left @ right
    if torch.is_grad_enabled() and right.requires_grad:
        # The gradient of the right-hand side is a sum over rows: one sum per head is more accurate than one per group.
        # Separate products avoid a copy of the right-hand side per head.
        by_member = left.unflatten(1, (kv_heads, -1)).unbind(2)
        return torch.stack([member @ right for member in by_member], 2).flatten(1, 2)
    folded = left.reshape(batch, kv_heads, (heads // kv_heads) * rows, width)
    return (folded @ right).view(batch, heads, rows, right.shape[3])
