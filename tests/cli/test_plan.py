"""`polyhead plan`: printed and written results, and one-line errors."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any

import pytest
from typer.testing import CliRunner

from polyhead.cli import app
from polyhead.layers import MultiHeadConfig

SIZES = ("--d-model", 512, "--heads", 8, "--kv-heads", 2, "--layers", 6, "--context", 1024)


def invoke(*arguments: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, [str(x) for x in arguments], env={"COLUMNS": "150", "NO_COLOR": "1"})
    assert result.exit_code == code, result.output
    return result


def test_a_layout_by_its_sizes():
    shown = invoke("plan", *SIZES).output
    assert "8/2x64 at 512: 6 layers of 8 heads x 64 over 2 KV heads, d_model 512" in shown
    assert "batch 1, context 1,024, bfloat16; attention layers only" in shown
    for words in (
        "3.93 M: Q 1.57 M, K 393 K, V 393 K, O 1.57 M",
        "0.625 of 4 d_model²",
        "3 KiB per token, 3 MiB in total",
    ):
        assert words in shown
    for title in ("training step", "prefill of the full context", "decode step"):
        assert title in shown
    assert "use --machine to see whether it fits, and times; machines: amd-epyc-9554 (datasheet), " in shown


def test_tokens_that_see_later_ones_meet_more_keys():
    causal, both = (
        json.loads(invoke("plan", *SIZES, *more, "--phase", "prefill", "--json").output)["phases"][0]["flops"]
        for more in ((), ("--bidirectional",))
    )
    assert both["scores"] > 1.9 * causal["scores"]


def test_rotary_positions_are_passes_over_memory():
    plain, rotated = (
        json.loads(invoke("plan", *SIZES, *more, "--json").output)["phases"][1] for more in ((), ("--rotary",))
    )
    assert rotated["flops"] == plain["flops"]
    assert "positions" in rotated["bytes"]
    assert "positions" not in plain["bytes"]
    assert "got --rotary as well" in invoke("plan", "gpt2", "--rotary", code=2).stderr


def test_only_the_phases_that_are_asked_for_and_times_of_a_machine():
    shown = invoke("plan", *SIZES, "--phase", "decode", "--dtype", "float32", "--machine", "cpu-2-cores").output
    assert "decode step, last token of the context (attention alone)" in shown
    assert "training step" not in shown
    assert "time" in shown
    assert "bound by" in shown


def test_json_is_the_plan():
    found = json.loads(invoke("plan", "llama3.1-8b", "--context", 8192, "--cache-dtype", "int8", "--json").output)
    assert found["crossover"] == 10240
    assert found["cache_dtype"] == "int8"
    assert found["cache_bytes_per_token"] == 32 * (2 * 8 * 128 + 2 * 8 * 4)
    assert [phase["phase"] for phase in found["phases"]] == ["training", "prefill", "decode"]


def test_a_config_of_ours_and_one_of_hugging_face(tmp_path):
    ours = tmp_path / "layer.json"
    ours.write_text(MultiHeadConfig(64, 4, causal=True).to_json(), encoding="utf-8")
    assert "3 layers of 4 heads x 16" in invoke("plan", "--config", ours, "--layers", 3).output
    theirs = tmp_path / "config.json"
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 1}
    theirs.write_text(json.dumps({"model_type": "mistral", **sizes, "sliding_window": 32}), encoding="utf-8")
    shown = invoke("plan", tmp_path, "--context", 100).output
    assert "2 layers of 4 heads x 16 over 1 KV head and a window of 32" in shown
    assert "note: cache bytes count all tokens" in shown


def test_warnings_and_rolling_caches_are_told_in_the_table_and_in_json():
    options = ("plan", "--d-model", 512, "--heads", 512, "--window", 128, "--context", 1000)
    shown = invoke(*options).output
    assert "one channel: 512 heads of one channel each" in shown
    assert "one channel: with a head_dim of 1 every logit is a product of two scalars" in shown
    assert "2 KiB per token, 1.95 MiB in total, 256 KiB with rolling caches" in shown
    assert "with rolling caches of 256 KiB" in shown
    found = json.loads(invoke(*options, "--json").output)
    assert [warned["kind"] for warned in found["warnings"]] == ["one channel", "narrow", "rank"]
    assert found["rolling_cache_bytes"] == found["phases"][2]["rolling_cache"] == 256 * 1024
    assert "warning" not in invoke("plan", "llama3.1-8b").output


def test_a_context_is_the_model_s_own_where_that_is_short_and_beyond_it_only_when_asked():
    assert "context 512" in invoke("plan", "bert-base").output
    assert "at most 512 tokens for bert-base, got 600" in invoke("plan", "bert-base", "--context", 600, code=2).stderr
    assert "context 600" in invoke("plan", "bert-base", "--context", 600, "--beyond").output


def test_a_context_beyond_one_that_only_transformers_knows_of_is_refused(tmp_path):
    pytest.importorskip("transformers")
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}
    found = {"model_type": "gemma3", "text_config": text, "transformers_version": "4.50.0"}
    (tmp_path / "config.json").write_text(json.dumps(found), encoding="utf-8")
    told = invoke("plan", tmp_path, "--context", 5_000_000, code=2).stderr
    assert "at most 131,072 tokens for " in told


def test_known_models_are_counted_with_the_mask_that_is_asked_for():
    def pairs(*options: str) -> int:
        return json.loads(invoke("plan", "llama3.1-8b", *options, "--json").output)["phases"][1]["flops"]["scores"]

    assert pairs("--bidirectional") * 4097 == pairs("--causal") * 2 * 4096
    assert pairs("--causal") == pairs()
    shown = invoke("plan", "bert-base", "--causal", "--phase", "decode").output
    assert "decode step" in shown
    assert "counted as causal, as requested" in shown


class _Page(HTMLParser):
    """Unclosed tags, scripts, and whatever would be fetched from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.fetched: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self.open.append(tag)
        self.fetched += [str(value) for name, value in attrs if name in ("src", "href", "xlink:href", "data")]

    def handle_endtag(self, tag: str) -> None:
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)


