"""The benchmark keeps its own rules: pairs, intervals, honest absences, no ratio between different functions."""

from __future__ import annotations

import gc
import importlib.util
import json
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import agreement, contenders, layer, masked, tables
from benchmarks import layers as command
from benchmarks.contenders import CONTENDERS, OURS, PLAIN, X_TRANSFORMERS, Setting, Shape, Weights
from benchmarks.decode import BytesWritten, bytes_of_step
from benchmarks.measuring import results
from benchmarks.measuring.agreement import Disagreement, hold, hold_within
from benchmarks.measuring.results import Figure, Row
from benchmarks.overhead import functions_entered
from benchmarks.training.trials import RATES, SEEDS, Result, Trial, append_result
from polyhead.costs.measuring import machine, runner
from polyhead.costs.measuring.runner import Comparison, Ratio, Run, Timings, WarmUp, alternate, paired_ratio
from polyhead.errors import BackendUnsupported

CPU = torch.device("cpu")
SMALL = Shape(2, 19, 46, 2)
# x-transformers scripts a function when it is first imported.
pytestmark = pytest.mark.filterwarnings(r"ignore:`torch\.jit\.script` is deprecated:DeprecationWarning")

RUN = Run(CPU, torch.float32, alternations=3)


def test_drift_of_the_machine_leaves_a_paired_ratio_alone():
    drift = [1.0 + 0.1 * i for i in range(31)]
    found = paired_ratio([1.2 * d for d in drift], drift)
    assert found.low == pytest.approx(1.2)
    assert found.median == pytest.approx(1.2)
    assert found.high == pytest.approx(1.2)


def test_the_interval_holds_the_median_and_repeats_under_its_seed():
    ours = [1.0 + 0.01 * (i % 7) for i in range(31)]
    first, again = paired_ratio(ours, [1.0] * 31), paired_ratio(ours, [1.0] * 31)
    assert first == again
    assert 1.0 <= first.low <= first.median <= first.high <= 1.06


@pytest.mark.parametrize(("ours", "theirs"), [([1.0], [1.0, 2.0]), ([], [])])
def test_unpaired_samples_are_refused(ours, theirs):
    with pytest.raises(ValueError, match=f"got {len(ours)} and {len(theirs)}"):
        paired_ratio(ours, theirs)


@pytest.mark.parametrize(
    ("low", "high", "bound", "missed"),
    [(1.06, 1.20, 1.05, True), (1.04, 1.20, 1.05, True), (0.90, 1.16, 1.05, False), (2.0, 3.0, None, False)],
)
def test_a_miss_is_a_median_above_the_bound(low, high, bound, missed):
    assert Comparison("a", "b", Ratio((low + high) / 2, low, high), bound).missed is missed


def test_every_contender_is_timed_once_an_alternation_in_a_drawn_order():
    seen: list[str] = []
    calls = {name: lambda name=name: seen.append(name) for name in "abc"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "_warm_up", lambda call, device: WarmUp(1, 1e-3, 0.0))
        timings = alternate(calls, device=CPU, alternations=30, seed=7)
        first, seen = seen, []
        calls = {name: lambda name=name: seen.append(name) for name in "abc"}
        alternate(calls, device=CPU, alternations=30, seed=7)
    rounds = [tuple(first[i : i + 3]) for i in range(0, len(first), 3)]
    assert len(rounds) == 30
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds)
    assert len(set(rounds)) > 1
    assert first == seen
    assert {name: len(samples) for name, samples in timings.samples_ms.items()} == {"a": 30, "b": 30, "c": 30}


def test_a_quick_call_is_repeated_until_a_sample_can_be_measured():
    assert runner._warm_up(lambda: None, CPU).times > 100


def test_a_slow_call_is_warmed_up_once_and_timed_as_one_sample(monkeypatch):
    calls: list[int] = []
    monkeypatch.setattr(runner, "seconds_of", lambda call, times, device, leads=0: calls.append(times) or 0.7)
    assert runner._warm_up(lambda: None, CPU) == WarmUp(1, 0.7, 0.0)
    assert calls == [1]


