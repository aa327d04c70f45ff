"""`python -m benchmarks statistics` measures every row of its table, never wrong numbers, and says what is absent."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import AuxOutput
from typer.testing import CliRunner

import polyhead
from benchmarks import statistics_speed
from benchmarks.app import app
from benchmarks.measuring.agreement import Disagreement
from benchmarks.measuring.cases import Entrants, Run
from benchmarks.measuring.runner import rows_of as measured
from benchmarks.statistics_speed import PARTS, Shape, attention, contenders, decode, exact, memory, plan
from benchmarks.statistics_speed import layer as layers
from benchmarks.statistics_speed.contenders import (
    CUDNN,
    FLASH,
    FLEX,
    GUARDED,
    MATERIALISED,
    PENALTY,
    PROFILE,
    WITH,
    WITHOUT,
)
from benchmarks.statistics_speed.cpu import LargestTensor
from benchmarks.statistics_speed.exact import Exact, Found
from benchmarks.statistics_speed.places import ROW_STATISTICS, shapes_of
from benchmarks.statistics_speed.problem import Problem
from polyhead.errors import OptionError

CPU = torch.device("cpu")
SMALL = Shape.parse("2x4/2x71x16")
RUN = Run(CPU, torch.float32, alternations=2, fewest=2, repetitions=0)


@pytest.fixture(autouse=True)
def few_alternations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics_speed, "_QUICK_ALTERNATIONS", 3)


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's rows with kernels that any machine has: other figures, the same rows."""
    monkeypatch.setattr(contenders, "BACKEND", "blockwise")
    monkeypatch.setattr(contenders, "SDPA", dict.fromkeys(contenders.SDPA, SDPBackend.MATH))
    monkeypatch.setattr(memory, "extra_bytes", lambda device, call, own: 16 * 1000)
    monkeypatch.setattr(decode, "l2_bytes", lambda device: 10_000)
    monkeypatch.setattr(decode, "replayed", lambda calls, device: lambda: [call() for call in calls])
    monkeypatch.setattr(decode, "decode", decode_by_formula)


def decode_by_formula(query, cache, *, scale, names):
    result = polyhead.attention(
        query, cache.key, cache.value, scale=scale, statistics=tuple(names), logsumexp=True, backend="reference"
    )
    return result.output, result.logsumexp, dict(result.statistics.items())


def invoke(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["statistics", *arguments], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert result.exit_code == code, result.output
    return result.output


# ---- the command


def test_without_a_gpu_it_says_so_and_measures_the_cpu(without_gpu, tmp_path):
    path = tmp_path / "run.json"
    shown = invoke("--quick", "--shapes", "1x2x71x16", "--output", str(path), "--commit", "abc123", "--seed", "5")
    assert "no CUDA GPU was found: left out are forward, backward, profile, materialised, memory" in shown
    assert "cpu, forward + backward, causal" in shown
    kept = json.loads(path.read_text(encoding="utf-8"))
    assert [row["bench"] for row in kept["rows"]] == [
        "cpu",
        "cpu, forward + backward",
        "cpu, causal",
        "cpu, forward + backward, causal",
        "cpu, layer",
        "cpu, layer, forward + backward",
    ]
    assert kept["machine"]["gpu"] is None
    assert kept["machine"]["cpu"]
    assert kept["versions"]["polyhead"] == polyhead.__version__
    assert (kept["commit"], kept["seed"], kept["quick"]) == ("abc123", 5, True)
    assert kept["seconds"] > 0
    first = kept["rows"][0]
    assert first["dtype"] == "float32"
    assert {name: len(samples) for name, samples in first["samples_ms"].items()} == {
        WITH: 3,
        "scaled_dot_product_attention": 3,
    }


def test_without_a_gpu_and_without_the_cpu_part_nothing_is_measured(without_gpu, tmp_path):
    path = tmp_path / "run.json"
    assert invoke("--only", "decode,layer", "--output", str(path)).strip() == (
        "no CUDA GPU was found: left out are decode, layer"
    )
    assert not path.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--only", "forward,speed"), "got 'speed'"),
        (("--shapes", "4x16x4096"), "got '4x16x4096'"),
        (("--shapes", "4x16x4096x0"), "got '4x16x4096x0'"),
        (("--shapes", "4x16/3x4096x64"), "heads must be a multiple of kv_heads, got '4x16/3x4096x64'"),
    ],
)
def test_a_wrong_option_is_refused_in_words(arguments, words):
    assert words in invoke(*arguments, code=2)


