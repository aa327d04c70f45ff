"""Host overhead of a layer call on an undisturbed machine, by phase and attention route."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from polyhead.costs.calibration.calls import layer_call
from polyhead.costs.calibration.timing import Call, host_samples
from polyhead.costs.cost import layer_work
from polyhead.costs.timing.limits import route
from polyhead.costs.timing.machine import HostCost
from polyhead.costs.work import AttentionCore, Device, Work
from polyhead.costs.workload import Workload
from polyhead.layers import MultiHeadConfig

# (batch, tokens, heads, KV heads, head_dim) of layers with negligible device work. The host does some work for each
# sequence of a cache, and shared KV heads need operators of their own.
SMALL = ((1, 16, 2, 2, 64), (8, 64, 8, 1, 128), (32, 16, 4, 2, 64))
# Keys of a decoded token: few enough for one program, and enough to be split and combined.
FEW, MANY = 64, 4096
# The shortest sequences whose windows our kernels serve on a GPU, so that the host does not wait for the device.
LONG = ((1, 16_384, 2, 2, 64), (1, 8192, 8, 1, 64))
WINDOW = 8


@dataclass(frozen=True, slots=True)
class SmallLayer:
    """Layer call with negligible device work."""

    config: MultiHeadConfig
    workload: Workload

    def work(self, dtype: torch.dtype) -> Work:
        return layer_work(self.config, self.workload, dtype=dtype)


def small_layers(device: torch.device) -> Iterator[SmallLayer]:
    """Yield plain and windowed layers in each phase; on a GPU of several sizes, and windows without a mask tensor."""
    on_gpu = device.type == "cuda"
    for window in (None, WINDOW):
        for batch, tokens, heads, kv_heads, dim in SMALL if on_gpu else SMALL[:1]:
            config = _config(heads, kv_heads, dim, window)
            yield from _forward_and_training(config, batch, tokens)
            if window is None or on_gpu:
                past = MANY if on_gpu and window is None else FEW
                yield SmallLayer(config, Workload.decode(past=past, batch=batch))
    for batch, tokens, heads, kv_heads, dim in LONG if on_gpu else ():
        yield from _forward_and_training(_config(heads, kv_heads, dim, WINDOW), batch, tokens)


def _config(heads: int, kv_heads: int, dim: int, window: int | None) -> MultiHeadConfig:
    options = {"num_kv_heads": kv_heads, "causal": True, "window": window, "bias": False, "finite": True}
    return MultiHeadConfig(heads * dim, heads, **options)  # type: ignore[arg-type]


def _forward_and_training(config: MultiHeadConfig, batch: int, tokens: int) -> Iterator[SmallLayer]:
    yield SmallLayer(config, Workload.forward(tokens, batch=batch))
    yield SmallLayer(config, Workload.training_step(tokens, batch=batch))


class Host:
    """Host that is timed repeatedly, between other measurements.

    If other processes share its cores, a call takes up to twice as long from one moment to the next: it is slowed down,
    not interrupted. The fastest of many samples that are far apart is that of an undisturbed host, and reproducible.
    """

    def __init__(self, layers: Sequence[SmallLayer], device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.works = [layer.work(dtype) for layer in layers]
        self._calls = [layer_call(x.config, x.workload, device=device, dtype=dtype) for x in layers]
        self._launch = _launch_call(device, dtype)
        self._samples: list[list[float]] = [[] for _ in layers]
        self._launches: list[float] = []

    def visit(self, report: Callable[[str], None]) -> None:
        """Time every call once more; `report` is called with the name of the next."""
        self._launches += host_samples(self._launch, self.device)
        for work, call, samples in zip(self.works, self._calls, self._samples, strict=True):
            report(f"a call of a small layer, {work.phase}")
            samples += host_samples(call, self.device)

    @property
    def launch_seconds(self) -> float:
        return min(self._launches)

    @property
    def costs(self) -> tuple[HostCost, ...]:
        """Lowest cost of each layer so far."""
        kind: Device = "cuda" if self.device.type == "cuda" else "cpu"
        costs = []
        for work, samples in zip(self.works, self._samples, strict=True):
            cores = (x for x in work.pieces if isinstance(x, AttentionCore) and x.direction != "backward")
            (served,) = {route(core, kind) for core in cores}
            costs.append(HostCost(work.phase, served, min(samples), work.launches))
        return tuple(costs)


def _launch_call(device: torch.device, dtype: torch.dtype) -> Call:
    """Return a call of one operator on a tiny tensor."""
    x, weight = torch.randn(1, 8, device=device, dtype=dtype), torch.randn(8, 8, device=device, dtype=dtype)

    def call() -> None:
        with torch.no_grad():
            F.linear(x, weight)

    return call
