"""Request type of `talking_attention`, as its backends take it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyhead.masks import Mask
from polyhead.ops.common.nonfinite import without_nonfinite, without_nonfinite_queries
from polyhead.ops.common.request import AttentionRequest


@dataclass(frozen=True, slots=True, eq=False)
class TalkingRequest:
    """One validated call of `talking_attention`: an `attention` request and two mixing matrices."""

    attention: AttentionRequest
    mask: Mask | None
    scale: float
    logits_mix: Tensor  # [heads, heads] in the dtype of the query, from scores (first axis) to logits
    weights_mix: Tensor  # [heads, heads], from softmax weights (first axis) to the weights of the values
    statistics: Any = None  # as passed by the caller

    @property
    def needs_grad(self) -> bool:
        mixes_need_grad = self.logits_mix.requires_grad or self.weights_mix.requires_grad
        return self.attention.needs_grad or (torch.is_grad_enabled() and mixes_need_grad)


@dataclass(frozen=True, slots=True, eq=False)
class FiniteInputs:
    """Queries, keys and values without NaN and Inf, and NaN flags ("poison") for the tokens that had any.

    Mixing propagates a NaN of one head to all heads, so the flags are per token and not per head.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    query_poison: Tensor | None  # [batch, queries]: NaN or 0; None if all are known to be finite
    key_poison: Tensor | None  # [batch, keys]


def remove_nonfinite(request: AttentionRequest) -> FiniteInputs:
    """Remove NaN and Inf from the inputs, so that those of masked keys do not propagate through 0 * NaN."""
    query, key, value = request.query, request.key, request.value
    if request.visibility is None or request.finite:
        return FiniteInputs(query, key, value, None, None)
    query, query_poison = without_nonfinite_queries(query)
    key, value, key_poison = without_nonfinite(key, value)
    dtype = request.accumulation_dtype
    poisons = (None if x is None else x.detach().to(dtype).amax(1) for x in (query_poison, key_poison))
    return FiniteInputs(query, key, value, *poisons)
