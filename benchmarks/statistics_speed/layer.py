"""The layer with statistics of every head against `nn.MultiheadAttention` that returns its weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

import polyhead
from benchmarks.measuring.agreement import hold
from benchmarks.measuring.cases import Case, Entrants, Pair, Run
from benchmarks.statistics_speed.contenders import WITH
from benchmarks.statistics_speed.exact import ROWS, Found, formula
from benchmarks.statistics_speed.places import ROW_STATISTICS, Shape
from benchmarks.statistics_speed.problem import Problem

TORCH = "nn.MultiheadAttention, weights"
AVERAGED = "nn.MultiheadAttention, mean weights"
BOUNDS = {"cuda": (0.35, 2048), "cpu": (1.0, 1024)}  # and the tokens from which on each holds


def layer(run: Run, shape: Shape) -> Iterator[Case]:
    """Yield forward and training of self-attention of width heads * head_dim; the bound is on the forward.

    PyTorch's layer returns the weights of each head, from which statistics could be computed, or their mean over heads,
    which is the default of `need_weights=True` and costs one more pass. Ours is compared with both.
    """
    width = shape.heads * shape.head_dim
    ours = polyhead.MultiHeadAttention(width, shape.heads, num_kv_heads=shape.kv_heads, finite=True)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.copy_(run.inputs(*parameter.shape, salt=parameter.numel()) * width**-0.5)
    ours = ours.to(run.device, run.dtype)
    x = run.inputs(shape.batch, shape.tokens, width, salt=1)
    upstream = run.inputs(*x.shape, salt=2)
    check = _checks(ours, x, shape, run.seed)
    bench = "layer" if run.device.type == "cuda" else f"{run.device.type}, layer"
    for training in (False, True):
        found = Entrants()
        found.enter(
            WITH,
            functools.partial(_step, _ours(ours), x, upstream, training),
            functools.partial(check, WITH),
        )
        for name in (TORCH, AVERAGED):
            if shape.group > 1:
                found.absent[name] = "it has no grouped-query heads"
                continue
            found.enter(
                name,
                functools.partial(_step, _torch(ours, averaged=name == AVERAGED), x, upstream, training),
                functools.partial(check, name),
            )
        most, tokens = BOUNDS[run.device.type]
        bound = most if shape.tokens >= tokens and not training else None
        yield found.case(
            f"{bench}, forward + backward" if training else bench,
            shape,
            [Pair(WITH, name, bound) for name in (TORCH, AVERAGED)],
            notes={"width": width, "backend": _backend(ours, x)},
        )


def _ours(layer: polyhead.MultiHeadAttention) -> tuple[nn.Module, Callable[[Tensor], Found]]:
    def call(x: Tensor) -> Found:
        return Found.of(layer(x, statistics=ROW_STATISTICS, logsumexp=True))

    return layer, call


def _torch(layer: polyhead.MultiHeadAttention, *, averaged: bool) -> tuple[nn.Module, Callable[[Tensor], Found]]:
    module = layer.to_torch()

    def call(x: Tensor) -> Found:
        output, weights = module(x, x, x, need_weights=True, average_attn_weights=averaged)
        assert weights is not None and weights.ndim == (3 if averaged else 4)
        return Found(output)

    return module, call


def _step(
    contender: tuple[nn.Module, Callable[[Tensor], Found]],
    x: Tensor,
    upstream: Tensor,
    training: bool,
) -> Callable[[], Found]:
    module, call = contender
    if not training:

        def forward() -> Found:
            module.eval()
            with torch.no_grad():
                return call(x)

        return forward
    leaf = x.detach().clone().requires_grad_()
    parameters = [leaf, *module.parameters()]

    def step() -> Found:
        module.train()
        for parameter in parameters:
            parameter.grad = None
        found = call(leaf)
        found.output.backward(upstream)
        return found

    return step


def _checks(layer: polyhead.MultiHeadAttention, x: Tensor, shape: Shape, seed: int) -> Callable[[str, Found], None]:
    """Return a check of results against the layer's formula in float64, at rows of the last sequence."""
    drawn = torch.randperm(shape.tokens, generator=torch.Generator().manual_seed(seed))[:ROWS]
    index = drawn.sort().values.to(x.device)
    exact, plain = (_formula(layer, x[-1:], shape, index, dtype) for dtype in (torch.float64, x.dtype))

    def check(name: str, found: Found) -> None:
        hold(f"{name}: the output", found.output[-1:, index], exact.output, plain.output)
        for what, actual in found.rows.items():
            hold(f"{name}: {what}", actual[-1:, :, index], exact.rows[what], plain.rows[what])

    return check


def _formula(layer: polyhead.MultiHeadAttention, x: Tensor, shape: Shape, index: Tensor, dtype: torch.dtype) -> Found:
    def project(linear: nn.Linear, inputs: Tensor) -> Tensor:
        return inputs @ linear.weight.to(dtype).T + linear.bias.to(dtype)

    def split(linear: nn.Linear, heads: int) -> Tensor:
        return project(linear, x.to(dtype)).unflatten(-1, (heads, shape.head_dim)).transpose(1, 2)

    with torch.no_grad():
        query = split(layer.q_proj, shape.heads)
        key, value = (split(linear, shape.kv_heads) for linear in (layer.k_proj, layer.v_proj))
        found = formula(Problem(shape, False, query, key, value), index, dtype)
        return Found(project(layer.out_proj, found.output.transpose(1, 2).flatten(2)), found.rows)


def _backend(layer: polyhead.MultiHeadAttention, x: Tensor) -> str:
    with torch.no_grad():
        return layer(x[:1], statistics=ROW_STATISTICS, logsumexp=True).backend