@pytest.mark.parametrize(("seconds", "expected"), [(None, 31), (100.0, 31), (10.0, 20), (1e-3, 7)])
def test_slow_calls_get_the_alternations_that_fit_and_no_fewer_than_the_fewest(monkeypatch, seconds, expected):
    monkeypatch.setattr(runner, "_warm_up", lambda call, device: WarmUp(1, 0.25, 0.0))
    calls = {"a": lambda: None, "b": lambda: None}
    timings = alternate(calls, device=CPU, seconds=seconds)
    assert {len(samples) for samples in timings.samples_ms.values()} == {expected}


def test_collection_is_as_it_was_after_a_settled_run(monkeypatch):
    calls = []
    monkeypatch.setattr(gc, "freeze", lambda: calls.append("freeze"))
    monkeypatch.setattr(gc, "unfreeze", lambda: calls.append("unfreeze"))
    with runner.settled():
        assert calls == ["freeze"]
    assert calls == ["freeze", "unfreeze"]


def test_time_of_one_of_several_things_that_a_call_does():
    timings = Timings({"a": [4.0, 8.0]}, {"b": "absent"}).per(4)
    assert timings == Timings({"a": [1.0, 2.0]}, {"b": "absent"})


@pytest.mark.parametrize(
    ("actual", "words"),
    [
        ([1.0, 2.5], r"it is off by 0.5, at most 0.4 is allowed"),
        ([1.0, float("nan")], "it is off by nan"),
        ([1.0], "shape"),
    ],
)
def test_an_error_beyond_its_limit_is_named_with_it(actual, words):
    exact, allowed = torch.tensor([1.0, 2.0]).double(), torch.tensor([0.0, 0.4])
    assert hold_within("it", torch.tensor([1.0, 2.25]), exact, allowed).error == 0.25
    with pytest.raises(Disagreement, match=words):
        hold_within("it", torch.tensor(actual), exact, allowed)


def test_what_rounding_explains_is_four_times_what_the_plain_formula_loses():
    exact = torch.tensor([1.0]).double()
    plain = torch.tensor([1.01])
    assert hold("it", torch.tensor([1.03]), exact, plain).allowed == pytest.approx(0.04, rel=1e-3)
    with pytest.raises(Disagreement, match="is explained by rounding"):
        hold("it", torch.tensor([1.05]), exact, plain)


def test_running_out_of_memory_is_recorded_and_the_others_go_on():
    def starved() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def starved_on_the_cpu() -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    calls = {"fits": lambda: None, "starved": starved, "on the CPU": starved_on_the_cpu}
    timings = alternate(calls, device=CPU, alternations=2)
    assert list(timings.samples_ms) == ["fits"]
    assert timings.absent == {"starved": "out of memory", "on the CPU": "out of memory"}
    assert timings.compare("fits", "starved") is None


def test_another_error_is_not_swallowed_and_collection_is_switched_on_again(monkeypatch):
    def broken() -> None:
        raise RuntimeError("shapes do not fit")

    with pytest.raises(RuntimeError, match="shapes do not fit"):
        alternate({"broken": broken}, device=CPU)
    calls = iter(range(8))

    def breaks_later() -> None:
        if next(calls) > 5:
            raise KeyError("later")

    monkeypatch.setattr(runner, "_warm_up", lambda call, device: WarmUp(1, 1e-3, 0.0))
    with pytest.raises(KeyError, match="later"):
        alternate({"breaks": breaks_later}, device=CPU, alternations=9)
    assert gc.isenabled()


SETTINGS = {
    "plain": PLAIN,
    "causal": Setting(causal=True),
    "padded": Setting(lengths=torch.tensor([19, 11])),
}


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("name", CONTENDERS)
def test_contenders_given_the_same_weights_compute_the_same_function(name, kind):
    if name == X_TRANSFORMERS:
        pytest.importorskip("x_transformers")
    setting = SETTINGS[kind]
    weights = Weights.random(SMALL, device=CPU, dtype=torch.float32, seed=1)
    x = RUN.inputs(2, 19, 46)
    module = CONTENDERS[name](weights, setting)
    for training in (False, True):
        agreement.check_output(name, module.train(training), x, weights, setting, seed=2)
    found = agreement.check_gradients(name, CONTENDERS[name], x, weights, setting, seed=2)
    assert len(found) == 5


