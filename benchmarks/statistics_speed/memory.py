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
from benchmarks.statistics_speed.attention import enter_ours, enter_profile, enter_sdpa
from benchmarks.statistics_speed.contenders import CUDNN, PROFILE, WITH
from benchmarks.statistics_speed.exact import Exact
from benchmarks.statistics_speed.places import Shape
from benchmarks.statistics_speed.problem import Problem
from polyhead.costs.measuring.runner import Timings
from polyhead.ops.profile import BlockMap

BYTES_BOUND = 24.0  # a (batch, head, row), for log-sum-exp, largest logit, entropy and reach
GROWTH_BOUND = 2.05  # of the bytes beyond inputs and output when the tokens double; n² would be 4
MAP = BlockMap(resolution=(256, 256))  # the same picture at any length


def memory(run: Run, shape: Shape) -> Iterator[Case]:
    """Yield the bytes beyond inputs and output of causal calls, and their times."""
    half = replace(shape, tokens=shape.tokens // 2)
    yield _forward_case(run, shape, _bytes_of_forward(Entrants(), _exact(run, half)))
    tidy()
    yield _profile_case(run, shape, _bytes_of_profile(Entrants(), _exact(run, half)))


def _exact(run: Run, shape: Shape) -> Exact:
    return Exact(Problem.draw(run, shape, causal=True), seed=run.seed)


def _forward_case(run: Run, shape: Shape, smaller: int | None) -> Case:
    found, exact = Entrants(), _exact(run, shape)
    figures = _figures(_bytes_of_forward(found, exact), smaller, shape, BYTES_BOUND)
    enter_sdpa(found, exact, CUDNN)
    return found.case("memory, forward, causal", shape, [Pair(WITH, CUDNN)], figures=lambda timings: figures)


def _profile_case(run: Run, shape: Shape, smaller: int | None) -> Case:
    found = Entrants()
    figures = _figures(_bytes_of_profile(found, _exact(run, shape)), smaller, shape, None)

    def all_figures(timings: Timings) -> list[Figure]:
        samples = timings.samples_ms.get(PROFILE)
        return figures if samples is None else [*figures, Figure.of_time("profile, time", samples)]

    return found.case("memory, profile, causal", shape, figures=all_figures)


def _bytes_of_forward(found: Entrants, exact: Exact) -> int | None:
    """Enter our forward, and return its bytes beyond inputs and output; None if it cannot run or is wrong."""
    if not enter_ours(found, exact, WITH, lambda: contenders.with_rows(exact.problem)):
        return None
    return extra_bytes(exact.problem.query.device, found.calls[WITH], lambda result: [result.output])


def _bytes_of_profile(found: Entrants, exact: Exact) -> int | None:
    """Enter the profile, and return its bytes beyond inputs and output; None if it cannot run or is wrong."""
    if not enter_profile(found, exact.problem, MAP):
        return None
    device = exact.problem.query.device
    return extra_bytes(device, found.calls[PROFILE], lambda result: [result.received, result.block_map])


def extra_bytes(device: torch.device, call: Callable[[], Any], own: Callable[[Any], list[Tensor]]) -> int:
    """Return the peak memory of a call without what was allocated before it and without its results."""
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before - sum(x.nbytes for x in own(result))


def _figures(extra: int | None, smaller: int | None, shape: Shape, bound: float | None) -> list[Figure]:
    if extra is None:
        return []
    figures = [Figure("beyond inputs and output", extra / shape.rows, "bytes a row", bound)]
    if smaller is not None:
        growth = extra / smaller if smaller else float(extra > 0)
        figures.append(Figure("the same over that of half the tokens", growth, "", GROWTH_BOUND))
    return figures
