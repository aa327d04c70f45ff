"""Statistics without a GPU: `blockwise` with them against PyTorch's own function without."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import polyhead
from benchmarks.measuring.cases import Case, Entrants, Pair, Run
from benchmarks.measuring.verdicts import Figure
from benchmarks.statistics_speed.contenders import WITH, TrainingStep
from benchmarks.statistics_speed.exact import GRADIENT_TOKENS, Exact, Found, check_gradients
from benchmarks.statistics_speed.places import LONG, ROW_STATISTICS, Shape
from benchmarks.statistics_speed.problem import Problem

PLAIN = "scaled_dot_product_attention"
FORWARD_BOUND = 1.5
TRAINING_BOUND = 2.0


class LargestTensor(TorchDispatchMode):
    """The most bytes of any tensor that an operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.nbytes = max([self.nbytes, *(x.nbytes for x in tree_leaves(out) if isinstance(x, Tensor))])
        return out


def cpu(run: Run, shape: Shape, causal: bool) -> Iterator[Case]:
    """Forward, then forward + backward."""
    problem = Problem.draw(run, shape, causal=causal)
    exact = Exact(problem, seed=run.seed)
    step, short = TrainingStep(problem, seed=run.seed), TrainingStep(problem.shortened(GRADIENT_TOKENS), seed=run.seed)
    found = Entrants()
    found.enter(WITH, lambda: _ours(problem), lambda result: exact.check_ours(WITH, Found.of(result)))
    found.enter(PLAIN, lambda: _sdpa(problem), lambda result: exact.check(PLAIN, Found(result)))
    yield _case("cpu", problem, found, FORWARD_BOUND)

    found = Entrants()
    for name, build in {WITH: _our_step, PLAIN: _sdpa_step}.items():
        found.enter(
            name,
            functools.partial(build, step),
            functools.partial(_check_gradients, name, build, short),
        )
    yield _case("cpu, forward + backward", problem, found, TRAINING_BOUND)


def _check_gradients(
    name: str, build: Callable[[TrainingStep], Callable[[], tuple[Tensor, ...]]], short: TrainingStep, _: object
) -> None:
    check_gradients(name, short.problem, build(short)(), short.upstream, None)


def _case(bench: str, problem: Problem, found: Entrants, bound: float) -> Case:
    figures = []
    if WITH in found.calls:
        with LargestTensor() as largest:
            found.calls[WITH]()
        # In the end it is the tile, which does not grow with the tokens; the weights grow with their square.
        weights = problem.shape.rows * problem.shape.tokens * problem.query.element_size()
        figures.append(Figure("largest tensor, of the weights' bytes", largest.nbytes / weights))
    pairs = [Pair(WITH, PLAIN, bound if problem.shape.tokens >= LONG else None)]
    name = f"{bench}, causal" if problem.causal else bench
    return found.case(name, problem.shape, pairs, figures=lambda timings: figures)


def _ours(problem: Problem) -> Callable[[], polyhead.AttentionOutput]:
    def call() -> polyhead.AttentionOutput:
        with torch.no_grad():
            return polyhead.attention(
                problem.query,
                problem.key,
                problem.value,
                mask=problem.mask,
                statistics=ROW_STATISTICS,
                logsumexp=True,
                backend="blockwise",
                finite=True,
            )

    return call


def _sdpa(problem: Problem) -> Callable[[], Tensor]:
    def call() -> Tensor:
        with torch.no_grad():
            return F.scaled_dot_product_attention(
                problem.query,
                problem.key,
                problem.value,
                is_causal=problem.causal,
                enable_gqa=problem.shape.group > 1,
            )

    return call


def _our_step(step: TrainingStep) -> Callable[[], tuple[Tensor, ...]]:
    return step.ours(backend="blockwise")


def _sdpa_step(step: TrainingStep) -> Callable[[], tuple[Tensor, ...]]:
    return step.sdpa(None)
