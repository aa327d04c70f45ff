"""Stability of training: what diverged means, which runs are made, and that contenders differ only in their remedy."""

from __future__ import annotations

import math
from dataclasses import replace
from xml.etree import ElementTree

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import tables
from benchmarks.alarms import outcomes
from benchmarks.app import app
from benchmarks.measuring.json_lines import append_result
from benchmarks.stability import command, loop
from benchmarks.stability.figure import panels
from benchmarks.stability.loop import build_optimizers, train
from benchmarks.stability.tables import alarm_rows, clip_rows
from benchmarks.stability.trials import (
    LOWER,
    MARGIN,
    PLANTS,
    Result,
    Setting,
    Study,
    Trial,
    next_trial,
    read_results,
    verdict,
)
from benchmarks.training.model import ByteModel
from benchmarks.training.text import Text
from polyhead.costs.measuring import machine_facts
from polyhead.errors import OptionError

CPU = torch.device("cpu")
TINY = Setting(layers=2, width=24, heads=3, context=11, batch=2, steps=4, warm_up=2)
PLAIN = Trial("clip", "plain", 0.01, TINY)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"one two three four five six seven. " * 50)
    return path


@pytest.fixture
def text(file):
    return Text.read(file, TINY.context)


def result(trial: Trial = PLAIN, losses=(2.0,) * 300, logits=None, outcome=None, facts=None) -> Result:
    clipped = None if trial.threshold is None else [3] * len(losses)
    return Result(trial, losses, logits or [9.0] * len(losses), clipped, outcome, 1000, 1.5, facts or {})


def test_the_default_model_has_about_100m_parameters():
    setting = Setting()
    with torch.device("meta"):
        model = ByteModel(setting.attention(), setting.sizes)
    assert sum(x.numel() for x in model.parameters()) == setting.parameters
    assert 95e6 < setting.parameters < 105e6
    assert str(setting).startswith("12 layers, 12 heads of 64, 104M parameters, 16 x 512 bytes per step, 500 steps")


def test_contenders_start_from_the_same_weights_and_batches(text):
    plain, clip = (train(x, text, CPU) for x in (PLAIN, replace(PLAIN, contender="QK-clip", threshold=1e6)))
    assert plain.losses == clip.losses
    assert plain.max_logits == clip.max_logits
    assert clip.clipped == [0] * TINY.steps
    assert plain.clipped is None
    states = []
    for contender in ("plain", "QK-norm"):
        torch.manual_seed(0)
        states.append(ByteModel(TINY.attention(contender), TINY.sizes).state_dict())
    assert len(states[1]) == len(states[0]) + 2 * TINY.layers
    assert all(torch.equal(states[1][name], weight) for name, weight in states[0].items())


def test_qk_clip_bounds_the_logits_that_a_larger_rate_of_queries_and_keys_raises(text):
    fast = replace(PLAIN, setting=replace(TINY, qk_rate_factor=30.0, steps=6))
    plain, clip = (train(x, text, CPU) for x in (fast, replace(fast, contender="QK-clip", threshold=2.0)))
    assert max(plain.max_logits) > max(train(PLAIN, text, CPU).max_logits)
    assert max(clip.max_logits) < max(plain.max_logits)
    assert sum(clip.clipped) > 0


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_every_parameter_has_one_optimizer_and_its_factor(optimizer):
    setting = replace(TINY, optimizer=optimizer, qk_rate_factor=7.0, weight_decay=0.3)
    model = ByteModel(setting.attention("QK-norm"), setting.sizes)
    optimizers = build_optimizers(model, setting, CPU)
    groups = {id(x): group for one in optimizers for group in one.param_groups for x in group["params"]}
    assert sum(len(group["params"]) for one in optimizers for group in one.param_groups) == len(groups)
    for name, weight in model.named_parameters():
        group = groups[id(weight)]
        assert group["rate_factor"] == (7.0 if "q_proj" in name or "k_proj" in name else 1.0), name
        assert group["weight_decay"] == (0.3 if weight.ndim > 1 else 0.0), name
    assert [type(x).__name__ for x in optimizers] == (["AdamW"] if optimizer == "adamw" else ["Muon", "AdamW"])


