"""Whole layers against each other: forward and training step, plain, causal and padded."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.layer_speed import agreement
from benchmarks.layer_speed.contenders import (
    CONTENDERS,
    FLOOR,
    FUSED_QKV,
    OURS,
    PLAIN,
    THREE_LINEAR,
    TORCH,
    TRUSTING,
    Setting,
    Shape,
    Weights,
)
from benchmarks.measuring.calls import FORWARD, TRAINING, step
from benchmarks.measuring.cases import Case, Entrants, Pair, Run

FLOOR_BOUND = 1.05
TORCH_BOUND = 1.0
WITHOUT_GUESTS = (OURS, TORCH, FUSED_QKV, THREE_LINEAR)
MASKED = (*WITHOUT_GUESTS, TRUSTING)


def layer(run: Run, shape: Shape) -> Iterator[Case]:
    """Yield self-attention without a mask by every contender, with bounds."""
    names = tuple(name for name in CONTENDERS if name != TRUSTING)  # without a mask there is nothing to guard
    yield from _cases("layer", run, shape, PLAIN, names, bounded=OURS)


def causal(run: Run, shape: Shape) -> Iterator[Case]:
    """Yield the same with a causal mask.

    The others assume that their input is finite, so the bounds are on ours with `finite=True`; ours with the guard
    against NaN is timed as well.
    """
    yield from _cases("causal", run, shape, Setting(causal=True), MASKED, bounded=TRUSTING)


def padded(run: Run, shape: Shape) -> Iterator[Case]:
    """Yield a right-padded batch, in the same way."""
    yield from _cases("padded", run, shape, Setting(lengths=padding(run, shape)), MASKED, bounded=TRUSTING)


def padding(run: Run, shape: Shape) -> Tensor:
    """Return lengths [batch] from half of the tokens to all; the first sequence is full if there are several."""
    generator = torch.Generator().manual_seed(run.seed)
    lengths = torch.randint((shape.tokens + 1) // 2, shape.tokens + 1, (shape.batch,), generator=generator)
    if shape.batch > 1:
        lengths[0] = shape.tokens
    return lengths.to(run.device)


def _cases(
    bench: str, run: Run, shape: Shape, setting: Setting, names: tuple[str, ...], *, bounded: str
) -> Iterator[Case]:
    weights = Weights.random(shape, device=run.device, dtype=run.dtype, seed=run.seed)
    x = run.inputs(shape.batch, shape.tokens, shape.embed_dim, salt=1)
    upstream = run.inputs(*x.shape, salt=2)
    pairs = [Pair(bounded, FLOOR, FLOOR_BOUND), Pair(bounded, TORCH, TORCH_BOUND)]
    pairs += [Pair(OURS, name) for name in names if name != OURS]
    # A layer may take one path in eval and another in training, and run out of memory on one alone.
    for mode in (FORWARD, TRAINING):
        found = Entrants()
        errors: dict[str, float] = {}

        def build(name: str, mode: str = mode) -> Callable[[], Tensor]:
            module = CONTENDERS[name](weights, setting).train(mode == TRAINING)
            return step(module, x, upstream, list(module.parameters()), mode == TRAINING)

        def check(name: str, output: Tensor, mode: str = mode, errors: dict[str, float] = errors) -> None:
            errors[name] = agreement.check_output(name, output, x, weights, setting, run.seed).error
            if mode == TRAINING:
                agreement.check_gradients(name, CONTENDERS[name], x, weights, setting, run.seed)

        for name in names:
            found.enter(name, functools.partial(build, name), functools.partial(check, name))
        yield found.case(f"{bench}, {mode}", shape, pairs, notes={"largest_error": errors})
