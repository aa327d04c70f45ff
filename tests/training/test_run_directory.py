"""A run directory has each step once, whatever ends the process, and its steps can be compared."""

from __future__ import annotations

import dataclasses
import os
import signal
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from torch import nn

import polyhead
from polyhead import MultiHeadAttention
from polyhead.errors import OptionError
from polyhead.inspection import load_inspection, save_inspection
from polyhead.inspection.run_files import STEPS
from polyhead.training import (
    HeadHistory,
    HeadLocation,
    HeadMonitor,
    RunDirectory,
    head_history,
    inspect_step,
    load_run,
    run_directory,
)

pytest.importorskip("pyarrow")
HEADS = 3
STATISTICS = ("max_logit", "entropy")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([MultiHeadAttention(12, HEADS, causal=True) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).output
        return x


def train(monitor: HeadMonitor, steps: int) -> None:
    """Train to a number of steps, with data that depend on the number of the step."""
    optimizer = torch.optim.SGD(monitor.model.parameters(), lr=0.1)
    with monitor:
        while monitor.steps < steps:
            generator = torch.Generator().manual_seed(monitor.steps)
            loss = monitor.model(torch.randn(2, 7, 12, generator=generator)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss)


def model() -> nn.Module:
    torch.manual_seed(0)
    return Model().train()


def monitor_of(folder: Path | None, network: nn.Module | None = None, **options) -> HeadMonitor:
    callbacks = [] if folder is None else [RunDirectory(folder, **options)]
    return HeadMonitor(network or model(), statistics=STATISTICS, callbacks=callbacks)


def assert_same(history: HeadHistory, expected: HeadHistory) -> None:
    assert history.steps == expected.steps
    assert history.losses == expected.losses
    assert history.heads == expected.heads
    assert history.columns == expected.columns
    for name in history.columns:
        torch.testing.assert_close(history[name], expected[name], rtol=0, atol=0, equal_nan=True)


def test_a_run_comes_back_and_any_reader_of_parquet_reads_it(tmp_path, monkeypatch):
    monkeypatch.setattr(run_directory, "PART_ROWS", 4 * 2 * HEADS)  # 4 steps
    monitor = monitor_of(tmp_path / "run")
    train(monitor, 11)
    assert_same(load_run(tmp_path / "run"), monitor.history)
    parts = sorted(path.name for path in (tmp_path / "run" / STEPS).iterdir())
    assert parts == ["000000000000.parquet", "000000000004.parquet", "000000000008.parquet"]
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_parquet(tmp_path / "run" / STEPS)
    assert frame.to_dict("list") == monitor.history.rows()
    assert list(frame.columns[:8]) == ["step", "loss", "site", "kind", "stack", "layer", "head", "original_head"]


def test_every_kth_step_is_written(tmp_path):
    train(monitor_of(tmp_path, every=3), 8)
    assert load_run(tmp_path).steps == (0, 3, 6)


def test_memory_is_bounded_by_one_file(tmp_path, monkeypatch):
    monkeypatch.setattr(run_directory, "PART_ROWS", 4 * 2 * HEADS)
    monitor = monitor_of(tmp_path)
    train(monitor, 21)
    assert len(monitor.callbacks[0]._part) <= 4


@pytest.mark.parametrize("rows", [1 << 17, 1], ids=["one file", "a file for each step"])
@pytest.mark.parametrize("is_resumed", [False, True])
def test_all_steps_of_a_run_have_the_same_heads(tmp_path, monkeypatch, rows, is_resumed):
    monkeypatch.setattr(run_directory, "PART_ROWS", rows)
    monitor = monitor_of(tmp_path)
    train(monitor, 2)
    writer = monitor.callbacks[0]
    if is_resumed:
        state, writer = writer.state_dict(), RunDirectory(tmp_path)
        writer.load_state_dict(state)
    (*_, last) = monitor.history.records()
    fewer = dataclasses.replace(last, step=2, heads=last.heads[1:], values=last.values[:, 1:], measured=None)
    with pytest.raises(OptionError, match="must have the same heads and statistics"):
        writer.on_record(fewer)
    writer.on_exit()
    assert load_run(tmp_path).steps == (0, 1)


def test_the_history_of_a_monitor_keeps_the_latest_steps(monkeypatch):
    monkeypatch.setattr(head_history, "KEPT_VALUES", 5 * len(STATISTICS) * 2 * HEADS)
    monitor = monitor_of(None)
    train(monitor, 8)
    assert monitor.history.steps == (3, 4, 5, 6, 7)
    assert len(monitor.history.losses) == len(monitor.history["entropy"]) == 5
    assert repr(monitor.history).startswith("HeadHistory(5 steps of 6 heads, 3 before them dropped: ")
    resumed = monitor_of(None)
    resumed.load_state_dict(monitor.state_dict())
    train(resumed, 9)
    assert (resumed.history.steps, resumed.history.dropped) == ((4, 5, 6, 7, 8), 4)


def _killed(folder: Path) -> None:
    """Train with a checkpoint after 5 steps, and be killed after 9."""
    torch.set_num_threads(1)  # the threads of the parent are not here
    run_directory.SAVE_SECONDS = 0.0
    monitor = monitor_of(folder / "run")
    optimizer = torch.optim.SGD(monitor.model.parameters(), lr=0.1)
    with monitor:
        for step in range(9):
            loss = monitor.model(torch.randn(2, 7, 12, generator=torch.Generator().manual_seed(step))).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss)
            if step == 4:
                torch.save((monitor.model.state_dict(), monitor.state_dict()), folder / "checkpoint.pt")
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("rows", [3 * 2 * HEADS, 1000])  # several files, one file
def test_a_killed_run_continues_with_each_step_once(tmp_path, monkeypatch, rows):
    monkeypatch.setattr(run_directory, "PART_ROWS", rows)
    process = get_context("fork").Process(target=_killed, args=(tmp_path,))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert load_run(tmp_path / "run").steps == tuple(range(9))
    (tmp_path / "run" / STEPS / f".000000000003.parquet.{'0' * 16}").write_bytes(b"half")
    weights, state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    resumed = monitor_of(tmp_path / "run")
    resumed.model.load_state_dict(weights)
    resumed.load_state_dict(state)
    assert load_run(tmp_path / "run").steps == tuple(range(5))
    train(resumed, 12)
    whole = monitor_of(None)
    train(whole, 12)
    assert_same(load_run(tmp_path / "run"), whole.history)
    assert not list((tmp_path / "run" / STEPS).glob(".*"))


