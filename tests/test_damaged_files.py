"""Damaged and hostile files, one by one: each is refused in one line that names the file and what is wrong with it."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from typer.testing import CliRunner

from polyhead.cli import app
from polyhead.errors import CheckpointError, OptionError, PolyheadError
from polyhead.inspection import Settings, load_inspection, save_inspection
from polyhead.observation.saving import write_atomically
from polyhead.sources import read_texts
from polyhead.sources import texts as texts_module
from polyhead.surgery import PruneHeads, apply, load, load_record, save, undo
from polyhead.surgery.native.configs import ConfigChange
from polyhead.surgery.storage.manifest import Manifest
from polyhead.workflows.inspecting import inspect_model
from polyhead.workflows.model_loading import load_model
from tests.forked import Forked
from tests.inspection.small_models import model_folder, text_folder

pytest.importorskip("pyarrow")


def invoke(*arguments: object, code: int = 2):
    result = CliRunner().invoke(app, [str(x) for x in arguments], env={"COLUMNS": "150", "NO_COLOR": "1"})
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A model, a run of it, and the model with a head less."""
    folder = tmp_path_factory.mktemp("place")
    model_folder(folder / "llama", "llama")
    text = text_folder(folder / "text", documents=2, words=40)
    options = {"context": 64, "tokens": 200, "importance": "none", "chance": False}
    settings = Settings(str(folder / "llama"), str(text), **options)
    save_inspection(folder / "run", inspect_model(settings, folder=folder / "run"))
    model = load_model(folder / "llama").model
    save(model, folder / "edited", record=apply(model, [PruneHeads(0, (0, 1)), PruneHeads(1, (0, 1))]), form="uniform")
    return folder


# ---- runs


