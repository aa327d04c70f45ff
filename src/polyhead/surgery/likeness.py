"""How much of what a model says is left after an edit: its last hidden states held against those it had before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from polyhead.errors import OptionError


@dataclass(frozen=True, slots=True)
class Likeness:
    """The mean cosine over tokens, and its standard error over texts, within which tokens are no evidence apart."""

    cosine: float
    error: float
    tokens: int
    texts: int


@torch.no_grad()
def last_states(model: Any, batches: Iterable[Mapping[str, Any]]) -> list[Tensor]:
    """What a model of transformers says of each text, [tokens, width] without padding, on the CPU in float32."""
    body = getattr(model, model.base_model_prefix, model) if model.base_model_prefix else model
    found = []
    was_training = model.training
    model.eval()
    try:
        for batch in batches:
            states = body(**batch).last_hidden_state
            mask = batch.get("attention_mask")
            real = torch.ones(states.shape[:2], dtype=torch.bool) if mask is None else mask.cpu() != 0
            found += [row[kept].float() for row, kept in zip(states.cpu(), real, strict=True)]
    finally:
        model.train(was_training)
    return found


def likeness(before: Sequence[Tensor], after: Sequence[Tensor]) -> Likeness:
    """Of what was said of the same texts before and after.

    >>> states = [torch.randn(5, 7), torch.randn(3, 7)]
    >>> likeness(states, [2 * x for x in states]).tokens
    8
    """
    if [x.shape for x in before] != [x.shape for x in after] or not before:
        raise OptionError(
            f"the same texts are compared, some at least; got {len(before)} and {len(after)}, or of other lengths"
        )
    cosines = [F.cosine_similarity(one, other, dim=-1) for one, other in zip(before, after, strict=True)]
    means = torch.stack([x.mean() for x in cosines]).double()
    error = float(means.std() / len(means) ** 0.5) if len(means) > 1 else float("nan")
    every = torch.cat(cosines)
    return Likeness(float(every.double().mean()), error, len(every), len(means))
