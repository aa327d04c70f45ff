"""Cost of exact statistics of every head: each figure of benchmarks/RESULTS.md, measured on the machine at hand."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from benchmarks.measuring.cases import Case, Run, Step, masked_name
from benchmarks.statistics_speed import attention, cpu, decode, layer, memory
from benchmarks.statistics_speed.places import PARTS, Shape, shapes_of
from polyhead.errors import OptionError

__all__ = ["PARTS", "Shape", "plan"]

_SECONDS = {"cuda": (1.0, 0.4), "cpu": (20.0, 4.0)}  # of one place, warming up apart; of a quick look
_QUICK_ALTERNATIONS, _QUICK_FEWEST = 11, 3


def plan(
    only: Sequence[str] = PARTS,
    shapes: Sequence[Shape] | None = None,
    *,
    quick: bool = False,
    seed: int = 0,
    gpu: torch.device | None = None,
) -> list[Step]:
    """The steps of a run, in the order of `PARTS`. Without a GPU there are those of the part "cpu" alone."""
    if unknown := [name for name in only if name not in PARTS]:
        raise OptionError(f"a part is one of {', '.join(PARTS)}; got {', '.join(unknown)}")
    steps: list[Step] = []
    for part in PARTS:
        if part not in only:
            continue
        if part == "cpu":
            steps += _cpu_steps(_run(torch.device("cpu"), quick, seed), shapes, quick)
        elif gpu is not None:
            steps += _gpu_steps(part, _run(gpu, quick, seed), shapes or shapes_of(part, quick=quick), quick)
    return steps


def _run(device: torch.device, quick: bool, seed: int) -> Run:
    options: dict[str, Any] = {"alternations": _QUICK_ALTERNATIONS, "fewest": _QUICK_FEWEST} if quick else {}
    return Run.on(device, seed=seed, quick=quick, seconds=_SECONDS[device.type][quick], **options)


def _gpu_steps(part: str, run: Run, shapes: Sequence[Shape], quick: bool) -> Iterator[Step]:
    once = {"memory": memory.memory, "layer": layer.layer, "decode": decode.one_token}
    both: dict[str, Callable[[Run, Shape, bool], Iterator[Case]]] = {
        "forward": functools.partial(attention.forward, compiled=not quick),
        "backward": attention.backward,
        "profile": attention.profiles,
        "materialised": attention.materialised,
    }
    for shape in shapes:
        if part in once:
            yield Step(part, str(shape), run, functools.partial(once[part], run, shape))
        else:
            yield from _both(part, both[part], run, shape)


def _cpu_steps(run: Run, shapes: Sequence[Shape] | None, quick: bool) -> Iterator[Step]:
    for shape in shapes or shapes_of("cpu", quick=quick):
        yield from _both("cpu", cpu.cpu, run, shape)
    for shape in shapes or shapes_of("cpu layer", quick=quick):
        yield Step("cpu", f"{shape}, layer", run, functools.partial(layer.layer, run, shape))


def _both(part: str, measure: Callable[[Run, Shape, bool], Iterator[Case]], run: Run, shape: Shape) -> Iterator[Step]:
    for causal in (False, True):
        yield Step(part, masked_name(shape, causal), run, functools.partial(measure, run, shape, causal))