def test_a_run_is_not_mixed_with_another(tmp_path):
    first = monitor_of(tmp_path)
    train(first, 3)
    with pytest.raises(OptionError, match="a new run is written to a folder without steps"):
        train(monitor_of(tmp_path), 2)
    assert load_run(tmp_path).steps == (0, 1, 2)
    train(monitor_of(tmp_path, overwrite=True), 2)
    assert load_run(tmp_path).steps == (0, 1)
    refused = monitor_of(tmp_path)
    with pytest.raises(OptionError, match="without step 2"):
        refused.load_state_dict(first.state_dict())
    with pytest.raises(OptionError, match="got step 0 after 2; write a new run to a new folder"):
        train(HeadMonitor(model(), statistics=STATISTICS, callbacks=first.callbacks), 1)


def test_two_writers_at_a_time_are_refused(tmp_path):
    monitor = monitor_of(tmp_path)
    with monitor:
        monitor.model(torch.randn(2, 7, 12))
        monitor.step()
        with pytest.raises(OptionError, match="only one process at a time"):
            train(monitor_of(tmp_path), 1)


def test_bad_folders_are_refused(tmp_path):
    with pytest.raises(OptionError, match="without steps"):
        load_run(tmp_path / "absent")
    (tmp_path / "file").write_text("text")
    with pytest.raises(OptionError, match="must be a folder"):
        RunDirectory(tmp_path / "file")
    with pytest.raises(OptionError, match="every must be at least 1, got 0"):
        RunDirectory(tmp_path / "run", every=0)
    train(monitor_of(tmp_path / "run"), 3)
    part = next((tmp_path / "run" / STEPS).iterdir())
    (part.parent / "000000000001.parquet").write_bytes(part.read_bytes())
    with pytest.raises(OptionError, match="its steps must increase from 1"):
        load_run(tmp_path / "run")
    (part.parent / "000000000001.parquet").write_bytes(part.read_bytes()[:-20])
    with pytest.raises(OptionError, match=r"as `RunDirectory` wrote them, got .*000000000001\.parquet"):
        load_run(tmp_path / "run")


