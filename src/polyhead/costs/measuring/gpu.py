"""CUDA graphs of calls, to time them without host overhead, and working sets larger than the L2 cache of a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

T = TypeVar("T")
WARM_UPS = 3
TIMES_L2 = 3  # total size of the KV caches in turn, in multiples of the L2 cache


@dataclass(frozen=True, eq=False)
class Replay(Generic[T]):
    """Calls as one CUDA graph; the calls are referenced because the graph reads their tensors."""

    graph: torch.cuda.CUDAGraph
    calls: Sequence[Callable[[], T]]
    results: list[T]

    def __call__(self) -> list[T]:
        self.graph.replay()
        return self.results


def replayed(calls: Sequence[Callable[[], T]], device: torch.device) -> Replay[T]:
    """Capture all calls, one after the other, in one CUDA graph, whose replay has no host overhead per call."""
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            for call in calls:
                call()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [call() for call in calls]
    return Replay(graph, calls, results)


def l2_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).L2_cache_size