def test_torch_is_timed_on_its_fast_path_in_eval_and_off_it_in_training(monkeypatch):
    fast, calls = torch._native_multi_head_attention, []
    monkeypatch.setattr(torch, "_native_multi_head_attention", lambda *args: calls.append(1) or fast(*args))
    weights = Weights.random(SMALL, device=CPU, dtype=torch.float32, seed=1)
    module = contenders.TorchLayer(weights, PLAIN)
    x = RUN.inputs(2, 19, 46)
    layer._training_step(module.train(), x, x)()
    assert not calls
    layer._forward(module.eval(), x, x)()
    assert calls


def test_a_contender_with_another_weight_disagrees():
    weights = Weights.random(SMALL, device=CPU, dtype=torch.float32, seed=1)
    module = contenders.ThreeLinear(weights, PLAIN)
    with torch.no_grad():
        module.key.weight[3, 5] += 0.5
    with pytest.raises(Disagreement, match=r"other: the output is off by .* explained by rounding"):
        agreement.check_output("other", module, RUN.inputs(2, 19, 46), weights, PLAIN, seed=0)


def test_a_contender_with_another_gradient_disagrees():
    class Detached(contenders.ThreeLinear):
        def forward(self, x):
            return super().forward(x) + 0.1 * (self.query(x) - self.query(x).detach())

    weights = Weights.random(SMALL, device=CPU, dtype=torch.float32, seed=1)
    x = RUN.inputs(2, 19, 46)
    agreement.check_output("other", Detached(weights, PLAIN), x, weights, PLAIN, seed=0)
    with pytest.raises(Disagreement, match=r"other: the gradient of the input is off by"):
        agreement.check_gradients("other", Detached, x, weights, PLAIN, seed=0)


def test_a_run_with_a_disagreement_reports_no_figure(monkeypatch, tmp_path, capsys):
    class Wrong(contenders.Tutorial):
        def forward(self, x):
            return super().forward(x) * 1.01

    monkeypatch.setitem(CONTENDERS, "tutorial", Wrong)
    path = tmp_path / "run.json"
    assert (
        command.main(["--device", "cpu", "--quick", "--shapes", str(SMALL), "--only", "layer", "--output", str(path)])
        == 2
    )
    printed = capsys.readouterr()
    assert "no figures: tutorial: the output is off by" in printed.err
    assert printed.out == ""
    assert not path.exists()


def test_a_contender_that_is_not_installed_is_recorded_as_such(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "x_transformers" else find(name))
    row = next(layer.layer(RUN, SMALL))
    assert row.timings.absent == {X_TRANSFORMERS: "not installed"}
    assert any(X_TRANSFORMERS in line and "not installed" in line for line in results.cells([row]))


def test_layer_rows_hold_bounds_against_the_faster_floor_and_against_torch():
    forward, training = layer.layer(RUN, SMALL)
    assert (forward.bench, training.bench) == ("layer, forward", "layer, forward + backward")
    for row in (forward, training):
        floor = row.notes["floor"]
        assert row.timings.median_ms(floor) == min(map(row.timings.median_ms, contenders.FLOOR))
        bounds = {c.against: c.bound for c in row.comparisons}
        assert bounds[floor] == 1.05
        assert bounds["nn.MultiheadAttention"] == 1.0
        assert bounds["tutorial"] is None
        assert all(c.subject == OURS for c in row.comparisons)


def test_bytes_written_counts_new_memory_and_writes_but_no_views():
    x = torch.zeros(7, 11)
    with BytesWritten() as counter:
        x.view(77)[:5].reshape(5, 1).transpose(0, 1)
    assert counter.total == 0
    with BytesWritten() as counter:
        x + 1
        x[2:5].mul_(3)
    assert counter.total == 4 * (77 + 33)


