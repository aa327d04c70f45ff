"""The random calls of attention: their formula, what they find, and that a case repeats."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from polyhead import AttentionOutput, attention, profile
from polyhead.errors import OptionError
from tests import fuzz_attention
from tests.fuzz import calls
from tests.fuzz.calls import run_case
from tests.fuzz.cases import Call, Case, CaseId, Family, MaskDraw, ProfileDraw, Sizes, describe, draw_case
from tests.fuzz.formula import MAXIMA, RowOptions, formula_results
from tests.fuzz.scenes import VectorisedMask, draw_scene, in_layout
from tests.fuzz.workers import ROOT, Pool, Run
from tests.ops.attention.test_statistics import definitions, functional, gradients, has_ties
from tests.ops.oracle import Scene, Who, scenes

CASES = 40


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """Restore what the tool sets."""
    threads, exact = torch.get_num_threads(), torch.backends.cuda.matmul.allow_tf32
    yield
    torch.set_num_threads(threads)
    torch.backends.cuda.matmul.allow_tf32 = exact


def numbered(position: int, *, seed: int = 0) -> CaseId:
    return CaseId("small", seed, 0, position)


# ---- the formula


@settings(max_examples=20)
@given(scenes(max_heads=3))
def test_the_formula_is_the_one_that_visits_every_pair(scene: Scene) -> None:
    exact = scene.with_gradients()
    ours = replace(scene, who=VectorisedMask.of(scene.who)).with_gradients()
    found = formula_results(ours, RowOptions(window=5, sink_keys=2)).tensors
    expected = definitions(exact, sink_keys=2, window=5)
    formula = exact.formula()
    assert found.keys() == {"output", "logsumexp", *expected}
    torch.testing.assert_close(found["output"], formula.output)
    torch.testing.assert_close(found["logsumexp"], formula.logsumexp)
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, rtol=1e-10, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")
    uncertain = MAXIMA if has_ties(exact) else ()
    expected, found = ({name: x for name, x in y.items() if name not in uncertain} for y in (expected, found))
    expected_gradients = gradients(functional(expected), exact)
    for name, grad in gradients(functional(found), ours).items():
        torch.testing.assert_close(grad, expected_gradients[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("position", range(0, 360, 9))
def test_the_masks_of_drawn_cases_are_those_of_single_pairs(position: int) -> None:
    case = draw_case(numbered(position))
    sizes = replace(case.sizes, queries=min(case.sizes.queries, 19), keys=min(case.sizes.keys, 23))
    if case.mask.tokens in ("packed", "documents"):
        sizes = replace(sizes, queries=sizes.keys)
    case = replace(case, sizes=sizes)
    who = draw_scene(case, case.calls[0], "cpu").clean.who
    pairs = Who(**{name: getattr(who, name) for name in Who.__dataclass_fields__})
    shape = (sizes.batch, sizes.heads, sizes.queries, sizes.keys)
    assert torch.equal(who.visible(*shape), pairs.visible(*shape))
    assert torch.equal(who.distances(*shape[:1], *shape[2:]), pairs.distances(*shape[:1], *shape[2:]))


def test_every_layout_has_the_same_numbers() -> None:
    x = torch.randn(2, 3, 5, 7)
    layouts = {layout for position in range(300) for layout in draw_case(numbered(position)).calls[0].layouts}
    strides = set()
    for layout in layouts - {"one batch", "one head"}:
        other = in_layout(x, layout)
        assert torch.equal(other, x), layout
        strides.add((other.stride(), other.storage_offset()))
    assert len(strides) == len(layouts) - 2 >= 8
    assert in_layout(x, "one batch").stride(0) == in_layout(x, "one head").stride(1) == 0


# ---- what is found

PLAIN = Case(
    Family("float32", 16, 24, ("entropy", "mean_distance"), "output"),
    Sizes(batch=2, heads=4, kv_heads=2, queries=33, keys=65),
    (Call(seed=5),),
    mask=MaskDraw(tokens="query lengths", causal=True),
    logsumexp=True,
)


class ScaledGradient(torch.autograd.Function):
    """Identity whose gradient is 1% too large in head 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad[:, 1] *= 1.01
        return grad


def with_wrong_row(*tensors: Tensor, **options: Any) -> AttentionOutput:
    result = attention(*tensors, **options)
    output = result.output.clone()
    row = int(output[1, 2].any(-1).nonzero()[-1])
    output[1, 2, row] = output[1, 1, row]
    return replace(result, output=output)


