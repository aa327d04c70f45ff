"""Every reader of files, given what nobody would write: it reads it, or refuses it in one line that names the file.

Files are valid ones with a few bytes, JSON values, safetensors headers or Parquet columns changed, drawn by hypothesis
from a fixed seed and in a fixed number, so that every run of the suite tries the same files.
"""

from __future__ import annotations

import copy
import gzip
import io
import json
import re
import shutil
import struct
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from polyhead import MultiHeadAttention
from polyhead.analysis.syntax_table import SyntaxTable
from polyhead.costs.layouts.layout_sources import read_layout
from polyhead.costs.timing.machine import Machine
from polyhead.costs.timing.machine_files import SHIPPED
from polyhead.errors import PolyheadError
from polyhead.inspection import Settings, load_inspection, save_inspection
from polyhead.inspection import compare as compare_runs
from polyhead.layers.config import AttentionConfig
from polyhead.observation import load as load_observations
from polyhead.observation import observe, read_facts
from polyhead.observation import save as save_observations
from polyhead.report import page_of
from polyhead.report.training_page import training_html
from polyhead.sources import read_texts
from polyhead.sources.models import check_folder
from polyhead.sources.treebank import read_treebank
from polyhead.surgery import EditRecord, PruneHeads, apply, edits_from_json, load, save
from polyhead.surgery.storage.folders import FILES, check_free
from polyhead.surgery.storage.undo_folder import recorded_digest
from polyhead.training import HeadLocation, RunDirectory, StepRecord, inspect_step, load_run
from polyhead.workflows.inspecting import inspect_model
from polyhead.workflows.model_loading import load_model
from tests.inspection.small_models import model_folder, text_folder
from tests.sources.small_gguf import write_gguf

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

TREEBANK = "# text = a w1.\n1\ta\ta\tDET\t_\t_\t2\tdet\t_\t_\n2\tw1\tw1\tNOUN\t_\t_\t0\troot\t_\tSpaceAfter=No\n\n"
SYNTAX_ROW = {
    "relation": "det", "direction": "up", "count": 9, "site": "a", "layer": 0, "head": 1, "accuracy": 0.5, "low": 0.2,
    "high": 0.8, "offset": 1, "baseline": 0.3, "baseline_low": 0.1, "baseline_high": 0.6, "head_only": 3,
    "baseline_only": 1, "chosen_count": 8, "chosen_accuracy": 0.6, "chosen_baseline": 0.4,
}  # fmt: skip
SYNTAX = {"heads": 8, "texts": [5, 5], "minimum": 3, "seed": 0, "left_out": [["obj", "up", 1]]}
OURS = {"kind": "multi_head", "embed_dim": 24, "num_heads": 4, "causal": True}

# The keys of a GGUF file with a 32-bit number, and the type of that.
GGUF_NUMBERS = re.compile(rb"llama\.[a-z_.]*(?:length|count|kv|size)\x04\x00\x00\x00")

HOSTILE: tuple[Any, ...] = (
    None, 0, -3, 1, 2**31, 10**9, 10**400, True, 0.5, -1e308, float("nan"), float("inf"), "", "x", "__class__", "../up",
    "/etc/passwd", "\ud800", "a" * 1000, [], [[]], {}, {"x": 1}, [1, 2, 3], ["x"], [None],
)  # fmt: skip


# ---- files that are nearly valid


@st.composite
def changed_bytes(draw: DrawFn, whole: bytes) -> bytes:
    """Cut, overwritten, inserted into, or something else altogether."""
    kind = draw(st.sampled_from(("cut", "overwritten", "inserted", "other")))
    place = draw(st.integers(0, max(0, len(whole) - 1)))
    drawn = draw(st.binary(min_size=1, max_size=16))
    if kind == "cut":
        return whole[:place]
    if kind == "overwritten":
        return whole[:place] + drawn + whole[place + len(drawn) :]
    if kind == "inserted":
        return whole[:place] + drawn + whole[place:]
    return drawn