def test_a_decoding_step_writes_as_much_into_a_long_cache_as_into_a_short_one():
    shape = Shape(2, 61, 46, 2)
    weights = Weights.random(shape, device=CPU, dtype=torch.float32, seed=0)
    ours = contenders.Polyhead(weights, PLAIN).eval().layer
    assert bytes_of_step(RUN, ours, shape, 13) == bytes_of_step(RUN, ours, shape, 61)


def test_functions_entered_is_a_count_without_noise():
    x = torch.ones(3)
    module = nn.Identity()
    assert functions_entered(lambda: None) < functions_entered(lambda: module(x))
    assert functions_entered(lambda: module(x)) == functions_entered(lambda: module(x))


def test_a_run_writes_what_it_was_taken_on_and_shows_a_table(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "QUICK_ALTERNATIONS", 2)
    path = tmp_path / "results" / "run.json"
    arguments = ["--device", "cpu", "--quick", "--shapes", "2x19x46x2", "--output", str(path)]
    assert command.main(arguments) == 0
    written = json.loads(path.read_text(encoding="utf-8"))
    assert written["machine"]["cpu"]
    assert written["machine"]["cores"] >= 1
    assert set(written["versions"]) >= {"python", "torch", "triton"}
    assert {"commit", "date", "misses"} <= set(written)
    assert {row["bench"].split(",")[0] for row in written["rows"]} == {
        "layer", "causal", "padded", "NaN guard", "decode one token", "overhead",
    }  # fmt: skip
    first = written["rows"][0]
    assert first["dtype"] == "float32"
    assert all(len(samples) == 2 for samples in first["samples_ms"].values())
    shown = capsys.readouterr().out
    assert "layer, forward" in shown
    assert str(path) in shown


def a_row(low: float) -> Row:
    timings = Timings({"ours": [2.0], "floor": [1.0]}, {"tutorial": "out of memory"})
    comparison = Comparison("ours", "floor", Ratio(low + 0.1, low, low + 0.2), 1.05)
    return Row.of("layer, forward", "2x3x5x1", torch.float32, timings, [comparison, None], failed="")


@pytest.mark.parametrize("with_rich", [True, False])
def test_the_table_marks_misses_and_absences(with_rich, capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: find(name) if with_rich or name != "rich" else None)
    command.show([a_row(1.3), a_row(0.9)])
    shown = capsys.readouterr().out
    assert shown.count("MISS") == 1
    assert shown.count("out of memory") == 2
    assert "layer, forward at 2x3x5x1: ours / floor is 1.400 [1.300, 1.500], above 1.05" in shown


def test_figures_have_lines_and_misses_of_their_own():
    figures = [Figure("beyond inputs", 28.0, "bytes a row", 24.0), Figure("bandwidth", 3.5, "TB/s")]
    row = Row.of("memory", "1x2x3x4", torch.bfloat16, Timings({"ours": [1.0]}), [], figures=figures)
    first, second = results.cells([row])
    assert first == ("memory", "1x2x3x4", "28 bytes a row", "beyond inputs", "", "", "<= 24", "MISS")
    assert second == ("", "", "3.5 TB/s", "bandwidth", "", "", "", "")
    assert row.misses == ["memory at 1x2x3x4: beyond inputs is 28 bytes a row, above 24"]
    assert row.to_dict()["figures"][0] == {
        "what": "beyond inputs", "value": 28.0, "unit": "bytes a row", "bound": 24.0, "missed": True,
    }  # fmt: skip
    assert Figure("not a number", float("nan"), "", 1.0).missed


def test_strict_turns_a_miss_into_a_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "_rows", lambda run, only, shapes: iter([a_row(1.3)]))
    arguments = ["--device", "cpu", "--output", str(tmp_path / "run.json")]
    assert command.main(arguments) == 0
    assert command.main([*arguments, "--strict"]) == 1