def test_a_table_in_another_order_is_refused(tmp_path):
    from pyarrow import parquet

    train(monitor_of(tmp_path), 3)
    part = next((tmp_path / STEPS).iterdir())
    table = parquet.read_table(part)
    for order in ([("step", "ascending"), ("head", "ascending")], [("step", "ascending"), ("layer", "descending")]):
        parquet.write_table(table.sort_by(order), part)
        with pytest.raises(OptionError, match="in the order of steps and heads"):
            load_run(tmp_path)


def test_a_table_of_text_and_one_that_is_too_long_are_refused_each_for_its_reason(tmp_path, monkeypatch):
    import pyarrow
    from pyarrow import parquet

    train(monitor_of(tmp_path), 3)
    part = next((tmp_path / STEPS).iterdir())
    table = parquet.read_table(part)
    index = table.schema.get_field_index("loss")
    parquet.write_table(table.set_column(index, "loss", table["loss"].cast(pyarrow.string())), part)
    with pytest.raises(OptionError, match="it must have integers or floats in the columns loss"):
        load_run(tmp_path)
    parquet.write_table(table, part)
    monkeypatch.setattr(run_directory, "MAX_TABLE_ROWS", 5)
    with pytest.raises(OptionError, match=rf"it has {table.num_rows} rows, and at most 5 are read"):
        load_run(tmp_path)


# ---- steps as inspections


def history_of(values: torch.Tensor, heads: tuple[HeadLocation, ...] | None = None) -> HeadHistory:
    """Return a history of one statistic from [steps, heads]."""
    count = values.shape[1]
    heads = heads or tuple(HeadLocation("layers.0", "self", 0, head, str(head), count) for head in range(count))
    history = HeadHistory(heads, ("entropy",))
    for step, row in enumerate(values):
        history.append(step, row[None], float("nan"))
    return history


def test_a_difference_beyond_the_noise_of_steps_is_reported_and_noise_is_not():
    generator = torch.Generator().manual_seed(0)
    values = 2 + 0.1 * torch.randn(100, 50, generator=generator, dtype=torch.float64)
    values[50:, 7] += 1.0  # ten times the noise
    history = history_of(values)
    before, after = inspect_step(history, 20), inspect_step(history, 80)
    comparison = polyhead.compare(before, after)
    (change,) = comparison.significant()
    assert (change.head[1], change.before, change.after) == (7, values[20, 7], values[80, 7])
    assert change.error == pytest.approx(0.1 * 2**0.5, rel=0.5)
    assert (comparison.samples, comparison.over) == ((20, 20), ("pairs of steps",) * 2)


