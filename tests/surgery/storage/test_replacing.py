"""Only folders that polyhead wrote are replaced, and only the model's own regular files are copied."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from polyhead import load
from polyhead.cli import app
from polyhead.errors import CheckpointError, OptionError
from polyhead.surgery import PruneHeads, SideFiles, apply, fingerprint, save
from polyhead.surgery.storage import folders, side_files
from tests.inspection.small_models import model_folder

EDIT = ["--heads", "L0H1", "--no-compensate", "--form", "uneven", "--device", "cpu"]


def invoke(*arguments: object, code: int = 0):
    result = CliRunner().invoke(app, [str(x) for x in arguments], env={"COLUMNS": "150", "NO_COLOR": "1"})
    assert result.exit_code == code, result.output
    return result


def tree(folder: Path) -> dict[str, bytes]:
    return {str(x.relative_to(folder)): x.read_bytes() for x in sorted(folder.rglob("*")) if x.is_file()}


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    return model_folder(tmp_path_factory.mktemp("original") / "bert", "bert")


@pytest.fixture
def models(original, tmp_path) -> Path:
    """A folder of models: the original, and one beside it."""
    shutil.copytree(original, tmp_path / "models" / "orig")
    shutil.copytree(original, tmp_path / "models" / "sibling")
    return tmp_path / "models"


def test_a_folder_of_foreign_files_is_never_replaced(models, tmp_path):
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "thesis.txt").write_text("years of work")
    for replace in ([], ["--replace"]):
        said = invoke("prune", models / "orig", *EDIT, "-o", docs, *replace, code=2).stderr
    assert "only a folder that polyhead wrote, and with nothing else in it, is replaced" in said
    assert tree(docs) == {"thesis.txt": b"years of work"}
    assert sorted(x.name for x in tmp_path.iterdir()) == ["docs", "models"]


@pytest.mark.parametrize("command", ["prune", "merge", "convert", "undo"])
def test_the_source_and_the_folders_that_hold_it_are_never_replaced(command, models, tmp_path):
    before = tree(models)
    arguments = {
        "prune": EDIT,
        "merge": ["--heads", "L0H0+L0H1"],
        "convert": ["--kv-heads", 2],
        "undo": [],
    }[command]
    for output in (models / "orig", models, tmp_path):
        said = invoke(command, models / "orig", *arguments, "-o", output, "--replace", code=2).stderr
        assert "not written over the one it came from" in said
    assert tree(models) == before


def test_a_folder_written_here_does_not_make_its_siblings_replaceable(models, tmp_path):
    """The source is within a folder that polyhead wrote."""
    invoke("prune", models / "orig", *EDIT, "-o", tmp_path / "out")
    shutil.move(models / "orig", tmp_path / "out" / "orig")
    before = tree(tmp_path / "out")
    said = invoke("prune", tmp_path / "out" / "orig", *EDIT, "-o", tmp_path / "out", "--replace", code=2).stderr
    assert "not written over the one it came from" in said
    said = invoke("prune", models / "sibling", *EDIT, "-o", tmp_path / "out", "--replace", code=2).stderr
    assert "orig/" in said
    assert "was not written by polyhead" in said
    assert tree(tmp_path / "out") == before


def test_the_working_directory_home_and_their_ancestors_are_never_replaced(models, tmp_path, monkeypatch):
    invoke("prune", models / "orig", *EDIT, "-o", tmp_path / "out")
    before = tree(tmp_path / "out")
    with monkeypatch.context() as here:
        here.chdir(tmp_path / "out")
        for output in (".", tmp_path / "out"):
            said = invoke("prune", models / "orig", *EDIT, "-o", output, "--replace", code=2).stderr
            assert "the working directory is never replaced" in said
        said = invoke("prune", models / "orig", *EDIT, "-o", "..", "--replace", code=2).stderr
        assert "not written over the one it came from" in said
    (tmp_path / "out" / "user").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "out" / "user"))
    said = invoke("prune", models / "orig", *EDIT, "-o", tmp_path / "out", "--replace", code=2).stderr
    assert "the home folder is never replaced" in said
    assert tree(tmp_path / "out") == before


def test_what_was_put_into_a_folder_since_keeps_it_from_being_replaced(models, tmp_path):
    out = tmp_path / "out"
    invoke("prune", models / "orig", *EDIT, "-o", out)
    again = ("prune", models / "orig", "--heads", "L0H2", *EDIT[2:], "-o", out, "--replace")
    written = tree(out)

    (out / "notes").mkdir()
    (out / "notes" / "mine.txt").write_text("mine")
    assert "with notes/mine.txt, which was not written by polyhead" in invoke(*again, code=2).stderr
    shutil.rmtree(out / "notes")

    (out / "elsewhere").symlink_to(models)
    assert "with elsewhere, which is no regular file" in invoke(*again, code=2).stderr
    (out / "elsewhere").unlink()

    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"mine": "a change"}))
    assert "with config.json, which was changed since" in invoke(*again, code=2).stderr
    (out / "config.json").write_bytes(written["config.json"])

    (tmp_path / "link").symlink_to(out)
    said = invoke(*again[:-2], tmp_path / "link", "--replace", code=2).stderr
    assert "which is a file or a link" in said

    for content in ("{", '{"files": 3}', "[" * 100_000):
        (out / folders.FILES).write_text(content)
        assert "polyhead-files.json that is damaged" in invoke(*again, code=2).stderr
    (out / folders.FILES).unlink()
    assert "without polyhead-files.json" in invoke(*again, code=2).stderr
    (out / folders.FILES).write_bytes(written[folders.FILES])

    assert tree(out) == written
    invoke(*again)
    assert sorted(x.name for x in tmp_path.iterdir()) == ["link", "models", "out", "out.undo"]
    assert fingerprint(load(out)) != ""
    assert tree(out) != written


def test_a_replaced_folder_comes_back_when_the_last_step_fails(original, tmp_path, monkeypatch):
    model = load(original)
    save(model, tmp_path / "out", form="uneven", record=apply(model, [PruneHeads(0, (1,))]))
    before = tree(tmp_path)
    assert len(before) > 4
    record = apply(model, [PruneHeads(0, (1,))])
    true = folders.fsync

    def full(path):
        if Path(path) == tmp_path:
            raise OSError(28, "No space left on device")
        true(path)

    monkeypatch.setattr(folders, "fsync", full)
    for renameat2 in (True, False):
        if not renameat2:
            monkeypatch.setattr(folders.ctypes, "CDLL", lambda name: object())
        with pytest.raises(OptionError, match="No space left"):
            save(model, tmp_path / "out", form="uneven", record=record, replace=True)
        assert tree(tmp_path) == before
        assert sorted(x.name for x in tmp_path.iterdir()) == ["out", "out.undo"]


def test_a_file_that_appears_at_the_last_moment_is_not_deleted(original, tmp_path, monkeypatch):
    model = load(original)
    save(model, tmp_path / "out")
    true = folders._exchange

    def late(new, old):
        if not (old / "late.txt").exists() and not (new / "late.txt").exists():
            (old / "late.txt").write_text("mine")
        true(new, old)

    monkeypatch.setattr(folders, "_exchange", late)
    with pytest.raises(OptionError, match=r"late\.txt, which was not written by polyhead"):
        save(model, tmp_path / "out", replace=True)
    assert (tmp_path / "out" / "late.txt").read_text() == "mine"
    assert [x.name for x in tmp_path.iterdir()] == ["out"]


# ---- side files


@pytest.mark.parametrize("kind", ["key", "zero", "fifo", "folder", "dangling"])
def test_side_files_that_are_not_the_models_own_are_refused(kind, models, tmp_path):
    secret = tmp_path / "id_ed25519"
    secret.write_text("PRIVATE KEY")
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "key.txt").write_text("PRIVATE KEY")
    path = models / "orig" / "README.md"
    words = "must be in its folder"
    if kind == "key":
        path.symlink_to(secret)
    elif kind == "zero":
        path.symlink_to("/dev/zero")
    elif kind == "fifo":
        os.mkfifo(path)
        words = "regular files"
    elif kind == "folder":
        path.symlink_to(tmp_path / "private")
    else:
        path.symlink_to(tmp_path / "nothing")
        words = "must be readable"
    said = invoke("prune", models / "orig", *EDIT, "-o", tmp_path / "out", code=2).stderr
    assert words in said
    assert "README.md" in said
    assert "Load the model" not in said  # refused before anything costs time
    assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError, match=r"README\.md"):
        save(load(models / "sibling"), tmp_path / "out", tokenizer=SideFiles(models / "orig"))
    assert not (tmp_path / "out").exists()


def test_links_within_the_folder_and_into_the_hubs_blobs_are_followed(original, tmp_path):
    cache = tmp_path / "models--some--bert"
    snapshot = cache / "snapshots" / "0123abc"
    (cache / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(original.iterdir())):
        shutil.copy(file, cache / "blobs" / str(number))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
    (snapshot / "README.md").write_text("hello")
    (snapshot / "LICENSE").symlink_to("README.md")
    invoke("prune", snapshot, *EDIT, "-o", tmp_path / "out")
    assert (tmp_path / "out" / "LICENSE").read_text() == "hello"
    assert not (tmp_path / "out" / "LICENSE").is_symlink()
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (original / "tokenizer.json").read_bytes()
    (snapshot / "refs").symlink_to(cache / "secret")
    (cache / "secret").write_text("not a blob")
    with pytest.raises(CheckpointError, match="refs, a link to"):
        SideFiles(snapshot).check()


def test_the_bytes_beside_a_model_are_bounded(models, tmp_path, monkeypatch):
    monkeypatch.setattr(side_files, "_MAX_BYTES", 10_000)
    (models / "orig" / "diary.txt").write_bytes(b"x" * 20_000)
    with pytest.raises(CheckpointError, match="at most 4,096 files and 10,000 bytes are copied"):
        SideFiles(models / "orig").save_pretrained(tmp_path / "out")
    monkeypatch.setattr(side_files, "_LARGE", 5_000)
    SideFiles(models / "sibling").check()


def test_names_in_the_list_of_a_folder_that_lead_out_of_it_delete_nothing(models, tmp_path):
    invoke("prune", models / "orig", *EDIT, "-o", tmp_path / "out")
    victims = [tmp_path / "absolute.txt", tmp_path / "above.txt"]
    for victim in victims:
        victim.write_text("years of work")
    listed = json.loads((tmp_path / "out" / folders.FILES).read_text())
    listed["files"] |= {str(victims[0]): 13, "../above.txt": 13}
    (tmp_path / "out" / folders.FILES).write_text(json.dumps(listed))
    invoke("prune", models / "orig", *EDIT, "-o", tmp_path / "out", "--replace")
    assert [victim.read_text() for victim in victims] == ["years of work"] * 2
