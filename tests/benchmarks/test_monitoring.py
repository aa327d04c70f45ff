"""The cost of a monitor: whole training steps of one model, with and without it."""

from __future__ import annotations

import pytest
import torch

from benchmarks import monitoring
from benchmarks.measuring.cases import Run
from benchmarks.measuring.runner import rows_of

PLACE = monitoring.Place(1, 32, 2, 2, 32, 2, 9, 20)


@pytest.fixture
def run() -> Run:
    return Run(torch.device("cpu"), torch.float32, 2, 0, 0.2, 2, repetitions=0)


def test_steps_are_timed_with_a_monitor_of_every_step_and_of_every_tenth(run):
    (row,) = rows_of(monitoring.measure(run, PLACE), run)
    assert row.failed == ""
    assert set(row.timings.samples_ms) == {monitoring.PLAIN, monitoring.EVERY, monitoring.TENTH}
    assert {(x.subject, x.against) for x in row.comparisons} == {
        (monitoring.EVERY, monitoring.PLAIN),
        (monitoring.TENTH, monitoring.PLAIN),
    }


def test_a_monitor_that_leaves_a_column_out_is_not_timed(run, monkeypatch):
    from polyhead.training import head_signals

    monkeypatch.setattr(head_signals, "output_matrix", lambda *_: None)  # as if W_O were quantised
    (row,) = rows_of(monitoring.measure(run, PLACE), run)
    assert set(row.timings.samples_ms) == {monitoring.PLAIN}
    assert "the monitor has no values of output_norm" in row.failed
