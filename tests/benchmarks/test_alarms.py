"""The study of alarms: its models have the statistics of a monitor, and its spikes and figures are those defined."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.alarms import runs
from benchmarks.alarms.outcomes import outcome, summary
from benchmarks.alarms.runs import Trace, healthy_runs, planted_runs, train
from benchmarks.alarms.stacked_model import COLUMNS, Sizes, StackedModels
from benchmarks.app import app
from polyhead import MultiHeadAttention
from polyhead.training import HeadMonitor

SIZES = Sizes(width=12, heads=3, layers=1, context=7, batch=2)


def test_statistics_are_those_of_a_monitor():
    models = StackedModels(SIZES, [5, 6], [0.0, 0.0])
    tokens = torch.randint(32, (2, 2, 8))
    _, values = models.step(tokens, 1.0)
    for index in range(2):
        weights = models.weights.detach()[index]
        part = {name: weights[models.part(name)].view(models.shapes[name]) for name in models.names}
        layer = MultiHeadAttention(12, 3, causal=True, bias=False).train()
        with torch.no_grad():
            for name, linear in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj"), ("output", "out_proj")):
                getattr(layer, linear).weight.copy_(part[f"0.{name}"].T)
            x = part["embed"][tokens[index, :, :-1]] + part["position"]
        with HeadMonitor(layer) as monitor:
            layer(torch.nn.functional.layer_norm(x, (12,)))
            monitor.step()
        for name in ("max_logit", "entropy", "normalized_entropy", "sink_mass", "mean_distance"):
            expected = monitor.history[name][0].float()
            torch.testing.assert_close(values[index, COLUMNS.index(name)], expected, rtol=1e-4, atol=1e-5)


def test_stacked_models_train_as_they_would_alone():
    pair = [replace(run, steps=4) for run in planted_runs("query", 2, 7)]
    together, alone = train(pair), train(pair[1:])
    torch.testing.assert_close(together[1].losses, alone[0].losses)
    torch.testing.assert_close(together[1].values, alone[0].values, rtol=1e-3, atol=1e-4)


def trace(losses: torch.Tensor, logits: torch.Tensor, plant: bool = True) -> Trace:
    (run,) = planted_runs("query", 1, 3) if plant else healthy_runs(0, 1, 3)
    count = run.sizes.layers * run.sizes.heads
    values = torch.full((len(losses), len(COLUMNS), count), 0.4)
    values[:, 0] = 8.0
    if plant:
        layer, head = run.place
        values[:, 0, layer * run.sizes.heads + head] = logits
    return Trace(run, losses, values)


def test_a_spike_lasts_five_steps_above_five_deviations():
    losses = 2 + 0.1 * torch.linspace(-1, 1, 400)[torch.randperm(400, generator=torch.Generator().manual_seed(0))]
    flat = torch.full((400,), 8.0)
    assert trace(losses, flat).spike is None
    losses[300:304] = 9.0
    assert trace(losses, flat).spike is None
    losses[304] = torch.nan
    assert trace(losses, flat).spike == 300


def test_an_alarm_counts_if_it_names_the_plant_in_time():
    losses = torch.full((400,), 2.0) + 0.01 * torch.arange(400).remainder(2)
    losses[320:] = 5.0
    logits = 8.0 * 1.03 ** (torch.arange(400) - 200).clamp(min=0)
    found = outcome(trace(losses, logits))
    assert found["spike"] == 320
    assert 40 < found["lead"] < 110
    assert found["first_names"]
    late = outcome(trace(losses, 8.0 * 1.1 ** (torch.arange(400) - 300).clamp(min=0)))
    assert late["lead"] is None
    assert late["count"] > 0
    healthy = outcome(trace(torch.full((400,), 2.0), torch.full((400,), 8.0), plant=False))
    shown = summary([found, late, healthy])
    assert "query: 1 of 2 spikes are announced 20 to 500 steps ahead" in shown
    assert "healthy: 0 of 1 runs raise an alarm; 0 others spike" in shown


def test_the_command_writes_a_line_per_run_and_reads_trained_runs_again(tmp_path):
    output = tmp_path / "alarms.jsonl"
    arguments = ["alarms", "--quick", "--output", str(output), "--traces", str(tmp_path / "runs"), "--commit", "abc"]
    first = CliRunner().invoke(app, arguments)
    assert first.exit_code == 0, first.output
    facts, *rows = map(json.loads, output.read_text().splitlines())
    assert facts["facts"]["commit"] == "abc"
    assert [row["run"]["plant"] for row in rows] == [
        "query",
        "query",
        "layer rate",
        "layer rate",
        "rate",
        "rate",
        None,
        None,
    ]
    assert len(list((tmp_path / "runs").iterdir())) == 4
    assert CliRunner().invoke(app, arguments).output == first.output
    refused = CliRunner().invoke(app, ["alarms", "--split", "none"])
    assert refused.exit_code != 0
    assert "--split must be test or tune, got 'none'" in refused.output


@pytest.mark.parametrize("plant", ["query", "layer rate", "rate"])
def test_what_is_planted_starts_at_its_step(plant, monkeypatch):
    monkeypatch.setattr(runs, "PLANTED", 5)
    (run,) = planted_runs(plant, 1, 11)
    run = replace(run, steps=9, sizes=replace(run.sizes, width=8, context=5, batch=1))
    (planted,), (plain,) = train([run]), train([replace(run, plant=None)])
    assert torch.equal(planted.losses[:5], plain.losses[:5])
    assert not torch.equal(planted.losses[7:], plain.losses[7:])
