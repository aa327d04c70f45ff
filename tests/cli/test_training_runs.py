"""`polyhead compare` and `polyhead report` of training runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from polyhead.cli import app
from polyhead.training import HeadLocation, RunDirectory, StepRecord

pytest.importorskip("pyarrow")


def invoke(*arguments: object, code: int = 0):
    result = CliRunner().invoke(app, [str(x) for x in arguments], env={"COLUMNS": "150", "NO_COLOR": "1"})
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run in which the logits of L0H2 are higher from step 50 on, beyond the noise of steps."""
    folder = tmp_path_factory.mktemp("place") / "run"
    heads = tuple(HeadLocation("layers.0.attn", "self", 0, head, str(head), 5) for head in range(5))
    generator, callback = torch.Generator().manual_seed(0), RunDirectory(folder)
    for step in range(100):
        values = 4 + 0.1 * torch.randn(1, 5, generator=generator, dtype=torch.float64)
        values[0, 2] += 3.0 * (step >= 50)
        callback.on_record(StepRecord(step, 2.5 - step / 100, heads, ("max_logit",), values))
    callback.on_exit()
    return folder


def test_two_steps_are_compared(run):
    shown = invoke("compare", f"{run}@20", f"{run}@80").stdout.splitlines()
    assert shown[0] == f"A  {run}@20, loss 2.3"
    assert "1 of 5 tested values differ" in shown[2]
    assert "noise of a step from 20 pairs of neighbouring steps in A, 20 in B" in shown
    assert shown[-1].split()[:2] == ["L0H2", "max_logit"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("@200", "the nearest is 99; got 200"),
        ("@last", "RUN@STEP with a number"),
        ("", "which is a training run; `polyhead report` draws it, `polyhead compare` takes"),
        ("-absent@3", "without steps"),
    ],
)
def test_what_is_no_step_is_refused(run, name, words):
    assert words in invoke("compare", f"{run}{name}", f"{run}@1", code=2).stderr


def test_few_steps_are_said_to_be_few(run, tmp_path):
    short, heads = tmp_path / "short", (HeadLocation("layers.0.attn", "self", 0, 0, "0", 1),)
    callback = RunDirectory(short)
    for step in range(10):
        callback.on_record(StepRecord(step, 2.5, heads, ("max_logit",), torch.randn(1, 1, dtype=torch.float64)))
    callback.on_exit()
    shown = invoke("compare", f"{short}@2", f"{short}@8").stdout
    assert "5 pairs of neighbouring steps in A, 5 in B: too few for a reliable test, which needs 10 in each" in shown
    assert "which does not exist" in invoke("report", tmp_path / "nope", code=2).stderr


def test_a_report_draws_the_steps(run, tmp_path):
    assert invoke("report", run).stdout.strip() == str(run / "polyhead-report.html")
    page = tmp_path / "page.html"
    invoke("report", run, "--output", page, "--lang", "zh")
    assert "5 个头，从第 0 步到第 99 步共 100 步" in page.read_text(encoding="utf-8")
    assert "got a training run" in invoke("report", run, "--syntax", page, code=2).stderr
