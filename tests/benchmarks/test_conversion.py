"""`python -m benchmarks conversion` measures every way on the choosing split and reports the best options once."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from benchmarks.app import app
from benchmarks.surgery_quality import language
from polyhead.surgery import fingerprint

VOCABULARY = 31


@pytest.fixture
def small(monkeypatch, tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=3, num_key_value_heads=3, head_dim=8)).eval()

    def read(text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) % VOCABULARY for letter in text]}

    loaded = SimpleNamespace(model=model, tokenizer=read, name="small", kind="causal")
    monkeypatch.setattr("polyhead.workflows.model_loading.load_model", lambda *given, **options: loaded)
    monkeypatch.setattr(language, "CONTEXT", 64)
    draw = torch.Generator().manual_seed(2)
    text = "".join(chr(97 + int(x)) for x in torch.randint(26, (3000,), generator=draw))
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    return model


def invoke(tmp_path, *arguments: str, code: int = 0) -> tuple[str, list[dict[str, Any]]]:
    output = tmp_path / "rows.jsonl"
    places = ["--text", str(tmp_path / "text.txt"), "--output", str(output), "--device", "cpu"]
    done = CliRunner().invoke(app, ["conversion", *places, *arguments])
    assert done.exit_code == code, (done.output, done.exception)
    return done.output, [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []


def test_every_way_is_measured_and_the_best_options_are_reported(small, tmp_path):
    before = fingerprint(small)
    options = ["--options", "{}", "--options", json.dumps({"ridge": 0.5})]
    shown, rows = invoke(tmp_path, "--kv-heads", "1", "--ways", "pooled,converted", *options, "--report")
    assert [(row["way"], row["key_heads"], "report" in row) for row in rows] == [
        ("whole", None, True),
        ("pooled", 1, True),
        ("converted", 1, False),
        ("converted", 1, False),
        ("converted", 1, True),
    ]
    tried = {json.dumps(row["options"]): row["choose"]["perplexity"][0] for row in rows[2:4]}
    assert tried[json.dumps(rows[4]["options"])] == min(tried.values())
    assert all(row["model"] == "small" and row["machine"]["versions"]["torch"] == torch.__version__ for row in rows)
    assert fingerprint(small) == before
    assert json.loads(shown.splitlines()[0])["way"] == "whole"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--kv-heads", "1", "--ways", "pooled,magic"], "got magic"),
        (["--kv-heads", "1", "--options", "ridge"], "options are written as JSON"),
        (["--kv-heads", "one"], "KV heads are written as 4,1, got 'one'"),
    ],
)
def test_a_wrong_option_is_refused_in_words(small, tmp_path, arguments, words):
    shown, rows = invoke(tmp_path, *arguments, code=2)
    assert words in shown
    assert rows == []
