"""One runner for all timings: pairs, intervals, the definition of a miss, repetitions, honest absences."""

from __future__ import annotations

import gc
import json
import math
import subprocess

import pytest
import torch
import typer

from benchmarks.measuring import results
from benchmarks.measuring import runner as benchmark_runner
from benchmarks.measuring.agreement import Disagreement, hold, hold_within
from benchmarks.measuring.cases import Case, Entrants, Pair, Run, Step
from benchmarks.measuring.results import Row
from benchmarks.measuring.runner import joined, measure, rows_of, run_steps, show
from benchmarks.measuring.verdicts import Comparison, Figure, Ratio, judge, paired_ratio
from polyhead.costs.measuring import machine_facts, runner
from polyhead.costs.measuring.runner import Timings, WarmUp, alternate
from polyhead.errors import BackendUnsupported

CPU = torch.device("cpu")
RUN = Run(CPU, torch.float32, alternations=3)

# ---- the definition of a miss


@pytest.mark.parametrize(
    ("low", "median", "high", "bound", "verdict"),
    [
        (1.051, 1.06, 1.07, 1.05, "miss"),
        (1.045, 1.051, 1.06, 1.05, "miss"),  # its interval holds the bound, and its median is above it
        (1.045, 1.05, 1.06, 1.05, "ok"),
        (1.03, 1.049, 1.05, 1.05, "ok"),
        (0.99, 1.0, 1.011, 1.05, "unsettled"),  # 2.1% of its median
        (0.991, 1.0, 1.01, 1.05, "ok"),
        (1.30, 1.4, 1.50, 1.05, "unsettled"),
        (0.10, 0.2, 0.30, 1.05, "unsettled"),
        (2.00, 2.5, 3.00, None, ""),
        (math.nan, math.nan, math.nan, 1.05, "miss"),
    ],
)
def test_a_miss_is_a_median_above_the_bound_with_an_interval_of_at_most_two_percent(low, median, high, bound, verdict):
    assert judge(median, low, high, bound) == verdict
    assert Comparison("a", "b", Ratio(median, low, high), bound).verdict == verdict
    assert Figure("a", median, "ms", bound, low, high).verdict == verdict


@pytest.mark.parametrize(("value", "verdict"), [(28.0, "miss"), (24.0, "ok"), (math.nan, "miss")])
def test_a_count_has_no_interval_and_is_settled(value, verdict):
    assert Figure("beyond inputs", value, "bytes a row", 24.0).verdict == verdict


# ---- repetitions


NOISY, CLEAR = [1.0, 1.4, 1.0, 1.4, 1.0], [1.0] * 200


def in_rounds(monkeypatch, *rounds: dict[str, list[float]]) -> list[int]:
    """Give the samples of one round after the other instead of timing anything; returns the seeds of the rounds."""
    seeds: list[int] = []

    def taken(calls, *, seed, absent, **_):
        seeds.append(seed)
        samples = rounds[len(seeds) - 1]
        missing = {name: "out of memory" for name in calls if name not in samples}
        return Timings(samples, {**absent, **missing}, {"ours": 7.0 * len(seeds)})

    monkeypatch.setattr(benchmark_runner, "alternate", taken)
    return seeds


def case(bound: float | None = 1.05, **options) -> Case:
    calls = {"ours": lambda: None, "theirs": lambda: None}
    return Case("bench", "1x2", calls, [Pair("ours", "theirs", bound)], **options)


def test_a_row_with_a_narrow_interval_is_timed_once(monkeypatch):
    seeds = in_rounds(monkeypatch, {"ours": [2.0] * 5, "theirs": [1.0] * 5})
    row = measure(case(), Run(CPU, torch.float32, seed=5))
    assert (seeds, row.rounds) == ([5], 1)
    assert row.found("miss") == ["bench at 1x2: ours / theirs is 2.000 [2.000, 2.000], above 1.05"]


def test_a_row_with_a_wide_interval_is_repeated_and_all_its_samples_count(monkeypatch):
    noisy, clear = ({"ours": x, "theirs": [1.0] * len(x)} for x in (NOISY, CLEAR))
    seeds = in_rounds(monkeypatch, noisy, clear)
    row = measure(case(), Run(CPU, torch.float32, seed=5))
    assert (seeds, row.rounds) == ([5, 6], 2)  # in another order
    assert row.timings.samples_ms["ours"] == NOISY + CLEAR
    assert row.timings.peak_mib == {"ours": 7.0}
    assert [c.verdict for c in row.comparisons] == ["ok"]


