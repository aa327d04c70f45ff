"""Permissions come from the command line alone: no file of a run or of a model runs code without a flag."""

from __future__ import annotations

import json
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from typer.testing import CliRunner

from polyhead.cli import app
from polyhead.inspection import Settings, load_inspection
from polyhead.workflows.inspecting import inspect_model
from tests.inspection.small_models import model_folder, text_folder

pytest.importorskip("pyarrow")

CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
open({proof!r}, 'w').close()
class OwnConfig(LlamaConfig):
    model_type = 'own-model'
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def invoke(*arguments: object, code: int = 0):
    result = CliRunner().invoke(app, [str(x) for x in arguments], env={"COLUMNS": "150", "NO_COLOR": "1"})
    assert result.exit_code == code, result.output
    return result


class Payload:
    """Payload of a hostile pickle: a call that the reader makes."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return open, (str(self.proof), "w")


def with_code(folder: Path, proof: Path) -> None:
    """Turn a saved model into one whose code leaves a file when it is imported."""
    (folder / "own_code.py").write_text(CODE.format(proof=str(proof)))
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own-model", "architectures": ["OwnModel"]}
    config["auto_map"] = {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnModel"}
    (folder / "config.json").write_text(json.dumps(config))


def with_pickle(folder: Path, proof: Path) -> None:
    """Turn a saved model into one whose weights are a pickle that leaves a file when it is read."""
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"weight": Payload(proof)}))


HOSTILE = {"code": (with_code, "requires custom code"), "pickle": (with_pickle, "a pickle, which can run code")}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A model, a text and a run of both."""
    folder = tmp_path_factory.mktemp("place")
    model_folder(folder / "llama", "llama")
    text_folder(folder / "text")
    invoke(
        "inspect", folder / "llama", "--text", folder / "text", "--context", 64, "--tokens", 400,
        "--importance", "none", "--no-chance", "--device", "cpu", "--save", folder / "run",
    )  # fmt: skip
    return folder


@pytest.fixture
def hostile(place, tmp_path, request) -> tuple[Path, Path, Path, str]:
    """A hostile model, a run of it that claims every permission, the file left by code that runs, and the refusal."""
    change, refusal = HOSTILE[request.param]
    model, run, proof = tmp_path / "model", tmp_path / "run", tmp_path / "it ran"
    shutil.copytree(place / "llama", model)
    shutil.copytree(place / "run", run)
    change(model, proof)
    granted = {"model": str(model), "trust_remote_code": True, "allow_pickle": True}
    with safe_open(run / "observations.safetensors", framework="pt") as file:
        header = json.loads(file.metadata()["polyhead.observations"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    header["facts"]["settings"] |= granted
    save_file(tensors, run / "observations.safetensors", {"polyhead.observations": json.dumps(header)})
    rest = json.loads((run / "inspection.json").read_text())
    rest["settings"] |= granted
    (run / "inspection.json").write_text(json.dumps(rest))
    return model, run, proof, refusal


each_kind = pytest.mark.parametrize("hostile", HOSTILE, indirect=True)


@each_kind
def test_a_run_that_claims_permissions_is_resumed_without_them(hostile):
    _, run, proof, refusal = hostile
    assert refusal in invoke("inspect", "--resume", run, code=2).stderr
    assert not proof.exists()


@each_kind
def test_no_reader_of_a_run_passes_its_permissions_on(hostile):
    _, run, proof, refusal = hostile
    found = load_inspection(run)
    assert not hasattr(found.settings, "trust_remote_code")
    with pytest.raises(Exception, match=refusal):
        inspect_model(found.settings, folder=run, resume=True)
    assert refusal in invoke("view", run, "--no-open", code=2).stderr
    invoke("report", run)
    invoke("compare", run, run)
    assert not proof.exists()


@each_kind
def test_no_command_runs_what_comes_with_a_model(hostile, place, tmp_path):
    model, _, proof, refusal = hostile
    text = ["--text", place / "text"]
    treebank = tmp_path / "trees.conllu"
    treebank.write_text("1\ta\ta\tDET\t_\t_\t2\tdet\t_\t_\n2\tw1\tw1\tNOUN\t_\t_\t0\troot\t_\t_\n\n")
    for arguments in (
        ["inspect", model, *text],
        ["view", model, "--no-open"],
        ["syntax", model, "--treebank", treebank],
        ["prune", model, "--heads", "L0H1", "--no-compensate", "--form", "uneven", "-o", tmp_path / "out"],
        ["merge", model, "--heads", "L0H0+L0H1", "--form", "uneven", "-o", tmp_path / "out"],
        ["convert", model, "--kv-heads", 1, "-o", tmp_path / "out"],
        ["shrink", model, "--target", "50%-heads", *text, "-o", tmp_path / "out"],
    ):
        assert refusal in invoke(*arguments, code=2).stderr, arguments
        assert not proof.exists(), arguments
    invoke("undo", model, "-o", tmp_path / "out", code=2)  # there is no record, which is read before the model
    assert not proof.exists()
    CliRunner().invoke(app, ["plan", str(model)])  # reads config.json itself, and may plan for it
    assert not proof.exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("hostile", ["code"], indirect=True)
def test_a_flag_of_this_command_line_permits_what_the_run_cannot(hostile, tmp_path, monkeypatch):
    from transformers import dynamic_module_utils

    _, run, proof, _ = hostile
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    # The code ran, as the flag permits; that it makes another model than the run began with is refused after that.
    said = invoke("inspect", "--resume", run, "--trust-remote-code", code=2).stderr
    assert "a run must be resumed with the model it was started with" in said
    assert proof.exists()


def test_a_dtype_that_a_run_names_is_one_of_three(place, tmp_path):
    shutil.copytree(place / "run", tmp_path / "run")
    rest = json.loads((tmp_path / "run" / "inspection.json").read_text())
    rest["settings"]["dtype"] = "load"  # a name that torch has, and that calls
    (tmp_path / "run" / "inspection.json").write_text(json.dumps(rest))
    assert "dtype must be one of float32" in invoke("view", tmp_path / "run", "--no-open", code=2).stderr
    assert Settings(dtype="float16").dtype == "float16"
    assert hasattr(torch, "load")