def with_scaled_gradient(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> AttentionOutput:
    return attention(query, ScaledGradient.apply(key), value, **options)


def with_wrong_statistic(*tensors: Tensor, **options: Any) -> AttentionOutput:
    result = attention(*tensors, **options)
    assert result.statistics is not None
    assert result.statistics.entropy is not None
    entropy = result.statistics.entropy.clone()
    entropy[0, 0, 30] += 1e-2
    return replace(result, statistics=replace(result.statistics, entropy=entropy))


def with_half_the_mask(*tensors: Tensor, mask: Any, **options: Any) -> AttentionOutput:
    return attention(*tensors, mask=replace(mask, right=1), **options)


def with_a_value_in_an_empty_row(*tensors: Tensor, **options: Any) -> AttentionOutput:
    result = attention(*tensors, **options)
    return replace(result, output=result.output + 1e-9)


def with_nan(*tensors: Tensor, **options: Any) -> AttentionOutput:
    result = attention(*tensors, **options)
    output = result.output.clone()
    output[0, 0, 0, 0] = torch.nan
    return replace(result, output=output)


def that_raises(*tensors: Tensor, **options: Any) -> AttentionOutput:
    raise IndexError("index 7 is out of bounds")


@pytest.mark.parametrize(
    ("planted", "words"),
    [
        (with_wrong_row, r"call 0 output: error .* exceeds"),
        (with_scaled_gradient, r"call 0 grad key: error .* exceeds"),
        (with_wrong_statistic, r"call 0 entropy: error 1.000e-02 exceeds"),
        (with_half_the_mask, r"call 0 output: error"),
        (with_a_value_in_an_empty_row, r"call 0 output: rows without visible keys are not exactly 0"),
        (with_nan, r"call 0 output: 1 elements are not finite"),
        (that_raises, r"exception: IndexError: index 7 is out of bounds \(.*test_fuzz_attention.py:\d+\)"),
    ],
)
def test_a_planted_error_is_found(
    monkeypatch: pytest.MonkeyPatch, planted: Callable[..., AttentionOutput], words: str
) -> None:
    assert run_case(PLAIN, "cpu").problems == []
    monkeypatch.setattr(calls, "attention", planted)
    assert re.search(words, "; ".join(map(str, run_case(PLAIN, "cpu").problems)))


def test_a_wrong_profile_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(PLAIN, profile=ProfileDraw(("received",)))
    assert run_case(case, "cpu").problems == []
    monkeypatch.setattr(calls, "profile", lambda query, *rest, **options: profile(query / 2, *rest, **options))
    assert "received: off by" in str(run_case(case, "cpu").problems[0])


def test_an_error_after_the_first_call_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a launch planned for other strides would be."""
    strides = set()

    def planted(query: Tensor, *tensors: Tensor, **options: Any) -> AttentionOutput:
        strides.add(query.stride())
        return attention(query if len(strides) == 1 else query * 1.01, *tensors, **options)

    monkeypatch.setattr(calls, "attention", planted)
    case = replace(PLAIN, calls=(Call(seed=5), Call(seed=6, layouts=("transposed",) * 3)))
    problems = run_case(case, "cpu").problems
    assert problems
    assert {str(x).split()[1] for x in problems} == {"1"}


def test_a_refusal_is_counted_by_its_message_without_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*tensors: Tensor, **options: Any) -> AttentionOutput:
        raise OptionError("at most 7 keys, got 65")

    monkeypatch.setattr(calls, "attention", refuses)
    outcome = run_case(PLAIN, "cpu")
    assert outcome.problems == []
    assert outcome.refused == {"OptionError: at most N keys, got N": 1}


@pytest.mark.parametrize("first", range(0, CASES, 5))
def test_drawn_cases_have_no_findings_on_the_cpu(first: int) -> None:
    for position in range(first, first + 5):
        name = numbered(position, seed=2)
        outcome = run_case(draw_case(name), "cpu")
        assert not outcome.problems, f"{name}: {outcome.problems} {outcome.trace} {outcome.text}"
        assert outcome.ran or outcome.refused


def test_drawn_cases_have_every_option() -> None:
    text = " ".join(describe(draw_case(numbered(position))) for position in range(600))
    for word in (
        *("no_grad", "inference_mode", "autocast=True", "stream=True", "poison='nan'", "profile=", "by_name=True"),
        *("'packed'", "'two documents'", "'query lengths'", "'positions'", "side='left'", "first=70", "softcap="),
        *(
            "sinks=True",
            "table=",
            "bias=",
            "scale='heads'",
            "scale=0.0",
            "float16",
            "float64",
            "finite=True",
            "small_tiles=True",
        ),
    ):
        assert word in text, word


# ---- processes


def test_a_case_is_repeated_bit_for_bit_in_another_process(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--device", "cpu", "--case", "small-0-0-0"]
    assert fuzz_attention.main(arguments) == 0
    here = capsys.readouterr().out
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    command = [sys.executable, "-m", "tests.fuzz_attention", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=environment, timeout=240)
    assert done.stdout == here
    assert re.search(r"inputs \w{16}, results \w{16}, calls \{'", here)


def test_a_case_is_drawn_from_its_name_alone() -> None:
    for position in (3, 17, 40):
        name = str(numbered(position, seed=4))
        case = draw_case(CaseId.parse(name))
        assert case == draw_case(numbered(position, seed=4))
        assert case != draw_case(numbered(position, seed=5))
        scene, again = (draw_scene(case, case.calls[0], "cpu").passed for _ in range(2))
        assert all(torch.equal(x.nan_to_num(), again.learned[key].nan_to_num()) for key, x in scene.learned.items())


def test_a_name_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="such as small-0-3-57; got 'small-0-3'"):
        CaseId.parse("small-0-3")
    with pytest.raises(SystemExit):
        fuzz_attention.main(["--case", "medium-0-3-1"])
    assert "with sizes full or small" in capsys.readouterr().err


def test_a_finding_is_one_line_that_repeats_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calls, "attention", that_raises)
    assert fuzz_attention.main(["--device", "cpu", "--case", "small-0-0-4"]) == 1
    *_, line = capsys.readouterr().out.splitlines()
    assert line.startswith("FINDING small-0-0-4 [no backend] exception: IndexError: index 7")
    assert "| python -m tests.fuzz_attention --device cpu --case small-0-0-4 | Case(family=Family(" in line


WORKER = """
import json, os, sys, time
stream = {stream}
end = dict(ran={{"sdpa": 2}}, refused={{"OptionError: no": 1}}, finding=None)
print(json.dumps(dict(begin=f"small-0-{{stream}}-0")), flush=True)
print(json.dumps(dict(end=f"small-0-{{stream}}-0", **end)), flush=True)
print("a library prints this", flush=True)
if stream in (0, 1):
    print(json.dumps(dict(begin=f"small-0-{{stream}}-1")), flush=True)
    print("CUDA error: misaligned address", file=sys.stderr, flush=True)
    os.abort() if stream == 0 else time.sleep(60)
time.sleep(0.2)
"""


def test_a_worker_that_dies_or_hangs_is_replaced_and_its_case_reported() -> None:
    lines: list[str] = []
    run = Run(seed=0, sizes="small", device="cpu", seconds=3.0, jobs=2, case_seconds=1.0)
    tally = Pool(run, lines.append, lambda _, stream: [sys.executable, "-c", WORKER.format(stream=stream)]).wait()
    assert tally.cases > 2
    assert (tally.findings, tally.lost, tally.ran["sdpa"]) == (2, 2, 2 * tally.cases)
    died, hung = sorted(lines)
    assert "FINDING small-0-0-1 the process died or hung in this case: SIGABRT: " in died
    assert "CUDA error: misaligned address | python -m tests.fuzz_attention" in died
    assert "FINDING small-0-1-1 the process died or hung in this case: SIGKILL: " in hung
    summary = tally.lines()
    assert summary[0] == f"{tally.cases} cases; calls by backend: sdpa {2 * tally.cases}"
    assert summary[1:] == [
        f"refused {tally.cases:5}  OptionError: no",
        "2 workers died and were replaced",
        "2 findings",
    ]


def test_a_worker_reports_its_cases_and_ends_in_time(capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.chdir(ROOT):
        assert fuzz_attention.main(["--device", "cpu", "--worker", "3", "--seconds", "0.01"]) == 0
    begun, ended = capsys.readouterr().out.splitlines()
    assert begun == '{"begin": "small-0-3-0"}'
    assert ended.startswith('{"end": "small-0-3-0", "ran": {')
