"""Held-out shapes: drawn by a seed within their ranges, none seen by a calibration, and errors counted as they are."""

from __future__ import annotations

import dataclasses
import json
import math
import runpy
import statistics

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import plan_accuracy
from benchmarks.app import app
from benchmarks.plan_accuracy import Outcome, command, shapes, summaries
from benchmarks.plan_accuracy.shapes import CPU, GPU, Shape, draw, roofline
from benchmarks.plan_tables import accuracy_section
from polyhead.costs import calibration
from polyhead.costs.calibration import timing
from polyhead.costs.timing.machine import Machine, shipped
from polyhead.costs.timing.predict import predict
from polyhead.costs.work import AttentionCore
from polyhead.errors import OptionError

BF16 = torch.bfloat16


def timed():
    """All that a calibration of a GPU may have timed."""
    return [piece for group in calibration.planned(torch.device("cuda"), (BF16,)) for piece in group.pieces]


@pytest.fixture(scope="module")
def drawn():
    return draw(GPU, known=timed())


def test_the_same_seed_draws_the_same_and_another_draws_others(drawn):
    assert draw(GPU, known=timed()) == drawn
    assert not draw(GPU, seed=shapes.SEED + 1).keys() & drawn.keys()


def test_there_are_enough_of_every_regime(drawn):
    counts = {regime: list(drawn.values()).count(regime) for regime in shapes.REGIMES}
    assert counts == dict(GPU.quotas)
    assert len(drawn) >= 48
    assert min(counts["prefill"], counts["decode"], counts["training"]) >= 12
    assert counts["launch-bound"] >= 8
    assert list(drawn.values())[:8] == list(shapes.REGIMES) * 2  # a run that is cut short has some of all


