"""`python -m benchmarks replaced`: every row of its table runs, and nothing wrong is timed."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

import polyhead
from benchmarks import inspection_speed, replaced
from benchmarks.app import app
from benchmarks.measuring.cases import Run
from benchmarks.measuring.runner import rows_of
from benchmarks.statistics_speed import contenders, decode
from benchmarks.statistics_speed.contenders import CUDNN, GUARDED, PENALTY, PROFILE, WITH

CPU = torch.device("cpu")
RUN = Run(CPU, torch.float32, alternations=2, fewest=2, repetitions=0)
SMALL = "2x4/2x71x16"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small shapes, and the rows of a GPU with kernels that any machine has."""
    monkeypatch.setattr(replaced, "ATTENTION", {"cpu": {SMALL: (1.0, 2.0)}})
    monkeypatch.setattr(replaced, "STATISTICS", {"cpu": {SMALL: 3.0}})
    monkeypatch.setattr(replaced, "TRAINING", {SMALL: (4.0, 5.0)})
    monkeypatch.setattr(replaced, "DENSE_MASKS", {SMALL: (5.5, 5.6)})
    monkeypatch.setattr(replaced, "PROFILES", {SMALL: 6.0})
    monkeypatch.setattr(replaced, "DECODE", {SMALL: 7.0})
    monkeypatch.setattr(replaced, "LAYERS", {"cpu": {"2x5x32x4": (8.0, 9.0)}})
    monkeypatch.setattr(replaced, "ROUTED", {(2, 9, 32, 4, 2): (10.0, 11.0)})
    monkeypatch.setattr(contenders, "BACKEND", "blockwise")
    kernel = torch.nn.attention.SDPBackend.MATH
    monkeypatch.setattr(contenders, "SDPA", dict.fromkeys(contenders.SDPA, kernel))
    monkeypatch.setattr(decode, "l2_bytes", lambda device: 1)
    monkeypatch.setattr(decode, "replayed", lambda calls, device: lambda: [call() for call in calls])


def measured(part: str) -> list:
    return [row for _, build in replaced._places(part, "cpu") for row in rows_of(build(RUN), RUN)]


@pytest.mark.parametrize(
    ("part", "bounds"),
    [
        ("attention", [{(replaced.OURS, 1.0)}, {(replaced.OURS, 2.0)}]),
        ("statistics", [{(WITH, 3.0), (GUARDED, None)}] * 2),
        ("training", [{(WITH, 4.0), (PENALTY, 5.0)}] * 2),
        ("dense", [{(WITH, 5.5)}, {(WITH, 5.6)}]),
        ("profile", [{(PROFILE, 6.0)}] * 2),
        ("decode", [{(WITH, 7.0)}]),
        ("layer", [{(replaced.OURS, 8.0), (WITH, 9.0), (replaced.TORCH, None)}]),
        ("routed", [{("polyhead, 2 of 4 heads", 10.0)}, {("polyhead, 2 of 4 heads", 11.0)}]),
    ],
)
def test_every_part_is_timed_and_bounded(small, part, bounds):
    rows = measured(part)
    assert [{(c.subject, c.bound) for c in row.comparisons} for row in rows] == bounds
    assert not any(row.failed for row in rows)
    assert not any(row.timings.absent for row in rows)


def test_a_wrong_result_is_not_timed(small, monkeypatch):
    attention = polyhead.attention

    def wrong(*inputs, **options):
        result = attention(*inputs, **options)
        return replace(result, output=result.output * 1.01)

    monkeypatch.setattr(polyhead, "attention", wrong)
    for row in measured("attention"):
        assert "not timed" in row.failed
        assert not row.comparisons


def test_host_time_is_the_difference_of_the_calls():
    found = replaced.host_microseconds(lambda: time.sleep(1e-3), lambda: None, CPU, calls=2, rounds=3)
    assert found >= 1000
    assert replaced.host_microseconds(lambda: None, lambda: time.sleep(1e-3), CPU, calls=2, rounds=3) <= -1000


def test_host_time_has_a_bound_for_each_call(monkeypatch):
    monkeypatch.setattr(replaced, "host_microseconds", lambda *_: 25.0)
    ((row,),) = [list(rows_of(build(RUN), RUN)) for _, build in replaced._places("host", "cpu")]
    assert {figure.what: figure.verdict for figure in row.figures} == {
        "attention, beyond PyTorch's": "miss",
        "attention, causal, beyond PyTorch's": "miss",
        "statistics, beyond PyTorch's": "miss",
        "forward + backward, beyond PyTorch's": "ok",
    }


def test_a_gpu_has_every_part_and_a_cpu_those_it_can_run():
    def parts(device: torch.device, **options) -> list[str]:
        return [step.part for step in replaced.plan(replaced.PARTS, seed=0, device=device, **options)]

    assert list(dict.fromkeys(parts(torch.device("cuda"), quick=False))) == list(replaced.PARTS)
    assert parts(torch.device("cuda"), quick=True) == list(replaced.PARTS)
    assert tuple(parts(CPU, quick=True)) == replaced.ON_A_CPU
    places = [place for place, _ in replaced._places("observe", "cuda")]
    assert len(places) == 4
    assert all("16 layers" in place for place in places)
    assert inspection_speed.LAYERS == 16


def test_the_command_writes_its_rows(small, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(app, ["replaced", "--quick", "--only", "attention", "--output", str(tmp_path / "r.json")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "r.json").exists()
    assert "1 rows" in done.output
    assert CliRunner().invoke(app, ["replaced", "--only", "all"]).exit_code == 2
    assert CUDNN not in done.output
