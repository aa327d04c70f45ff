"""Fixed, pruned and grown heads at equal compute: the compute is equal, and a run resumes."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from benchmarks import dynamic_heads
from benchmarks.app import app
from benchmarks.dynamic_heads import DIM, HEADS, SCHEDULES, TASKS, Result, read_results, rows, step_flops, train


@pytest.fixture
def tasks():
    return {name: build(None) for name, build in TASKS.items()}


@pytest.mark.parametrize("name", TASKS)
def test_flops_are_those_that_pytorch_counts_for_the_matrix_products(tasks, name):
    """The attention itself, of which PyTorch counts masked pairs too or nothing at all, is counted here."""
    task = tasks[name]
    batch = task.batch(torch.Generator().manual_seed(0))
    model, rows_of_batch = task.build(HEADS), len(batch[0])
    with FlopCounterMode(display=False) as counter:
        dynamic_heads.loss_of(model, batch).backward()
    counted = counter.get_flop_counts()["Global"]
    dense = sum(flops for op, flops in counted.items() if op is torch.ops.aten.mm or op is torch.ops.aten.addmm)
    decoded, source = (x // rows_of_batch for x in task.tokens)
    pairs = {"language": 2 * decoded**2 // 2, "translation": 2 * (source**2 + decoded**2 // 2 + decoded * source)}[name]
    attention = 3 * 4 * pairs * rows_of_batch * HEADS * DIM
    assert step_flops(model, task, rows_of_batch) == pytest.approx(dense + attention, rel=1e-9)


def test_every_schedule_spends_the_same_compute_and_ends_with_its_heads(tasks, monkeypatch):
    monkeypatch.setattr(dynamic_heads, "evaluate", lambda model, task: 3.0)
    results = {schedule: train(tasks["language"], schedule, 0, steps=10) for schedule in SCHEDULES}
    most = max(x.flops for x in results.values())
    assert {schedule: sum(x.heads) for schedule, x in results.items()} == {"fixed": 8, "prune": 4, "grow": 12}
    assert all(0.9 * most < x.flops <= most for x in results.values())
    assert results["prune"].steps >= 9


def test_a_run_resumes_from_its_file_and_prints_the_intervals(tmp_path, monkeypatch):
    monkeypatch.delenv("POLYHEAD_DATA", raising=False)
    calls = []

    def trained(task, schedule, seed, *, steps):
        calls.append((task.name, schedule, seed))
        return Result(task.name, schedule, seed, 3.0 + (schedule == "prune") + 0.1 * seed, 5, 10**12, [4, 4], 0.1)

    monkeypatch.setattr(dynamic_heads, "train", trained)
    arguments = ["dynamic_heads", "--output", str(tmp_path / "results.jsonl")]
    for extra in (["--only", "language", "--quick"], ["--only", "language"], []):
        result = CliRunner().invoke(app, [*arguments, *extra, "--commit", "abc"])
        assert result.exit_code == 0, result.output
    assert len(calls) == len(set(calls)) == 2 * 3 * 5
    assert {x.facts["commit"] for x in read_results(tmp_path / "results.jsonl")} == {"abc"}
    table = rows(read_results(tmp_path / "results.jsonl"))
    assert len(table) == 1 + 2 * 3
    assert table[1][4:] == ("3.200 ± 0.196", "", "5")
    assert table[2][4:] == ("4.200 ± 0.196", "+1.000 ± 0.000", "5")
