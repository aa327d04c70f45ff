"""Check every contender against float64 before it is timed: times of different functions are not compared."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from benchmarks.layer_speed.contenders import PROJECTIONS, Setting, Weights
from benchmarks.measuring.agreement import Agreement, Disagreement, hold

T = TypeVar("T")

ROWS = 256  # queries whose output is recomputed in float64, drawn from all of them
GRADIENT_TOKENS = 256  # the float64 gradient holds tokens x tokens weights


def formula(
    x: Tensor, weight: dict[str, Tensor], bias: dict[str, Tensor], heads: int, setting: Setting, rows: Tensor
) -> Tensor:
    """Multi-head attention of the queries at `rows`, [batch, rows, embed_dim], every intermediate in x's dtype."""
    batch, tokens, width = x.shape

    def split(inputs: Tensor, name: str) -> Tensor:
        projected = inputs @ weight[name].T + bias[name]
        return projected.view(batch, inputs.shape[1], heads, width // heads).transpose(1, 2)

    query, key, value = split(x[:, rows], "query"), split(x, "key"), split(x, "value")
    scores = query @ key.transpose(-2, -1) / math.sqrt(width // heads)
    if setting.causal:
        future = torch.arange(tokens, device=x.device) > rows[:, None]
        scores = scores.masked_fill(future, -torch.inf)
    if (real := setting.real(tokens)) is not None:
        scores = scores.masked_fill(~real[:, None, None, :], -torch.inf)
    mixed = (torch.softmax(scores, -1) @ value).transpose(1, 2).reshape(batch, -1, width)
    return mixed @ weight["output"].T + bias["output"]


def check_output(name: str, output: Tensor, x: Tensor, weights: Weights, setting: Setting, seed: int) -> Agreement:
    """Check random rows of the output on `x` at full size against the formula in float64."""
    tokens = x.shape[1]
    drawn = torch.randperm(tokens, generator=torch.Generator().manual_seed(seed))[:ROWS].sort().values.to(x.device)
    with torch.no_grad():
        actual = output[:, drawn]
        exact, plain = _both(lambda w, y: formula(y, w.weight, w.bias, w.heads, setting, drawn), weights, x)
    real = setting.real(tokens)
    if real is not None:
        # The output of a padded query is undefined: ours is the output bias, others attend with it.
        keep = real[:, drawn, None]
        actual, exact, plain = (torch.where(keep, y, torch.zeros_like(y)) for y in (actual, exact, plain))
    return hold(f"{name}: the output", actual, exact, plain)


def check_gradients(
    name: str,
    build: Callable[[Weights, Setting], nn.Module],
    x: Tensor,
    weights: Weights,
    setting: Setting,
    seed: int,
) -> list[Agreement]:
    """Check the gradients of the input and the four weights on a shorter sequence against the formula in float64."""
    x = x[:2, :GRADIENT_TOKENS].detach()
    lengths = setting.lengths
    shorter = Setting(setting.causal, None if lengths is None else lengths[:2].clamp(max=x.shape[1]))
    generator = torch.Generator().manual_seed(seed)
    upstream = torch.randn(x.shape, generator=generator).to(x)
    if (real := shorter.real(x.shape[1])) is not None:
        upstream = upstream * real[..., None].to(x)

    def reference(w: Weights, y: Tensor) -> list[Tensor]:
        weight = {key: value.clone().requires_grad_() for key, value in w.weight.items()}
        y = y.clone().requires_grad_()
        out = formula(y, weight, w.bias, w.heads, shorter, torch.arange(y.shape[1], device=y.device))
        return list(torch.autograd.grad(out, [y, *weight.values()], upstream.to(y.dtype)))

    exact, plain = _both(reference, weights, x)
    y = x.clone().requires_grad_()
    module = build(weights, shorter)
    module(y).backward(upstream)
    actual = [y.grad, *module.gradients()]  # type: ignore[operator]
    names = ("the input", *(f"the {projection} weight" for projection in PROJECTIONS))
    found = []
    for what, ours, right, rounded in zip(names, actual, exact, plain, strict=True):
        if ours is None:
            raise Disagreement(f"{name}: no gradient of {what} arrived")
        found.append(hold(f"{name}: the gradient of {what}", ours, right, rounded))
    return found


def _both(compute: Callable[[Weights, Tensor], T], weights: Weights, x: Tensor) -> tuple[T, T]:
    return compute(weights.to(torch.float64), x.double()), compute(weights, x)