def test_muon_trains_with_qk_clip(text):
    trial = Trial("clip", "QK-clip", 0.1, replace(TINY, optimizer="muon"), threshold=0.5)
    found = train(trial, text, CPU)
    assert len(found.losses) == TINY.steps
    assert found.losses[-1] < found.losses[0]
    assert sum(found.clipped) > 0


def test_a_run_whose_loss_is_not_finite_ends(text, monkeypatch):
    calls = []

    def losses(model, pieces):
        loss, own = byte_losses(model, pieces)
        calls.append(loss)
        return loss * (math.nan if len(calls) == 3 else 1.0), own

    byte_losses = loop.byte_losses
    monkeypatch.setattr(loop, "byte_losses", losses)
    found = train(replace(PLAIN, setting=replace(TINY, steps=50)), text, CPU)
    assert 3 <= len(found.losses) <= 6
    assert math.isnan(found.losses[2])
    assert verdict(found, [found]).nonfinite == 2


def test_diverged_is_a_spike_a_loss_that_is_not_finite_or_a_final_loss_clearly_above_the_best():
    noise = torch.rand(300, generator=torch.Generator().manual_seed(0)).tolist()
    healthy = [2.0 + 0.1 * x for x in noise]
    fine = result(losses=healthy)
    assert str(verdict(fine, [fine])) == "no"
    spiked = result(losses=[*healthy[:200], *[4.0] * 10, *healthy[210:]])
    assert str(verdict(spiked, [spiked])) == "spike at step 200"
    ended = result(losses=[*healthy[:150], math.nan])
    assert verdict(ended, [ended]).nonfinite == 150
    assert math.isnan(verdict(ended, [ended]).final)
    lower = replace(PLAIN, rate=0.005)
    behind = verdict(fine, [fine, result(lower, [x - 1.1 * MARGIN for x in healthy])])
    assert behind.is_behind
    assert behind.diverged
    assert str(behind) == "final loss 0.55 above the best"
    others = [
        replace(PLAIN, rate=0.02),
        replace(lower, contender="QK-norm"),
        replace(lower, setting=replace(TINY, seed=1)),
    ]
    assert not verdict(fine, [result(x, [0.5] * 300) for x in others]).diverged
    short = result(losses=[3.0, 2.0, 4.0])
    assert not verdict(short, [short]).diverged


def runs_of(study: Study, diverging) -> list[Trial]:
    """The trials of a study in their order, if the plain runs at these rates diverge."""
    done: list[Result] = []
    while (trial := next_trial(study, done)) is not None:
        done.append(result(trial, [2.0] * 299 + [math.nan if trial.rate in diverging else 2.0]))
    return [x.trial for x in done]


def test_remedies_are_tried_at_the_lowest_rate_whose_plain_run_diverged():
    study = Study(TINY, (0.1, 0.01, 0.03), 50.0, 6e-4, ("clip",))
    order = [(x.contender, x.rate, x.threshold) for x in runs_of(study, {0.03, 0.1})]
    at_03 = [("plain", 0.03, None), ("QK-clip", 0.03, 50.0), ("QK-norm", 0.03, None)]
    assert order == [("plain", 0.01, None), *at_03]
    assert [x.rate for x in runs_of(replace(study, contests=2), {0.03, 0.1})] == [0.01, *[0.03] * 3, *[0.1] * 3]
    assert {x.contender for x in runs_of(study, set())} == {"plain"}
    lowest = runs_of(study, {0.01})
    assert [x.rate for x in lowest] == [0.01, 0.01, 0.01, 0.01 / LOWER]
    assert lowest[-1].contender == "plain"