def test_shapes_span_the_ranges(drawn):
    assert all(128 <= s.tokens <= 131_072 and s.tokens % 8 == 0 for s in drawn)
    assert all(1 <= s.batch <= 64 and 1 <= s.heads <= 128 and 1 <= s.heads // s.kv_heads <= 16 for s in drawn)
    assert {s.head_dim for s in drawn} == {64, 128, 256}
    assert {s.window is None for s in drawn} == {True, False}
    assert max(s.tokens for s in drawn) > 65_536
    assert min(s.heads for s in drawn) == 1


def test_sizes_are_drawn_log_uniformly():
    generator = shapes.random.Random(5)
    logs = [math.log2(shapes._log_uniform(generator, (128, 131_072))) for _ in range(4000)]
    quarters = [sum(7 + 2.5 * i <= x < 9.5 + 2.5 * i for x in logs) / len(logs) for i in range(4)]
    assert quarters == pytest.approx([0.25] * 4, abs=0.02)  # three standard errors of 4,000 draws


def test_what_a_calibration_timed_is_drawn_again(drawn):
    shape = next(s for s in drawn if s.phase == "prefill")
    known = [piece for piece in shape.work(BF16).pieces if isinstance(piece, AttentionCore)]
    assert shape in draw(GPU)
    assert shape not in draw(GPU, known=known)


def test_what_is_too_long_or_too_large_is_left_out(drawn):
    for shape in drawn:
        work = shape.work(BF16)
        assert work.flops <= GPU.max_flops
        assert work.bytes <= GPU.max_bytes
    windowed = Shape("prefill", 4, 32, 32, 128, 24_576, 64)
    assert shapes.fits(windowed, windowed.work(BF16), GPU)  # our kernel skips what is hidden
    on_a_cpu = dataclasses.replace(GPU, device="cpu")
    assert not shapes.fits(windowed, windowed.work(BF16), on_a_cpu)  # its mask is a tensor, and every pair is computed


def test_launch_bound_is_what_a_datasheet_promises_in_no_time(drawn):
    for shape, regime in drawn.items():
        work = shape.work(BF16)
        quick = roofline(work, GPU.nominal.flops, GPU.nominal.bandwidth) < GPU.launch_seconds * work.launches
        assert regime == ("launch-bound" if quick else shape.phase)


def test_layers_that_meet_kernels_of_ours_are_compiled_for_ahead():
    plain, tiled = Shape("training", 2, 4, 2, 64, 512), Shape("training", 2, 4, 2, 64, 40_000, 128)
    decode, huge = Shape("decode", 2, 4, 2, 64, 512), Shape("decode", 64, 64, 64, 128, 65_536)
    tasks = plan_accuracy._tasks([plain, tiled, decode, huge], BF16)
    assert [arguments[1] for _, arguments in tasks] == [tiled.workload, decode.workload]


def test_quotas_that_cannot_be_filled_are_reported(monkeypatch):
    monkeypatch.setattr(shapes, "MAX_DRAWS", 50)
    with pytest.raises(OptionError, match="50 draws must fill the quotas"):
        draw(dataclasses.replace(CPU, max_flops=0))


def outcome(regime, predicted, measured, promised=1.0):
    """What was usual is twice what was measured."""
    usual = None if measured is None else 2 * measured
    times = (measured, usual, predicted, promised, "matrix", predicted, 0.0)
    return Outcome(Shape("prefill", 1, 2, 1, 64, 128), regime, *times)


def test_errors_are_shares_of_what_was_measured():
    rows = [outcome("prefill", 1.1, 1.0), outcome("prefill", 0.6, 1.0, 0.5), outcome("decode", 3.0, 2.0)]
    prefill, decode, everything = summaries(rows)
    assert (prefill.regime, prefill.shapes) == ("prefill", 2)
    assert prefill.median == pytest.approx(0.25)
    assert prefill.worst == pytest.approx(0.4)
    assert prefill.datasheet_worst == pytest.approx(0.5)
    assert prefill.usual_median == pytest.approx((0.45 + 0.7) / 2)
    assert prefill.usual_worst == pytest.approx(0.7)
    assert decode.median == pytest.approx(0.5)
    assert everything.median == pytest.approx(0.4)
    assert (everything.regime, everything.missed) == ("all", True)


def test_a_shape_without_memory_is_reported_and_not_counted():
    lost = outcome("prefill", 1.0, None)
    (prefill, _) = summaries([lost, outcome("prefill", 1.0, 1.0)])
    assert (prefill.shapes, prefill.missed) == (1, False)
    assert "error" not in plan_accuracy.to_dict([lost])[0]
    assert summaries([lost]) == []
    header, row = command._rows([lost])
    assert dict(zip(header, row, strict=True))["measured"] == "no memory"


def test_the_promise_is_the_vendors_or_the_best_that_was_reached():
    machine = Machine.load("cpu-2-cores")
    reached = plan_accuracy.promise(machine, torch.float32)
    assert (reached.flops, reached.bandwidth) == (machine.matrix_rate(torch.float32), machine.bandwidth)
    named = dataclasses.replace(machine, facts={"processor": "NVIDIA H200"})
    sheet = shipped("nvidia-h200").sheet
    assert plan_accuracy.promise(named, torch.float32) == (sheet.flops["float32"], sheet.bandwidth)


@pytest.fixture
def few(monkeypatch):
    quotas = {"prefill": 1, "decode": 1, "training": 1, "launch-bound": 1}
    monkeypatch.setattr(shapes, "CPU", dataclasses.replace(CPU, quotas=quotas, max_flops=2e7))
    monkeypatch.setattr(timing, "SAMPLES", {"cpu": 3})


def test_the_command_predicts_measures_and_keeps_both(few, tmp_path):
    file = tmp_path / "accuracy.json"
    result = CliRunner().invoke(app, ["plan", "--machine", "cpu-2-cores", "--quick", "--output", str(file)])
    assert result.exit_code == 0, result.output
    content = json.loads(file.read_text(encoding="utf-8"))
    assert [row["regime"] for row in content["rows"]] == list(shapes.REGIMES)
    assert content["drawn"] == 4
    assert [row["regime"] for row in content["summary"]] == [*shapes.REGIMES, "all"]
    assert content["seed"] == shapes.SEED
    assert content["versions"]["torch"] == torch.__version__
    row = content["rows"][0]
    assert row["error"] == pytest.approx(row["predicted"] / row["measured"] - 1, abs=1e-3)
    shape = Shape(**row["shape"])
    found = predict(shape.work(torch.float32), Machine.load("cpu-2-cores"))
    assert row["predicted"] == pytest.approx(found.seconds, rel=1e-3)
    assert "4 of 4 shapes in" in result.output


def test_what_was_measured_can_be_predicted_again(few, tmp_path):
    first, again = tmp_path / "first.json", tmp_path / "again.json"
    command = ["plan", "--machine", "cpu-2-cores", "--quick"]
    assert CliRunner().invoke(app, [*command, "--output", str(first)]).exit_code == 0
    machine = Machine.load("cpu-2-cores")
    slower = [dataclasses.replace(cost, seconds=cost.seconds + 1) for cost in machine.host]
    file = dataclasses.replace(machine, name="slower", host=tuple(slower)).save(tmp_path / "slower.json")
    command[2] = str(file)
    result = CliRunner().invoke(app, [*command, "--times", str(first), "--output", str(again)])
    assert result.exit_code == 0, result.output
    before, after = (json.loads(path.read_text(encoding="utf-8")) for path in (first, again))
    assert [row["measured"] for row in after["rows"]] == [row["measured"] for row in before["rows"]]
    gained = [b["predicted"] - a["predicted"] for a, b in zip(before["rows"], after["rows"], strict=True)]
    assert gained == pytest.approx([1] * 4, rel=1e-3)
    assert (after["date"], after["calibration"]["name"]) == (before["date"], "slower")


ROW = {"shape": {"phase": "prefill", "batch": 1, "heads": 2, "kv_heads": 1, "head_dim": 64, "tokens": 128}}
ROW |= {"regime": "prefill", "measured": 1.0, "usual": 1.0}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "Expecting property name"),
        ("[1]", "a list"),
        ("{}", "it has no 'dtype'"),
        (json.dumps({"dtype": "float12", "rows": []}), "AttributeError"),
        (json.dumps({"dtype": "float32", "rows": [3]}), "TypeError"),
        (json.dumps({"dtype": "float32", "rows": [{**ROW, "regime": "rest"}]}), "a row of 'rest'"),
        (json.dumps({"dtype": "float32", "rows": [{**ROW, "measured": 0}]}), "with 0 and 1.0 seconds"),
        (json.dumps({"dtype": "float32", "rows": [{**ROW, "usual": "1"}]}), "TypeError"),
        (json.dumps({"dtype": "float16", "rows": [ROW]}), "calibrated in float32, got float16"),
    ],
)
def test_times_that_no_run_has_kept_are_refused(tmp_path, content, words):
    file = tmp_path / "times.json"
    file.write_text(content, encoding="utf-8")
    command = ["plan", "--machine", "cpu-2-cores", "--times", str(file)]
    result = CliRunner().invoke(app, command, env={"COLUMNS": "400", "NO_COLOR": "1"})
    assert result.exit_code == 2, result.output
    assert "--times" in result.stderr
    assert words in result.stderr


