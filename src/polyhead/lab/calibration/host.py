"""What a call of a layer costs its host, by phase and by how its attention is served."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from polyhead.lab.calibration.layers import layer_call
from polyhead.lab.calibration.timing import host_seconds
from polyhead.layers import MultiHeadConfig
from polyhead.plan.layer_work import layer_work
from polyhead.plan.timing.limits import LARGEST_MASK, route
from polyhead.plan.timing.machine import HostCost
from polyhead.plan.work import AttentionCore, Work
from polyhead.plan.workload import Workload

WIDTH, HEADS, TOKENS, WINDOW = 128, 2, 16, 8


@dataclass(frozen=True, slots=True)
class SmallLayer:
    """One with next to nothing to compute."""

    config: MultiHeadConfig
    work: Workload

    def counted(self, dtype: torch.dtype) -> Work:
        return layer_work(self.config, self.work, dtype=dtype)


def small_layers(device: torch.device) -> Iterator[SmallLayer]:
    """Plain and windowed, in each phase; on a GPU also windows too long for a mask tensor."""
    tall = int(LARGEST_MASK**0.5) + 64
    for window, tokens, heads in ((None, TOKENS, HEADS), (WINDOW, TOKENS, HEADS), (WINDOW, tall, 1)):
        if tokens == tall and device.type == "cpu":
            continue
        width = WIDTH if heads == HEADS else WIDTH // HEADS
        config = MultiHeadConfig(width, heads, causal=True, window=window, bias=False, finite=True)
        yield SmallLayer(config, Workload.forward(tokens))
        yield SmallLayer(config, Workload.training_step(tokens))
        if window is None:
            yield SmallLayer(config, Workload.decode(past=tokens))


def measure_host(small: SmallLayer, device: torch.device, dtype: torch.dtype) -> HostCost:
    work = small.counted(dtype)
    (served,) = {route(piece) for piece in work.pieces if isinstance(piece, AttentionCore) and _is_forward(piece)}
    seconds = host_seconds(layer_call(small.config, small.work, device=device, dtype=dtype), device)
    return HostCost(work.phase, served, seconds, work.launches)


def measure_launch(device: torch.device, dtype: torch.dtype) -> float:
    """One operator on next to nothing."""
    x, weight = torch.randn(1, 8, device=device, dtype=dtype), torch.randn(8, 8, device=device, dtype=dtype)

    def call() -> None:
        with torch.no_grad():
            F.linear(x, weight)

    return host_seconds(call, device)


def _is_forward(piece: AttentionCore) -> bool:
    return piece.direction != "backward"