def test_alarms_have_a_healthy_run_and_the_schedule_of_their_own_benchmark():
    setting = replace(TINY, warm_up=100, qk_rate_factor=4.0, optimizer="muon")
    trials = runs_of(Study(setting, (0.01,), 50.0, 6e-4, ("alarms",)), set())
    assert [x.plant for x in trials] == list(PLANTS)
    assert {(x.rate, x.setting) for x in trials} == {(6e-4, replace(TINY, warm_up=50, weight_decay=0.1))}


@pytest.mark.parametrize("plant", ["query", "rate"])
def test_what_is_planted_starts_at_its_step(plant, text, monkeypatch):
    monkeypatch.setattr(loop, "PLANTED", 2)
    healthy = Trial("alarms", "plain", 0.01, replace(TINY, steps=6))
    plain, planted = (train(x, text, CPU) for x in (healthy, replace(healthy, plant=plant)))
    assert plain.losses[:2] == planted.losses[:2]
    assert plain.losses[4:] != planted.losses[4:]


def test_an_alarm_of_the_monitor_names_the_planted_head(text, monkeypatch):
    for module in (loop, outcomes):
        monkeypatch.setattr(module, "PLANTED", 5)
    found = train(Trial("alarms", "plain", 1e-4, replace(TINY, steps=75), plant="query"), text, CPU)
    layer, head = found.outcome["place"]
    assert found.outcome["first_names"]
    assert found.outcome["first"][2] == (layer, head)
    assert found.outcome["named"] == found.outcome["first"][1]
    ((_, *cells),) = alarm_rows([found])[1:]
    assert f": L{layer}H{head}" in cells[4]


def study_of(facts) -> list[Result]:
    """A run at a lower rate, one that diverges, two remedies, and two runs with alarms."""
    worse = replace(PLAIN, rate=0.1)
    outcome = {"place": None, "spike": None, "before": 0, "count": 0, "alarms": [], "first": None, "named": None}
    planted = outcome | {"place": [1, 2], "spike": 280, "lead": 40, "by": "logit growth", "count": 3, "named": 240}
    planted["first"] = ["logit growth", 240, [1, 2]]
    alarms = Trial("alarms", "plain", 6e-4, TINY)
    return [
        result(facts=facts),
        result(worse, [*[2.0] * 200, *[5.0] * 100], [9.0] * 150 + [400.0] * 149 + [math.inf], facts=facts),
        result(replace(worse, contender="QK-clip", threshold=50.0), facts=facts),
        result(replace(worse, contender="QK-norm"), [3.0] * 300, facts=facts),
        result(replace(alarms, plant="query"), outcome=planted, facts=facts),
        result(alarms, outcome=outcome, facts=facts),
    ]


def test_a_record_is_a_section_with_a_figure(tmp_path):
    facts = {**machine_facts.describe(CPU, "abc123"), "text": "some.txt", "quick": True}
    path, images = tmp_path / "stability-a.jsonl", tmp_path / "images"
    page = "<!-- stability: begin -->\n<!-- stability: end -->\n"
    assert tables.results_page(page, tmp_path) == page
    images.mkdir()
    tables.draw_figures(tmp_path, images)
    assert not list(images.iterdir())
    for each in study_of(facts):
        append_result(path, each)
    assert read_results(path)[1].max_logits[:-1] == study_of(facts)[1].max_logits[:-1]
    shown = tables.results_page(page, tmp_path)
    assert "6 training runs on some.txt" in shown
    assert "At a learning rate of 0.1 the plain run diverged; QK-norm diverged as well; QK-clip at 50 did not." in shown
    assert "| plain | 0.1 | spike at step 200, final loss 3.00 above the best | 300 | 5.000 | 400 | 150 |  |" in shown
    assert "| QK-clip at 50 | 0.1 | no | 300 | 2.000 | 9 | never | 3.0 |" in shown
    assert "| healthy | 0.0006 | none | 0 | 0 | none |  |  |" in shown
    assert (
        "| W_Q of one head times 1.08 per step, L1H2 | 0.0006 | step 280 | 0 | 3 | step 240, logit growth: L1H2 | "
        "step 240 | 40 steps ahead, logit growth |"
    ) in shown
    assert "../docs/images/stability-a.svg" in shown
    tables.draw_figures(tmp_path, images)
    content = (images / "stability-a.svg").read_text(encoding="utf-8")
    ElementTree.fromstring(content)
    assert all(words in content for words in ("QK-clip at 50", "QK-norm", "learning rate 0.01", "nats per byte"))
    assert "No plain run diverged." in tables.stability_section(_of(tmp_path, study_of(facts)[:1]))


