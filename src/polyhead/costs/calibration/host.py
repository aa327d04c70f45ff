"""Host overhead of a layer call on an undisturbed machine, by phase and by how its attention is served."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from polyhead.costs.calibration.layers import layer_call
from polyhead.costs.calibration.timing import Call, host_samples
from polyhead.costs.layer_work import layer_work
from polyhead.costs.timing.limits import route
from polyhead.costs.timing.machine import HostCost, Route
from polyhead.costs.work import AttentionCore, Device, Work
from polyhead.costs.workload import Workload
from polyhead.layers import MultiHeadConfig

# (batch, tokens, heads, KV heads, width of a head) of layers with next to nothing to compute. A host does something
# for each sequence of a cache, and heads that share keys take operators of their own.
SMALL = ((1, 16, 2, 2, 64), (8, 64, 8, 1, 128), (32, 16, 4, 2, 64))
SMALL_ON_A_CPU = SMALL[:1]
# Keys of a decoded token: so few that one program sees them all, and so many that they are split and joined.
FEW, MANY = 64, 4096
# The shortest whose windows our kernels take on a GPU, so that the device is not waited for.
LONG = ((1, 16_384, 2, 2, 64), (1, 8192, 8, 1, 64))
WINDOW = 8


@dataclass(frozen=True, slots=True)
class SmallLayer:
    """One with next to nothing to compute."""

    config: MultiHeadConfig
    work: Workload

    def counted(self, dtype: torch.dtype) -> Work:
        return layer_work(self.config, self.work, dtype=dtype)


def small_layers(device: torch.device) -> Iterator[SmallLayer]:
    """Plain and windowed, in each phase; on a GPU of several kinds, and windows that are no mask tensor too."""
    on_gpu = device.type == "cuda"
    for window in (None, WINDOW):
        for batch, tokens, heads, kv_heads, dim in SMALL if on_gpu else SMALL_ON_A_CPU:
            config = _config(heads, kv_heads, dim, window)
            yield from _called(config, batch, tokens)
            if window is None or on_gpu:
                yield SmallLayer(config, Workload.decode(past=MANY if on_gpu and window is None else FEW, batch=batch))
    for batch, tokens, heads, kv_heads, dim in LONG if on_gpu else ():
        yield from _called(_config(heads, kv_heads, dim, WINDOW), batch, tokens)


def _config(heads: int, kv_heads: int, dim: int, window: int | None) -> MultiHeadConfig:
    options = {"num_kv_heads": kv_heads, "causal": True, "window": window, "bias": False, "finite": True}
    return MultiHeadConfig(heads * dim, heads, **options)  # type: ignore[arg-type]


def _called(config: MultiHeadConfig, batch: int, tokens: int) -> Iterator[SmallLayer]:
    yield SmallLayer(config, Workload.forward(tokens, batch=batch))
    yield SmallLayer(config, Workload.training_step(tokens, batch=batch))


class Host:
    """A host that is visited again and again between other work.

    Where others share its cores, a call takes up to twice as long as a moment ago: it is slower, not interrupted. What
    they leave undisturbed is the fastest of many moments that lie apart, and the only one that comes back.
    """

    def __init__(self, layers: Sequence[SmallLayer], device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.layers = layers
        self.works = [layer.counted(dtype) for layer in layers]
        self._calls = [layer_call(x.config, x.work, device=device, dtype=dtype) for x in layers]
        self._launch = launch_call(device, dtype)
        self._samples: list[list[float]] = [[] for _ in layers]
        self._launches: list[float] = []

    def visit(self, told: Callable[[str], None]) -> None:
        """Time every call once more; `told` what comes next."""
        self._launches += host_samples(self._launch, self.device)
        for work, call, samples in zip(self.works, self._calls, self._samples, strict=True):
            told(f"a call of a small layer, {work.phase}")
            samples += host_samples(call, self.device)

    @property
    def launch_seconds(self) -> float:
        return min(self._launches)

    @property
    def costs(self) -> tuple[HostCost, ...]:
        """Of each layer, the least that it cost so far."""
        kind: Device = "cuda" if self.device.type == "cuda" else "cpu"
        found = []
        for work, samples in zip(self.works, self._samples, strict=True):
            found.append(HostCost(work.phase, _route(work, kind), min(samples), work.launches))
        return tuple(found)


def launch_call(device: torch.device, dtype: torch.dtype) -> Call:
    """One operator on next to nothing."""
    x, weight = torch.randn(1, 8, device=device, dtype=dtype), torch.randn(8, 8, device=device, dtype=dtype)

    def call() -> None:
        with torch.no_grad():
            F.linear(x, weight)

    return call


def _route(work: Work, device: Device) -> Route:
    cores = (piece for piece in work.pieces if isinstance(piece, AttentionCore) and piece.direction != "backward")
    (served,) = {route(core, device) for core in cores}
    return served
