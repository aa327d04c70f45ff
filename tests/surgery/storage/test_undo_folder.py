"""The undo record beside a model: it belongs to that model alone, and a write that is cut short loses neither."""

from __future__ import annotations

import json
import os
import shutil
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

import polyhead
from polyhead.cli import app
from polyhead.errors import CheckpointError, OptionError
from polyhead.surgery import PruneHeads, apply, fingerprint, load, load_record, save
from polyhead.surgery.storage import folders, saving, undo_folder
from tests.inspection.small_models import model_folder

EDIT = ["--no-compensate", "--device", "cpu", "--heads", "L0H0,L0H3,L1H1,L1H2"]
OTHER = [*EDIT[:-1], "L0H1,L0H2,L1H1,L1H2"]


def invoke(*arguments: object, code: int = 0):
    result = CliRunner().invoke(app, [str(x) for x in arguments], env={"COLUMNS": "150", "NO_COLOR": "1"})
    assert result.exit_code == code, result.output
    return result


def tree(folder: Path) -> dict[str, bytes]:
    return {str(x.relative_to(folder)): x.read_bytes() for x in sorted(folder.rglob("*")) if x.is_file()}


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    return model_folder(tmp_path_factory.mktemp("original") / "llama", "llama")


@pytest.fixture(scope="module")
def pruned(original, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pruned")
    invoke("prune", original, *EDIT, "-o", folder / "small")
    return folder


@pytest.fixture
def place(pruned, tmp_path, monkeypatch) -> Path:
    """The working directory, with the pruned model and its record."""
    shutil.copytree(pruned, tmp_path / "place")
    monkeypatch.chdir(tmp_path / "place")
    return tmp_path / "place"


@cache
def fingerprint_of(original: Path) -> str:
    return fingerprint(load(original))


def restored(folder: str | Path, original: Path) -> bool:
    return fingerprint(polyhead.undo(folder).model) == fingerprint_of(original)


def test_the_record_is_found_by_every_name_of_the_model(place, original, tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(place / "small")
    (tmp_path / "linked").symlink_to(place)
    for name in ("small", "small/", "./small", place / "small", tmp_path / "link", tmp_path / "linked" / "small"):
        assert restored(name, original), name
    monkeypatch.chdir(place / "small")
    assert restored(".", original)
    assert restored("../small", original)
    invoke("undo", ".", "-o", "../back")
    assert fingerprint(load(place / "back")) == fingerprint(load(original))


def test_a_moved_model_is_undone_where_its_record_is_moved_too(place, original):
    record = load_record("small").after
    Path("small").rename("elsewhere")
    said = invoke("undo", "elsewhere", "-o", "back", code=2).stderr
    assert "the undo record of elsewhere is " in said
    assert "got none; if elsewhere was moved or copied, put its undo folder beside it, as elsewhere.undo" in said
    assert fingerprint(load("elsewhere")) == record  # the model itself needs no record
    # Where it was, nothing else is written, which would be taken for the record's model.
    for replace in ([], ["--replace"]):
        said = invoke("prune", original, *OTHER, "-o", "small", *replace, code=2).stderr
        assert "which is not of the model in small; choose another folder for the model, or move this one" in said
        assert "Load the model" not in said
    shutil.move("small.undo", "elsewhere.undo")
    assert restored("elsewhere", original)


def test_what_is_in_the_way_of_the_record_is_refused_before_anything_is_computed(place, original):
    Path("new.undo").mkdir()
    (Path("new.undo") / "notes.txt").write_text("mine")
    Path("file.undo").write_text("mine")
    Path("link.undo").symlink_to("new.undo")
    before = tree(place)
    for name, words in (
        ("new", "got one that holds notes.txt"),
        ("file", "got a file or a link there"),
        ("link", "got a file or a link there"),
    ):
        for replace in ([], ["--replace"]):
            said = invoke("prune", original, *EDIT, "-o", name, *replace, code=2).stderr
            assert words in said
            assert "Load the model" not in said
        with pytest.raises(OptionError, match=words):
            save(load(original), name)
    (Path("small.undo") / "notes.txt").write_text("mine")
    assert "holds notes.txt" in invoke("prune", original, *EDIT, "-o", "small", "--replace", code=2).stderr
    (Path("small.undo") / "notes.txt").unlink()
    assert tree(place) == before
    Path("empty.undo").mkdir()
    invoke("prune", original, *EDIT, "-o", "empty")
    assert restored("empty", original)


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write anywhere")
def test_a_parent_that_cannot_be_written_is_refused_before_anything_is_computed(place, original):
    Path("small").rename("small.old")
    shutil.rmtree("small.undo")
    Path("small").mkdir()
    place.chmod(0o555)
    try:
        said = invoke("prune", original, *EDIT, "-o", "small", code=2).stderr
    finally:
        place.chmod(0o755)
    assert "is not writable" in said
    assert "Load the model" not in said


def test_a_replaced_model_takes_its_record_with_it(place, original):
    before = {file.name for file in Path("small.undo").iterdir()}
    for _ in range(2):  # the second time with the same record as before
        invoke("prune", original, *OTHER, "-o", "small", "--replace")
        (record,) = Path("small.undo").iterdir()
        assert record.name not in before
        assert restored("small", original)
    # A model without a record leaves none behind.
    invoke("prune", original, *EDIT, "-o", "other")
    invoke("undo", "other", "-o", "small", "--replace")
    assert sorted(x.name for x in place.iterdir()) == ["other", "other.undo", "small"]
    with pytest.raises(OptionError, match="undo needs the record saved with an edited model, got small without one"):
        polyhead.undo("small")


@pytest.mark.parametrize("metadata", ["", "---\nlicense: mit\n---\n"])
def test_the_card_of_an_edited_model_says_so_and_that_of_the_restored_one_does_not(place, original, tmp_path, metadata):
    source = shutil.copytree(original, tmp_path / "source")
    card = f"{metadata}# A model\n\nwith 8 heads\n".encode()
    (source / "README.md").write_bytes(card)
    invoke("prune", source, *EDIT, "-o", "one")
    invoke("prune", "one", "--no-compensate", "--heads", "L0H0,L1H0", "-o", "two")
    for name, count in (("one", 2), ("two", 4)):
        written = (Path(name) / "README.md").read_text()
        assert written.startswith(f"{metadata}<!-- polyhead -->\n> **Heads of this model were edited**")
        assert f"({count} PruneHeads)" in written
        assert written.count("<!-- polyhead -->") == 1
        assert written.endswith("\n\n# A model\n\nwith 8 heads\n")
        invoke("undo", name, "-o", f"{name} back")
        assert (Path(f"{name} back") / "README.md").read_bytes() == card


def test_edits_one_after_the_other_are_undone_together(place, original):
    """Also if the first model and its record are gone by then, and if only the second makes the heads uniform."""
    invoke("prune", original, "--no-compensate", "--heads", "L0H0,L0H3", "--form", "uneven", "-o", "one")
    shown = invoke("prune", "one", "--no-compensate", "--heads", "L1H0,L1H3", "-o", "two").stdout
    assert "uniform: plain transformers loads it as LlamaForCausalLM" in shown
    assert restored("two", original)
    invoke("prune", "small", "--no-compensate", "--heads", "L0H0,L1H0", "-o", "smaller")
    shutil.rmtree("small")
    shutil.rmtree("small.undo")
    assert [layer.layout.num_heads for layer in polyhead.surgery.find_layers(load("smaller"))] == [1, 1]
    assert restored("smaller", original)


def test_records_of_other_models_are_not_used(place, original):
    invoke("prune", original, *OTHER, "-o", "other")
    shutil.rmtree("small.undo")
    shutil.copytree("other.undo", "small.undo")
    with pytest.raises(CheckpointError, match=r"got \w{32}\.safetensors, which is another model's"):
        load_record("small")
    with pytest.raises(CheckpointError, match="is another model's"):
        polyhead.undo("small")


@pytest.mark.parametrize("digest", ["../../secret", "x" * 32, 7, ["0" * 32]])
def test_a_digest_that_leads_elsewhere_is_refused(place, digest):
    manifest = json.loads(Path("small/polyhead.json").read_text())
    Path("small/polyhead.json").write_text(json.dumps({**manifest, "undo": digest}))
    with pytest.raises(CheckpointError, match="which is no digest"):
        polyhead.undo("small")


def test_a_process_that_is_killed_at_any_step_leaves_a_model_with_its_record(tmp_path, monkeypatch):
    """Nothing is cleaned up then; a model that is there can be loaded and undone, the old one or the new one."""
    monkeypatch.setattr(saving, "_read_back", lambda *_: None)  # takes most of the time, and the model is loaded below
    old, new = (load(model_folder(tmp_path / name, "llama", seed)) for seed, name in enumerate(("a", "b")))
    records = [apply(model, [PruneHeads(layer, (0, 3)) for layer in range(2)]) for model in (old, new)]
    save(old, tmp_path / "whole" / "model", record=records[0])
    place = tmp_path / "place"
    steps = [(os, "replace"), (folders, "_exchange"), (folders, "fsync"), (undo_folder, "fsync"), (Path, "unlink")]
    found = []
    for moment in range(60):
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(tmp_path / "whole", place)
        child = os.fork()
        if not child:
            left = [moment]

            def killing(function, left=left):
                def call(*given, **named):
                    left[0] -= 1
                    if left[0] < 0:
                        os._exit(9)
                    return function(*given, **named)

                return call

            for owner, name in steps:
                setattr(owner, name, killing(getattr(owner, name)))
            try:
                save(new, place / "model", record=records[1], replace=True)
            except BaseException:  # noqa: BLE001 - the parent sees the code
                os._exit(1)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, 9)
        record = load_record(place / "model")
        assert fingerprint(load(place / "model")) == record.after
        found.append([x.after for x in records].index(record.after))
        # The next run is not in the way of what is left of this one.
        save(new, place / "model", record=records[1], replace=True)
        assert load_record(place / "model").after == records[1].after
        assert len(list((place / "model.undo").iterdir())) == 1
        if not code:
            break
    assert len(found) > 5
    assert found == sorted(found)
    assert set(found) == {0, 1}
    assert len(list((place / "model.undo").iterdir())) == 1


def test_a_process_that_saves_to_the_folder_meanwhile_takes_nothing_from_another(tmp_path, monkeypatch):
    """One waits with all files written; the other one saves; then the first one replaces that."""
    monkeypatch.setattr(saving, "_read_back", lambda *_: None)
    models = [load(model_folder(tmp_path / name, "llama", seed)) for seed, name in enumerate(("a", "b"))]
    records = [apply(model, [PruneHeads(layer, (0, 3)) for layer in range(2)]) for model in models]
    place = tmp_path / "place" / "model"
    save(models[0], place, record=records[0])
    written, proceed = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        fsync, seen = folders.fsync, []

        def waiting(path):
            if not seen:
                os.write(written[1], b".")
                os.read(proceed[0], 1)
            seen.append(path)
            fsync(path)

        monkeypatch.setattr(folders, "fsync", waiting)
        try:
            save(models[1], place, record=records[1], replace=True)
        except BaseException:  # noqa: BLE001 - the parent sees the code
            os._exit(1)
        os._exit(0)
    assert os.read(written[0], 1) == b"."
    save(models[0], place, record=records[0], replace=True)
    assert load_record(place).after == fingerprint(load(place)) == records[0].after
    os.write(proceed[1], b".")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert load_record(place).after == fingerprint(load(place)) == records[1].after
    assert sorted(path.name for path in place.parent.iterdir()) == ["model", "model.undo"]
    assert len(list((place.parent / "model.undo").iterdir())) == 1


def test_the_record_of_a_first_write_that_was_killed_is_not_in_the_way_of_the_next(place, original, monkeypatch):
    rename, record = os.rename, os.listdir("small.undo")
    for name in ("small", "small.undo"):
        shutil.rmtree(name)
    child = os.fork()
    if not child:
        monkeypatch.setattr(os, "rename", lambda *_: os._exit(9))
        invoke("prune", original, *EDIT, "-o", "small")
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert (os.path.exists("small"), os.listdir("small.undo")) == (False, record)
    invoke("prune", original, *OTHER, "-o", "small")
    assert len(os.listdir("small.undo")) == 1
    assert os.listdir("small.undo") != record
    assert restored("small", original)
    assert sorted(os.listdir()) == ["small", "small.undo"]
    # From now on it is a record as any other, also for a model that was moved.
    rename("small", "moved")
    assert "which is not of the model in small" in invoke("prune", original, *EDIT, "-o", "small", code=2).stderr