def test_the_noise_of_a_rare_statistic_is_that_of_the_steps_that_have_it():
    values = torch.full((100, 3), torch.nan, dtype=torch.float64)
    values[::4] = torch.randn(25, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values[60:, 1] += 100
    comparison = polyhead.compare(*(inspect_step(history_of(values), step) for step in (8, 92)))
    assert [change.head[1] for change in comparison.significant()] == [1]
    assert comparison.samples == (12, 12)


def test_false_alarms_of_a_comparison_are_as_rare_as_promised():
    found = 0
    for seed in range(100):
        generator = torch.Generator().manual_seed(seed)
        history = history_of(5 + torch.randn(90, 40, generator=generator, dtype=torch.float64))
        found += bool(polyhead.compare(inspect_step(history, 10), inspect_step(history, 70)).significant())
    assert found <= 12  # 5% of the runs, and 4 standard errors


def test_steps_are_saved_as_inspections(tmp_path):
    monitor = monitor_of(None)
    train(monitor, 6)
    save_inspection(tmp_path, inspect_step(monitor.history, 4, "mine"))
    loaded = load_inspection(tmp_path)
    assert torch.equal(loaded.table["entropy"], monitor.history["entropy"][4].double())
    assert [site.stack for site in loaded.table.sites] == ["layers.*"] * 6
    assert (loaded.facts["model"], loaded.facts["step"]) == ("mine", 4)
    with pytest.raises(OptionError, match="the nearest is 5; got 7"):
        inspect_step(monitor.history, 7)


def test_heads_of_an_edited_model_are_compared_with_their_originals(tmp_path):
    network = model()
    first = monitor_of(None, network)
    train(first, 6)
    polyhead.surgery.apply(network, [polyhead.surgery.PruneHeads(1, (0,))])
    train(monitor_of(tmp_path, network), 6)
    found = polyhead.compare(inspect_step(first.history, 5), inspect_step(load_run(tmp_path), 5))
    pairs = {(x.head[0].layer, x.head[1], x.head_after[1]) for x in found.changes}
    assert pairs == {(0, 0, 0), (0, 1, 1), (0, 2, 2), (1, 1, 0), (1, 2, 1)}
    assert [str(x) for x in found.only_before] == ["L1H0 removed"]


def test_a_merged_and_a_new_head_have_their_origins():
    labels = ("2+0", "new", "1", "new", "padding")
    heads = tuple(HeadLocation("layers.0", "self", 0, index, label, 4) for index, label in enumerate(labels))
    site = inspect_step(history_of(torch.zeros(3, 5), heads), 1).table.sites[0]
    assert site.origins == polyhead.geometry.HeadOrigins(((0, 2), (-1,), (1,), (-2,), ()), 4)


def test_what_was_not_measured_is_null_and_is_not_reported_as_nonfinite(tmp_path):
    model_of_run = model()
    with HeadMonitor(model_of_run, pairs_every=2, callbacks=[RunDirectory(tmp_path)]) as monitor:
        for _ in range(4):
            loss = model_of_run(torch.randn(2, 5, 12)).square().mean()
            loss.backward()
            monitor.step(loss)
    found, expected = load_run(tmp_path), monitor.history
    assert_same(found, expected)
    assert found["output_cosine"].isnan().all(1).tolist() == [False, True, False, True]
    assert found.first_nonfinite() is expected.first_nonfinite() is None
    assert found.rows() == expected.rows()
    assert found.rows()["output_cosine"].count(None) == 2 * len(found.heads)


def test_a_missing_loss_is_null_and_one_that_is_nan_stays_so(tmp_path):
    from pyarrow import parquet

    network = model()
    with monitor_of(tmp_path, network) as monitor:
        for loss in (1.5, None, torch.nan):
            network(torch.randn(2, 7, 12))
            monitor.step(loss)
    stored = parquet.read_table(tmp_path / STEPS)["loss"].to_pylist()
    assert stored[: 2 * HEADS] == [1.5] * 2 * HEADS
    assert stored[2 * HEADS : 4 * HEADS] == [None] * 2 * HEADS
    records = list(load_run(tmp_path).records())
    assert [record.has_loss for record in records] == [True, False, True]
    assert [record.loss == record.loss for record in records] == [True, False, False]
