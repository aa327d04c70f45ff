"""`polyhead compare`, `polyhead report` and `polyhead view` of training runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from polyhead.cli import app
from polyhead.errors import OptionError
from polyhead.training import HeadLocation, RunDirectory, StepRecord, load_run

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
        ("", "which is a training run; `polyhead view` and `polyhead report` show it, `polyhead compare` takes"),
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
    error = invoke("report", tmp_path / "nope", code=2).stderr
    assert "which does not exist; tiny-run is the packaged training run" in error


def test_a_report_draws_the_steps(run, tmp_path):
    assert invoke("report", run).stdout.strip() == str(run / "polyhead-report.html")
    page = tmp_path / "page.html"
    invoke("report", run, "--output", page, "--lang", "zh")
    assert "5 个头，从第 0 步到第 99 步共 100 步" in page.read_text(encoding="utf-8")
    assert "got a training run" in invoke("report", run, "--syntax", page, code=2).stderr


def test_a_run_is_viewed_without_a_model(run, monkeypatch, tmp_path):
    serve, served = pytest.importorskip("polyhead.report.viewer.serve"), []
    client = pytest.importorskip("starlette.testclient").TestClient
    monkeypatch.setattr(serve, "_serve", lambda *arguments: served.append(arguments))
    invoke("view", run, "--no-open", "--lang", "zh")
    ((application, token, listening, _),) = served
    port = listening.getsockname()[1]
    listening.close()
    page = client(application, base_url=f"http://127.0.0.1:{port}").get(f"/{token}/").text
    assert page.startswith('<!doctype html>\n<html lang="zh-Hans">')
    assert "5 个头，从第 0 步到第 99 步共 100 步" in page
    error = invoke("view", run, "--text", "a.txt", "--device", "cpu", code=2).stderr
    assert "--text and --device must be left out with a training run" in error
    (tmp_path / "steps").mkdir()
    (tmp_path / "config.json").write_text("no model")
    assert "config.json" in invoke("view", tmp_path, "--no-open", code=2).stderr
    assert len(served) == 1


def test_the_packaged_run_has_a_name_unless_a_folder_here_has_it(run, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    history = load_run("tiny-run")
    assert len(history.heads) == 40
    first, last = history.steps[0], history.steps[-1]
    assert invoke("report", "tiny-run").stdout.strip() == str(tmp_path / "polyhead-report.html")
    assert f"40 heads, {len(history)} steps from 0 to {last:,}" in Path("polyhead-report.html").read_text("utf-8")
    assert f"A  tiny-run@{first}, loss 5." in invoke("compare", f"tiny-run@{first}", f"tiny-run@{last}").stdout
    with pytest.raises(OptionError, match="`RunDirectory` wrote, or tiny-run, got no-run without steps"):
        load_run("no-run")
    Path("tiny-run").symlink_to(run)
    assert len(load_run("tiny-run").heads) == 5
    assert invoke("report", "tiny-run").stdout.strip() == str(tmp_path / "tiny-run" / "polyhead-report.html")


def test_a_run_needs_pyarrow(run, monkeypatch):
    monkeypatch.setattr("polyhead.files.find_spec", lambda name: None)
    with pytest.raises(OptionError, match="needs pyarrow; install it with"):
        load_run(run)
