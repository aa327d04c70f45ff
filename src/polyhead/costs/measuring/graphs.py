"""Calls as CUDA graphs, which leave out what they cost the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

T = TypeVar("T")
WARM_UPS = 3


@dataclass(frozen=True, eq=False)
class Replay(Generic[T]):
    """Calls as one CUDA graph. What they read was not allocated for it, so that they are kept for as long as it is."""

    graph: torch.cuda.CUDAGraph
    calls: Sequence[Callable[[], T]]
    results: list[T]

    def __call__(self) -> list[T]:
        self.graph.replay()
        return self.results


def replayed(calls: Sequence[Callable[[], T]], device: torch.device) -> Replay[T]:
    """All calls, one after the other, as one CUDA graph: what is left is the device's own time."""
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