@pytest.mark.parametrize("repetitions", [0, 2])
@pytest.mark.parametrize("factor", [1.0, 3.0])  # below the bound, and far above it
def test_a_row_that_stays_wide_is_unsettled_neither_passed_nor_missed(monkeypatch, repetitions, factor, capsys):
    noisy = {"ours": [factor * x for x in NOISY], "theirs": [1.0] * 5}
    seeds = in_rounds(monkeypatch, *[noisy] * 3)
    row = measure(case(1.3), Run(CPU, torch.float32, repetitions=repetitions))
    assert (len(seeds), row.rounds) == (repetitions + 1, repetitions + 1)
    assert [c.verdict for c in row.comparisons] == ["unsettled"]
    assert (row.found("ok"), row.found("miss"), len(row.found("unsettled"))) == ([], [], 1)
    show([row])
    shown = capsys.readouterr().out
    assert "<= 1.3 unsettled" in shown
    assert f"No miss, 1 unsettled ({int(factor > 1)} with a median above the bound)" in shown
    assert (
        f"bench at 1x2: ours / theirs is {row.comparisons[0].ratio}, {'above' if factor > 1 else 'within'} 1.3" in shown
    )


def test_nothing_is_repeated_for_a_ratio_without_a_bound(monkeypatch):
    in_rounds(monkeypatch, {"ours": NOISY, "theirs": [1.0] * 5})
    assert measure(case(None), RUN).rounds == 1


def test_a_bound_on_a_time_itself_is_repeated_too(monkeypatch):
    noisy, clear = ({"ours": x, "theirs": [1.0] * len(x)} for x in (NOISY, CLEAR))
    in_rounds(monkeypatch, noisy, clear)

    def waits(timings):
        return [Figure.of_time("wait", timings.samples_ms["ours"], 0.5)]

    row = measure(case(None, figures=waits), RUN)
    assert row.rounds == 2
    assert row.found("miss") == ["bench at 1x2: wait is 1 ms [1, 1], above 0.5"]


def test_a_contender_without_memory_in_one_round_is_absent(monkeypatch):
    one = {"ours": NOISY, "theirs": [1.0] * 5}
    in_rounds(monkeypatch, one, {"ours": NOISY})
    row = measure(case(), RUN)
    assert row.comparisons == ()
    assert row.timings.absent == {"theirs": "out of memory"}
    assert list(row.timings.samples_ms) == ["ours"]
    other_way = joined(Timings({"a": [1.0]}, {"b": "out of memory"}), Timings({"a": [2.0], "b": [3.0]}))
    assert other_way == Timings({"a": [1.0, 2.0]}, {"b": "out of memory"})


# ---- cases


def row_of(samples: dict[str, list[float]], *pairs: Pair, **options) -> Row:
    return Row.of(Case("bench", "1x2", {}, pairs, **options), torch.float32, Timings(samples))


def test_of_several_baselines_the_fastest_is_the_floor_and_no_pair_is_compared_twice():
    samples = {"ours": [3.0], "slow": [2.0], "fast": [1.0]}
    row = row_of(
        samples, Pair("ours", ("slow", "fast", "absent"), 1.05), *(Pair("ours", x) for x in samples if x != "ours")
    )
    assert [(c.against, c.bound) for c in row.comparisons] == [("fast", 1.05), ("slow", None)]
    assert row.notes == {"floor": "fast"}
    assert row_of(samples, Pair("ours", ("absent",), 1.05), Pair("absent", "slow")).comparisons == ()


def test_times_are_of_one_of_the_items_that_a_call_does():
    row = row_of({"ours": [4.0, 8.0]}, items=4, figures=lambda timings: [Figure("time", timings.median_ms("ours"))])
    assert row.timings.samples_ms == {"ours": [1.0, 2.0]}
    assert row.figures == (Figure("time", 1.5),)


def test_each_case_is_timed_before_the_next_is_built(monkeypatch):
    seen: list[str] = []

    def cases():
        for name in "ab":
            seen.append(f"build {name}")
            yield Case(name, "1", {})

    monkeypatch.setattr(benchmark_runner, "measure", lambda case, run: seen.append(f"time {case.bench}"))
    list(rows_of(cases(), RUN))
    assert seen == ["build a", "time a", "build b", "time b"]


def test_the_absence_of_others_is_a_fact_and_that_of_ours_a_failure():
    def refuse():
        raise BackendUnsupported("fused", ["no such kernel here"])

    found = Entrants()
    assert not found.enter("cuDNN", refuse)
    assert found.failures == []
    assert "no such kernel here" in found.absent["cuDNN"]
    assert not found.enter("polyhead, statistics", refuse)
    assert found.failures[0].startswith("polyhead, statistics: backend 'fused' cannot serve")
    assert found.case("bench", "1x2").failed == found.failures[0]
    with pytest.raises(KeyError, match="a mistake"):
        found.enter("cuDNN", lambda: {}["a mistake"])


