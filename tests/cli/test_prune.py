"""`polyhead prune`, `merge` and `undo`: printed and written results, and error messages."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import polyhead
from polyhead.cli import app
from polyhead.surgery import find_layers, fingerprint, load_record
from polyhead.workflows import model_loading
from polyhead.workflows.calibration_text import CalibrationText, model_inputs
from polyhead.workflows.compensating import DISTILLED, NOT_COMPENSATED
from polyhead.workflows.evaluating import measure_original
from polyhead.workflows.model_loading import load_model
from tests.forked import Bystander
from tests.inspection.small_models import broken_folder, model_folder, text_folder


def invoke(*arguments: object, code: int = 0, **options):
    environment = {"COLUMNS": "250", "NO_COLOR": "1"}
    result = CliRunner().invoke(app, [str(x) for x in arguments], env=environment, **options)
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    for name in ("bert", "llama"):
        model_folder(folder / name, name)
    text_folder(folder / "text")
    return folder


def heads(folder: Path) -> list[int]:
    return [layer.layout.num_heads for layer in find_layers(polyhead.load(folder))]


def test_heads_by_name_are_taken_out_repaired_written_and_brought_back(place, tmp_path):
    text = ["--text", place / "text", "--device", "cpu"]
    uneven = ["--form", "uneven"]
    named = ["--heads", "L0H3, l1h0,L0H1", *uneven]
    shown = invoke("prune", place / "bert", *named, *text, "--output", tmp_path / "pruned").stdout
    assert "without heads L0H1, L0H3, L1H0" in shown
    assert {DISTILLED, NOT_COMPENSATED} & set(shown.splitlines())
    assert [line.split()[-3:] for line in shown.splitlines() if line.startswith("heads ")] == [["8", "5", "0.62"]]
    assert f"Saved to {tmp_path / 'pruned'}, " in shown
    assert "uneven: plain transformers does not load it: all layers need the same number of heads, got" in shown
    assert f"polyhead undo {tmp_path / 'pruned'} --output FOLDER` to restore the weights as they were loaded" in shown
    assert heads(tmp_path / "pruned") == [2, 3]
    assert f"their record is {tmp_path / 'pruned.undo'}, to be kept beside the model" in shown
    invoke("prune", place / "bert", *named, "--no-compensate", "--output", tmp_path / "plain")
    compensated, plain = polyhead.load(tmp_path / "pruned"), polyhead.load(tmp_path / "plain")
    name = "encoder.layer.0.attention.self.query.weight"
    assert torch.equal(compensated.get_parameter(name), plain.get_parameter(name))
    name = "encoder.layer.0.attention.output.dense.weight"
    assert not torch.equal(compensated.get_parameter(name), plain.get_parameter(name))
    back = invoke("undo", tmp_path / "pruned", "--output", tmp_path / "back").stdout
    original = polyhead.load(place / "bert")
    assert f"Fingerprint {fingerprint(original)}, that of the model before its edits, in float32" in " ".join(
        back.split()
    )
    weights, expected = (load_file(folder / "model.safetensors") for folder in (tmp_path / "back", place / "bert"))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], x) for name, x in expected.items())
    # Every file is byte for byte that of the original, or is named as one that may differ.
    (anew,) = re.findall(
        r"^Written anew, so that their bytes may differ from the original's: (.*); the other", back, re.M
    )
    assert "model.safetensors" in anew.split(", ")
    same = {file.name for file in (place / "bert").iterdir()} - set(anew.split(", "))
    assert {"tokenizer.json", "tokenizer_config.json"} <= same
    assert all((tmp_path / "back" / name).read_bytes() == (place / "bert" / name).read_bytes() for name in same)


def test_a_share_is_chosen_on_the_text(place, tmp_path):
    options = ["--text", place / "text", "--share", "25%", "--device", "cpu"]
    shown = invoke("prune", place / "llama", *options, "--preview", "--form", "uneven").stdout
    assert [line.split()[-3:] for line in shown.splitlines() if line.startswith("heads ")] == [["8", "6", "0.75"]]
    assert "remain in every layer" not in shown
    assert "Saved" not in shown
    assert list(tmp_path.iterdir()) == []
    for form in ("padded", "uneven"):
        again = invoke("prune", place / "llama", *options, "--output", tmp_path / form, "--form", form).stdout
        assert sum(heads(tmp_path / form)) == 6
        assert next(line for line in shown.splitlines() if line.startswith("without heads")) in again
        assert ("the saved model has the sizes and costs of the original" in again) == (form == "padded")


def plain_logits(folder: Path, ids: torch.Tensor) -> tuple[torch.Tensor, str, str, int]:
    """Load a model where polyhead cannot be imported: its logits, class and attention, and its number of heads."""
    for name in [name for name in sys.modules if name.split(".")[0] == "polyhead"]:
        sys.modules[name] = None  # type: ignore[assignment]
    with pytest.raises(ImportError):
        __import__("polyhead")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = model(ids).logits
    config = model.config
    return (
        logits,
        f"{type(model).__module__}.{type(model).__name__}",
        config._attn_implementation,
        config.num_attention_heads,
    )


def test_a_pruned_model_is_smaller_loads_without_polyhead_and_comes_back(place, tmp_path, monkeypatch):
    """The defaults: as many heads in every layer, and the record beside the folder."""
    monkeypatch.chdir(tmp_path)
    options = ["--text", place / "text", "--share", "40%", "--device", "cpu"]
    shown = invoke("prune", place / "llama", *options, "--preview").stdout
    assert list(tmp_path.iterdir()) == []
    written = invoke("prune", place / "llama", *options, "--output", "small/").stdout
    assert "without heads" in written
    assert set(shown.splitlines()) < set(written.splitlines())
    assert "2 heads over 2 KV heads remain in every layer, 50.0% fewer than before, for 40.0% requested" in shown
    assert "uniform: plain transformers loads it as LlamaForCausalLM" in written
    assert heads(tmp_path / "small") == [2, 2]
    assert sorted(x.name for x in tmp_path.iterdir()) == ["small", "small.undo"]
    weights = [(folder / "model.safetensors").stat().st_size for folder in (place / "llama", Path("small"))]
    assert weights[0] - weights[1] == 2 * 2 * 2 * 6 * 24 * 4  # layers, W_Q and W_O, heads, channels, width, bytes
    whole, small = (
        sum(file.stat().st_size for file in folder.iterdir()) for folder in (place / "llama", Path("small"))
    )
    assert small < whole
    assert f"{small:,} bytes" in written

    ids = torch.randint(5, 90, (2, 12), generator=torch.Generator().manual_seed(0))
    elsewhere = Bystander()
    logits, *loaded = elsewhere.run(plain_logits, tmp_path / "small", ids)
    elsewhere.end()
    assert loaded == ["transformers.models.llama.modeling_llama.LlamaForCausalLM", "sdpa", 2]
    edited = polyhead.prune(place / "llama", share=0.4, text=place / "text")
    with torch.no_grad():
        torch.testing.assert_close(logits, edited.model(ids).logits, rtol=0, atol=1e-5)

    invoke("undo", "small", "--output", "back")
    assert fingerprint(polyhead.load("back")) == fingerprint(polyhead.load(place / "llama"))
    assert not Path("back.undo").exists()


def test_forms_that_cannot_be_are_refused_by_the_config_alone(place, tmp_path, monkeypatch):
    """A native BERT has heads of hidden_size / num_attention_heads channels, and no KV heads."""
    load = model_loading.read_model
    monkeypatch.setattr(model_loading, "read_model", lambda *_, **__: pytest.fail("the weights were read"))
    (tmp_path / "unreadable.txt").write_bytes(b"\xff\xfe\x00\xd8")
    options = ["--device", "cpu", "--output", tmp_path / "out"]
    text = ["--text", tmp_path / "unreadable.txt"]
    for arguments, words in (
        (
            ["prune", place / "bert", "--share", "50%", *text],
            "BertModel, which has none: .*1 head of 6 channels.*; use",
        ),
        (
            ["prune", place / "bert", "--heads", "L0H1,L1H1", *text],
            "gives 3 heads of 8 channels .* has 3 heads of 6 channels",
        ),
        (
            ["prune", place / "llama", "--heads", "L0H3,L1H1,L1H2", *text],
            "uniform form: all layers need the same number of heads, got",
        ),
        (
            ["prune", place / "llama", "--heads", "L0H0,L0H1,L0H2,L1H0", *text],
            r"got 1 over 1 KV heads \(layer 0\) and 3 over 2 KV heads \(the others\)",
        ),
        (
            ["prune", place / "llama", "--heads", "L0H0,L1H0", *text],
            r"in equal groups, but .*0.self_attn reads \[0, 1, 1\]",
        ),
        (
            ["prune", place / "llama", "--share", "30%", "--criterion", "plain", *text],
            "needs the criterion compensated",
        ),
        (
            ["merge", place / "llama", "--heads", "L0H0+L0H1"],
            "uniform form: all layers need the same number of heads, got",
        ),
        (["convert", place / "bert", "--kv-heads", "2", *text], "native BertSelfAttention has one KV head per head"),
        (
            ["shrink", place / "bert", "--target", "50%-heads", *text],
            "BertModel, which has none: .*1 head of 6 channels.*; use",
        ),
        (["prune", place / "llama", "--share", "30%", *text], r"30% fewer heads, for .*; use --share 50% \(2/2\), --"),
        (["prune", place / "llama", "--share", "30%", *text, "--preview"], r"use --share 50% \(2/2\), --form padded"),
        (["shrink", place / "llama", "--target", "30%-heads", *text], r"use --target 50%-heads \(2/2\), --form pad"),
        (["shrink", place / "llama", "--target", "3x-cache", *text], "1/1 leaves 25% of the heads, 50% of the cache"),
    ):
        said = invoke(*arguments, *options, code=2).stderr.splitlines()[-1]
        assert said.startswith(f"polyhead {arguments[0]}: ")
        assert re.search(words, said), said
        assert (
            "--form padded (loads anywhere, saves nothing) or --form uneven (smaller, loads with polyhead.load)" in said
        )
        assert [x.name for x in tmp_path.iterdir()] == ["unreadable.txt"]
    shrink = ["shrink", place / "llama", "--form", "uneven", "--target", "80%-heads", *text, *options]
    assert "every layer keeps at least one head, which leaves 25%" in invoke(*shrink, code=2).stderr
    monkeypatch.setattr(model_loading, "read_model", load)
    # Nothing is selected on a text for a preview of the layout.
    assert (
        "2 heads over 2 KV heads remain"
        in invoke("prune", place / "llama", "--share", "45%", *text, "--preview").stdout
    )
    # Equal numbers in equal groups are uniform, whoever names them.
    options[-1] = tmp_path / "named"
    shown = invoke("prune", place / "llama", "--heads", "L0H0,L0H3,L1H1,L1H2", "--no-compensate", *options).stdout
    assert "uniform: plain transformers loads it" in shown


def test_text_is_read_or_held_out_and_never_both(place):
    loaded = load_model(place / "bert", dtype="saved")
    text = CalibrationText.of(loaded, place / "text", context=40, tokens=10_000)
    read = [row.tolist() for batch in model_inputs(loaded, text.calibrating) for row in batch["input_ids"]]
    count, split = len(text.text.contexts), (text.calibrating, text.selecting, text.held_out)
    assert sum(map(len, split)) == count
    assert len(text.held_out) == pytest.approx(count / 4, abs=1.5)
    assert len(text.selecting) == pytest.approx(count / 8, abs=1)
    assert len(read) == len(text.calibrating)
    for context in text.text.contexts:
        padded = [row for row in read if row[: len(context.ids)] == context.ids]
        assert len(padded) == (context in text.calibrating)
    judged = measure_original(text).held_out
    real = [int(row.sum()) for batch in judged.batches for row in batch["attention_mask"]]
    assert sorted(real) == sorted(len(context.ids) for context in text.held_out)
    assert judged.measure().value == pytest.approx(1, abs=1e-6)
    assert 60 < CalibrationText.of(loaded, place / "text", context=40, tokens=100).text.tokens <= 100


def test_documents_are_split_as_a_whole_and_from_all_of_the_text(place):
    """With 40 documents, no document is in two parts, and each part has documents of every quarter."""
    loaded = load_model(place / "llama", dtype="saved")
    words = " ".join(file.read_text() for file in sorted((place / "text").glob("*.txt"))).split()
    texts = [" ".join(words[start : start + 40]) for start in range(0, 600, 15)]
    text = CalibrationText.of(loaded, texts, context=16, tokens=10_000)
    parts = [{x.document for x in part} for part in (text.calibrating, text.selecting, text.held_out)]
    assert [len(x) for x in parts] == [25, 5, 10]
    assert set.union(*parts) == set(range(40))
    assert len(set(text.groups)) == 10 < len(text.held_out)
    assert all({document // 10 for document in part} == {0, 1, 2, 3} for part in parts)


def test_another_text_is_held_out_and_compared_with_that_which_calibrates(place, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("w1 " * 400)
    options = ["--text", place / "text", "--context", 40, "--device", "cpu", "--heads", "L0H0,L0H3,L1H1,L1H2"]
    shown = invoke("prune", place / "llama", *options, "--test-text", other, "--output", tmp_path / "one").stdout
    found = re.search(r"has a perplexity of (\S+) on --test-text and of (\S+) on --text\.", shown)
    text = CalibrationText.of(load_model(place / "llama"), place / "text", context=40, test_text=other)
    assert {tuple(set(x.ids)) for x in text.held_out} == {tuple(set(text.held_out[0].ids))}  # of one word
    assert not set(map(id, text.held_out)) & set(map(id, (*text.calibrating, *text.selecting)))
    assert len(text.calibrating) + len(text.selecting) == len(text.text.contexts)
    original = measure_original(text)
    assert [float(x) for x in found.groups()] == pytest.approx(
        [original.held_out.original, original.calibration], rel=1e-3
    )
    shown = invoke("prune", place / "llama", *options, "--test-text", place / "text", "-o", tmp_path / "two").stdout
    assert "The texts differ" not in shown
    said = invoke(
        "prune", place / "llama", *options, "--test-text", tmp_path / "no", "-o", tmp_path / "x", code=2
    ).stderr
    assert "there is no such file" in said


def test_what_is_left_is_measured_on_text_that_nothing_was_repaired_on(place, tmp_path):
    options = ["--text", place / "text", "--context", 40, "--device", "cpu", "--form", "uneven"]
    options += ["--heads", "L0H0,L0H1,L0H2,L1H0,L1H1,L1H2"]
    shown = invoke("prune", place / "bert", *options, "--output", tmp_path / "one").stdout
    found = re.search(
        r"Fidelity on held-out text \((\d+) tokens, (\d+) contexts\), the mean cosine of final hidden states with the "
        r"original's: ([\d.]+) ± \S+ without compensation, ([\d.]+) ± ([\d.]+) after",
        shown,
    )
    tokens, texts, plain, cosine, error = (float(x) for x in found.groups())
    assert plain < cosine
    assert texts == 7
    assert texts * 12 < tokens <= texts * 40
    assert 0.3 < cosine < 1
    assert error < 0.1
    warning = "Fewer than 5 documents or stretches of text are held out, too few for a reliable interval; for more, use"
    few = invoke("prune", place / "bert", *options, "--tokens", 500, "--output", tmp_path / "few").stdout
    assert warning in few
    assert warning not in shown
    enough = invoke("prune", place / "bert", *options, "--context", 16, "--output", tmp_path / "three").stdout
    assert int(re.search(r"Fidelity on held-out text \(\d+ tokens, (\d+) contexts\)", enough)[1]) >= 8
    assert "are held out" not in enough
    # Where there is little text, all of it is needed.
    short = invoke("prune", place / "bert", *options, "--tokens", 290, "--output", tmp_path / "two").stdout
    assert "needs a text of 8 contexts, of which two are held out, got 7; use more text" in short


@pytest.mark.parametrize("edit", [["prune", "--heads", "L0H0,L0H3,L1H1,L1H2"], ["convert", "--kv-heads", "1"]])
def test_perplexity_is_that_of_the_saved_model_on_contexts_that_nothing_was_fitted_to(place, tmp_path, edit):
    options = [edit[0], place / "llama", *edit[1:], "--text", place / "text", "--context", 40, "--device", "cpu"]
    shown = invoke(*options, "--output", tmp_path / "edited").stdout
    invoke(*options, *(["--no-compensate"] * (edit[0] == "prune")), "--output", tmp_path / "plain")
    folders = [place / "llama", *([tmp_path / "plain"] * (edit[0] == "prune")), tmp_path / "edited"]
    found = re.search(r"Perplexity on held-out text \((\d+) tokens, (\d+) contexts\): (.*)", shown)
    text = CalibrationText.of(load_model(place / "llama"), place / "text", context=40)
    assert [int(found[1]), int(found[2])] == [sum(len(x.ids) for x in text.held_out), len(text.held_out)]
    expected = []
    for folder in folders:
        native = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        with torch.no_grad():
            rows = [native(torch.tensor([x.ids])).logits[0, :-1].log_softmax(-1) for x in text.held_out]
        losses = [-row[range(len(row)), x.ids[1:]] for row, x in zip(rows, text.held_out, strict=True)]
        expected.append(float(torch.cat(losses).mean().exp()))
    values = re.findall(r"(\S+)(?: ± \S+)? (before|without compensation|after)", found[3])
    labels = ["before", "without compensation", "after"] if edit[0] == "prune" else ["before", "after"]
    assert [label for _, label in values] == labels
    assert [float(value) for value, _ in values] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("criterion", ["plain", "ablation", "gradient", "taylor", "magnitude", "redundancy", "random"])
def test_every_criterion_can_be_asked_for(place, criterion):
    options = ["--text", place / "text", "--share", "40%", "--criterion", criterion, "--device", "cpu", "--preview"]
    options += ["--form", "uneven"]

    def taken(name: str, *more: object) -> str:
        shown = invoke("prune", place / name, *options, *more).stdout
        return next(line for line in shown.splitlines() if line.startswith("without heads"))

    first = taken("llama")
    assert first.count("H") == 3
    if criterion == "random":
        assert len({first, *(taken("llama", "--seed", seed) for seed in range(1, 4))}) > 1
    if criterion in ("gradient", "taylor"):
        said = invoke("prune", place / "bert", *options, code=2).stderr
        assert "similarity to the unpruned model has none there" in said
    else:
        assert taken("bert").count("H") == 3


def test_edits_of_an_edited_model_are_undone_with_those_before(place, tmp_path):
    invoke(
        "prune",
        place / "bert",
        "--heads",
        "L0H0,L1H1",
        "--no-compensate",
        "--output",
        tmp_path / "one",
        "--form",
        "padded",
    )
    merged = ["merge", tmp_path / "one", "--heads", "L1H0+L1H2", "--form", "uneven"]
    shown = invoke(*merged, "--output", tmp_path / "two").stdout
    assert "with heads L1H0+L1H2 merged" in shown
    assert heads(tmp_path / "two") == [3, 2]
    record = load_record(tmp_path / "two")
    assert [type(edit).__name__ for edit in record.edits] == ["PruneHeads", "PruneHeads", "MergeHeads"]
    invoke("undo", tmp_path / "two", "--output", tmp_path / "back")
    assert fingerprint(polyhead.load(tmp_path / "back")) == fingerprint(polyhead.load(place / "bert"))
    half = invoke(*merged, "--output", tmp_path / "half", "--dtype", "bfloat16")
    assert "Only these edits can be undone, not earlier ones: the weights were loaded in another dtype" in half.stdout
    back = ["undo", tmp_path / "half", "--output", tmp_path / "half back"]
    assert "--form padded (loads anywhere" in invoke(*back, code=2).stderr  # its original is an edited model
    invoke(*back, "--form", "padded")
    assert heads(tmp_path / "half back") == [3, 3]
    # Without the record of the first edit, the second one can still be undone, and that is said.
    shutil.rmtree(tmp_path / "one.undo")
    shown = invoke(*merged, "--output", tmp_path / "three").stdout
    assert re.search(
        r"Only these edits can be undone, not earlier ones: the undo record of .*one is .*, got none", shown
    )
    invoke("undo", tmp_path / "three", "--output", tmp_path / "three back", "--form", "uneven")
    assert fingerprint(polyhead.load(tmp_path / "three back")) == fingerprint(polyhead.load(tmp_path / "one"))


def test_merged_groups_are_numbered_as_they_were_before(place, tmp_path):
    groups = ["--heads", "L0H0+L0H2, l0h1+l0h3,L1H1+L1H2+L1H3", "--form", "uneven"]
    shown = invoke("merge", place / "bert", *groups, "--output", tmp_path / "merged").stdout
    assert "L0H0+L0H2,L0H1+L0H3,L1H1+L1H2+L1H3" in shown
    found, whole = polyhead.load(tmp_path / "merged"), polyhead.load(place / "bert")
    path = "encoder.layer.0.attention.self.query.weight"
    queries, before = found.get_parameter(path).view(2, 6, 24), whole.get_parameter(path).view(4, 6, 24)
    torch.testing.assert_close(queries[0], (before[0] + before[2]) / 2)
    torch.testing.assert_close(queries[1], (before[1] + before[3]) / 2)
    assert heads(tmp_path / "merged") == [2, 2]


def test_an_edited_model_is_inspected_by_its_folder(place, tmp_path):
    pytest.importorskip("pyarrow")
    for name, taken in (("bert", "L0H1,L0H2"), ("llama", "L0H1")):
        options = ["--heads", taken, "--form", "uneven", "--no-compensate"]
        invoke("prune", place / name, *options, "--output", tmp_path / name)
        shown = invoke("inspect", tmp_path / name, "--text", place / "text", "--context", 64, "--device", "cpu").stdout
        assert f"{6 if name == 'bert' else 7} heads" in shown
        assert shown.count("•") == 3


def test_the_original_is_left_alone_and_folders_are_replaced_when_told(place, tmp_path):
    options = ["--no-compensate", "--form", "uneven", "--heads", "L0H1"]
    before = {file.name: file.read_bytes() for file in (place / "bert").iterdir()}
    for extra in ([], ["--replace"]):
        said = invoke("prune", place / "bert", *options, "--output", place / "bert", *extra, code=2).stderr
        assert ("which holds files" if not extra else "not written over the one it came from") in said
    assert {file.name: file.read_bytes() for file in (place / "bert").iterdir()} == before
    invoke("prune", place / "bert", *options, "--output", tmp_path / "one")
    assert (
        "which holds files; choose another one"
        in invoke("prune", place / "bert", *options, "--output", tmp_path / "one", code=2).stderr
    )
    invoke("prune", place / "bert", *options[:-1], "L0H1,L0H2", "--output", tmp_path / "one", "--replace")
    assert heads(tmp_path / "one") == [2, 4]
    assert (
        "not written over the one it came from"
        in invoke("undo", tmp_path / "one", "--output", tmp_path / "one", "--replace", code=2).stderr
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--heads", "L0H4"], "this layer has heads 0 to 3, got [4]"),
        (["--heads", "L2H0"], "has layers 0 to 1, got layer 2"),
        (["--heads", "L0H0,L0H1,L0H2,L0H3"], "a layer must keep at least one head, got all 4 heads of layer 0"),
        (["--heads", "L0H0,L0H0"], "heads must be distinct, got [0] more than once in [0, 0]"),
        (["--heads", "0-1"], "a head is written L5H3, for layer 5 and head 3; got '0-1'"),
        (["--heads", "L0H1, 1.2"], "a head is written L1H2, for layer 1 and head 2; got '1.2'"),
        (["--share", "30"], "a percentage between 0% and 100%, e.g. 30%; got '30'"),
        (["--share", "100%"], "e.g. 30%; got '100%'"),
        (["--share", "3%"], "share must be at least one head, got 3.0% of 8 heads"),
        (["--share", "99%"], "count must be 0 to 6, so that each layer keeps a head, got 8"),
        ([], "specify either --heads or --share; got both or neither"),
        (["--heads", "L0H1", "--share", "30%"], "got both or neither"),
        (["--share", "30%", "--criterion", "luck"], "criterion must be one of compensated, plain, ablation"),
        (
            ["--share", "30%", "--stack", "decoder"],
            "stack must be one of encoder.layer.*.attention.self, got 'decoder'",
        ),
        (["--heads", "L0H1", "--form", "flat"], "form must be one of uniform, uneven, padded, got 'flat'"),
        (["--share", "30%", "--form", "uniform"], "the uniform form needs a native config with fewer heads"),
        (["--heads", "L0H1", "--text", "{empty}"], "calibration needs a text of at least 8 tokens"),
        (["--heads", "L0H1", "--text", "{short}"], "must have at least as many tokens as the heads of"),
        (["--share", "30%", "--text", "{short}"], "must have at least as many tokens as the heads of"),
        (["--heads", "L0H1", "--text", "nowhere.txt"], "there is no such file"),
        (["--heads", "L0H1", "--stack", "decoder"], "stack must be one of encoder.layer.*.attention.self"),
        (["--heads", "L0H1", "--context", "9999"], "context must be at most 130 tokens, the maximum of bert, got 9999"),
        (["--heads", "L0H1", "--dtype", "int8"], "must be float32, bfloat16 or float16; got 'int8'"),
    ],
)
def test_bad_input_of_prune_is_said_in_a_line_and_nothing_is_written(place, tmp_path, arguments, words):
    (tmp_path / "empty.txt").write_text("  \n")
    (tmp_path / "short.txt").write_text(" ".join(["w1 w2"] * 6))
    places = {"empty": tmp_path / "empty.txt", "short": tmp_path / "short.txt"}
    given = [x.format(**places) for x in arguments]
    if "--text" not in given:
        given += ["--text", place / "text"]
    if "--form" not in given:
        given += ["--form", "uneven"]
    said = invoke("prune", place / "bert", *given, "--device", "cpu", "--output", tmp_path / "out", code=2).stderr
    assert words in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty.txt", "short.txt"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--heads", "L1H3"], "a group must be two or more heads of one layer, e.g. L1H3+L1H7; got 'L1H3'"),
        (["--heads", "L0H1+L1H2"], "got 'L0H1+L1H2'"),
        (["--heads", "L0H1+L0H2,L0H2+L0H3"], "a head may occur only once, got L0H2 more than once"),
        (["--heads", "L0H1+L0H1"], "a head may occur only once, got L0H1 more than once"),
        (["--heads", "L0H1+L0H7"], "this layer has heads 0 to 3, got [7]"),
        (["--heads", "L0H1+x"], "a head is written L5H3, for layer 5 and head 3; got 'x'"),
        (["--heads", "1.2+1.3"], "a head is written L1H2, for layer 1 and head 2; got '1.2'"),
    ],
)
def test_bad_input_of_merge_is_said_in_a_line_and_nothing_is_written(place, tmp_path, arguments, words):
    said = invoke("merge", place / "bert", *arguments, "--output", tmp_path / "out", code=2).stderr
    assert words in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("heads", [("--share", "50%"), ("--heads", "L1H0", "--form", "uneven")])
def test_outputs_that_are_not_finite_are_not_taken_for_a_short_text(place, tmp_path, heads):
    broken = broken_folder(tmp_path / "broken", place / "llama", 0, 3)
    text = ["--text", place / "text", "--device", "cpu", "--output", tmp_path / "pruned"]
    said = " ".join(invoke("prune", broken, *heads, *text, code=2).stderr.split())
    assert re.search(r"must be finite.*, got (nan|NaN or Inf)", said), said
    assert "as many tokens" not in said


def test_an_output_is_needed_unless_only_counted(place):
    options = ["--heads", "L0H1", "--form", "uneven"]
    said = invoke("prune", place / "bert", *options, "--no-compensate", code=2).stderr
    assert "required unless --preview is used" in said
    assert "0.88" in invoke("prune", place / "bert", *options, "--preview").stdout


def test_what_cannot_be_undone_is_said(place, tmp_path):
    said = invoke("undo", place / "bert", "--output", tmp_path / "out", code=2).stderr
    assert "undo needs the record saved with an edited model, got" in said
    assert (
        "undo needs the folder of an edited model"
        in invoke("undo", tmp_path / "nowhere", "--output", tmp_path / "out", code=2).stderr
    )
    invoke(
        "prune", place / "bert", "--heads", "L0H1", "--no-compensate", "--output", tmp_path / "one", "--form", "padded"
    )
    (record,) = (tmp_path / "one.undo").iterdir()
    whole = record.read_bytes()
    back = ["undo", tmp_path / "one", "-o", tmp_path / "out"]
    for content in (whole[:-9], whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:]):
        record.write_bytes(content)
        said = invoke(*back, code=2).stderr
        assert f"the undo record of {tmp_path / 'one'} must be as it was saved, got {record}, which was changed" in said
        assert "Load the model" not in said
    record.write_bytes(whole)
    invoke(
        "prune", place / "bert", "--heads", "L0H2", "--no-compensate", "--output", tmp_path / "two", "--form", "padded"
    )
    shutil.rmtree(tmp_path / "two.undo")
    said = invoke("undo", tmp_path / "two", "-o", tmp_path / "out", code=2).stderr
    assert f"the undo record of {tmp_path / 'two'} is {tmp_path / 'two.undo'}{os.sep}" in said
    assert "got none; if" in said
    shutil.copytree(tmp_path / "one.undo", tmp_path / "two.undo")
    said = invoke("undo", tmp_path / "two", "-o", tmp_path / "out", code=2).stderr
    assert f"got {record.name}, which is another model's" in said
    (own,) = re.findall(r"two\.undo/(\w+\.safetensors)", said)
    (tmp_path / "two.undo" / record.name).rename(tmp_path / "two.undo" / own)
    assert (
        "which was changed or damaged since" in invoke("undo", tmp_path / "two", "-o", tmp_path / "out", code=2).stderr
    )
    assert not (tmp_path / "out").exists()
    manifest = json.loads((tmp_path / "one" / "polyhead.json").read_text())
    assert (manifest["form"], f"{manifest['undo']}.safetensors") == ("padded", record.name)
    weights = load_file(tmp_path / "one" / "model.safetensors")
    weights["pooler.dense.bias"] += 1
    save_file(weights, tmp_path / "one" / "model.safetensors", {"format": "pt"})
    assert "they are damaged or another model's" in invoke(*back, code=2).stderr
