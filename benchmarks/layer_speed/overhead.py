"""Overhead of a call besides the arithmetic: Python, dispatch and bookkeeping.

At a width at which the arithmetic is negligible (one sequence of two tokens, 16 channels, 2 heads) the time of a call
is its overhead, since the same code runs as at any other size; with one thread, since waking others is no overhead of
a layer. At the smallest shape of the table the whole time is compared, overhead and arithmetic. The number of Python
and C functions that a call enters is reported as well, which is free of noise.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType

import torch

from benchmarks.layer_speed.contenders import CONTENDERS, FLOOR, OURS, PLAIN, TORCH, Shape, Weights
from benchmarks.layer_speed.layer import TORCH_BOUND, WITHOUT_GUESTS
from benchmarks.measuring.cases import Case, Pair, Run

VANISHING = Shape(1, 2, 16, 2)
SMALLEST = Shape(2, 10, 512, 8)


def overhead(run: Run, shape: Shape) -> Iterator[Case]:
    """Yield the forward in eval under no_grad, and while gradients are recorded. `shape` is not used."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield from _cases(run)
    finally:
        torch.set_num_threads(threads)


def _cases(run: Run) -> Iterator[Case]:
    for place in (VANISHING, SMALLEST):
        weights = Weights.random(place, device=run.device, dtype=run.dtype, seed=run.seed)
        x = run.inputs(place.batch, place.tokens, place.embed_dim, salt=7)
        modules = {name: CONTENDERS[name](weights, PLAIN) for name in WITHOUT_GUESTS}
        for mode in ("no_grad", "recording"):
            for module in modules.values():
                module.train(mode == "recording")
            calls = {name: _call(module, x, mode == "recording") for name, module in modules.items()}
            entered = {name: functions_entered(call) for name, call in calls.items()}
            pairs = [Pair(OURS, TORCH, TORCH_BOUND), Pair(OURS, FLOOR)]
            yield Case(f"overhead, {mode}", str(place), calls, pairs, notes={"functions_entered": entered})


def _call(module: torch.nn.Module, x: torch.Tensor, recording: bool) -> Callable[[], object]:
    def call() -> None:
        with torch.set_grad_enabled(recording):
            module(x)

    return call


def functions_entered(call: Callable[[], object]) -> int:
    """Return the number of Python and C functions that one call enters."""
    count = 0

    def watch(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    call()
    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(before)
    return count
