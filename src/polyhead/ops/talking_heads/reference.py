"""Talking heads as the formula has them, weights materialised: what the other backends are tested against.

L_g = sum_h A[h, g] (scale Q_h K_h^T)      W_g = softmax(L_g)      U_g = sum_h B[h, g] W_h      O_g = U_g V_g
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyhead.masks import Mask
from polyhead.ops.attention.api import attention
from polyhead.ops.common.combined_weights import CombinedWeights
from polyhead.ops.common.nonfinite import over_heads
from polyhead.ops.common.request import AttentionOutput
from polyhead.ops.common.statistics import RowStatistics
from polyhead.ops.talking_heads.request import TalkingRequest, cleaned


def unsupported_reasons(request: TalkingRequest) -> list[str]:
    return []


def run(request: TalkingRequest) -> AttentionOutput:
    plain = request.plain
    logits, value = _logits(request)
    weights, logsumexp = _softmax(logits)
    mixed = torch.einsum("bhqk,hg->bgqk", weights, request.weights_mix.to(weights.dtype))
    output = mixed @ over_heads(value, plain.query.shape[1])
    # What arrives at a row that sees nothing is selected away: a NaN there would meet weights of zero.
    output = torch.where((logsumexp == -torch.inf)[..., None], 0.0, output).to(plain.query.dtype)
    told = None if plain.statistics is None else _statistics(request, logits.detach())
    return AttentionOutput(output, logsumexp, weights if plain.weights else None, told, backend="reference")


def mixed_weights(request: TalkingRequest) -> CombinedWeights:
    logits, _ = _logits(request)
    weights, _ = _softmax(logits)
    mixed = torch.einsum("bhqk,hg->bgqk", weights, request.weights_mix.to(weights.dtype))
    largest = mixed.abs().amax(-1) if mixed.shape[-1] else mixed.sum(-1)
    return CombinedWeights(mixed.sum(-1), mixed.abs().sum(-1), largest)


def _logits(request: TalkingRequest) -> tuple[Tensor, Tensor]:
    """Mixed logits with hidden ones at -inf, and the values."""
    plain, clean = request.plain, cleaned(request.plain)
    dtype = plain.accumulation_dtype
    query, key, value = (x.to(dtype) for x in (clean.query, clean.key, clean.value))
    scores = request.scale * (query @ over_heads(key, query.shape[1]).transpose(-1, -2))
    logits = torch.einsum("bhqk,hg->bgqk", scores, request.logits_mix.to(dtype))
    if clean.query_poison is not None:
        logits = logits + clean.query_poison[:, None, :, None]
    if clean.key_poison is not None:
        logits = logits + clean.key_poison[:, None, None]
    everything = (0, query.shape[2]), (0, key.shape[2])
    allowed = None if plain.visibility is None else plain.visibility.allowed_tile(*everything)
    return logits if allowed is None else torch.where(allowed, logits, -torch.inf), value


def _softmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Weights, all 0 in a row that sees no key, and the log-sum-exp of every row."""
    largest = logits.detach().amax(-1, keepdim=True) if logits.shape[-1] else logits.new_zeros(*logits.shape[:-1], 1)
    shift = torch.where(largest == -torch.inf, 0.0, largest)
    exponentials = torch.exp(logits - shift)
    total = exponentials.sum(-1, keepdim=True)
    empty = total == 0
    total = torch.where(empty, 1.0, total)
    logsumexp = torch.where(empty, -torch.inf, shift + torch.log(total)).squeeze(-1)
    return exponentials / total, logsumexp


def _statistics(request: TalkingRequest, logits: Tensor) -> RowStatistics | None:
    """Those of attention to keys of zero, whose logits are a bias and nothing else."""
    nothing = logits.new_zeros(*logits.shape[:2], max(logits.shape[2:]), 1)
    query, key = nothing[:, :, : logits.shape[2]], nothing[:, :, : logits.shape[3]]
    bias = Mask.bias(logits)
    mask = bias if request.mask is None else request.mask & bias
    return attention(query, key, key, mask=mask, backend="reference", statistics=request.statistics).statistics
