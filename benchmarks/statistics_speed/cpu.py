"""Statistics without a GPU: `blockwise` with them against PyTorch's own function without."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.measuring.cases import Case, Entrants, Pair, Run, masked_name
from benchmarks.measuring.verdicts import Figure
from benchmarks.statistics_speed import contenders
from benchmarks.statistics_speed.attention import enter_ours, enter_step
from benchmarks.statistics_speed.contenders import WITH, TrainingStep
from benchmarks.statistics_speed.exact import GRADIENT_TOKENS, Exact, Found
from benchmarks.statistics_speed.places import LONG, Shape
from benchmarks.statistics_speed.problem import Problem

BACKEND = "blockwise"
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
    enter_ours(found, exact, WITH, lambda: contenders.with_rows(problem, backend=BACKEND))
    found.enter(PLAIN, lambda: contenders.pytorch(problem), lambda result: exact.check(PLAIN, Found(result)))
    yield _case("cpu", problem, found, FORWARD_BOUND)

    found = Entrants()
    enter_step(found, WITH, lambda step: step.ours(backend=BACKEND), step, short)
    enter_step(found, PLAIN, lambda step: step.sdpa(None), step, short)
    yield _case("cpu, forward + backward", problem, found, TRAINING_BOUND)


def _case(bench: str, problem: Problem, found: Entrants, bound: float) -> Case:
    figures = []
    if WITH in found.calls:
        with LargestTensor() as largest:
            found.calls[WITH]()
        # In the end it is the tile, which does not grow with the tokens; the weights grow with their square.
        weights = problem.shape.rows * problem.shape.tokens * problem.query.element_size()
        figures.append(Figure("largest tensor, of the weights' bytes", largest.nbytes / weights))
    pairs = [Pair(WITH, PLAIN, bound if problem.shape.tokens >= LONG else None)]
    return found.case(masked_name(bench, problem.causal), problem.shape, pairs, figures=lambda timings: figures)