@pytest.mark.parametrize(
    ("arguments", "ending"),
    [
        ([], "cores.json"),
        (["--quick"], "cores-quick.json"),
        (["--only", "layer"], "cores-partial.json"),
        (["--shapes", "2x3x8x2", "--quick"], "cores-quick-partial.json"),
    ],
)
def test_a_part_of_a_run_never_replaces_the_whole(arguments, ending, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    monkeypatch.setattr(command, "_rows", lambda run, only, shapes: iter([a_row(0.9)]))
    assert command.main(["--device", "cpu", *arguments]) == 0
    (written,) = tmp_path.iterdir()
    assert written.name.startswith("cpu-")
    assert written.name.endswith(ending)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--shapes", "2x10x512"], "got '2x10x512'"),
        (["--shapes", "0x10x512x8"], "got '0x10x512x8'"),
        (["--only", "layer,speed"], "no bench is called speed"),
        (["--device", "tpu"], "tpu"),
    ],
)
def test_a_wrong_argument_is_refused_in_words(arguments, words, capsys):
    with pytest.raises(SystemExit, match="2"):
        command.main(arguments)
    assert words in capsys.readouterr().err


def test_a_layer_too_large_for_one_path_is_still_timed_on_the_other():
    class TooLargeInEval(contenders.Tutorial):
        def forward(self, x):
            if not self.training:
                raise torch.OutOfMemoryError("too large")
            return super().forward(x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CONTENDERS, "tutorial", TooLargeInEval)
        forward, training = layer.layer(RUN, SMALL)
    assert forward.timings.absent["tutorial"] == "out of memory"
    assert "tutorial" in training.timings.samples_ms


def test_a_layer_too_large_for_every_path_is_recorded_as_such(monkeypatch):
    class TooLarge(contenders.Tutorial):
        def forward(self, x):
            raise torch.OutOfMemoryError("too large")

    monkeypatch.setitem(CONTENDERS, "tutorial", TooLarge)
    assert all(row.timings.absent["tutorial"] == "out of memory" for row in layer.layer(RUN, SMALL))


def test_a_guard_that_cannot_run_is_recorded_with_its_reasons(monkeypatch):
    def refuse(*args, **kwargs):
        raise BackendUnsupported("sdpa", ["no fused kernel serves this"])

    monkeypatch.setattr(masked.polyhead, "attention", refuse)
    row = next(masked.guard(RUN, SMALL))
    assert "no fused kernel serves this" in row.timings.absent[masked.GUARDED]
    assert row.comparisons == ()


def test_the_machine_is_described():
    facts = machine.describe(CPU)
    assert facts["machine"]["gpu"] is None
    assert facts["versions"]["torch"] == torch.__version__.split("+")[0] or "+" in facts["versions"]["torch"]
    assert machine.describe(CPU, "abc123")["commit"] == "abc123"
    assert machine.version("no-such-package") is None
    assert machine._output("no-such-program") == ""


def test_a_package_within_somebody_elses_repository_has_no_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "PACKAGE", tmp_path)
    assert machine.commit() is None
    (tmp_path / "__init__.py").write_text("")
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    assert machine.commit() is None


def test_the_page_holds_the_figures_that_were_measured(project_root: Path) -> None:
    page = (project_root / "docs" / "performance.md").read_text(encoding="utf-8")
    assert tables.performance_page(page) == page, "run python -m benchmarks.tables"


def test_the_page_of_statistics_holds_the_figures_that_were_measured(project_root: Path) -> None:
    assert list(tables.RESULTS.glob(f"{tables.STATISTICS}*.json"))
    page = (project_root / "docs" / "statistics.md").read_text(encoding="utf-8")
    assert tables.statistics_page(page) == page, "run python -m benchmarks.tables"


def test_the_page_of_attention_holds_the_figures_that_were_measured(project_root: Path) -> None:
    assert list(tables.RESULTS.glob(f"{tables.RECORDED}*.json"))
    page = (project_root / "docs" / "attention.md").read_text(encoding="utf-8")
    assert tables.attention_page(page) == page, "run python -m benchmarks.tables"