@pytest.mark.parametrize("timed", [False, True])
def test_a_page_holds_all_it_needs(tmp_path, timed):
    options = ("--dtype", "float32", "--machine", "cpu-2-cores") if timed else ()
    file = tmp_path / "plan.html"
    assert str(file) in invoke("plan", *SIZES, *options, "--output", file).output
    text = file.read_text(encoding="utf-8")
    page = _Page()
    page.feed(text)
    assert set(page.fetched) == {"#/fit", "#/speed", "#/layout", "#/numbers"}
    assert page.open == []
    data, _ = page.scripts
    assert {view: len(variants) for view, variants in json.loads(data).items()} == {"fit": 1, "speed": 3, "layout": 1}
    assert "default-src 'none'" in text
    assert '<html lang="en">' in text
    invoke("plan", *SIZES, "--lang", "zh", "--output", file)
    assert '<html lang="zh-Hans">' in file.read_text(encoding="utf-8")


def test_a_machine_known_by_its_datasheet_is_labelled_as_such():
    shown = invoke("plan", *SIZES, "--phase", "decode", "--machine", "nvidia-l4").output
    assert "bfloat16 on nvidia-l4 (datasheet estimate, error not measured)" in shown
    assert "note: datasheet of nvidia-l4: NVIDIA L4 Tensor Core GPU datasheet" in shown
    found = json.loads(invoke("plan", *SIZES, "--phase", "decode", "--machine", "nvidia-l4", "--json").output)[
        "machine"
    ]
    assert (found["name"], found["kind"], found["error"]) == ("nvidia-l4", "datasheet", None)
    assert found["source"].startswith("NVIDIA L4 Tensor Core GPU datasheet")
    shown = invoke("plan", *SIZES, "--machine", "amd-epyc-9554").output
    assert "note: amd-epyc-9554 has no rate in bfloat16: planned in float32 instead" in shown


def test_a_page_writes_a_name_as_text(tmp_path):
    folder = tmp_path / "<b>x"
    folder.mkdir()
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2}
    (folder / "config.json").write_text(json.dumps({"model_type": "mistral", **sizes}), encoding="utf-8")
    invoke("plan", folder, "--context", 64, "--output", tmp_path / "plan.html")
    text = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert "&lt;b&gt;x" in text
    assert "<b>x" not in text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[1]", "it contains a list instead of an object"),
        (b"\xff{", "codec can't decode byte 0xff"),
        (None, "it is no regular file"),
    ],
)
def test_a_file_that_is_no_machine_gets_one_clear_line(tmp_path, content, words):
    file = tmp_path / "machine.json"
    file.mkdir() if content is None else file.write_bytes(content)
    result = invoke("plan", "gpt2", "--machine", file, code=2)
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "specify one of MODEL, --config, and --d-model with --heads; got none"),
        (("gpt2", "--d-model", 512), "got MODEL and --d-model"),
        (("gpt2", "--heads", 3), "MODEL defines its own heads, got --heads as well"),
        (("gpt2", "--layers", 3), "gpt2 has a fixed number of layers, got layers 3"),
        (("--d-model", 512), "--d-model requires --heads, got --d-model 512 without it"),
        (("--d-model", -512, "--heads", 8), "d_model must be a positive integer, got -512"),
        (("--d-model", 512, "--heads", 7), "got 512 and 7"),
        (("gpt2", "--context", 0), "context must be a positive integer, got 0"),
        (("gpt2", "--batch", -1), "batch must be a positive integer, got -1"),
        (("gpt2", "--dtype", "float12"), "got 'float12'"),
        (("gpt2", "--dtype", "int8"), "dtype must be bfloat16, float16, float32 or float64, got int8"),
        (("gpt2", "--phase", "rest"), "phase must be one of training, prefill, decode; got 'rest'"),
        (("bert-base", "--phase", "decode"), "decode needs causal layers"),
        (
            ("gpt2", "--machine", "abacus"),
            "nvidia-l4 (datasheet), nvidia-rtx-4090 (datasheet), or a .json file; got 'aba",
        ),
        (("gpt2", "--machine", "nowhere.json"), "a machine file must exist, got 'nowhere.json'"),
        (("gpt2", "--lang", "fr"), "--lang must be one of en, zh; got 'fr'"),
        (("--batch", 2, "calibrate"), "takes no options of `polyhead plan`, got some before calibrate; omit them, or"),
        (("gpt2", "--calibrate"), "there is no option --calibrate"),
        (("--config", "nowhere.json"), "--config must be an existing file, got nowhere.json"),
        (("./nowhere",), "there is no such file or folder"),
        (("gpt2", "--output", "nowhere/plan.html"), "--output must be a file in an existing folder"),
    ],
)
def test_bad_input_gets_one_clear_line(arguments, words):
    result = invoke("plan", *arguments, code=2)
    assert result.stderr.startswith("polyhead plan: ")
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_config_without_heads_is_refused_with_the_fields_it_has(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2}), encoding="utf-8")
    result = invoke("plan", file, code=2)
    assert "a config must contain its number of heads (num_attention_heads" in result.stderr
    assert "got only the fields hidden_size, model_type, num_hidden_layers" in result.stderr
