"""`polyhead.inspect`, `compare` and `syntax` as Python calls."""

from __future__ import annotations

import pytest
import transformers

import polyhead
from polyhead.errors import OptionError
from polyhead.progress import Progress
from polyhead.workflows.model_loading import load_model
from tests.inspection.small_models import model_folder, text_folder, tokenizer

OPTIONS = {"context": 48, "importance": "none", "chance": False}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    model_folder(folder / "bert", "bert")
    text_folder(folder / "text")
    return folder


@pytest.mark.usefixtures("only_roles_and_pairs")
def test_a_model_and_a_text_in_memory_give_the_inspection_of_their_files(place):
    seen = []
    by_name = polyhead.inspect(place / "bert", place / "text", progress=seen.append, **OPTIONS)
    assert seen[0] == Progress("load the model")
    assert any(x.step == "read the text" and x.done == x.total for x in seen)
    model = transformers.BertModel.from_pretrained(place / "bert").eval()
    texts = [file.read_text() for file in sorted((place / "text").glob("*.txt"))]
    in_memory = polyhead.inspect(model, texts, tokenizer=tokenizer(), **OPTIONS)
    found = polyhead.compare(by_name, in_memory)
    assert len(found.changes) > 8
    assert all(change.before == change.after for change in found.changes)
    assert in_memory.facts["documents"] == by_name.facts["documents"] == 6
    assert in_memory.settings.text == "(in memory)"


@pytest.mark.usefixtures("only_roles_and_pairs")
def test_a_run_of_a_model_in_memory_is_resumed_with_the_same_text_only(place, tmp_path):
    loaded = load_model(place / "bert")
    texts = [file.read_text() for file in sorted((place / "text").glob("*.txt"))]
    first = polyhead.inspect(loaded, texts, folder=tmp_path / "run", **OPTIONS)
    again = polyhead.inspect(loaded, texts, folder=tmp_path / "run", resume=True, **OPTIONS)
    assert str(again.table) == str(first.table)
    with pytest.raises(OptionError, match="text"):
        polyhead.inspect(loaded, texts[:3], folder=tmp_path / "run", resume=True, **OPTIONS)


def test_options_are_checked_before_the_model_is_loaded(place):
    with pytest.raises(OptionError, match="importance must be one of"):
        polyhead.inspect("no/such-model", place / "text", importance="magic")
    with pytest.raises(OptionError, match="needs the model's tokenizer, got bert without one"):
        polyhead.inspect(transformers.BertModel.from_pretrained(place / "bert").eval(), place / "text")
    with pytest.raises(OptionError, match=r"call model.eval\(\) first"):
        polyhead.inspect(transformers.BertModel.from_pretrained(place / "bert").train(), place / "text")


def test_a_model_with_a_part_in_training_mode_is_refused(place):
    loaded = load_model(place / "bert")
    loaded.model.encoder.layer[1].attention.train()
    rule = r"evaluation mode, got one whose encoder.layer.1.attention is in training mode; call model.eval\(\) first"
    for model, options in ((loaded, {}), (loaded.model, {"tokenizer": loaded.tokenizer})):
        with pytest.raises(OptionError, match=rule):
            polyhead.inspect(model, place / "text", **options, **OPTIONS)
    loaded.model.train()
    with pytest.raises(OptionError, match="evaluation mode, got one in training mode"):
        polyhead.inspect(loaded, place / "text", **OPTIONS)


def test_a_treebank_is_read_before_the_model_is_loaded(place, tmp_path):
    def load():
        raise AssertionError("the model was loaded")

    (tmp_path / "bank.conllu").write_text("1\tno\n")
    with pytest.raises(OptionError):
        polyhead.syntax(load, tmp_path / "bank.conllu")
