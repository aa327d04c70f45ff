"""One token against a cache that no L2 holds: replays of a CUDA graph, the joining of the splits included."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from benchmarks.measuring.calls import caches_beyond
from benchmarks.measuring.cases import Case, Entrants, Pair, Run
from benchmarks.measuring.verdicts import Figure
from benchmarks.statistics_speed import contenders
from benchmarks.statistics_speed.contenders import CUDNN, WITH
from benchmarks.statistics_speed.exact import Exact, Found
from benchmarks.statistics_speed.places import DECODE_STATISTICS, Shape
from benchmarks.statistics_speed.problem import Problem
from polyhead.costs.measuring.gpu import l2_bytes, replayed
from polyhead.costs.measuring.runner import Timings
from polyhead.ops.decode.fused import CacheArguments, decode

BOUND = 1.0


def one_token(
    run: Run, shape: Shape, *, ours: Callable[[Problem], Callable[[], Found]] | None = None, bound: float = BOUND
) -> Iterator[Case]:
    """Log-sum-exp, largest logit and entropy beside the output, against cuDNN's output alone.

    `ours` builds our call for a problem; by default it calls the kernel's operator.
    """
    ours = ours or _ours
    first = Problem.draw(run, shape, queries=1)
    size = first.key.nbytes + first.value.nbytes
    count = caches_beyond(l2_bytes(run.device), size)
    problems = [first, *(Problem.draw(run, shape, queries=1, salt=salt) for salt in range(1, count))]
    exact = Exact(first, seed=run.seed)
    found = Entrants()
    found.enter(
        WITH,
        lambda: replayed([ours(problem) for problem in problems], run.device),
        lambda results: exact.check_ours(WITH, results[0]),
    )
    found.enter(
        CUDNN,
        lambda: replayed([_cudnn(problem) for problem in problems], run.device),
        lambda results: exact.check(CUDNN, results[0]),
    )

    def bandwidths(timings: Timings) -> list[Figure]:
        speeds = {name: size / timings.median_ms(name) / 1e9 for name in timings.samples_ms}
        return [Figure(f"bandwidth, {name}", speed, "TB/s") for name, speed in speeds.items()]

    notes = {"caches": count, "bytes": size}
    pairs = [Pair(WITH, CUDNN, bound)]
    yield found.case("decode one token", shape, pairs, notes=notes, items=count, figures=bandwidths)


def _ours(problem: Problem) -> Callable[[], Found]:
    cache = CacheArguments(problem.key, problem.value)

    def call() -> Found:
        with torch.no_grad():
            output, logsumexp, rows = decode(problem.query, cache, scale=problem.scale, names=DECODE_STATISTICS)
        return Found(output, {"logsumexp": logsumexp, **rows})

    return call


def _cudnn(problem: Problem) -> Callable[[], Found]:
    call = contenders.sdpa(problem, CUDNN)
    return lambda: Found(call())
