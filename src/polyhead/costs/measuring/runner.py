"""One way to time everything: contenders alternate within one run, so that their samples come in pairs.

Machines drift: another process wakes up, a clock falls, a card warms. A ratio of two medians taken minutes apart
carries that drift; the ratio of two samples taken one after the other hardly does.

On a GPU a sample follows a call of the same, as layers follow each other in a model: what is timed is how long a call
takes where calls come one after the other. A call whose kernels take longer than its Python is then as long as its
kernels, and one whose Python takes longer is as long as that.
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

ALTERNATIONS = 31
FEWEST = 7  # alternations of calls so slow that their time is limited
SAMPLE_SECONDS = 2e-3  # shorter samples measure the clock and the scheduler
WARM_UPS = 3
WARM_SECONDS = 0.5  # a call as slow as this is warm after one
LEAD_SECONDS = 5e-3  # beside a call as slow as this, its Python is nothing
OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True)
class Timings:
    """Milliseconds a call, one sample an alternation, in the order in which they were taken."""

    samples_ms: Mapping[str, list[float]]
    absent: Mapping[str, str] = field(default_factory=dict)  # who could not run, and why
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
    """Time every call once an alternation, in an order drawn anew for each.

    A call that runs out of memory while it is warmed up is recorded as such and left out; the others go on. Where
    `seconds` are given, slow calls get as many alternations as fit into them, and no fewer than `fewest`.
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
    """Leave what is there already out of every collection within: to look through all of torch takes half a second."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def is_out_of_memory(error: BaseException) -> bool:
    """The CPU's allocator has no error class of its own."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


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
    """The time of so many calls; `leads` go before them, whose kernels still run while the first is prepared."""
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
