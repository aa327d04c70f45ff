"""Datasets as texts: rows are streamed, and a missing column or package is reported."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from polyhead.errors import OptionError
from polyhead.sources import Document, texts
from polyhead.sources.datasets import DatasetTexts, check_dataset, read_dataset, split_of
from polyhead.sources.text_contexts import documents_of


class Stream:
    """Rows without an end, as an `IterableDataset` yields them, and how many were read."""

    def __init__(self, column_names: list[str] | None = None) -> None:
        self.column_names = column_names
        self.read = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.read = 0
        for number in itertools.count():
            self.read += 1
            yield {"body": f"row {number}", "id": number}


@pytest.fixture
def package(monkeypatch) -> ModuleType:
    """A package `datasets` whose `load_dataset` returns a stream, and records its arguments."""
    made: Any = ModuleType("datasets")
    made.__version__, made.calls = "4.1.0", []
    made.__spec__, made.origin = None, "datasets"

    def load_dataset(path: str, *, split: str, streaming: bool) -> Stream:
        made.calls.append((path, split, streaming))
        if path == "none":
            raise FileNotFoundError("Couldn't find any data file at none.\nTry another")
        return Stream(["body", "id"])

    made.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", made)
    monkeypatch.setattr("polyhead.sources.datasets.find_spec", lambda name: made)
    return made


def test_rows_are_read_one_at_a_time_and_again_from_the_start():
    stream = Stream()
    documents = documents_of(stream, field="body")
    for _ in range(2):
        assert list(itertools.islice(documents, 2)) == [
            Document("document 0", "row 0"),
            Document("document 1", "row 1"),
        ]
        assert stream.read == 2


def test_strings_and_rows_are_documents_and_none_is_empty():
    rows = ["one", {"text": "two"}, {"text": None}]
    assert [document.text for document in documents_of(rows)] == ["one", "two", ""]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (Stream(["body", "id"]), "the dataset has no column 'text', only 'body', 'id'"),
        (Stream(), "document 0 has no field 'text', only 'body', 'id'"),
        ([{"text": 3}], "got document 0: int"),
        (iter([3]), "got document 0: int"),
        (3, "a text must be a path, documents or a dataset, got int"),
        (["a", "b\ud800"], "half of a surrogate pair in document 1, character 1"),
        ({"text": ["one"]}, "strings or rows, got a dictionary of 'text'; pass one of them"),
    ],
)
def test_a_dataset_without_the_text_is_refused(rows, words):
    with pytest.raises(OptionError, match=words):
        list(documents_of(rows))


def test_a_data_frame_is_refused_whose_iteration_yields_the_names_of_columns():
    class Frame(list[str]):
        columns = ("text", "other")

    with pytest.raises(OptionError, match="must be strings, got a Frame; pass the list of one column"):
        DatasetTexts(Frame(["text", "other"]))


def test_a_stream_that_breaks_off_names_the_row_before():
    def rows() -> Iterator[str]:
        yield from ("one", "two")
        raise ConnectionError("reset by peer")

    with pytest.raises(OptionError, match="must be readable, got an error after document 1: reset by peer"):
        list(DatasetTexts(rows()))


def test_a_stream_that_fails_at_once_names_no_row():
    def rows() -> Iterator[str]:
        raise ConnectionError("reset by peer")
        yield

    with pytest.raises(OptionError, match="must be readable, got an error before the first row: reset by peer"):
        list(DatasetTexts(rows()))


def test_a_dictionary_of_splits_is_refused():
    class Splits(dict[str, list[str]]):
        @property
        def column_names(self) -> dict[str, list[str]]:
            return {name: ["text"] for name in self}

    with pytest.raises(OptionError, match="one split of a dataset, got a dictionary of 'train', 'test'"):
        DatasetTexts(Splits(train=[], test=[]))


def test_a_document_beyond_the_limit_is_refused(monkeypatch):
    monkeypatch.setattr(texts, "MAX_BYTES", 5)
    assert len(list(DatasetTexts(["12345"]))) == 1
    for text in ("123456", "1234é"):  # 6 bytes each, in 6 and in 5 characters
        with pytest.raises(OptionError, match="at most 5 bytes, got more in document 0"):
            list(DatasetTexts([text]))


def test_a_named_dataset_is_streamed(package):
    documents = documents_of("datasets:corpus/en:validation", field="body")
    assert package.calls == [("corpus/en", "validation", True)]
    assert next(iter(documents)) == Document("corpus/en:validation 0", "row 0")
    with pytest.raises(OptionError, match=r"must be a dataset that .* got none and split train: Couldn't find any"):
        read_dataset("datasets:none")
    with pytest.raises(OptionError, match="no column 'text'"):
        read_dataset("datasets:corpus/en")


def test_a_version_that_runs_code_of_datasets_is_refused(package):
    package.__version__ = "3.6.0"
    with pytest.raises(OptionError, match=r"needs datasets 4 or later, .* got 3\.6\.0"):
        read_dataset("datasets:corpus")
    assert package.calls == []


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("polyhead.sources.datasets.find_spec", lambda name: None)
    with pytest.raises(OptionError, match=r"got datasets:corpus; pip install datasets"):
        check_dataset("datasets:corpus")
    # A folder of this name in the working folder is a namespace, not the package.
    monkeypatch.setattr("polyhead.sources.datasets.find_spec", lambda name: SimpleNamespace(origin=None))
    with pytest.raises(OptionError, match=r"got datasets:corpus; pip install datasets"):
        check_dataset("datasets:corpus")


@pytest.mark.parametrize("name", ["datasets:", "datasets::train"])
def test_a_dataset_needs_a_path(name):
    with pytest.raises(OptionError, match=f"must be datasets:PATH or datasets:PATH:SPLIT, got '{name}'"):
        split_of(name)


def test_a_folder_of_the_real_package_is_streamed(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "one.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    assert [document.text for document in documents_of(f"datasets:{tmp_path}")] == ["one", "two"]


def test_a_parquet_cell_beyond_the_limit_is_refused(tmp_path, monkeypatch):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"text": ["12345", "123456"]}), tmp_path / "a.parquet")
    monkeypatch.setattr(texts, "MAX_BYTES", 5)
    with pytest.raises(OptionError, match=r"at most 5 bytes, got more in a\.parquet:2"):
        list(texts.read_texts(tmp_path / "a.parquet"))
