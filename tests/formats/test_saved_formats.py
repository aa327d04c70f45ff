"""Files that version 0.1.0 saved are read: runs, checkpoints, what undoes edits, configs, machines and tables."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pyarrow.parquet
import pytest
import torch
import transformers
from typer.testing import CliRunner

import polyhead
from polyhead.analysis.syntax_table import SyntaxTable
from polyhead.cli import app
from polyhead.costs import CostEstimate
from polyhead.costs.layouts.model_layout import ModelLayout
from polyhead.costs.timing.machine import Machine
from polyhead.inspection import load_inspection
from polyhead.layers.config import AttentionConfig, build_attention
from polyhead.observation.renamed import current_name
from polyhead.surgery import edits_from_json

SAVED = Path(__file__).parent / "saved"


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A copy of all that was saved, as the working directory: paths in the files are relative."""
    folder = tmp_path / "saved"
    shutil.copytree(SAVED, folder)
    monkeypatch.chdir(folder)
    return folder


def command(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(x) for x in arguments], env={"COLUMNS": "250", "NO_COLOR": "1"})
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("name", ["decoder", "encoder"])
def test_a_run_has_every_number_that_was_saved(name):
    run = load_inspection(SAVED / f"run-{name}")
    rows = pyarrow.parquet.read_table(SAVED / f"run-{name}" / "heads.parquet").to_pydict()
    read = run.table.to_arrow().to_pydict()
    assert len(read["head"]) == 8
    for column, numbers in rows.items():
        if column.startswith("sentence_share"):  # it counted the token itself
            assert column not in read
            continue
        assert list(map(repr, read[current_name(column)])) == list(map(repr, numbers)), column  # NaN is NaN
    rest = json.loads((SAVED / f"run-{name}" / "inspection.json").read_text("utf-8"))
    assert len(run.roles) == len(rest["roles"]) == 8
    assert len(run.findings) == len(rest["findings"]) > 0
    for finding, saved in zip(run.findings, rest["findings"], strict=True):  # saved as "layer 0 head 3"
        names = [f"L{layer}H{head}" for layer, head in re.findall(r"layer (\d+) head (\d+)", saved["text"])]
        assert re.findall(r"L\d+H\d+", str(finding)) == names
    assert len(run.examples) == len(rest["examples"]) > 0
    assert len(run.pairs) == len(rest["pairs"])
    assert run.redundant == ()  # not measured at the time
    # Scores of the weights are no roles any more.
    evidence = [
        [score["evidence"] for score in head["scores"] if score["role"] not in ("copy", "anti-copy")]
        for head in rest["roles"]
    ]
    assert [[score.evidence for score in head.scores] for head in run.roles] == evidence
    assert [str(reason) for reason in run.facts["left_out"]] == rest["facts"]["left_out"]
    assert str(run.facts["pairs_by"]) == rest["facts"]["pairs_by"]


def test_saved_runs_are_compared_and_make_a_page(place):
    assert "0" in command("compare", "run-decoder", "run-decoder")
    shutil.copytree("run-decoder", "other")
    rest = json.loads(Path("other/inspection.json").read_text("utf-8"))
    rest["roles"][6]["scores"][0]["holds"] = True
    Path("other/inspection.json").write_text(json.dumps(rest), "utf-8")
    assert "\nL1H2 gained the role positional\n" in command("compare", "run-decoder", "other")
    assert "\nL1H2 lost the role positional\n" in command("compare", "other", "run-decoder")
    command("report", "run-encoder", "--output", "page.html")
    assert (place / "page.html").stat().st_size > 100_000


def test_a_stopped_run_goes_on(place):
    command("inspect", "--resume", "run-stopped")
    found = load_inspection(place / "run-stopped")
    assert set(found.table["tokens"].tolist()) == {167.0}
    # Sums by document, which it did not begin with, would be of a part of the text.
    assert not any("entropy" in effects for effects in found.influence.values())
    # The part that was read counted the token itself as inside its word.
    assert "punctuation_mass" in found.table.columns
    assert not {"word_share", "copy_score", "anti_copy_score"} & set(found.table.columns)


@pytest.mark.parametrize(("form", "original"), [("uniform", "decoder"), ("padded", "decoder"), ("uneven", "encoder")])
def test_an_edited_model_is_loaded_and_comes_back(form, original):
    """Their records are in their folders."""
    assert polyhead.load(SAVED / f"model-{form}")(torch.arange(5)[None])[0].isfinite().all()
    model = polyhead.undo(SAVED / f"model-{form}").model
    kind = {"decoder": transformers.LlamaForCausalLM, "encoder": transformers.BertModel}[original]
    before = kind.from_pretrained(SAVED / original).state_dict()
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_edits_are_read():
    edits = edits_from_json((SAVED / "edits.json").read_text("utf-8"))
    names = ["GroupQueries", "GroupQueries", "PruneHeads", "ReorderHeads", "MergeHeads", "AddHeads"]
    assert [type(edit).__name__ for edit in edits] == names


def test_the_journal_of_another_compensation_is_refused(place):
    """Its measurements are of other weights."""
    read = ["--text", "text", "--context", "24", "--tokens", "200", "--device", "cpu"]
    options = ["--target", "25%-heads", *read, "--resume", "journal", "--preview", "--form", "uneven"]
    result = CliRunner().invoke(app, ["shrink", "encoder", *options])
    assert result.exit_code == 2
    assert "resumes runs of format 2, got 1 in journal/journal.json" in result.output


def test_configs_of_every_layer_are_read():
    saved = json.loads((SAVED / "configs.json").read_text("utf-8"))
    assert len({config["kind"] for config in saved}) == 8
    for config in saved:
        read = AttentionConfig.from_dict(config)
        assert AttentionConfig.from_dict(read.to_dict()) == read
        assert sum(x.numel() for x in build_attention(read, device="meta").parameters()) > 0


def test_layouts_costs_and_machines_are_read():
    layout = ModelLayout.from_dict(json.loads((SAVED / "layout.json").read_text("utf-8")))
    assert (layout.name, layout.context, layout.cache_dtype) == ("a model", 4096, torch.int8)
    cost = CostEstimate.from_json((SAVED / "cost.json").read_text("utf-8"))
    assert (cost.parameters, cost.pairs) == (4776, 17787)
    machine = Machine.load(SAVED / "machine.json")
    assert machine.device == "cpu"
    assert len(machine.samples) > 2


def test_tables_of_syntax_are_read():
    tables = [SyntaxTable.load(SAVED / f"syntax.{form}") for form in ("json", "parquet")]
    assert tables[0] == tables[1]
    assert len(tables[0]) > 0
    heads = [f"L{row.layer}H{row.head}" for row in tables[0].entries]
    assert [cells[3] for cells in tables[0].cells()[1]] == heads
