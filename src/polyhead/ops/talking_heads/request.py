"""What is asked of talking heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyhead.masks import Mask
from polyhead.ops.common.nonfinite import without_broken, without_broken_queries
from polyhead.ops.common.request import AttentionRequest


@dataclass(frozen=True, slots=True, eq=False)
class TalkingRequest:
    """One validated call of `talking_attention`: an attention, and the two mixes of its heads."""

    plain: AttentionRequest
    mask: Mask | None
    scale: float
    logits_mix: Tensor  # [heads, heads] in the dtype of the query, from scores (first axis) to logits
    weights_mix: Tensor  # [heads, heads], from weights (first axis) to what multiplies the values
    statistics: Any = None  # as the caller asked for them

    @property
    def needs_grad(self) -> bool:
        learned = self.logits_mix.requires_grad or self.weights_mix.requires_grad
        return self.plain.needs_grad or (torch.is_grad_enabled() and learned)


@dataclass(frozen=True, slots=True, eq=False)
class Cleaned:
    """Queries, keys and values without NaN and Inf, and a poison for rows that had any or see a key that had.

    A mix carries what one head holds to all of them, so a poison is of a token and not of a head.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    query_poison: Tensor | None  # [batch, queries]: NaN or 0; None where all is known to be finite
    key_poison: Tensor | None  # [batch, keys]


def cleaned(request: AttentionRequest) -> Cleaned:
    """Where a mask hides keys, what stands in them must reach nothing, by way of 0 * NaN neither."""
    query, key, value = request.query, request.key, request.value
    if request.visibility is None or request.finite:
        return Cleaned(query, key, value, None, None)
    query, query_poison = without_broken_queries(query)
    key, value, key_poison = without_broken(key, value)
    dtype = request.accumulation_dtype
    poisons = (None if x is None else x.detach().to(dtype).amax(1) for x in (query_poison, key_poison))
    return Cleaned(query, key, value, *poisons)
