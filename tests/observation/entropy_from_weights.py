"""Entropy of materialised attention weights in float64, with its gradient: reference for `session.statistics`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Both sides are float64. A result of two layers takes some thousand roundings of 1.1e-16 each, and a statistic is sums
# of a few dozen logarithms: 1e-10 of the largest element leaves room for all of them. One row of padding that counts,
# or one term of a gradient that is dropped, moves it by 1e-3.
EXACT = 1e-10


@contextmanager
def softmax_of_its_input() -> Iterator[None]:
    """transformers' eager attention rounds its weights to float32; here they stay float64."""
    softmax = F.softmax

    @wraps(softmax)  # it keeps its name, by which a session knows it
    def plain(logits: Tensor, *positional: Any, dtype: torch.dtype | None = None, **keywords: Any) -> Tensor:
        return softmax(logits, *positional, **keywords)

    F.softmax = plain
    try:
        yield
    finally:
        F.softmax = softmax


def entropy(weights: Tensor, *, learned_sinks: bool = False) -> Tensor:
    """[..., queries], of weights [..., queries, keys]; a learned sink has what they lack to one."""
    terms = weights
    if learned_sinks:
        terms = torch.cat([weights, 1 - weights.sum(-1, keepdim=True)], -1)
    return -(terms * torch.where(terms > 0, terms, 1.0).log()).sum(-1)


def head_means(weights: Tensor, real: Tensor | None = None, *, learned_sinks: bool = False) -> Tensor:
    """The mean entropy of each head, [heads], over the real tokens [batch, queries]."""
    rows = entropy(weights, learned_sinks=learned_sinks).transpose(0, 1)  # [heads, batch, queries]
    return rows.flatten(1).mean(-1) if real is None else rows[:, real].mean(-1)


def gradients(result: Tensor, model: nn.Module) -> dict[str, Tensor]:
    """Of a sum with a different factor for each element, so that no two heads can be exchanged."""
    factors = torch.arange(1, result.numel() + 1, dtype=result.dtype, device=result.device)
    parameters = dict(model.named_parameters())
    loss = (result.flatten() * factors).sum()
    found = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True, allow_unused=True)
    pairs = zip(parameters.items(), found, strict=True)
    return {name: torch.zeros_like(x) if gradient is None else gradient for (name, x), gradient in pairs}


def assert_close(actual: Tensor, expected: Tensor, name: str = "entropy") -> None:
    assert actual.shape == expected.shape, f"{name}: {list(actual.shape)}, not {list(expected.shape)}"
    assert actual.isfinite().all(), name
    error, size = float((actual - expected).detach().abs().max()), float(expected.detach().abs().max())
    assert error <= EXACT * max(size, 1.0), f"{name} is off by {error:.2e}, its largest element is {size:.2e}"


def assert_same_gradients(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert any(float(x.abs().max()) > 1e-3 for x in expected.values()), "gradients of zero prove nothing"
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_close(actual[name], gradient, name)