def _of(folder, results):
    path = folder / "stability-b.jsonl"
    for each in results:
        append_result(path, each)
    return path


def test_a_figure_has_a_panel_for_each_rate_that_diverged():
    found = study_of({})
    ((title, curves),) = panels(found)
    assert title == "learning rate 0.1"
    assert [label for label, _, _ in curves] == ["plain", "QK-clip at 50", "QK-norm", "learning rate 0.01"]
    (nothing,) = panels(found[:1])
    assert nothing[0] == "no run diverged"
    planted = [replace(x, trial=replace(x.trial, setting=replace(TINY, qk_rate_factor=10.0))) for x in found[:4]]
    assert [title for title, _ in panels([*found, *planted])][1] == "learning rate 0.1, W_Q and W_K times 10"


ARGUMENTS = ["--layers", "1", "--width", "8", "--heads", "1", "--context", "8", "--batch", "1", "--steps", "3"]


def test_the_command_resumes_and_keeps_to_its_budget(file, tmp_path, monkeypatch):
    output = tmp_path / "results.jsonl"
    arguments = ["stability", "--text", str(file), "--output", str(output), *ARGUMENTS, "--commit", "abc"]
    arguments += ["--rates", "1e-3", "--warm-up", "1", "--seed", "3"]
    nothing = CliRunner().invoke(app, [*arguments, "--seconds", "0"])
    assert nothing.exit_code == 0, nothing.output
    assert not read_results(output)
    made = []
    monkeypatch.setattr(
        loop, "train", lambda trial, *others, **options: made.append(trial) or train(trial, *others, **options)
    )
    for extra in (["--parts", "clip"], [], []):
        done = CliRunner().invoke(app, [*arguments, *extra])
        assert done.exit_code == 0, done.output
    assert len(made) == len(set(made)) == 1 + len(PLANTS)
    found = read_results(output)
    assert [x.trial for x in found] == made
    assert made[0].setting == Setting(layers=1, width=8, heads=1, context=8, batch=1, steps=3, warm_up=1, seed=3)
    assert {x.facts["commit"] for x in found} == {"abc"}
    assert "contender" in done.output
    assert "healthy" in done.output
    assert len(clip_rows(found)) == 2


def test_the_command_refuses_what_it_cannot_run(file, tmp_path):
    arguments = ["stability", "--text", str(file), "--output", str(tmp_path / "results.jsonl"), *ARGUMENTS]
    for extra, words in (
        (["--parts", "clip,none"], "--parts must be one of clip, alarms; got 'none'"),
        (["--optimizer", "sgd"], "--optimizer must be one of adamw, muon; got 'sgd'"),
        (["--rates", "1e-3,0"], "--rates must be positive numbers"),
    ):
        refused = CliRunner().invoke(app, [*arguments, *extra])
        assert refused.exit_code != 0
        assert words in " ".join(refused.output.split())


def test_rates_are_numbers():
    assert command._rates("1e-3,0.5") == [1e-3, 0.5]
    with pytest.raises(OptionError, match="got 'a'"):
        command._rates("a")
