"""Attention on a GPU: what row statistics cost in the forward and in training, and what the profile costs after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from benchmarks.measuring.agreement import Disagreement
from benchmarks.measuring.cases import Case, Entrants, Pair, Run, masked_name
from benchmarks.measuring.verdicts import Figure
from benchmarks.statistics_speed import contenders
from benchmarks.statistics_speed.contenders import (
    CUDNN,
    FLASH,
    FLEX,
    GUARDED,
    MATERIALISED,
    PENALTY,
    PROFILE,
    WITH,
    WITHOUT,
    TrainingStep,
)
from benchmarks.statistics_speed.exact import GRADIENT_TOKENS, Exact, Found, check_gradients, check_profile
from benchmarks.statistics_speed.places import LONG, Shape
from benchmarks.statistics_speed.problem import Problem
from polyhead import profile
from polyhead.costs.measuring.runner import Timings
from polyhead.ops.profile import AttentionProfile, BlockMap

STATISTICS_BOUND = 1.05  # with statistics / without, both ours
TRAINING_BOUND = 1.05
MAP = BlockMap(block=(128, 128))


def forward(run: Run, shape: Shape, causal: bool, *, compiled: bool = True) -> Iterator[Case]:
    """Yield ours with and without row statistics, kernels without any, and FlexAttention, which returns two."""
    problem = Problem.draw(run, shape, causal=causal)
    exact = Exact(problem, seed=run.seed)
    found = Entrants()
    enter_ours(found, exact, WITHOUT, lambda: contenders.with_rows(problem, ()))
    enter_ours(found, exact, WITH, lambda: contenders.with_rows(problem))
    if causal:  # without a mask there is nothing to guard
        enter_ours(found, exact, GUARDED, lambda: contenders.with_rows(problem, finite=False))
    for name in (CUDNN, FLASH):
        enter_sdpa(found, exact, name)
    if compiled:
        found.enter(
            FLEX, lambda: contenders.flex(problem), lambda result: exact.check(FLEX, contenders.read_flex(result))
        )
    else:
        found.absent[FLEX] = "left out of a quick look: to compile it takes longer than to measure it"
    pairs = [
        Pair(WITH, CUDNN, _forward_bound(shape)),
        Pair(WITH, WITHOUT, STATISTICS_BOUND),
        Pair(WITHOUT, CUDNN),
        Pair(WITH, FLASH),
        Pair(WITH, FLEX),
        Pair(GUARDED, WITH),
    ]
    yield found.case(masked_name("forward", causal), shape, pairs)


def materialised(run: Run, shape: Shape, causal: bool) -> Iterator[Case]:
    """Yield ours and materialised weights with the same statistics; our time alone where the weights do not fit."""
    problem = Problem.draw(run, shape, causal=causal)
    exact = Exact(problem, seed=run.seed)
    found = Entrants()
    enter_ours(found, exact, WITH, lambda: contenders.with_rows(problem))
    found.enter(
        MATERIALISED, lambda: contenders.materialised(problem), lambda result: exact.check(MATERIALISED, result)
    )
    bound = 1 / (45 if causal else 23) if LONG <= shape.tokens <= 16384 else None

    def alone(timings: Timings) -> list[Figure]:
        names = [WITH] if WITH in timings.samples_ms and MATERIALISED in timings.absent else []
        return [Figure.of_time(name, timings.samples_ms[name]) for name in names]

    yield found.case(masked_name("materialised", causal), shape, [Pair(WITH, MATERIALISED, bound)], figures=alone)


def backward(run: Run, shape: Shape, causal: bool) -> Iterator[Case]:
    """Yield forward + backward with gradients of the output alone, and of the output and the entropy."""
    problem = Problem.draw(run, shape, causal=causal)
    step, short = TrainingStep(problem, seed=run.seed), TrainingStep(problem.shortened(GRADIENT_TOKENS), seed=run.seed)
    builders: dict[str, Callable[[TrainingStep], Callable[[], tuple[Tensor, ...]]]] = {
        WITH: lambda step: step.ours(),
        PENALTY: lambda step: step.ours(penalty=True),
        CUDNN: lambda step: step.sdpa(CUDNN),
    }
    found = Entrants()
    for name, build in builders.items():
        enter_step(found, name, build, step, short)
    pairs = [Pair(WITH, CUDNN, TRAINING_BOUND), Pair(PENALTY, CUDNN), Pair(PENALTY, WITH)]
    yield found.case(masked_name("forward + backward", causal), shape, pairs)


def profiles(run: Run, shape: Shape, causal: bool) -> Iterator[Case]:
    """Yield column sums and the block map, given the log-sum-exp, and cuDNN's whole forward."""
    problem = Problem.draw(run, shape, causal=causal)
    found = Entrants()
    enter_profile(found, problem, MAP)
    enter_sdpa(found, Exact(problem, seed=run.seed), CUDNN)
    bound = None if shape.tokens < LONG else 0.7 if shape.head_dim >= 128 else 0.85
    yield found.case(masked_name("profile", causal), shape, [Pair(PROFILE, CUDNN, bound)])


def enter_profile(found: Entrants, problem: Problem, grid: BlockMap) -> bool:
    """Enter the profile, given the log-sum-exp of our forward; if that is wrong, so is the profile.

    The forward takes no part in the timing.
    """
    kept: list[Tensor] = []
    trial = Entrants()

    def keep(result: Any) -> None:
        Exact(problem).check_ours(PROFILE, Found.of(result))
        kept.append(result.logsumexp)

    if not trial.enter(PROFILE, lambda: contenders.with_rows(problem, ()), keep):
        found.failures += trial.failures
        return False
    (logsumexp,) = kept

    def call() -> AttentionProfile:
        return profile(
            problem.query,
            problem.key,
            logsumexp,
            mask=problem.mask,
            received=True,
            block_map=grid,
            backend=contenders.BACKEND,
        )

    return found.enter(PROFILE, lambda: call, lambda result: check_profile(PROFILE, problem, logsumexp, result))


def _forward_bound(shape: Shape) -> float | None:
    if shape.tokens < LONG:
        return None
    return 1.10 if shape.head_dim >= 128 else 1.15


def enter_ours(found: Entrants, exact: Exact, name: str, build: Callable[[], Callable[[], Any]]) -> bool:
    return found.enter(name, build, lambda result: exact.check_ours(name, Found.of(result)))


def enter_sdpa(found: Entrants, exact: Exact, name: str) -> None:
    found.enter(name, lambda: contenders.sdpa(exact.problem, name), lambda result: exact.check(name, Found(result)))


def enter_step(
    found: Entrants,
    name: str,
    build: Callable[[TrainingStep], Callable[[], tuple[Tensor, ...]]],
    step: TrainingStep,
    short: TrainingStep,
) -> None:
    """Enter a step whose gradients agree with float64 on a short problem, and are finite on the timed one."""
    entropy_upstream = short.entropy_upstream if name == PENALTY else None

    def check(grads: tuple[Tensor, ...]) -> None:
        check_gradients(name, short.problem, build(short)(), short.upstream, entropy_upstream)
        if not all(bool(grad.isfinite().all()) for grad in grads):
            raise Disagreement(f"{name}: a gradient is not finite")

    found.enter(name, lambda: build(step), check)
