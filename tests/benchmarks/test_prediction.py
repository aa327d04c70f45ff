"""`python -m benchmarks prediction` measures the printed loss of quality on text that the command did not read."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import prediction
from benchmarks.app import app
from benchmarks.prediction import coverage
from polyhead.surgery import fingerprint

pytest.importorskip("transformers")
from polyhead.workflows.model_loading import load_model
from tests.inspection.small_models import model_folder

DOCUMENTS = 40


@pytest.fixture
def small(tmp_path):
    """A random model in a folder, and a text of random words."""
    model_folder(tmp_path / "model", "llama")
    letters = torch.randint(97, 123, (DOCUMENTS, 29), generator=torch.Generator().manual_seed(2)).tolist()
    lines = [json.dumps({"text": " ".join(bytes(line).decode())}) for line in letters]
    (tmp_path / "text.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return load_model(tmp_path / "model", dtype=torch.float32)


def invoke(tmp_path, *arguments: str, code: int = 0) -> tuple[str, list[dict[str, Any]]]:
    output = tmp_path / "rows.jsonl"
    places = ["--text", str(tmp_path / "text.jsonl"), "--output", str(output), "--device", "cpu"]
    places += ["--model", str(tmp_path / "model")]
    done = CliRunner().invoke(app, ["prediction", *places, *arguments])
    assert done.exit_code == code, (done.output, done.exception)
    return done.output, [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []


def test_every_draw_and_target_has_a_row_with_its_interval_and_the_ratio_on_unread_text(small, tmp_path):
    shown, rows = invoke(tmp_path, "--targets", "50%-heads,50%", "--draws", "2", "--commit", "abc")
    assert [(row["draw"], row["target"]) for row in rows] == [
        (0, "50%-heads"),
        (0, "50%"),
        (1, "50%-heads"),
        (1, "50%"),
    ]
    for row in rows:
        assert row["low"] < row["ratio"] < row["high"]
        assert row["whole"] != row["small"] != row["ratio"]
        assert row["groups"] == 5  # of 20 documents, 2 of every 8
        assert (row["machine"]["commit"], row["machine"]["versions"]["torch"]) == ("abc", torch.__version__)
    assert rows[0]["whole"] != rows[2]["whole"]
    assert shown.splitlines()[-1] == coverage(rows)


def test_the_model_is_restored_after_each_row(small):
    before = fingerprint(small.model)
    documents = [f"document number {number}" for number in range(DOCUMENTS)]
    list(prediction.predicted_rows(small, documents, ["50%-heads"], 1, "uniform", None))
    assert fingerprint(small.model) == before


def test_the_loss_is_measured_on_the_half_that_the_command_does_not_read(small, monkeypatch):
    halves: list[list[str]] = []
    read_contexts = prediction.read_contexts

    def contexts(loaded: Any, part: list[str], **options: Any) -> Any:
        halves.append(part)
        return read_contexts(loaded, part, **options)

    def shrink(loaded: Any, target: str, text: list[str], **options: Any) -> Any:
        halves.append(text)
        raise InterruptedError

    monkeypatch.setattr(prediction, "read_contexts", contexts)
    monkeypatch.setattr("polyhead.shrink", shrink)
    documents = [f"document number {number}" for number in range(DOCUMENTS)]
    with pytest.raises(InterruptedError):
        next(prediction.predicted_rows(small, documents, ["50%-heads"], 1, "uniform", None))
    measured, *_, command = halves
    assert sorted(measured + command) == sorted(documents)
    assert len(command) == DOCUMENTS // 2


def test_coverage_counts_ratios_inside_the_interval():
    row = {"low": 0.9, "high": 1.1, "whole": 1.0, "small": 1.2}
    assert coverage([row, {**row, "small": 1.1}, {**row, "whole": 0.8}]).startswith(
        "In the printed interval: 2 of 3 ratios on the text that was not read, 1 of 3 on a quarter of it"
    )


def test_a_text_of_few_documents_is_refused(small, tmp_path):
    (tmp_path / "text.jsonl").write_text('{"text": "one long document"}', encoding="utf-8")
    shown, rows = invoke(tmp_path, "--targets", "50%-heads", code=2)
    assert "at least 32 documents" in shown
    assert "got 1; write one per line of a .jsonl file" in shown
    assert rows == []
