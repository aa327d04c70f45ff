"""Device time of a call, and host time of a call."""

from __future__ import annotations

import contextlib
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence

import torch

from polyhead.costs.measuring.gpu import replayed
from polyhead.costs.measuring.runner import seconds_of, settled

Call = Callable[[], object]
HARMLESS = "Attempting to run cuBLAS, but there was no current CUDA context"  # autograd's thread then creates one

GRAPHED_BELOW = 3e-3  # seconds of a call that is captured in a graph; the host time of longer ones is negligible
GRAPH_SECONDS, MAX_CALLS_PER_GRAPH = 1e-3, 20
SAMPLES = {"cuda": 7, "cpu": 25}
MIN_SAMPLES = 3
# Maximum host time of a call relative to its device time, since a busy host takes up to twice its shortest time.
MAX_HOST_SHARE = 0.5
SAMPLE_SECONDS = {"cuda": 5e-4, "cpu": 2e-4}  # shorter ones measure the clock
SLOW_SECONDS = 1e-2  # longer samples are taken `MIN_SAMPLES` times
HOST_CALLS = {"cuda": 20, "cpu": 5}
HOST_SAMPLES = {"cuda": 3, "cpu": 12}  # per visit


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Exclude existing objects from garbage collection, and ignore a harmless warning, during measurements."""
    with settled(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=HARMLESS)
        yield


def device_seconds(calls: Sequence[Call], device: torch.device, *, graphs: bool = True) -> float | None:
    """Return the seconds of one call from a few samples; `calls` do the same with other data and take turns.

    On a GPU short calls are replayed as a graph, which excludes their host time. Calls that cannot be captured
    (`graphs=False`) are timed as they are; None if the host takes about as long as the device.
    """
    calls[0]()  # compiles, allocates
    once = min(seconds_of(calls[0], 1, device) for _ in range(2))
    if device.type == "cuda" and graphs and once < GRAPHED_BELOW:
        count = max(1, min(MAX_CALLS_PER_GRAPH, int(GRAPH_SECONDS / once)), len(calls))
        return _sampled(replayed([calls[i % len(calls)] for i in range(count)], device), device) / count
    taken = _sampled(calls[0], device)
    if device.type == "cuda" and _issue_seconds(calls[0], device) > MAX_HOST_SHARE * taken:
        return None
    return taken


def _issue_seconds(call: Call, device: torch.device) -> float:
    """Return the host time of a call, without synchronisation."""
    taken = []
    for _ in range(MIN_SAMPLES):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    torch.cuda.synchronize(device)
    return min(taken)


def host_samples(call: Call, device: torch.device) -> list[float]:
    """Return seconds per call of several calls in a row, each with too little device work to wait for."""
    times = HOST_CALLS[device.type]
    seconds_of(call, times, device)
    return [seconds_of(call, times, device) / times for _ in range(HOST_SAMPLES[device.type])]


def _sampled(call: Call, device: torch.device) -> float:
    """Return the median sample on a GPU, whose clock varies, and the fastest on a CPU, which others may slow down."""
    once = min(seconds_of(call, 1, device) for _ in range(2))
    times = max(1, round(SAMPLE_SECONDS[device.type] / once))
    count = MIN_SAMPLES if once * times > SLOW_SECONDS else SAMPLES[device.type]
    samples = [seconds_of(call, times, device) / times for _ in range(count)]
    return min(samples) if device.type == "cpu" else statistics.median(samples)
