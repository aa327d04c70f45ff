"""Benchmark of the viewer: every wait is timed, and a wrong tile is reported."""

from __future__ import annotations

import pytest
import torch

from benchmarks import viewer_speed as speed
from benchmarks.measuring.cases import Run
from benchmarks.measuring.runner import rows_of
from polyhead.report.viewer import tiles


@pytest.fixture
def small():
    return Run(torch.device("cpu"), torch.float32, 3, 0, 0.2, 3, repetitions=0)


@pytest.mark.parametrize("causal", [True, False])
def test_every_wait_is_timed(small, causal):
    (row,) = rows_of(speed.measure(small, speed.Place(131, causal, heads=4, kv_heads=2, head_dim=7)), small)
    assert row.failed == ""
    assert set(row.timings.samples_ms) == {speed.FIRST, speed.PICTURE, speed.TILE, speed.TOKEN, speed.PLAIN}
    assert {figure.what: figure.bound for figure in row.figures} == speed.BOUNDS_MS
    assert all(figure.low <= figure.value <= figure.high for figure in row.figures)
    (compared,) = row.comparisons
    assert (compared.subject, compared.against) == (speed.TILE, speed.PLAIN)


def test_a_tile_that_is_wrong_is_refused(small, monkeypatch):
    true = tiles.window
    monkeypatch.setattr(tiles, "window", lambda *arguments: 1.01 * true(*arguments))
    (row,) = rows_of(speed.measure(small, speed.Place(131, True, heads=4, kv_heads=2, head_dim=7)), small)
    assert "a tile is off by" in row.failed


def test_a_plan_has_both_kinds_at_the_length_of_the_promise():
    assert [step.place for step in speed.plan()] == [
        "9/3 heads of 64, 32768 tokens, causal",
        "9/3 heads of 64, 32768 tokens",
    ]
    assert "4096 tokens" in speed.plan(quick=True)[0].place
