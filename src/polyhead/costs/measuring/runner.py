"""One way to time everything: contenders alternate within one run, and a figure is the median of paired ratios.

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

import numpy as np
import torch
from torch import Tensor

ALTERNATIONS = 31
FEWEST = 7  # alternations of calls so slow that their time is limited
SAMPLE_SECONDS = 2e-3  # shorter samples measure the clock and the scheduler
WARM_UPS = 3
WARM_SECONDS = 0.5  # a call as slow as this is warm after one
LEAD_SECONDS = 5e-3  # beside a call as slow as this, its Python is nothing
RESAMPLES = 10_000
OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True)
class Ratio:
    """The median of paired ratios and the 95% bootstrap interval of that median."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        places = 3 if self.median >= 0.05 else 4
        return f"{self.median:.{places}f} [{self.low:.{places}f}, {self.high:.{places}f}]"


@dataclass(frozen=True)
class Comparison:
    """Ours over another contender. A miss is a median above the bound, however wide its interval."""

    subject: str
    against: str
    ratio: Ratio
    bound: float | None = None

    @property
    def missed(self) -> bool:
        return self.bound is not None and not self.ratio.median <= self.bound


@dataclass(frozen=True)
class Timings:
    """Milliseconds a call, one sample an alternation, in the order in which they were taken."""

    samples_ms: Mapping[str, list[float]]
    absent: Mapping[str, str] = field(default_factory=dict)  # who could not run, and why
    peak_mib: Mapping[str, float] = field(default_factory=dict)

    def median_ms(self, name: str) -> float:
        return statistics.median(self.samples_ms[name])

    def per(self, calls: int) -> Timings:
        """The same where each of the timed calls did something so many times."""
        divided = {name: [sample / calls for sample in samples] for name, samples in self.samples_ms.items()}
        return Timings(divided, self.absent, self.peak_mib)

    def fastest(self, *names: str) -> str | None:
        """The one with the smallest median among those that ran."""
        return min((name for name in names if name in self.samples_ms), key=self.median_ms, default=None)

    def compare(self, subject: str, against: str | None, bound: float | None = None) -> Comparison | None:
        """None where one of the two did not run."""
        if against is None or subject not in self.samples_ms or against not in self.samples_ms:
            return None
        return Comparison(subject, against, paired_ratio(self.samples_ms[subject], self.samples_ms[against]), bound)


def paired_ratio(ours: list[float], theirs: list[float], *, seed: int = 0) -> Ratio:
    """The median of ours[i] / theirs[i], with its interval by resampling the pairs.

    >>> print(paired_ratio([2.0, 4.0, 8.0], [1.0, 2.0, 4.0]))
    2.000 [2.000, 2.000]
    """
    if len(ours) != len(theirs) or not ours:
        raise ValueError(f"paired samples must be as many on both sides, got {len(ours)} and {len(theirs)}")
    ratios = np.asarray(ours) / np.asarray(theirs)
    drawn = np.random.default_rng(seed).integers(0, len(ratios), (RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(ratios[drawn], axis=1), [2.5, 97.5])
    return Ratio(float(np.median(ratios)), float(low), float(high))


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


@dataclass(frozen=True)
class Run:
    """Settings of one run of a benchmark."""

    device: torch.device
    dtype: torch.dtype
    alternations: int = ALTERNATIONS
    seed: int = 0
    seconds: float | None = None  # of one place of the benchmark, warming up apart
    fewest: int = FEWEST

    def inputs(self, *size: int, salt: int = 0) -> Tensor:
        """Random numbers, never zeros: some processors are faster on zeros.

        They are drawn on the CPU, so that a seed means the same numbers on every device.
        """
        generator = torch.Generator().manual_seed(1000 * self.seed + salt)
        return torch.randn(*size, generator=generator).to(self.device, self.dtype)

    def time(self, calls: Mapping[str, Callable[[], object]], absent: Mapping[str, str] | None = None) -> Timings:
        return alternate(
            calls,
            device=self.device,
            alternations=self.alternations,
            seed=self.seed,
            absent=absent,
            seconds=self.seconds,
            fewest=self.fewest,
        )


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