def test_wrong_numbers_of_ours_are_not_timed_and_fail_the_command(without_gpu, monkeypatch):
    true = polyhead.attention

    def off(*args, **options):
        result = true(*args, **options)
        return replace(result, output=result.output * 1.01)

    monkeypatch.setattr(polyhead, "attention", off)
    shown = invoke("--quick", "--only", "cpu", "--shapes", "1x2x71x16", code=1)
    assert "not timed: polyhead, statistics: the output is off by" in shown


# ---- what is measured


def test_the_table_of_the_figures_is_planned_in_full():
    steps = plan(gpu=torch.device("cuda"))
    places = {part: [step.place for step in steps if step.part == part] for part in PARTS}
    assert places["forward"] == places["backward"] == places["profile"]
    assert places["forward"][-2:] == ["1x32/8x32768x128", "1x32/8x32768x128, causal"]
    assert len(places["forward"]) == 12
    assert places["memory"] == ["1x32x131072x128"]
    assert len(places["decode"]) == 4
    assert places["layer"] == ["8x16x2048x64", "2x16x8192x128"]
    assert places["cpu"] == ["1x8x4096x64", "1x8x4096x64, causal", "2x12x1024x64, layer", "1x8x4096x64, layer"]
    assert {step.run.device.type for step in steps if step.part != "cpu"} == {"cuda"}
    assert {step.run.device.type for step in steps if step.part == "cpu"} == {"cpu"}


def test_a_plan_without_a_gpu_holds_the_cpu_alone_and_a_quick_one_is_shorter():
    assert {step.part for step in plan()} == {"cpu"}
    whole, quick = (plan(gpu=torch.device("cuda"), quick=quick) for quick in (False, True))
    assert len(quick) < len(whole)
    assert {step.part for step in quick} == set(PARTS)
    with pytest.raises(OptionError, match="got speed"):
        plan(["speed"])


@pytest.mark.parametrize("text", ["16x12x512x64", "1x32/8x32768x128"])
def test_a_shape_is_written_as_it_is_read(text):
    assert str(Shape.parse(text)) == text


def rows_of(part: str) -> list:
    return [row for step in plan([part], [SMALL], quick=True, gpu=CPU) for row in measured(step.cases(), step.run)]


def pairs(row) -> dict[tuple[str, str], float | None]:
    return {(c.subject, c.against): c.bound for c in row.comparisons}


def test_forward_rows_compare_with_and_without_statistics(on_the_cpu):
    plain, causal = rows_of("forward")
    assert (plain.bench, causal.bench) == ("forward", "forward, causal")
    assert pairs(plain) == {
        (WITH, CUDNN): None, (WITH, WITHOUT): 1.05, (WITHOUT, CUDNN): None, (WITH, FLASH): None,
    }  # fmt: skip
    assert pairs(causal) == {**pairs(plain), (GUARDED, WITH): None}
    assert "quick" in plain.timings.absent[FLEX]
    assert plain.failed == causal.failed == ""


def test_flex_attention_is_held_to_what_it_tells():
    problem = Problem.draw(RUN, SMALL, causal=True)
    result = contenders_blockwise(problem)
    reported = AuxOutput(lse=result.logsumexp, max_scores=result.statistics.max_logit)
    Exact(problem).check(FLEX, contenders.read_flex((result.output, reported)))
    with pytest.raises(Disagreement, match="max: max_logit is off"):
        Exact(problem).check(FLEX, contenders.read_flex((result.output, reported._replace(max_scores=reported.lse))))


def test_a_contender_that_a_machine_does_not_have_says_so_in_its_own_words():
    problem = Problem.draw(RUN, Shape.parse("1x2x128x16"), causal=True)
    found = Entrants()
    assert not found.enter(FLEX, lambda: contenders.flex(problem), contenders.read_flex)
    assert list(found.absent) == [FLEX]
    assert found.absent[FLEX].startswith("Returning max scores is not supported on CPU")
    assert found.failures == []


