"""Reference backend of talking heads: the formula with materialised weights.

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
from polyhead.ops.talking_heads.request import TalkingRequest, remove_nonfinite


def unsupported_reasons(request: TalkingRequest) -> list[str]:
    return []


def run(request: TalkingRequest) -> AttentionOutput:
    inputs = request.attention
    logits, value = _logits(request)
    weights, logsumexp = _softmax(logits)
    mixed = torch.einsum("bhqk,hg->bgqk", weights, request.weights_mix.to(weights.dtype))
    output = mixed @ over_heads(value, inputs.query.shape[1])
    # Rows without visible keys are replaced by zeros: zero weights times a NaN would be NaN.
    output = torch.where((logsumexp == -torch.inf)[..., None], 0.0, output).to(inputs.query.dtype)
    statistics = None if inputs.statistics is None else _statistics(request, logits.detach())
    return AttentionOutput(output, logsumexp, weights if inputs.weights else None, statistics, backend="reference")


def mixed_weights(request: TalkingRequest) -> CombinedWeights:
    logits, _ = _logits(request)
    weights, _ = _softmax(logits)
    mixed = torch.einsum("bhqk,hg->bgqk", weights, request.weights_mix.to(weights.dtype))
    max_abs = mixed.abs().amax(-1) if mixed.shape[-1] else mixed.sum(-1)
    return CombinedWeights(mixed.sum(-1), mixed.abs().sum(-1), max_abs)


def _logits(request: TalkingRequest) -> tuple[Tensor, Tensor]:
    """Return the mixed logits, with masked ones at -inf, and the values."""
    inputs, clean = request.attention, remove_nonfinite(request.attention)
    dtype = inputs.accumulation_dtype
    query, key, value = (x.to(dtype) for x in (clean.query, clean.key, clean.value))
    scores = request.scale * (query @ over_heads(key, query.shape[1]).transpose(-1, -2))
    logits = torch.einsum("bhqk,hg->bgqk", scores, request.logits_mix.to(dtype))
    if clean.query_poison is not None:
        logits = logits + clean.query_poison[:, None, :, None]
    if clean.key_poison is not None:
        logits = logits + clean.key_poison[:, None, None]
    full_tile = (0, query.shape[2]), (0, key.shape[2])
    allowed = None if inputs.visibility is None else inputs.visibility.allowed_tile(*full_tile)
    return logits if allowed is None else torch.where(allowed, logits, -torch.inf), value


def _softmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights, all 0 in a row without visible keys, and the log-sum-exp of every row."""
    m_i = logits.detach().amax(-1, keepdim=True) if logits.shape[-1] else logits.new_zeros(*logits.shape[:-1], 1)
    m_safe = torch.where(m_i == -torch.inf, 0.0, m_i)
    p = torch.exp(logits - m_safe)
    l_i = p.sum(-1, keepdim=True)
    is_empty = l_i == 0
    l_i = torch.where(is_empty, 1.0, l_i)
    logsumexp = torch.where(is_empty, -torch.inf, m_safe + torch.log(l_i)).squeeze(-1)
    return p / l_i, logsumexp


def _statistics(request: TalkingRequest, logits: Tensor) -> RowStatistics | None:
    """Return the statistics of an attention with zero keys, whose logits are passed as a bias."""
    zeros = logits.new_zeros(*logits.shape[:2], max(logits.shape[2:]), 1)
    query, key = zeros[:, :, : logits.shape[2]], zeros[:, :, : logits.shape[3]]
    bias = Mask.bias(logits)
    mask = bias if request.mask is None else request.mask & bias
    return attention(query, key, key, mask=mask, backend="reference", statistics=request.statistics).statistics