def test_a_mistake_in_a_check_is_not_taken_for_the_contenders():
    def broken(result):
        raise RuntimeError("shapes do not fit")

    with pytest.raises(RuntimeError, match="shapes do not fit"):
        Entrants().enter("cuDNN", lambda: lambda: 1, broken)


# ---- the record and the table


def a_row(median: float, failed: str = "") -> Row:
    timings = Timings({"polyhead, fast": [2.0], "floor": [1.0]}, {"tutorial": "out of memory"}, {"floor": 3.0})
    comparison = Comparison("polyhead, fast", "floor", Ratio(median, median - 0.005, median + 0.005), 1.05)
    figures = (Figure("beyond inputs", 28.0, "bytes a row", 24.0), Figure("bandwidth", 3.5, "TB/s", None, 3.4, 3.6))
    return Row("layer", "2x3", "float32", timings, (comparison,), figures, failed, {"floor": "floor"}, 2)


def test_a_row_is_read_as_it_was_written(tmp_path):
    row = a_row(1.4, "something broke")
    results.write(tmp_path / "run.json", {"commit": "abc"}, [row])
    facts, (again,) = results.read(tmp_path / "run.json")
    assert again == row
    assert facts["misses"] == row.found("miss")
    assert (facts["commit"], facts["unsettled"]) == ("abc", [])
    (written,) = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))["rows"]
    assert written["comparisons"][0]["verdict"] == "miss"
    assert written["median_ms"] == {"polyhead, fast": 2.0, "floor": 1.0}


def test_the_table_has_a_line_for_every_ratio_figure_absence_and_failure():
    assert list(results.cells([a_row(1.4, "something broke")])) == [
        ("layer", "2x3", "2 ms (fast)", "floor (floor)", "1 ms", "1.400 [1.395, 1.405]", "<= 1.05 miss"),
        ("layer", "2x3", "28 bytes a row", "beyond inputs", "", "", "<= 24 miss"),
        ("layer", "2x3", "3.5 TB/s [3.4, 3.6]", "bandwidth", "", "", ""),
        ("layer", "2x3", "", "tutorial", "out of memory", "", ""),
        ("layer", "2x3", "", "", "something broke", "", "miss"),
    ]
    assert results.counted([a_row(1.4, "something broke"), a_row(0.9)]) == "4 misses"
    assert a_row(1.4, "something broke").found("miss") == [
        "layer at 2x3: polyhead, fast / floor is 1.400 [1.395, 1.405], above 1.05",
        "layer at 2x3: beyond inputs is 28 bytes a row, above 24",
        "layer at 2x3: something broke",
    ]


@pytest.mark.parametrize(
    ("ours", "failed", "strict", "code"),
    [(2.0, "", False, 0), (2.0, "", True, 1), (1.0, "", True, 0), (1.0, "broke", False, 1)],
)
def test_a_failure_fails_the_command_and_a_miss_where_that_is_strict(
    monkeypatch, tmp_path, capsys, ours, failed, strict, code
):
    in_rounds(monkeypatch, {"ours": [ours] * 5, "theirs": [1.0] * 5})
    step = Step("part", "place", RUN, lambda: iter([case(failed=failed)]))
    path = tmp_path / "run.json"
    try:
        run_steps([step], CPU, path, commit="abc", strict=strict, quick=True)
        left = 0
    except typer.Exit as end:
        left = end.exit_code
    assert left == code
    facts, rows = results.read(path)
    assert (facts["commit"], facts["quick"], facts["machine"]["gpu"], len(rows)) == ("abc", True, None, 1)
    assert {"versions", "date", "seconds"} <= set(facts)
    printed = capsys.readouterr()
    assert "part at place" in printed.err
    assert str(path) in printed.out


# ---- timing


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


def test_running_out_of_memory_is_recorded_and_the_others_go_on():
    def starved() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def starved_on_the_cpu() -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    calls = {"fits": lambda: None, "starved": starved, "on the CPU": starved_on_the_cpu}
    timings = alternate(calls, device=CPU, alternations=2)
    assert list(timings.samples_ms) == ["fits"]
    assert timings.absent == {"starved": "out of memory", "on the CPU": "out of memory"}


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


def test_the_machine_is_described():
    facts = machine_facts.describe(CPU)
    assert facts["machine"]["gpu"] is None
    assert facts["versions"]["torch"] == torch.__version__.split("+")[0] or "+" in facts["versions"]["torch"]
    assert machine_facts.describe(CPU, "abc123")["commit"] == "abc123"
    assert machine_facts.version("no-such-package") is None
    assert machine_facts._output("no-such-program") == ""


def test_a_package_within_somebody_elses_repository_has_no_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(machine_facts, "PACKAGE", tmp_path)
    assert machine_facts.commit() is None
    (tmp_path / "__init__.py").write_text("")
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    assert machine_facts.commit() is None