@pytest.mark.parametrize(
    ("text", "bound"), [("16x12x512x64", None), ("4x16x4096x64", 1.15), ("4x16x4096x128", 1.10), ("1x8x8192x256", 1.10)]
)
def test_the_forward_is_bound_at_long_sequences(text, bound):
    assert attention._forward_bound(Shape.parse(text)) == bound


def test_training_rows_hold_the_gradients_of_each(on_the_cpu):
    for row in rows_of("backward"):
        assert pairs(row) == {(WITH, CUDNN): 1.05, (PENALTY, CUDNN): None, (PENALTY, WITH): None}
        assert row.failed == ""


def test_profile_rows_compare_the_second_pass_with_a_forward(on_the_cpu):
    for row in rows_of("profile"):
        assert pairs(row) == {(PROFILE, CUDNN): None}
        assert row.failed == ""


def test_materialised_weights_are_bound_between_4096_and_16384_tokens(on_the_cpu, monkeypatch):
    monkeypatch.setattr(attention, "LONG", 64)
    plain, causal = rows_of("materialised")
    assert pairs(plain) == {(WITH, MATERIALISED): 1 / 23}
    assert pairs(causal) == {(WITH, MATERIALISED): 1 / 45}


def test_materialised_weights_that_do_not_fit_are_recorded_beside_our_time(on_the_cpu, monkeypatch):
    def starved(problem):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64 GiB")

    monkeypatch.setattr(contenders, "materialised", starved)
    row = rows_of("materialised")[0]
    assert row.timings.absent == {MATERIALISED: "out of memory"}
    assert [figure.what for figure in row.figures] == [WITH]
    assert row.failed == ""


def test_memory_rows_count_bytes_a_row_and_their_growth(on_the_cpu):
    forward, profile = rows_of("memory")
    # A thousand rows' worth of 16 bytes on 2 * 4 * 71 rows, the same at half the length.
    assert [round(figure.value, 2) for figure in forward.figures] == [round(16_000 / 568, 2), 1.0]
    assert [figure.bound for figure in forward.figures] == [24.0, 2.05]
    assert forward.found("miss") == [
        "memory, forward, causal at 2x4/2x71x16: beyond inputs and output is 28.17 bytes a row, above 24"
    ]
    assert [figure.unit for figure in profile.figures] == ["bytes a row", "", "ms"]
    assert profile.found("miss") == []


def test_decode_rows_tell_the_bandwidth_and_hold_ours_to_cudnn(on_the_cpu):
    (row,) = rows_of("decode")
    assert pairs(row) == {(WITH, CUDNN): 1.0}
    size = 2 * 2 * 2 * 71 * 16 * 4
    assert row.notes == {"caches": 2, "bytes": size}
    ours = next(figure for figure in row.figures if WITH in figure.what)
    assert ours.value == pytest.approx(size / (row.timings.median_ms(WITH) * 1e-3) / 1e12)
    assert row.failed == ""


def test_caches_in_turn_exceed_the_l2_three_times():
    assert decode.caches_beyond(60 << 20, 134_217_728) == 2
    assert decode.caches_beyond(60 << 20, 1 << 20) == 180


def test_the_layer_is_bound_by_the_device_it_runs_on(monkeypatch):
    assert layers.BOUNDS == {"cuda": (0.35, 2048), "cpu": (1.0, 1024)}
    monkeypatch.setitem(layers.BOUNDS, "cpu", (1.0, 71))
    forward, training = measured(layers.layer(RUN, Shape.parse("2x3x71x16")), RUN)
    assert pairs(forward) == {(WITH, layers.TORCH): 1.0, (WITH, layers.AVERAGED): 1.0}
    assert pairs(training) == {(WITH, layers.TORCH): None, (WITH, layers.AVERAGED): None}
    assert forward.failed == training.failed == ""
    grouped, _ = measured(layers.layer(RUN, SMALL), RUN)
    assert grouped.timings.absent == dict.fromkeys((layers.TORCH, layers.AVERAGED), "it has no grouped-query heads")


def test_the_cpu_has_bounds_for_forward_and_training(monkeypatch):
    from benchmarks.statistics_speed import cpu

    monkeypatch.setattr(cpu, "LONG", 71)
    forward, training = measured(cpu.cpu(RUN, SMALL, True), RUN)
    assert [c.bound for c in forward.comparisons] == [1.5]
    assert [c.bound for c in training.comparisons] == [2.0]


