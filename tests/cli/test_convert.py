"""`polyhead convert`: printed and written results, and error messages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from typer.testing import CliRunner

import polyhead
from polyhead.cli import app
from polyhead.surgery import ShareKeys, find_layers, load_record
from tests.inspection.small_models import model_folder, text_folder


def invoke(*arguments: object, code: int = 0):
    environment = {"COLUMNS": "250", "NO_COLOR": "1"}
    result = CliRunner().invoke(app, [str(x) for x in arguments], env=environment)
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    for name in ("bert", "llama", "t5"):
        model_folder(folder / name, name)
    text_folder(folder / "text")
    return folder


def kv_heads(folder: Path) -> list[int]:
    return [layer.layout.num_kv_heads for layer in find_layers(polyhead.load(folder))]


def test_a_llama_with_fewer_key_heads_is_stock_and_comes_back(place, tmp_path):
    options = ["--kv-heads", 1, "--text", place / "text", "--context", 40, "--device", "cpu"]
    shown = invoke("convert", place / "llama", *options, "--output", tmp_path / "one").stdout
    assert "with 1 KV head in each of 2 layers" in shown
    rows = {line.rsplit(maxsplit=3)[0]: line.split()[-3:] for line in shown.splitlines() if line.count("  ") > 1}
    assert rows["KV heads"] == ["4", "2", "0.50"]
    assert rows["cache bytes per token"][2] == "0.50"
    assert re.search(r"Perplexity on held-out text \(\d+ tokens, \d+ contexts\): \S+ before, \S+ ± \S+ after", shown)
    assert f"Saved to {tmp_path / 'one'}, " in shown
    native = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    assert native.config.num_key_value_heads == 1
    ids = torch.tensor([[2, 9, 14, 30, 3]])
    with torch.no_grad():
        torch.testing.assert_close(native(ids).logits, polyhead.load(tmp_path / "one")(ids).logits)
    assert all(isinstance(edit, ShareKeys) for edit in load_record(tmp_path / "one").edits)
    invoke("undo", tmp_path / "one", "--output", tmp_path / "back")
    weights, expected = (load_file(folder / "model.safetensors") for folder in (tmp_path / "back", place / "llama"))
    assert all(torch.equal(weights[name], x) for name, x in expected.items())


def test_a_bert_with_shared_keys_is_loaded_by_us_or_padded_by_stock_transformers(place, tmp_path):
    options = ["--kv-heads", 2, "--text", place / "text", "--device", "cpu"]
    shown = invoke("convert", place / "bert", *options, "--output", tmp_path / "own", "--form", "uneven").stdout
    assert "uneven: plain transformers does not load it" in shown
    assert kv_heads(tmp_path / "own") == [2, 2]
    by_name = invoke(
        "convert",
        place / "bert",
        *options,
        "--grouping",
        "neighbours",
        "--rounds",
        1,
        "--form",
        "padded",
        "--output",
        tmp_path / "padded",
    ).stdout
    assert "padded" in by_name
    ids = torch.tensor([[2, 9, 14, 30, 3]])
    native = transformers.AutoModel.from_pretrained(tmp_path / "padded")
    with torch.no_grad():
        ours = polyhead.load(tmp_path / "padded")(ids).last_hidden_state
        torch.testing.assert_close(native(ids).last_hidden_state, ours, rtol=1e-5, atol=1e-6)
    groups = [edit.groups for edit in load_record(tmp_path / "padded").edits]
    assert groups == [((0, 1), (2, 3))] * 2


def test_a_preview_counts_and_writes_nothing(place, tmp_path):
    options = ["--kv-heads", 1, "--form", "padded", "--device", "cpu"]
    shown = invoke("convert", place / "bert", *options, "--preview").stdout
    rows = [line.split()[-3:] for line in shown.splitlines() if line.startswith("KV heads")]
    assert rows == [["8", "2", "0.25"]]
    assert "Saved" not in shown
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("bert", ["--kv-heads", 3], "must divide 4, so that groups have one size, got 3"),
        ("llama", ["--kv-heads", 2], "every layer has 2 KV heads already"),
        ("t5", ["--kv-heads", 1], "cannot be edited"),
        ("bert", ["--kv-heads", 2, "--grouping", "random"], "grouping must be one of similar, neighbours"),
        ("bert", ["--kv-heads", 2, "--context", 12, "--tokens", 20], "at least as many tokens as the heads"),
        ("bert", ["--kv-heads", 2, "--stack", "decoder"], "stack must be one of"),
        ("bert", ["--kv-heads", 2, "--rounds", -1], "rounds must be at least 0, got -1"),
    ],
)
def test_what_cannot_be_is_one_line_and_nothing_is_written(place, tmp_path, name, options, words):
    given = ["--text", place / "text", "--device", "cpu", "--output", tmp_path / "out", "--form", "uneven"]
    result = invoke("convert", place / name, *options, *given, code=2)
    assert words in result.stderr
    assert result.stderr.strip().splitlines()[-1].startswith("polyhead convert: ")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_named_before_anything_costs_time(place):
    result = invoke("convert", place / "bert", "--kv-heads", 2, code=2)
    assert "required unless --preview is used" in result.stderr