def places_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to every part of a JSON value; of a long list, to its first parts."""
    found = [path]
    parts = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    for name, part in list(parts)[:40]:
        found += places_in(part, (*path, name))
    return found


@st.composite
def changed_value(draw: DrawFn, value: Any) -> Any:
    """A JSON value with a part or two replaced, taken out or nested deeply."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 2))):
        path = draw(st.sampled_from(places_in(value)))
        new = copy.deepcopy(draw(st.sampled_from(HOSTILE)))  # the next change may be made inside it
        if not path:
            return new
        owner = value
        for name in path[:-1]:
            owner = owner[name]
        kind = draw(st.sampled_from(("replaced", "replaced", "removed", "added")))
        if kind == "replaced":
            owner[path[-1]] = new
        elif kind == "removed":
            del owner[path[-1]]
        elif isinstance(owner, dict):
            owner[draw(st.sampled_from(("__class__", "x", "99", "num_heads", "-1.map")))] = new
    return value


@st.composite
def changed_json(draw: DrawFn, whole: bytes) -> bytes:
    if draw(st.integers(0, 15)) == 0:
        return b"[" * 200_000
    return json.dumps(draw(changed_value(json.loads(whole)))).encode()


@st.composite
def changed_tensors(draw: DrawFn, whole: bytes) -> bytes:
    """A safetensors file whose header says something else, in its metadata as well."""
    (length,) = struct.unpack("<Q", whole[:8])
    header = json.loads(whole[8 : 8 + length])
    own = [name for name in header.get("__metadata__", {}) if name.startswith("polyhead")]
    if own and draw(st.booleans()):
        said = json.loads(header["__metadata__"][own[0]])
        header["__metadata__"][own[0]] = json.dumps(draw(changed_value(said)))
    else:
        header = draw(changed_value(header))
    text = json.dumps(header).encode()
    size = draw(st.sampled_from((len(text), len(text), len(text), 0, 2**40, 2**63, len(text) + 1)))
    return struct.pack("<Q", size) + text + whole[8 + length :]


@st.composite
def changed_columns(draw: DrawFn, whole: bytes) -> bytes:
    """A Parquet file with a column of another name, type or length, or with rows without end."""
    table = parquet.read_table(io.BytesIO(whole))
    name = draw(st.sampled_from(table.column_names))
    at = table.column_names.index(name)
    kind = draw(st.sampled_from(("removed", "renamed", "null", "other", "no rows", "many rows")))
    rows = table.num_rows
    if kind == "removed":
        table = table.drop_columns([name])
    elif kind == "renamed":
        table = table.rename_columns([*table.column_names[:at], "x", *table.column_names[at + 1 :]])
    elif kind == "null":
        table = table.set_column(at, name, pyarrow.nulls(rows))
    elif kind == "other":
        values = draw(st.sampled_from((["x"] * rows, [-3] * rows, [[1]] * rows, [1e308] * rows, [b"\xff"] * rows)))
        table = table.set_column(at, name, pyarrow.array(values))
    elif kind == "no rows":
        table = table.slice(0, 0)
    else:
        table = pyarrow.table({column: pyarrow.nulls(1_100_000) for column in table.column_names})
    buffer = io.BytesIO()
    parquet.write_table(table, buffer)
    return buffer.getvalue()


@st.composite
def changed_numbers(draw: DrawFn, whole: bytes) -> bytes:
    """A GGUF file with another number of layers, heads or channels, of entries or of tensors."""
    place = draw(st.sampled_from([8, 16, *(match.end() for match in GGUF_NUMBERS.finditer(whole))]))
    hostile = st.sampled_from((0, 1, 7, 64, 4097, 10**6, 2**31 - 1, 2**31, 2**32 - 1))
    return whole[:place] + struct.pack("<I", draw(hostile)) + whole[place + 4 :]


CHANGES: dict[str, Callable[[bytes], SearchStrategy[bytes]]] = {
    "bytes": changed_bytes,
    "json": changed_json,
    "safetensors": changed_tensors,
    "parquet": changed_columns,
    "gguf": changed_numbers,
}


# ---- readers


@dataclass(frozen=True)
class Reader:
    """A file in the folder of valid ones, what reads it, and in which ways it is changed, so often."""

    file: str
    read: Callable[[Path], object]
    changes: tuple[str, ...]
    times: int = 25
    names: Callable[[Path], str] = lambda file: file.name  # what an error names


def read_run(file: Path) -> None:
    found = load_inspection(file.parent)
    page_of(found)
    compare_runs(found, found)


def read_steps(file: Path) -> None:
    steps = file.parent.parent / "training" / "steps"
    steps.mkdir(parents=True, exist_ok=True)
    shutil.copy(file, steps / file.name)
    history = load_run(steps.parent)
    training_html(history, "run")
    first, last = (inspect_step(history, history.steps[index]) for index in (0, -1))
    compare_runs(first, last)