def test_the_largest_tensor_of_a_call_is_seen():
    x = torch.ones(7, 11)
    with LargestTensor() as largest:
        (x[:, :3] + 1).sum()
    assert largest.nbytes == 4 * 7 * 3
    with LargestTensor() as largest:
        x @ x.T
    assert largest.nbytes == 4 * 11 * 7


# ---- who may be timed


@pytest.mark.parametrize("causal", [False, True])
def test_the_exact_rows_are_those_of_the_reference(causal):
    problem = Problem.draw(RUN, SMALL, causal=causal)
    wide = (x.double() for x in (problem.query, problem.key, problem.value))
    right = Found.of(
        polyhead.attention(*wide, mask=problem.mask, statistics=ROW_STATISTICS, logsumexp=True, backend="reference")
    )
    seen = Exact(problem)
    torch.testing.assert_close(seen.right.output, right.output[-1:, :, seen.index])
    assert set(seen.right.rows) == set(right.rows)
    for name, expected in right.rows.items():
        torch.testing.assert_close(seen.right.rows[name], expected[-1:, :, seen.index])


@pytest.mark.parametrize("name", [*ROW_STATISTICS, "logsumexp"])
def test_a_statistic_that_is_off_is_not_timed(name):
    problem = Problem.draw(RUN, SMALL, causal=True)
    right = Found.of(contenders_blockwise(problem))
    Exact(problem).check_ours(WITH, right)
    spoiled = {what: x + (0.1 if what == name else 0.0) for what, x in right.rows.items()}
    with pytest.raises(Disagreement, match=f"{WITH}: {name} is off by 0.1"):
        Exact(problem).check_ours(WITH, Found(right.output, spoiled))
    with pytest.raises(Disagreement, match=f"{name} is off by nan"):
        Exact(problem).check_ours(WITH, Found(right.output, {**right.rows, name: right.rows[name] * torch.nan}))


def contenders_blockwise(problem: Problem) -> polyhead.AttentionOutput:
    return polyhead.attention(
        problem.query, problem.key, problem.value, mask=problem.mask, statistics=ROW_STATISTICS, logsumexp=True,
        backend="blockwise",
    )  # fmt: skip


def test_a_wrong_gradient_is_not_timed():
    problem = Problem.draw(RUN, SMALL, causal=True)
    step = contenders.TrainingStep(problem)
    grads = step.ours(penalty=True, backend="blockwise")()
    exact.check_gradients("one", problem, grads, step.upstream, step.entropy_upstream)
    with pytest.raises(Disagreement, match="one: the gradient of the query is off"):
        exact.check_gradients("one", problem, grads, step.upstream, None)


@pytest.mark.parametrize("spoil", ["received", "block_map"])
def test_a_wrong_profile_is_not_timed(spoil):
    problem = Problem.draw(RUN, SMALL, causal=True)
    logsumexp = contenders_blockwise(problem).logsumexp
    found = polyhead.profile(problem.query, problem.key, logsumexp, mask=problem.mask, received=True, block_map=(16, 9))
    exact.check_profile(PROFILE, problem, logsumexp, found)
    wrong = replace(found, **{spoil: getattr(found, spoil).roll(1, -1)})
    with pytest.raises(Disagreement, match=f"{PROFILE}: "):
        exact.check_profile(PROFILE, problem, logsumexp, wrong)


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("part", [part for part in PARTS if part != "cpu"])
def test_every_part_runs_on_a_gpu(part):
    shape = Shape.parse("2x8x1024x64" if part == "layer" else "2x8/2x1024x64")
    for step in plan([part], [shape], quick=True, gpu=torch.device("cuda")):
        for row in measured(step.cases(), step.run):
            assert row.failed == ""
            assert row.timings.samples_ms


def test_quick_shapes_are_a_part_of_the_whole():
    for part in PARTS:
        assert {str(shape) for shape in shapes_of(part, quick=True)} <= {
            str(shape) for shape in shapes_of(part, quick=False)
        }


def test_nothing_of_a_run_is_kept_without_being_requested(without_gpu, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    invoke("--quick", "--only", "cpu", "--shapes", "1x2x19x16")
    assert list(tmp_path.iterdir()) == []
