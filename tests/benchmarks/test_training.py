"""The comparison by training: what is equal is equal, it goes on where it was, and models learn."""

from __future__ import annotations

import gzip
import math
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.app import app
from benchmarks.measuring.json_lines import append_result
from benchmarks.training.contestants import contest
from benchmarks.training.loop import train
from benchmarks.training.model import ByteModel, Sizes, parameters, step_flops
from benchmarks.training.running import Comparison
from benchmarks.training.standings import rows, standings
from benchmarks.training.text import Batches, Text
from benchmarks.training.trials import (
    BUDGETS,
    RATES,
    SEEDS,
    Contest,
    Result,
    Trial,
    best_rate,
    next_trial,
    read_results,
)
from polyhead.errors import OptionError
from polyhead.layers import MultiHeadConfig

CPU = torch.device("cpu")
TINY = Contest(
    {
        "multi-head": MultiHeadConfig(32, 4, causal=True),
        "multi-query": MultiHeadConfig(32, 4, num_kv_heads=1, causal=True),
        "narrow": MultiHeadConfig(32, 4, head_dim=4, causal=True),
    },
    Sizes(embed_dim=32, layers=2, context=16, hidden=64),
    batch=4,
    steps=30,
)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"one two three four five six seven. " * 200)
    return path


def result(trial: Trial, bits: float) -> Result:
    return Result(trial, bits, steps=30, tokens=1, parameters=2, flops=3, seconds=0.5, facts={"gpu": "none"})


@pytest.mark.parametrize("name", contest().variants)
def test_models_have_equally_many_parameters_as_counted(name):
    requested = contest()
    config, sizes = requested.variants[name], requested.sizes_of(name)
    first = parameters(requested.variants[requested.baseline], requested.sizes)
    assert first >= 10_000_000
    assert abs(parameters(config, sizes) - first) <= 0.002 * first
    small = contest(quick=True)
    config, sizes = small.variants[name], small.sizes_of(name)
    assert sum(x.numel() for x in ByteModel(config, sizes).parameters()) == parameters(config, sizes)


def test_steps_of_equal_compute_cost_the_same():
    requested = contest()
    first = requested.steps * step_flops(requested.variants[requested.baseline], requested.sizes, requested.batch)
    for name, config in requested.variants.items():
        spent = requested.steps_of(name, "compute") * step_flops(config, requested.sizes_of(name), requested.batch)
        assert abs(spent - first) <= 0.001 * first
        assert requested.steps_of(name, "tokens") == requested.steps