def read_observations(file: Path) -> None:
    read_facts(file)
    load_observations(file)


def read_model(file: Path) -> None:
    load_model(file.parent)


def read_edited(file: Path) -> None:
    load(file.parent)


def read_edits(file: Path) -> None:
    edits_from_json(file.read_text("utf-8", "replace"))


def read_own(file: Path) -> None:
    AttentionConfig.from_json(file.read_text())


def check_list(file: Path) -> None:
    check_free(file.parent, replace=True)


def read_lines(file: Path) -> None:
    for _ in read_texts(file):
        pass


def folder_name(file: Path) -> str:
    return file.parent.name


def nothing(file: Path) -> str:
    return ""


READERS = {
    "run: json": Reader("run/inspection.json", read_run, ("json", "bytes"), 30),
    "run of format 2": Reader("earlier/inspection.json", read_run, ("json",), 30, folder_name),
    "run: table": Reader("run/heads.parquet", read_run, ("parquet", "bytes"), 12),
    "run: relations": Reader("run/relations.safetensors", read_run, ("safetensors", "bytes"), 15),
    "run: pictures": Reader("run/pictures.safetensors", read_run, ("safetensors", "bytes"), 15),
    "training run": Reader("training/steps/000000000000.parquet", read_steps, ("parquet", "bytes")),
    "observations": Reader("observations.safetensors", read_observations, ("safetensors", "bytes")),
    "edit record": Reader("record.safetensors", EditRecord.load, ("safetensors", "bytes"), 40),
    "its digest": Reader("edited/polyhead.json", lambda file: recorded_digest(file.parent), ("json", "bytes")),
    "edits": Reader("edits.json", read_edits, ("json",), 25, nothing),
    "manifest": Reader("edited/polyhead.json", read_edited, ("json", "bytes"), 10),
    "file list": Reader(f"edited/{FILES}", check_list, ("json", "bytes"), 25, folder_name),
    "edited weights": Reader("edited/polyhead.safetensors", read_edited, ("safetensors",), 8, folder_name),
    "config": Reader("model/config.json", read_model, ("json", "bytes"), 12, folder_name),
    "weights": Reader("model/model.safetensors", read_model, ("safetensors",), 8, folder_name),
    "tokenizer": Reader("model/tokenizer.json", read_model, ("json", "bytes"), 6, folder_name),
    "gguf": Reader("small.gguf", load_model, ("gguf", "bytes"), 25, lambda file: file.stem),
    "index": Reader("sharded/model.safetensors.index.json", lambda file: check_folder(file.parent, False), ("json",)),
    "layout": Reader("model/config.json", lambda file: read_layout(file, causal=True), ("json", "bytes")),
    "own layout": Reader("ours.json", read_layout, ("json", "bytes")),
    "layer config": Reader("ours.json", read_own, ("json",), 25, nothing),
    "machine": Reader("machine.json", Machine.load, ("json", "bytes"), 12),
    "syntax": Reader("syntax.json", SyntaxTable.load, ("json", "bytes")),
    "syntax table": Reader("syntax.parquet", SyntaxTable.load, ("parquet", "bytes")),
    "treebank": Reader("trees.conllu", lambda file: list(read_treebank(file)), ("bytes",), 40),
    "packed treebank": Reader("trees.conllu.gz", lambda file: list(read_treebank(file)), ("bytes",)),
    "text": Reader("a.txt", read_lines, ("bytes",)),
    "packed text": Reader("a.txt.gz", read_lines, ("bytes",)),
    "lines": Reader("a.jsonl", read_lines, ("bytes", "json")),
    "rows": Reader("a.parquet", read_lines, ("parquet", "bytes")),
}  # fmt: skip