def test_the_page_of_inspections_holds_the_figures_that_were_measured(project_root: Path) -> None:
    assert list(tables.RESULTS.glob(f"{tables.INSPECTION}*.json"))
    page = (project_root / "docs" / "inspecting.md").read_text(encoding="utf-8")
    assert tables.inspection_page(page) == page, "run python -m benchmarks.tables"


def test_the_page_of_variants_has_the_measured_figures(project_root: Path) -> None:
    assert list(tables.RESULTS.glob(f"{tables.VARIANTS}*.json"))
    page = (project_root / "docs" / "variants.md").read_text(encoding="utf-8")
    assert tables.variants_page(page) == page, "run python -m benchmarks.tables"


def test_trainings_are_a_table(tmp_path):
    facts = {**machine.describe(CPU, "abc123"), "text": "some.txt", "quick": True}
    for number, rate in enumerate(RATES):
        trial = Trial("multi-head", "tokens", rate, SEEDS[0])
        result = Result(trial, 2.0 + number, steps=20, tokens=1, parameters=2000, flops=3, seconds=0.5, facts=facts)
        append_result(tmp_path / "training-a.jsonl", result)
    page = "before\n<!-- training: begin -->\nold\n<!-- training: end -->\nafter\n"
    told = tables.variants_page(page, tmp_path)
    assert "old" not in told
    assert f"{len(RATES)} training runs on some.txt" in told
    assert "| multi-head | tokens | 2,000 | 0.00 | 20 | 0.0005 (an end) | 2.0000 | nan of 1 |  |" in told
    assert tables.variants_page(told, tmp_path) == told


def test_trainings_without_a_whole_sweep_are_counted_and_are_no_table_yet(tmp_path):
    facts = {**machine.describe(CPU, "abc123"), "text": "some.txt", "quick": True}
    trial = Trial("multi-head", "tokens", RATES[0], SEEDS[0])
    append_result(tmp_path / "training-a.jsonl", Result(trial, 2.0, 20, 1, 2000, 3, 0.5, facts))
    told = tables.variants_page("<!-- training: begin -->\n<!-- training: end -->\n", tmp_path)
    assert "1 training runs on some.txt" in told
    assert "|" not in told


def test_each_page_takes_its_own_results_and_keeps_what_stands_around_the_marks(tmp_path):
    facts = {**machine.describe(CPU, "abc123")}
    figures = [Figure("beyond inputs", 28.0, "bytes a row", 24.0)]
    ratio = Comparison("polyhead, statistics", "materialised", Ratio(0.02, 0.0199, 0.0201), 1 / 45)
    timings = Timings({"polyhead, statistics": [2.0], "materialised": [100.0]}, {"flash": "not here"})
    row = Row.of("forward", "1x2x3x4", torch.bfloat16, timings, [ratio], figures=figures, failed="something broke")
    results.write(tmp_path / "statistics-a.json", facts, [row])
    results.write(tmp_path / "cpu-b.json", facts, [a_row(0.9)])
    page = "before\n<!-- figures:begin -->\nold\n<!-- figures:end -->\nafter\n"
    told = tables.statistics_page(page, tmp_path)
    assert told.startswith("before\n<!-- figures:begin -->\n")
    assert told.endswith("<!-- figures:end -->\nafter\n")
    assert "old" not in told
    assert (
        "| forward | 1x2x3x4 | 2 ms (statistics) | materialised | 100 ms | 0.0200 [0.0199, 0.0201] | <= 1/45 ok |"
    ) in told
    assert "| forward | 1x2x3x4 | 28 bytes per row | beyond inputs | | | <= 24 **miss** |" in told
    assert "| forward | 1x2x3x4 | | flash | not here | | |" in told
    assert "| forward | 1x2x3x4 | | | something broke | | **miss** |" in told
    assert "layer, forward" not in told
    assert tables.statistics_page(told, tmp_path) == told
    other = tables.performance_page(page, tmp_path)
    assert "layer, forward" in other
    assert "beyond inputs" not in other
    with pytest.raises(ValueError, match="exactly once"):
        tables.statistics_page("no marks", tmp_path)
    assert tables.statistics_page(page, tmp_path / "empty") == page
