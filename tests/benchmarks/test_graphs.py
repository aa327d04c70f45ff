"""Calls as CUDA graphs: what they read lives as long as the graph does."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import Any

import pytest
import torch

from benchmarks.measuring.calls import on_its_own, step
from polyhead.costs.measuring.gpu import WARM_UPS, replayed


class Stream:
    def wait_stream(self, other: Any) -> None: ...


class Graph:
    replays = 0

    def replay(self) -> None:
        self.replays += 1


@pytest.fixture
def cuda(monkeypatch):
    """Just enough of a GPU to capture calls, which run as they are."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: contextlib.nullcontext())
    return torch.device("cuda")


def test_a_replay_gives_what_its_calls_gave_and_calls_nothing(cuda):
    called = []
    replay = replayed([lambda: called.append("a") or 1, lambda: called.append("b") or 2], cuda)
    assert called == ["a", "b"] * (WARM_UPS + 1)
    assert [replay(), replay()] == [[1, 2]] * 2
    assert (replay.graph.replays, len(called)) == (2, 2 * (WARM_UPS + 1))


def test_what_a_captured_training_step_reads_outlives_it(cuda):
    """Its input is a copy that nobody else holds; a replay after it was freed would read what is no longer there."""
    leaves = []

    def call(x: torch.Tensor) -> torch.Tensor:
        leaves.append(weakref.ref(x))
        return x * 2

    x = torch.ones(3)
    replay = on_its_own(lambda: step(call, x, torch.ones(3), [], True), cuda)()
    gc.collect()
    assert leaves[-1]() is not None
    assert replay().tolist() == [2.0] * 3
    del replay
    gc.collect()
    assert leaves[-1]() is None
