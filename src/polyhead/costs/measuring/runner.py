"""Paired timings: contenders alternate within one run, so that their samples come in pairs.

Machines drift: another process starts, clock rates fall, a GPU heats up. A ratio of two medians taken minutes apart
includes that drift; the ratio of two consecutive samples hardly does.

On a GPU a sample follows a call of the same contender, as layers follow each other in a model. A call then takes as
long as its kernels, or as long as its Python if that takes longer.
"""

from __future__ import annotations

import contextlib
import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from polyhead.out_of_memory import is_out_of_memory

ALTERNATIONS = 31
FEWEST = 7  # alternations of slow calls, whose time is limited
SAMPLE_SECONDS = 2e-3  # shorter samples measure the clock and the scheduler
WARM_UPS = 3
WARM_SECONDS = 0.5  # warm-up ends after this time
LEAD_SECONDS = 5e-3  # the Python of slower calls is negligible
OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True)
class Timings:
    """Milliseconds per call, one sample per alternation, in the order of measurement."""

    samples_ms: Mapping[str, list[float]]
    absent: Mapping[str, str] = field(default_factory=dict)  # contenders that could not run, and the reasons
    peak_mib: Mapping[str, float] = field(default_factory=dict)

    def median_ms(self, name: str) -> float:
        return statistics.median(self.samples_ms[name])


def alternate(
    calls: Mapping[str, Callable[[], object]],
    *,
    device: torch.device,
    alternations: int = ALTERNATIONS,
    seed: int = 0,
    absent: Mapping[str, str] | None = None,
    seconds: float | None = None,
    fewest: int = FEWEST,
) -> Timings:
    """Time every call once per alternation, in random order.

    A call that runs out of memory during warm-up is recorded as `absent`. With `seconds`, slow calls get as many
    alternations as fit into that time, but at least `fewest`.
    """
    missing = dict(absent or {})
    warm: dict[str, WarmUp] = {}
    for name, call in calls.items():
        try:
            warm[name] = _warm_up(call, device)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            missing[name] = OUT_OF_MEMORY
        if name in missing and device.type == "cuda":
            torch.cuda.empty_cache()
    if seconds is not None and len(warm):
        fitting = int(seconds / sum(one.times * one.seconds for one in warm.values()))
        alternations = min(alternations, max(fewest, fitting))
    order = list(warm)
    shuffle = random.Random(seed).shuffle
    samples: dict[str, list[float]] = {name: [] for name in order}
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        for _ in range(alternations):
            shuffle(order)
            for name in order:
                times, taken = warm[name].times, warm[name].seconds
                leads = 1 if device.type == "cuda" and taken < LEAD_SECONDS else 0
                samples[name].append(1e3 * seconds_of(calls[name], times, device, leads) / times)
    finally:
        if enabled:
            gc.enable()
    ran = {name: samples[name] for name in calls if name in samples}
    peaks = {name: one.peak_mib for name, one in warm.items()} if device.type == "cuda" else {}
    return Timings(ran, missing, peaks)


@contextlib.contextmanager
def settled() -> Iterator[None]:
    """Exclude existing objects from garbage collection inside the block: scanning all of torch takes half a second."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class WarmUp(NamedTuple):
    """State of a call before it is measured."""

    times: int  # calls that make up one sample
    seconds: float  # of one call
    peak_mib: float  # of device memory


def _warm_up(call: Callable[[], object], device: torch.device) -> WarmUp:
    peak = 0.0
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) / 2**20
    taken = [seconds_of(call, 1, device)]
    while len(taken) < WARM_UPS and sum(taken) < WARM_SECONDS:
        taken.append(seconds_of(call, 1, device))
    times = max(1, math.ceil(SAMPLE_SECONDS / min(taken)))
    if times > 1:
        seconds_of(call, times, device)
    return WarmUp(times, min(taken), peak)


def seconds_of(call: Callable[[], object], times: int, device: torch.device, leads: int = 0) -> float:
    """Return the time of `times` calls, after `leads` calls whose kernels still run while the first is launched."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        for _ in range(leads):
            call()
        start.record()
        for _ in range(times):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3
    began = time.perf_counter()
    for _ in range(times):
        call()
    return time.perf_counter() - began
