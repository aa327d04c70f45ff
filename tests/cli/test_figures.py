"""Figures that the commands print: correct metric, unit and heads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import polyhead
from polyhead.cli import app
from polyhead.costs import read_layout
from polyhead.errors import OptionError
from polyhead.inspection import load_inspection
from polyhead.inspection.vocabulary import column_of
from polyhead.report import page_of
from polyhead.surgery import PruneHeads, ReorderHeads, SideFiles, apply, find_layers, preview, save
from polyhead.surgery.options import Target
from polyhead.surgery.selection.budgets import Size, check_target
from tests.inspection.small_models import model_folder, text_folder
from tests.integrations.huggingface.models import FAMILIES, build

SHORT = ["--context", "48", "--tokens", "500", "--no-chance"]


def invoke(*arguments: object, code: int = 0):
    environment = {"COLUMNS": "250", "NO_COLOR": "1"}
    result = CliRunner().invoke(app, [str(x) for x in arguments], env=environment)
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    for name in ("bert", "masked", "llama"):
        model_folder(folder / name, name)
    text_folder(folder / "text", documents=5, words=60)
    return folder


def test_the_issues_commands_compare_each_head_with_itself(place, tmp_path):
    options = ["--heads", "L0H1,L1H2", "--no-compensate", "--form", "uneven"]
    invoke("prune", place / "bert", *options, "--output", tmp_path / "pr")
    for model, run in ((place / "bert", "one"), (tmp_path / "pr", "two")):
        options = ["--text", place / "text", *SHORT, "--importance", "none", "--save", tmp_path / run]
        shown = invoke("inspect", model, *options).stdout
    edited = "removed L0H1, L1H2; 3 heads have a different number than in the original"
    assert f"Edited, in head numbers of the original: {edited}" in shown
    compared = invoke("compare", tmp_path / "one", tmp_path / "two", "--most", 1000).stdout
    assert re.search(r"^\d of 6 common heads changed$", compared, re.MULTILINE)
    assert "only in A: L0H1 removed, L1H2 removed" in compared
    # Nothing before W_O of the first layer has changed, so no head of it looks elsewhere.
    assert re.findall(r"^L0H\d.*(?:entropy|distance|mass).*$", compared, re.MULTILINE) == []
    assert re.findall(r"^L0H\d (?:gained|lost).*$", compared, re.MULTILINE) == []
    back = invoke("compare", tmp_path / "two", tmp_path / "one").stdout
    assert "only in B: L0H1 removed, L1H2 removed" in back
    other = ["inspect", place / "llama", "--text", place / "text", *SHORT, "--importance", "none"]
    invoke(*other, "--save", tmp_path / "other")
    refused = invoke("compare", tmp_path / "one", tmp_path / "other", code=2).stderr
    assert "two whose model type differs: bert in A" in refused


def test_a_head_that_moved_is_named_in_both(place, tmp_path):
    """Heads of another order that read shorter contexts: the table says which number is which."""
    model = polyhead.load(place / "bert")
    apply(model, [ReorderHeads(0, (3, 2, 1, 0)), ReorderHeads(1, (3, 2, 1, 0))])
    save(model, tmp_path / "turned", tokenizer=SideFiles(place / "bert"))
    for folder, context, run in ((place / "bert", 48, "one"), (tmp_path / "turned", 10, "two")):
        options = ["--text", place / "text", "--no-chance", "--importance", "none", "--save", tmp_path / run]
        shown = invoke("inspect", folder, *options, "--context", context, "--table").stdout
    assert "L0H0 (originally L0H3)" in shown
    compared = invoke("compare", tmp_path / "one", tmp_path / "two", "--statistic", "entropy", "--most", 99).stdout
    named = re.findall(r"^L(\d)H(\d) → L(\d)H(\d) +entropy, nats ", compared, re.MULTILINE)
    assert len(named) > 3
    assert all(layer == layer_after and int(head) == 3 - int(after) for layer, head, layer_after, after in named)


@pytest.mark.parametrize(("name", "caches"), [("bert", False), ("masked", False), ("llama", True)])
def test_bytes_of_a_cache_are_counted_where_there_is_one(place, name, caches):
    shown = invoke("prune", place / name, "--heads", "L0H1", "--form", "uneven", "--preview").stdout
    assert ("cache bytes per token" in shown) is caches
    assert "FLOPs of 512 tokens" in shown


def test_only_the_decoder_of_both_keeps_a_cache():
    model = build(next(family for family in FAMILIES if family.name == "bart"))
    layers = find_layers(model)
    counted = preview(model, [PruneHeads(0, (1,), stack=layers[0].stack)])
    by_path = {layer.path: layer.before.cache_bytes_per_token > 0 for layer in counted.layers}
    assert {True, False} == set(by_path.values())
    assert by_path == {layer.path: ".encoder." not in f".{layer.path}" for layer in layers}


def test_a_cache_is_no_target_for_an_encoder(place):
    options = ["--text", place / "text", "--context", "16", "--device", "cpu", "--preview"]
    for name in ("bert", "masked"):
        result = invoke("shrink", place / name, "--target", "2x-cache", *options, code=2)
        assert "a cache target needs a model with a KV cache" in result.stderr
        assert "Select heads" not in result.stderr  # refused before the text is read
    with pytest.raises(OptionError, match="for a model without one"):
        check_target(Target("cache", 2.0), polyhead.load(place / "bert"))
    check_target(Target("cache", 2.0), polyhead.load(place / "llama"))
    with pytest.raises(OptionError, match="for a model without one"):
        Size(0.5, None, 0.5).reaches(Target("cache", 2.0))
    assert str(Size(0.5, None, 0.25)) == "50% of the heads and 25% of the model's FLOPs"


def test_the_curve_of_an_encoder_has_no_column_of_a_cache(place):
    options = ["--text", place / "text", "--context", "16", "--device", "cpu", "--preview", "--form", "uneven"]
    shown = invoke("shrink", place / "bert", "--target", "25%-heads", *options, "--curve").stdout
    assert "cache" not in shown
    assert "fidelity, the mean cosine of final hidden states to those of the unpruned model" in shown


@pytest.mark.usefixtures("without_probes")
@pytest.mark.parametrize(
    ("name", "column", "label"),
    [
        ("bert", "ablation", "ablation: 1 - cosine"),
        ("llama", "gradient", "gradient of the loss, in nats"),
        ("masked", "gradient", "gradient of the loss, in nats"),
    ],
)
def test_importance_is_labelled_with_what_was_measured(place, name, column, label, tmp_path):
    shown = invoke("inspect", place / name, "--text", place / "text", *SHORT, "--save", tmp_path, "--table").stdout
    assert f"\n{label}\n" in shown
    assert "\nentropy (nats)\n" in shown
    assert "mean_distance: mean attention distance (tokens)\n" in shown
    page = page_of(load_inspection(tmp_path))
    assert page["importance"]["label"]["en"] == label
    (found,) = [x for x in page["columns"] if x["name"] == column]
    assert found["label"]["en"] == label
    assert found["format"] == ("number" if name == "bert" else "nats")


def test_a_loss_and_a_cosine_are_not_called_alike():
    loss, turn = column_of("ablation", "language"), column_of("ablation", "representation")
    assert (loss.unit.en, turn.unit.en) == ("nats", "")
    assert "loss" not in turn.label.en + turn.about.en
    assert "cosine" not in loss.label.en + loss.about.en


def test_a_plan_of_an_edited_model_counts_the_heads_it_has(place, tmp_path):
    for form in ("uneven", "padded"):
        options = ["--no-compensate", "--form", form, "--output", tmp_path / form]
        invoke("prune", place / "llama", "--heads", "L0H1,L1H0,L1H1", *options)
    found = read_layout(tmp_path / "uneven")
    heads = [(group.config.num_heads, group.config.num_kv_heads, group.layers) for group in found.groups]
    assert heads == [(3, 2, 1), (2, 1, 1)]
    shown = invoke("plan", tmp_path / "uneven").stdout
    assert "4 heads" not in shown
    assert "counted with the zero heads" in invoke("plan", tmp_path / "padded").stdout
