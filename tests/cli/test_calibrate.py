"""`polyhead plan calibrate`: the measured machine is saved, found again by `plan`, and nothing else is overwritten."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import polyhead.costs.calibration as calibration
from polyhead.cli import app
from polyhead.costs.timing.machine import Machine
from polyhead.progress import Progress


def invoke(*arguments: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, [str(x) for x in arguments], env={"COLUMNS": "150", "NO_COLOR": "1"})
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder of machines, and a calibration that takes no time and finds a machine of two cores."""

    def measured(*, progress: Any) -> Machine:
        progress(Progress("calibrate", 1, 2, "measurements", "a product"))
        return Machine.from_dict({**Machine.load("cpu-2-cores").to_dict(), "name": "my-machine"})

    monkeypatch.setattr(calibration, "calibrate", measured)
    monkeypatch.setenv("POLYHEAD_MACHINES", str(tmp_path / "machines"))
    return tmp_path / "machines"


def test_a_machine_is_saved_and_found_by_its_name(folder):
    result = invoke("plan", "calibrate")
    path = folder / "my-machine.json"
    saved, hint = result.stdout.splitlines()
    assert saved == f"calibrated my-machine in 20 s, saved to {path}"
    assert hint == "predict times for it with: polyhead plan MODEL --machine my-machine"
    assert result.stderr == "calibrate\n"  # its progress, which is a bar on a terminal
    shown = invoke("plan", "gpt2", "--phase", "decode", "--machine", "my-machine").output
    assert "float32 on my-machine (measured, median error 12%, worst 31%)" in shown
    assert "my-machine (measured)" in invoke("plan", "gpt2", "--machine", "abacus", code=2).stderr


def test_a_machine_is_saved_to_a_file(tmp_path, folder):
    file = tmp_path / "my file.json"
    result = invoke("plan", "calibrate", "--output", file)
    assert f"saved to {file}" in result.stdout
    assert f"--machine '{file}'" in result.stdout
    assert not folder.exists()
    assert "my-machine" in invoke("plan", "gpt2", "--phase", "decode", "--machine", file).output
    invoke("plan", "calibrate", "--output", file)  # a machine is replaced


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--output", "machine.txt"), "--output must be a .json file, got machine.txt"),
        (("--output", "nowhere/machine.json"), "there is no folder nowhere"),
        (("--output", "config.json"), "--output must be a new file or that of a measured machine, got config.json"),
        (("gpt2",), "got unexpected extra argument"),
        (("--machine", "nvidia-l4"), "there is no option --machine"),
    ],
)
def test_what_cannot_be_saved_is_refused_before_anything_is_measured(tmp_path, monkeypatch, arguments, words):
    monkeypatch.setattr(calibration, "calibrate", lambda **options: pytest.fail("it was measured"))
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text('{"hidden_size": 64}', encoding="utf-8")
    result = invoke("plan", "calibrate", *arguments, code=2)
    assert result.stderr.startswith("polyhead plan calibrate: ")
    assert words in result.stderr
    assert Path("config.json").read_text(encoding="utf-8") == '{"hidden_size": 64}'


def test_a_folder_that_cannot_be_written_is_reported_before_anything_is_measured(folder, monkeypatch):
    monkeypatch.setattr(calibration, "calibrate", lambda **options: pytest.fail("it was measured"))
    folder.write_text("", encoding="utf-8")
    assert "machines are saved to a writable folder" in invoke("plan", "calibrate", code=2).stderr


def test_a_model_of_that_name_is_planned_by_its_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("calibrate").mkdir()
    sizes = '{"model_type": "mistral", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, '
    Path("calibrate/config.json").write_text(sizes + '"num_key_value_heads": 1}', encoding="utf-8")
    assert "2 layers of 4 heads x 16" in invoke("plan", "./calibrate", "--context", 64).output