def test_no_shape_is_begun_after_its_time(few, tmp_path):
    file = tmp_path / "accuracy.json"
    arguments = ["--machine", "cpu-2-cores", "--quick", "--seconds", "0", "--output", str(file)]
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert result.exit_code == 0, result.output
    assert "0 of 4 shapes in" in result.output


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), RuntimeError("can't allocate memory: 9 bytes")])
def test_a_shape_that_finds_no_memory_has_no_time(monkeypatch, error):
    def full(*arguments, **options):
        raise error

    monkeypatch.setattr(plan_accuracy, "layer_call", full)
    shape = Shape("prefill", 1, 2, 1, 64, 128)
    assert plan_accuracy._measured(shape, torch.device("cpu"), torch.float32, 0) == []
    monkeypatch.setattr(plan_accuracy, "layer_call", lambda *arguments, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        plan_accuracy._measured(shape, torch.device("cpu"), torch.float32, 0)


def test_every_shape_is_visited_several_times_and_reported_with_its_fastest_and_median_sample(monkeypatch):
    drawn = draw(dataclasses.replace(CPU, quotas={"prefill": 2, "decode": 0, "training": 0, "launch-bound": 0}))
    one, other = drawn
    times = {one: iter([[2.0, 5.0], [1.0], [9.0]]), other: iter([[], [4.0], [3.0], *([3.5] for _ in range(6))])}
    monkeypatch.setattr(plan_accuracy, "_measured", lambda shape, *rest: next(times[shape]))
    monkeypatch.setattr(plan_accuracy, "compile_ahead", lambda tasks, device: 0)
    waits = {one: False, other: True}
    monkeypatch.setattr(plan_accuracy, "_may_be_host_bound", lambda prediction: waits[shape_of[id(prediction)]])
    shape_of = {}

    def predicted(work, machine):
        prediction = predict(work, machine)
        shape_of[id(prediction)] = next(shape for shape in drawn if shape.work(torch.float32) == work)
        kept.append(prediction)  # an id is another's once its object is gone
        return prediction

    kept = []
    monkeypatch.setattr(plan_accuracy, "predict", predicted)
    machine = Machine.load("cpu-2-cores")
    reported = list(plan_accuracy.measure(drawn, machine, CPU, device=torch.device("cpu")))
    assert [x.shape for x in reported] == [one, other] * 3 + [other] * 6
    assert [(x.measured, x.usual) for x in reported[:2]] == [(2.0, 3.5), (None, None)]
    assert [(x.measured, x.usual) for x in (reported[4], reported[-1])] == [(1.0, 3.5), (3.0, 3.5)]


def test_what_waits_for_its_host_at_a_disturbed_moment_is_visited_more_often():
    machine = Machine.load("nvidia-h200")
    small, large = Shape("prefill", 1, 2, 1, 64, 128), Shape("prefill", 8, 32, 32, 128, 8192)
    assert plan_accuracy._may_be_host_bound(predict(small.work(torch.bfloat16), machine))
    assert not plan_accuracy._may_be_host_bound(predict(large.work(torch.bfloat16), machine))


def test_a_machine_that_is_not_known_or_not_here_is_refused():
    result = CliRunner().invoke(app, ["plan", "--machine", "abacus"])
    assert result.exit_code == 2
    assert "abacus" in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_here_is_refused(tmp_path):
    machine = dataclasses.replace(Machine.load("cpu-2-cores"), device="cuda", name="far")
    result = CliRunner().invoke(app, ["plan", "--machine", str(machine.save(tmp_path / "far.json"))])
    assert result.exit_code == 2
    assert "this machine has none" in " ".join(result.output.split())


def test_the_page_tells_the_errors_of_a_run_and_the_picture_is_drawn_of_it(project_root):
    results = project_root / "benchmarks" / "results"
    (path,) = results.glob("plan-*.json")
    content = json.loads(path.read_text(encoding="utf-8"))
    rows = [dict(row) for row in content["rows"] if row["measured"] is not None]
    errors = [abs(row["predicted"] / row["measured"] - 1) for row in rows]
    section = accuracy_section(path)
    assert f"| all | {len(rows)} | {statistics.median(errors):.1%}" in section
    assert f"{max(errors):.1%}" in section
    assert section in (project_root / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    folder = project_root / "docs" / "images"
    drawn = runpy.run_path(str(folder / "draw_plan_accuracy.py"))["draw"](content)
    assert drawn == (folder / "plan-accuracy.svg").read_text(encoding="utf-8")
    assert drawn.count("<title>") == 2 * len(rows)
