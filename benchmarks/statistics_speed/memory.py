"""Memory of statistics at 131,072 tokens: rows, and nothing that grows with their square."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.measuring.cases import Case, Entrants, Pair, Run, tidy
from benchmarks.measuring.verdicts import Figure
from benchmarks.statistics_speed import contenders
from benchmarks.statistics_speed.attention import logsumexp_of, profile_of
from benchmarks.statistics_speed.contenders import CUDNN, PROFILE, WITH
from benchmarks.statistics_speed.exact import Exact, Found, check_profile
from benchmarks.statistics_speed.places import ROW_STATISTICS, Shape
from benchmarks.statistics_speed.problem import Problem
from polyhead.costs.measuring.runner import Timings
from polyhead.ops.profile import BlockMap

BYTES_BOUND = 24.0  # a (batch, head, row), for log-sum-exp, largest logit, entropy and reach
GROWTH_BOUND = 2.05  # of the bytes beyond inputs and output when the tokens double; n² would be 4
MAP = BlockMap(resolution=(256, 256))  # the same picture at any length


def memory(run: Run, shape: Shape) -> Iterator[Case]:
    """Bytes beyond inputs and output, causal; the time stands beside it."""
    half = replace(shape, tokens=shape.tokens // 2)
    yield _forward_case(run, shape, _extra_of_forward(run, half))
    tidy()
    yield _profile_case(run, shape, _extra_of_profile(run, half))


def _forward_case(run: Run, shape: Shape, smaller: int | None) -> Case:
    problem = Problem.draw(run, shape, causal=True)
    exact = Exact(problem, seed=run.seed)
    found = Entrants()
    figures = []
    if found.enter(
        WITH,
        lambda: contenders.ours(problem, ROW_STATISTICS),
        lambda result: exact.check_ours(WITH, Found.of(result)),
    ):
        extra = extra_bytes(run.device, found.calls[WITH], lambda result: [result.output])
        figures = _figures(extra, smaller, shape, BYTES_BOUND)
    found.enter(CUDNN, lambda: contenders.sdpa(problem, CUDNN), lambda result: exact.check(CUDNN, Found(result)))
    return found.case("memory, forward, causal", shape, [Pair(WITH, CUDNN)], figures=lambda timings: figures)


def _profile_case(run: Run, shape: Shape, smaller: int | None) -> Case:
    problem = Problem.draw(run, shape, causal=True)
    found = Entrants()
    figures = []
    logsumexp = logsumexp_of(found, problem)
    if logsumexp is not None and found.enter(
        PROFILE,
        lambda: profile_of(problem, logsumexp, MAP),
        lambda result: check_profile(PROFILE, problem, logsumexp, result),
    ):
        extra = extra_bytes(run.device, found.calls[PROFILE], lambda result: [result.received, result.block_map])
        figures = _figures(extra, smaller, shape, None)

    def all_figures(timings: Timings) -> list[Figure]:
        samples = timings.samples_ms.get(PROFILE)
        return figures if samples is None else [*figures, Figure.of_time("profile, time", samples)]

    return found.case("memory, profile, causal", shape, figures=all_figures)


def _extra_of_forward(run: Run, shape: Shape) -> int | None:
    problem = Problem.draw(run, shape, causal=True)
    found = Entrants()
    if not found.enter(WITH, lambda: contenders.ours(problem, ROW_STATISTICS), _unchecked):
        return None
    return extra_bytes(run.device, found.calls[WITH], lambda result: [result.output])


def _extra_of_profile(run: Run, shape: Shape) -> int | None:
    problem = Problem.draw(run, shape, causal=True)
    logsumexp = logsumexp_of(Entrants(), problem)
    found = Entrants()
    if logsumexp is None or not found.enter(PROFILE, lambda: profile_of(problem, logsumexp, MAP), _unchecked):
        return None
    return extra_bytes(run.device, found.calls[PROFILE], lambda result: [result.received, result.block_map])


def _unchecked(result: object) -> None:
    """At half the length nothing is timed; the whole length is checked."""


def extra_bytes(device: torch.device, call: Callable[[], Any], own: Callable[[Any], list[Tensor]]) -> int:
    """The peak of a call's memory less what was there before it and less what it was called for."""
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before - sum(x.nbytes for x in own(result))


def _figures(extra: int, smaller: int | None, shape: Shape, bound: float | None) -> list[Figure]:
    figures = [Figure("beyond inputs and output", extra / shape.rows, "bytes a row", bound)]
    if smaller is not None:
        growth = extra / smaller if smaller else float(extra > 0)
        figures.append(Figure("the same over that of half the tokens", growth, "", GROWTH_BOUND))
    return figures
