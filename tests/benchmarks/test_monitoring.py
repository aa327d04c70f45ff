"""The cost of a monitor: whole training steps of one model, with and without it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from benchmarks import monitoring
from benchmarks.measuring.cases import Case, Run
from benchmarks.measuring.runner import rows_of

PLACE = monitoring.Place(1, 32, 2, 2, 32, 2, 9, 20)


@pytest.fixture
def run(monkeypatch) -> Run:
    monkeypatch.setattr(monitoring, "BACKEND", "eager")  # a benchmark would take minutes of Inductor
    monkeypatch.setattr(monitoring, "STEPS", 3)
    return Run(torch.device("cpu"), torch.float32, 2, 0, 0.2, 2, repetitions=0)


def cases(run: Run) -> Iterator[Case]:
    for mode in monitoring.PARTS.values():
        yield from monitoring.measure(run, PLACE, mode)


def test_steps_are_timed_with_a_monitor_of_every_step_and_of_every_tenth(run, monkeypatch):
    """Those that are called compiled run compiled code."""
    ran, rows = [], []
    monkeypatch.setattr(monitoring, "BACKEND", lambda graph, _: lambda *args: ran.append(graph) or graph(*args))
    for case in cases(run):
        for name, call in case.calls.items():
            ran.clear()
            call()
            assert (len(ran) >= monitoring.STEPS) == name.endswith(monitoring.COMPILED), name
        rows += rows_of([case], run)
    eager, compiled = rows
    assert eager.failed == compiled.failed == ""
    assert set(eager.timings.samples_ms) == {monitoring.PLAIN, monitoring.EVERY, monitoring.TENTH}
    assert {(x.subject, x.against) for x in eager.comparisons} == {
        (monitoring.EVERY, monitoring.PLAIN),
        (monitoring.TENTH, monitoring.PLAIN),
    }
    every, tenth, plain = (x + monitoring.COMPILED for x in (monitoring.EVERY, monitoring.TENTH, monitoring.PLAIN))
    assert set(compiled.timings.samples_ms) == {every, tenth, plain, monitoring.PLAIN}
    assert {x.subject for x in compiled.comparisons} == {every, tenth}
    assert {x.against for x in compiled.comparisons} <= {plain, monitoring.PLAIN}


def test_a_monitor_that_leaves_a_column_out_is_not_timed(run, monkeypatch):
    from polyhead.training import head_signals

    monkeypatch.setattr(head_signals, "output_matrix", lambda *_: None)  # as if W_O were quantised
    eager, compiled = rows_of(cases(run), run)
    assert set(eager.timings.samples_ms) == {monitoring.PLAIN}
    assert set(compiled.timings.samples_ms) == {monitoring.PLAIN, monitoring.PLAIN + monitoring.COMPILED}
    assert "the monitor has no values of output_norm" in eager.failed
    assert "the monitor has no values of output_norm" in compiled.failed
