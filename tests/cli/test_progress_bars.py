"""Progress of commands whose stderr is no terminal: lines."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from polyhead.cli import progress_bars
from polyhead.progress import Progress, Step


@pytest.fixture
def clock(monkeypatch):
    """Seconds that a test sets, in this module alone: event loops of other threads read `time.monotonic` too."""
    now = [100.0]
    monkeypatch.setattr(progress_bars, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_a_line_has_the_percentage_and_the_time_left_of_the_step(clock):
    bars = progress_bars.ProgressBars()
    bars.report(Progress("Merge KV heads", 300, 1_300, "layers"))  # a resumed step: 300 layers took no time
    assert bars.line(107.0) == "Merge KV heads: 23%, 300 of 1,300 layers, 7 s so far"
    clock[0] = 110.0
    bars.report(Progress("Merge KV heads", 400, 1_300, "layers"))
    assert bars.line(110.0) == "Merge KV heads: 31%, 400 of 1,300 layers, 90 s left"
    assert bars.line(125.0) == "Merge KV heads: 31%, 400 of 1,300 layers, 75 s left", "it is 15 s since the last report"
    assert bars.line(999.0).endswith(", 0 s left"), "slower than estimated"
    clock[0] = 120.0
    bars.report(Progress("Merge KV heads", 401, 1_300, "layers"))
    assert bars.line(120.0).endswith(" 401 of 1,300 layers, 3 min left")
    bars.report(Progress("Merge KV heads", 1_300, 1_300, "layers"))
    assert bars.line(130.0) == "Merge KV heads: 100%, 1,300 of 1,300 layers, 30 s so far"


def test_a_step_of_unknown_length_has_the_time_so_far(clock):
    bars = progress_bars.ProgressBars()
    bars.report(Progress("Merge KV heads", 0, 1_300, "layers"))
    clock[0] = 140.0
    bars.report(Progress("Write"))
    assert bars.line(153.0) == "Write: 13 s so far"


def test_in_a_pipe_a_step_is_named_at_once_and_then_reported_every_few_seconds(capsys, monkeypatch):
    monkeypatch.setattr(progress_bars, "SECONDS_PER_LINE", 0.01)
    printed = threading.Semaphore(0)
    line = progress_bars.ProgressBars.line
    monkeypatch.setattr(progress_bars.ProgressBars, "line", lambda self, now: (printed.release(), line(self, now))[1])
    bars = progress_bars.ProgressBars()
    with bars as progress:
        step = Step(progress, "compute the gradient of every head", 4, "runs")
        assert capsys.readouterr().err.splitlines()[0] == "compute the gradient of every head"
        for _ in range(3):  # without a report of the step
            assert printed.acquire(timeout=60)
        step.advance()
    lines = capsys.readouterr().err.splitlines()
    assert "compute the gradient of every head: 0%, 0 of 4 runs, 0 s so far" in lines
    assert not bars.printer.is_alive(), "no line after the results"