def change_json(file: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        found = json.loads((folder / file).read_text())
        change(found)
        (folder / file).write_text(json.dumps(found))

    return damage


def rewrite(file: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / file).write_bytes(content)  # type: ignore[return-value]


def change_tensor(file: str, name: str, tensor: torch.Tensor) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        with safe_open(folder / file, framework="pt") as opened:
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        save_file({**tensors, name: tensor}, folder / file)

    return damage


def columns(change: Callable[[dict[str, list[Any]]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        import pyarrow
        from pyarrow import parquet

        found = parquet.read_table(folder / "heads.parquet").to_pydict()
        change(found)
        parquet.write_table(pyarrow.table(found), folder / "heads.parquet")

    return damage


RUNS: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "no JSON": (rewrite("inspection.json", b"{"), "inspection.json", "Expecting"),
    "a list": (rewrite("inspection.json", b"[1]"), "inspection.json", "contains a list instead of an object"),
    "no UTF-8": (rewrite("inspection.json", b"\xff{}"), "inspection.json", "codec can't decode"),
    "nested": (rewrite("inspection.json", b"[" * 200_000), "inspection.json", "nested too deeply"),
    "no sites": (change_json("inspection.json", lambda x: x.pop("sites")), "inspection.json", "no 'sites'"),
    "other sites": (
        change_json("inspection.json", lambda x: x.update(sites=[{"a": 1}])), "inspection.json", "no 'name'",
    ),
    "a site of 10^9 heads": (
        change_json("inspection.json", lambda x: x["sites"][0].update(num_heads=10**9)), "inspection.json", "65,536",
    ),
    "10^400": (
        change_json("inspection.json", lambda x: x["facts"].update(seconds=10**400)), "inspection.json", "401 digits",
    ),
    "a setting": (
        change_json("inspection.json", lambda x: x["settings"].update(tokens="many")), "inspection.json", "got 'many'",
    ),
    "a role": (
        change_json("inspection.json", lambda x: x["roles"][0]["scores"][0].update(role="x")), "inspection.json", "'x'",
    ),
    "a head": (change_json("inspection.json", lambda x: x["roles"][0].update(head=99)), "inspection.json", "got 99"),
    "a finding": (
        change_json("inspection.json", lambda x: x["findings"][0].update(values={})), "inspection.json", "a finding",
    ),
    "a reason": (
        change_json("inspection.json", lambda x: x["facts"]["left_out"][0].update(fields={})), "inspection.json",
        "a reason must have the values that its text needs",
    ),
    "no offset": (
        change_json("inspection.json", lambda x: x["roles"][0]["scores"][0].pop("offset")), "inspection.json",
        "a positional head must have an offset",
    ),
    "no table": (lambda folder: (folder / "heads.parquet").unlink(), "heads.parquet", "No such file"),
    "no Parquet": (rewrite("heads.parquet", b"PAR1"), "heads.parquet", ""),
    "no column": (columns(lambda x: x.pop("tokens")), "heads.parquet", "'tokens'"),
    "another site": (columns(lambda x: x["site"].__setitem__(0, "x")), "heads.parquet", "'x'"),
    "no number": (columns(lambda x: x.update(entropy=["x"] * len(x["site"]))), "heads.parquet", "got 'x'"),
    "a table that is a pipe": (lambda folder: _pipe(folder / "heads.parquet"), "heads.parquet", "no regular file"),
    "cut weights": (rewrite("relations.safetensors", b"\x10"), "relations.safetensors", ""),
    "a site too many": (
        change_tensor("relations.safetensors", "99.cosine", torch.zeros(2, 2)), "relations.safetensors", "got 99",
    ),
    "a shape": (
        change_tensor("relations.safetensors", "0.cosine", torch.zeros(3, 2)), "pictures.safetensors", "[3, 2]",
    ),
    "no picture": (change_tensor("pictures.safetensors", "0.map", torch.zeros(1)), "pictures.safetensors", "[1]"),
}  # fmt: skip


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("case", RUNS)
def test_a_damaged_run_is_refused_by_its_file(case, place, tmp_path):
    damage, file, words = RUNS[case]
    run = tmp_path / "run"
    shutil.copytree(place / "run", run)
    damage(run)
    with pytest.raises(PolyheadError) as caught:
        load_inspection(run)
    assert f"run/{file}" in str(caught.value)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert file in invoke("report", run).stderr
    assert file in invoke("compare", place / "run", run).stderr


@pytest.mark.parametrize("content", [b"", b"x", b"\xff" * 99])
def test_damaged_observations_are_refused_when_a_run_is_resumed(content, place, tmp_path):
    shutil.copytree(place / "run", tmp_path / "run")
    (tmp_path / "run" / "observations.safetensors").write_bytes(content)
    assert "observations.safetensors" in invoke("inspect", "--resume", tmp_path / "run").stderr


# ---- edits


@pytest.fixture
def edited(place, tmp_path) -> Path:
    """The edited model with its record in its folder, as of earlier versions, which stated no digest of it."""
    folder = tmp_path / "edited"
    shutil.copytree(place / "edited", folder)
    (record,) = (place / "edited.undo").iterdir()
    shutil.copy(record, folder / "polyhead-record.safetensors")
    manifest = Manifest.read(folder)
    dataclasses.replace(manifest, undo=None).write(folder)
    return folder


def change_header(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "polyhead-record.safetensors"
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["polyhead.edit_record"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(header)
    save_file(tensors, path, {"polyhead.edit_record": json.dumps(header)})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x.pop("edits"), "no 'edits'"),
        (lambda x: x.update(layers=[3]), "polyhead-record.safetensors"),
        (lambda x: x["config"][0].update(name="__class__"), "num_attention_heads, num_key_value_heads, head_dim"),
        (lambda x: x["config"][0].update(name="auto_map"), "got 'auto_map'"),
        (lambda x: x["config"][0].update(path="__class__"), "in '__class__'"),
        (lambda x: x["config"][0].update(after=10**400), "1 to 16,777,216"),
        (lambda x: x["layers"][0]["before"].update(num_heads=-3), "num_heads must be at least 1, got -3"),
        (lambda x: x.update(shapes=[1]), "shapes must be"),
    ],
)
def test_a_damaged_edit_record_is_refused_by_its_file(change, words, edited, tmp_path):
    change_header(edited, change)
    with pytest.raises(CheckpointError, match=r"polyhead-record\.safetensors") as caught:
        load_record(edited)
    assert words in str(caught.value)
    assert words in invoke("undo", edited, "-o", tmp_path / "out").stderr
    assert not (tmp_path / "out").exists()


def test_a_config_is_changed_in_its_heads_alone():
    assert ConfigChange("text_config", "head_dim", None, 8).name == "head_dim"
    for path, name in (
        ("", "__class__"),
        ("", "_attn_implementation"),
        ("__dict__", "head_dim"),
        ("a.__x", "head_dim"),
    ):
        with pytest.raises(OptionError, match="a config change must be of num_attention_heads"):
            ConfigChange(path, name, None, None)


def test_a_record_for_other_parameters_leaves_the_model_as_it_was(edited):
    path = edited / "polyhead-record.safetensors"
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    save_file({"no.such.weight": torch.zeros(3)}, path, metadata)
    model = load(edited)
    with pytest.raises(CheckpointError, match=r"'no\.such\.weight'"):
        undo(model, load_record(edited))


# ---- models


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads must be an integer of 1 to 65,536, got 0"),
        ({"num_attention_heads": -3}, "got -3"),
        ({"hidden_size": "x"}, "hidden_size must be an integer of 1 to 67,108,864, got 'x'"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be an integer of 1 to 4,096, got 1000000000"),
        ({"vocab_size": 10**400}, "vocab_size must be"),
        ({"hidden_size": 1 << 16, "head_dim": 64}, "must match the size of its weight files"),
        ({"vocab_size": 1 << 26}, "must match the size of its weight files"),
        ({"attn_implementation": "somebody/kernels"}, "code from the hub"),
    ],
)  # fmt: skip
def test_a_config_with_sizes_that_cannot_be_is_refused_before_anything_is_allocated(changes, words, place, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(place / "llama", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(PolyheadError) as caught:
        load_model(folder)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    if changes.keys() & {"num_attention_heads", "num_hidden_layers"} or changes == {"hidden_size": "x"}:
        assert "config.json" in invoke("plan", folder).stderr


def test_a_config_that_is_nested_without_end_is_refused(place, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(place / "llama", folder)
    (folder / "config.json").write_text('{"text_config":' * 100_000)
    for refused in (lambda: load_model(folder), lambda: invoke("plan", folder)):
        try:
            refused()
        except PolyheadError as error:
            assert "config.json: it is nested too deeply" in str(error)  # noqa: PT017
    with pytest.raises(CheckpointError, match="nested too deeply"):
        load_model(folder)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/secret.safetensors", "a/../../x.safetensors", "..", 3])
def test_a_shard_outside_the_folder_is_refused(name, place, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(place / "llama", folder)
    shutil.move(folder / "model.safetensors", tmp_path / "secret.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        load_model(folder)
    (folder / "model.safetensors.index.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": name}))
    (folder / "other.safetensors").write_bytes((tmp_path / "secret.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="a file in the model's folder"):
        load_model(folder)


# ---- texts


def test_a_small_compressed_text_that_unpacks_to_more_than_memory_is_refused(tmp_path, monkeypatch):
    import gzip

    monkeypatch.setattr(texts_module, "MAX_BYTES", 10_000)
    for name in ("a.txt.gz", "a.jsonl.gz"):
        (tmp_path / name).write_bytes(gzip.compress(b"x" * 20_000))
        with pytest.raises(OptionError, match=f"at most 10,000 bytes, got more in {name}"):
            list(read_texts(tmp_path / name))
    os.mkfifo(tmp_path / "a.txt")
    with pytest.raises(OptionError, match=r"a\.txt cannot be read: it is no regular file"):
        list(read_texts(tmp_path / "a.txt"))


# ---- writing


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_one_line_and_nothing_half_written(place, tmp_path, monkeypatch):
    (tmp_path / "old.txt").write_text("old")
    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", full)
        with pytest.raises(OptionError, match=r"got .*old\.txt: No space left on device"):
            write_atomically(tmp_path / "old.txt", b"new")
        options = ["--text", place / "text", "--context", 64, "--tokens", 200, "--importance", "none", "--no-chance"]
        said = invoke("inspect", place / "llama", *options, "--device", "cpu", "--save", tmp_path / "run").stderr
        assert "observations.safetensors: No space left on device" in said
        options = ["--heads", "L0H0", "--no-compensate", "--form", "uneven", "--device", "cpu"]
        said = invoke("prune", place / "llama", *options, "-o", tmp_path / "out").stderr
        assert f"{tmp_path / 'out'}: No space left on device" in said
        said = invoke("report", place / "run", "--output", tmp_path / "page.html").stderr
        assert "page.html: No space left on device" in said
    assert (tmp_path / "old.txt").read_text() == "old"
    assert sorted(x.name for x in tmp_path.iterdir()) == ["old.txt"]  # an empty folder of a run is removed again


def limit_files() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))


def test_a_file_that_cannot_grow_is_one_line_too(place, tmp_path):
    """Written by the safetensors library itself, which fails in its own way."""
    arguments = [
        "prune",
        place / "llama",
        "--heads",
        "L0H0",
        "--no-compensate",
        "--form",
        "uneven",
        "--device",
        "cpu",
        "-o",
        tmp_path / "out",
    ]
    command = Forked(arguments, limit_files)
    said = command.end()[1]
    assert command.returncode == 2, said
    assert "Traceback" not in said
    assert str(tmp_path / "out") in said.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_over_a_file_of_another_kind(place, tmp_path):
    thesis = tmp_path / "thesis.txt"
    thesis.write_text("years of work")
    said = invoke("report", place / "run", "--output", thesis).stderr
    assert "thesis.txt: it contains something else; choose another file" in said
    assert "it contains something else" in invoke("plan", "gpt2", "--output", thesis).stderr
    os.mkfifo(tmp_path / "pipe.html")
    assert "no regular file" in invoke("report", place / "run", "--output", tmp_path / "pipe.html").stderr
    invoke("report", place / "run", "--output", tmp_path / "page.html", code=0)
    invoke("report", place / "run", "--output", tmp_path / "page.html", code=0)  # a page goes over a page
    (tmp_path / "heads.parquet").write_text("somebody's own")
    said = " ".join(invoke("inspect", place / "llama", "--save", tmp_path).stderr.split())
    assert "--save must not contain heads.parquet" in said
    assert thesis.read_text() == "years of work"
    assert (tmp_path / "heads.parquet").read_text() == "somebody's own"