def test_flops_are_those_that_torch_counts():
    from torch.utils.flop_counter import FlopCounterMode

    model = ByteModel(MultiHeadConfig(32, 4, backend="reference"), TINY.sizes)
    tokens = torch.zeros(4, 16, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(tokens)[0].sum().backward()
    whole = step_flops(MultiHeadConfig(32, 4), TINY.sizes, 4)
    # A fused backward computes the scores once more, which a materialised one keeps.
    assert counter.get_total_flops() == whole - TINY.sizes.layers * 2 * 4 * 16 * 16 * 32


def test_every_arrangement_gets_the_same_sweep_then_seeds_at_its_best_rate():
    done: list[Result] = []
    while (trial := next_trial(TINY, done)) is not None:
        # A rate in the middle is best for one, the last for the other two.
        best = RATES[1] if trial.variant == "multi-head" else RATES[-1]
        done.append(result(trial, 2.0 + abs(trial.rate - best) + 0.01 * trial.seed))
    tried = {(x.trial.variant, x.trial.budget): [] for x in done}
    for x in done:
        tried[x.trial.variant, x.trial.budget].append((x.trial.rate, x.trial.seed))
    assert tried["multi-head", "tokens"] == [*((rate, 0) for rate in RATES), (RATES[1], 1), (RATES[1], 2)]
    assert tried["narrow", "compute"] == [*((rate, 0) for rate in RATES), (RATES[-1], 1), (RATES[-1], 2)]
    assert ("multi-head", "compute") not in tried  # the same training as for equal tokens
    found = {(x.variant, x.budget): x for x in standings(TINY, done)}
    assert len(found) == len(TINY.variants) * len(BUDGETS)
    assert found["multi-head", "compute"].bits == found["multi-head", "tokens"].bits == (2.0, 2.01, 2.02)
    assert found["narrow", "tokens"].at_an_end
    assert not found["multi-head", "tokens"].at_an_end
    assert found["narrow", "tokens"].spread == pytest.approx(0.01)
    assert len({len(line) for line in rows(list(found.values()))}) == 1


def test_what_is_under_way_is_begun_once_and_seeds_wait_for_their_sweep():
    begun: list[Trial] = []
    while (trial := next_trial(TINY, [], begun)) is not None:
        begun.append(trial)
    assert len(begun) == len(set(begun)) == len(RATES) * 4  # three arrangements, one of them under both budgets
    assert {trial.seed for trial in begun} == {SEEDS[0]}
    swept = [result(trial, 2.0) for trial in begun if trial.variant == "multi-head"]
    assert next_trial(TINY, swept, begun) == Trial("multi-head", "tokens", RATES[0], SEEDS[1])


SMALL = replace(TINY, variants={"multi-head": TINY.variants["multi-head"]}, steps=2)


def bits_by_rate(file: Path, output: Path, processes: int) -> dict[float, float]:
    """Run a small contest; return the results of the first seed."""
    found = list(Comparison(SMALL, file, CPU, output, {"gpu": "none"}).run(processes=processes))
    assert sorted(map(str, found)) == sorted(map(str, read_results(output)))
    assert len({x.trial for x in found}) == len(found) == len(RATES) + len(SEEDS) - 1
    return {x.trial.rate: x.bits for x in found if x.trial.seed == SEEDS[0]}


def test_each_trial_is_run_once_and_kept(file, tmp_path):
    assert set(bits_by_rate(file, tmp_path / "one.jsonl", 1)) == set(RATES)


@pytest.mark.usefixtures("one_thread")
def test_several_at_a_time_find_what_one_after_another_finds(file, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    several, one = (bits_by_rate(file, tmp_path / f"{count}.jsonl", count) for count in (2, 1))
    assert several == pytest.approx(one, rel=1e-6)


def test_a_training_that_came_apart_is_no_best_and_is_not_tried_again(tmp_path):
    path, sweep = tmp_path / "results.jsonl", [Trial("multi-head", "tokens", rate, SEEDS[0]) for rate in RATES]
    for trial, bits in zip(sweep, (2.0, 1.9, math.nan, 1.95), strict=True):
        append_result(path, result(trial, bits))
    found = read_results(path)
    assert math.isnan(found[2].bits)
    assert best_rate(found, "multi-head", "tokens") == RATES[1]
    assert next_trial(TINY, found) == Trial("multi-head", "tokens", RATES[1], 1)


def test_a_line_that_was_cut_short_is_done_again(tmp_path):
    path = tmp_path / "results.jsonl"
    append_result(path, result(Trial("multi-head", "tokens", RATES[0], 0), 2.0))
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 2])
    assert [x.bits for x in read_results(path)] == [2.0]


def test_a_model_learns_and_the_same_seed_says_the_same(file):
    text = Text.read(file, TINY.sizes.context)
    untrained, one, again = (
        train(replace(TINY, steps=steps), Trial("multi-head", "tokens", 5e-3, 3), text, CPU) for steps in (1, 30, 30)
    )
    assert one.bits == again.bits
    assert one.bits < 0.75 * untrained.bits
    assert one.tokens == 30 * 4 * 16


def test_text_is_cut_once_and_packed_text_is_the_same(file, tmp_path):
    content = file.read_bytes()
    packed = tmp_path / "text.gz"
    packed.write_bytes(gzip.compress(content))
    text = Text.read(packed, 16)
    assert bytes(text.learned.tolist()) + bytes(text.held_out.tolist()) == content
    questions = text.questions(16)
    assert questions.shape == ((len(text.held_out) - 1) // 16, 17)
    assert torch.equal(questions[:, :-1].flatten(), text.held_out[: questions.shape[0] * 16])
    draws = [Batches(text, batch=4, context=16, seed=seed, device=CPU).draw() for seed in (0, 0, 1)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    with pytest.raises(OptionError, match="must hold a context of 9999 bytes"):
        Text.read(file, 9999)


def test_the_command_goes_on(file, tmp_path):
    output = tmp_path / "results.jsonl"
    command = ["training", "--text", str(file), "--output", str(output), "--quick"]
    for _ in range(2):
        done = CliRunner().invoke(app, [*command, "--minutes", "0.0001", "--commit", "abc"])
        assert done.exit_code == 0, done.output
    first, second = read_results(output)
    assert [x.trial.rate for x in (first, second)] == list(RATES[:2])
    assert first.facts["commit"] == "abc"
    assert first.facts["quick"]
    assert CliRunner().invoke(app, [*command, "--processes", "0"]).exit_code != 0