@pytest.fixture(scope="module")
def valid(tmp_path_factory) -> Path:
    """A folder with a file of every kind, each as it should be."""
    folder = tmp_path_factory.mktemp("valid")
    model_folder(folder / "model", "llama")
    text = text_folder(folder / "text", documents=2, words=40)
    options = {"context": 64, "tokens": 200, "importance": "none", "chance": False}
    save_inspection(folder / "run", inspect_model(Settings(str(folder / "model"), str(text), **options)))
    shutil.copytree(Path(__file__).parent / "formats" / "saved" / "run-decoder", folder / "earlier")
    loaded = load_model(folder / "model")
    with observe(loaded.model, collect=()) as session:
        loaded.model(torch.arange(9)[None])
    save_observations(folder / "observations.safetensors", session.observations, {"settings": {}})
    heads = tuple(HeadLocation("layers.0", "self", 0, head, label, 4) for head, label in enumerate(("0+2", "new", "3")))
    steps = RunDirectory(folder / "training")
    for step in range(3):
        steps.on_record(StepRecord(step, 1.0, heads, ("entropy", "max_logit"), torch.rand(2, 3, dtype=torch.float64)))
    steps.on_exit()
    write_gguf(folder / "small.gguf")
    shutil.copytree(folder / "model", folder / "sharded")
    (folder / "sharded" / "model.safetensors").rename(folder / "sharded" / "model-1.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(loaded.model.state_dict(), "model-1.safetensors")}
    (folder / "sharded" / "model.safetensors.index.json").write_text(json.dumps(index))
    edits = [PruneHeads(0, (1,))]
    record = apply(loaded.model, edits)
    record.save(folder / "record.safetensors")
    save(loaded.model, folder / "edited", record=record, form="uneven")
    (folder / "edits.json").write_text('[{"kind": "prune", "layer": 0, "stack": null, "heads": [1]}]')
    (folder / "ours.json").write_text(json.dumps(OURS))
    machine = json.loads((SHIPPED / "cpu-2-cores.json").read_text())
    (folder / "machine.json").write_text(json.dumps(machine))
    (folder / "syntax.json").write_text(json.dumps({**SYNTAX, "rows": [SYNTAX_ROW]}))
    table = pyarrow.Table.from_pylist([SYNTAX_ROW]).replace_schema_metadata({"polyhead": json.dumps(SYNTAX)})
    parquet.write_table(table, folder / "syntax.parquet")
    (folder / "trees.conllu").write_text(TREEBANK)
    (folder / "trees.conllu.gz").write_bytes(gzip.compress(TREEBANK.encode()))
    (folder / "a.txt").write_text("a wörd")
    (folder / "a.txt.gz").write_bytes(gzip.compress(b"a word"))
    (folder / "a.jsonl").write_text('{"text": "one"}')
    parquet.write_table(pyarrow.table({"text": ["one", "two"], "n": [1, 2]}), folder / "a.parquet")
    return folder


@pytest.mark.parametrize("name", READERS)
def test_a_file_that_anybody_may_have_written_is_read_or_refused_in_one_line(name, valid, tmp_path):
    reader = READERS[name]
    kept = valid / reader.file
    folder = tmp_path / "place"
    shutil.copytree(kept.parent, folder) if "/" in reader.file else folder.mkdir()
    file = folder / kept.name
    shutil.copy(kept, file)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reader.read(file)  # as it is, it is read
    whole = kept.read_bytes()
    for change in reader.changes:
        _fuzz(reader, file, CHANGES[change](whole))


def _fuzz(reader: Reader, file: Path, contents: SearchStrategy[bytes]) -> None:
    named = reader.names(file)

    @settings(
        max_examples=reader.times, deadline=None, derandomize=True, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(contents)
    def refused_or_read(content: bytes) -> None:
        file.write_bytes(content)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                reader.read(file)
        except PolyheadError as error:
            said = str(error)
        else:
            return
        assert "\n" not in said
        assert named in said
        assert len(said) < 2000

    refused_or_read()


def test_undoing_with_a_changed_record_leaves_the_model_or_gives_it_back(tmp_path):
    """A record that is read may still not fit its model: nothing but one line, and the model as it was."""
    from polyhead.surgery import fingerprint, undo

    torch.manual_seed(0)
    layer = MultiHeadAttention(24, 4)
    path = tmp_path / "record.safetensors"
    record = apply(layer, [PruneHeads(0, (1,))])
    record.save(path)
    whole = path.read_bytes()

    @settings(max_examples=60, deadline=None, derandomize=True, database=None)
    @given(changed_tensors(whole))
    def refused_or_undone(content: bytes) -> None:
        path.write_bytes(content)
        edited = copy.deepcopy(layer)
        try:
            undo(edited, EditRecord.load(path))
            expected, said = record.before, ""
        except PolyheadError as error:
            expected, said = record.after, str(error)
        assert fingerprint(edited) == expected
        assert "\n" not in said

    refused_or_undone()
