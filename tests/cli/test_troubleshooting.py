"""docs/troubleshooting.md: every command with an output prints it; the examples in Python are doctests."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from typer.testing import CliRunner

from polyhead.cli import app
from polyhead.sources import load_errors
from tests.inspection.small_models import model_folder, text_folder, tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"


def commands() -> list[tuple[str, str]]:
    """Commands of the page that have an output, and the output, in which `...` stands for anything."""
    blocks = re.findall(r"^```console\n(.*?)^```$", PAGE.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    steps = [step for block in blocks for step in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)]
    return [(command, output) for command, output in steps if output.strip()]


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> Path:
    """A folder with the models and texts that the page names."""
    folder = tmp_path_factory.mktemp("troubleshooting")
    model = model_folder(folder / "my-model", "llama")
    for name in ("pickled", "remote", "newer", "damaged", "without-tokenizer"):
        shutil.copytree(model, folder / name)
    weights = folder / "pickled" / "model.safetensors"
    torch.save(load_file(weights), folder / "pickled" / "pytorch_model.bin")
    weights.unlink()
    config = json.loads((model / "config.json").read_text("utf-8"))
    remote = {**config, "model_type": "remote", "auto_map": {"AutoConfig": "configuration_remote.Config"}}
    (folder / "remote" / "config.json").write_text(json.dumps(remote), "utf-8")
    (folder / "newer" / "config.json").write_text(json.dumps({**config, "model_type": "llama9"}), "utf-8")
    damaged = folder / "damaged" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    for file in (folder / "without-tokenizer").glob("token*"):
        file.unlink()
    sizes = {"hidden_size": 24, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    yoso = transformers.YosoConfig(vocab_size=len(tokenizer()), **sizes)
    transformers.YosoForMaskedLM(yoso).save_pretrained(folder / "yoso")
    tokenizer().save_pretrained(folder / "yoso")
    (folder / "folder-with-gguf").mkdir()
    (folder / "folder-with-gguf" / "model.gguf").write_bytes(b"GGUF")
    texts = text_folder(folder / "texts")
    text = " ".join(file.read_text("utf-8") for file in sorted(texts.iterdir()))
    (folder / "book.txt").write_text(text, "utf-8")
    (folder / "short.txt").write_text(text[:200], "utf-8")
    (folder / "latin.txt").write_bytes("caf\xe9 ".encode("latin-1") * 9)
    (folder / "empty.txt").touch()
    return folder


def pattern_of(output: str) -> str:
    words = [" ".join(part.split()) for part in output.split("...")]
    return r"[\s\S]*".join(re.escape(part) for part in words)


def test_the_page_has_commands():
    assert len(commands()) >= 15


@pytest.mark.parametrize(("command", "output"), commands(), ids=[command[:60] for command, _ in commands()])
def test_a_command_of_the_page_prints_what_the_page_says(command, output, places, monkeypatch):
    monkeypatch.chdir(places)
    monkeypatch.setattr(load_errors, "_is_available", lambda name: False)  # no connection to the hub
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    _, *arguments = shlex.split(command)
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "300", "NO_COLOR": "1"})
    printed = " ".join(result.output.split())
    assert re.search(pattern_of(output), printed), printed
    assert result.exit_code == (2 if output.startswith("polyhead ") else 0)
