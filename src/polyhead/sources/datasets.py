"""Documents of Hugging Face datasets, streamed row by row; `datasets` is only imported to load one by its name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from polyhead.errors import OptionError, PolyheadError
from polyhead.files import in_one_line
from polyhead.sources.texts import Document, check_text, field_of, join_names

PREFIX = "datasets:"  # of a text on the command line
DEFAULT_SPLIT = "train"


@dataclass(frozen=True, slots=True)
class DatasetTexts:
    """Iterable of the documents of a dataset of strings, or of rows with a text field; each iteration reads it again.

    Args:
        rows: a `datasets.Dataset`, a `datasets.IterableDataset`, or anything else that yields strings or mappings.
        field: field of a row that contains the text; a row with None in it is an empty document.
        name: name of the dataset, for documents and errors.
    """

    rows: Iterable[Any]
    field: str = "text"
    name: str = "document"

    def __post_init__(self) -> None:
        if not isinstance(self.rows, Iterable):
            raise OptionError(f"a text must be a path, documents or a dataset, got {type(self.rows).__name__}")
        columns = getattr(self.rows, "column_names", None)  # None for a stream that does not know them
        if isinstance(columns, Mapping):
            raise OptionError(
                f"a text must be one split of a dataset, got a dictionary of {join_names(columns)}; pass one of them"
            )
        if columns is None and hasattr(self.rows, "columns"):  # of a data frame, whose iteration yields their names
            raise OptionError(f"a text must be strings, got a {type(self.rows).__name__}; pass the list of one column")
        if isinstance(self.rows, Mapping):
            raise OptionError(
                f"a text must be strings or rows, got a dictionary of {join_names(self.rows)}; pass one of them"
            )
        if columns is not None and self.field not in columns:
            raise OptionError(
                f"the dataset has no column {self.field!r}, only {join_names(columns)}; pass the column that contains "
                "the text as field"
            )

    def __iter__(self) -> Iterator[Document]:
        return (Document(f"{self.name} {number}", self._text(row, number)) for number, row in enumerate(self._rows()))

    def _rows(self) -> Iterator[Any]:
        place = "before the first row"
        try:
            for number, row in enumerate(self.rows):
                place = f"after {self.name} {number}"
                yield row
        except PolyheadError:
            raise
        except Exception as error:  # of any reader and file system, in the middle of a stream
            raise OptionError(
                f"rows of a dataset must be readable, got an error {place}: {in_one_line(error)}"
            ) from error

    def _text(self, row: Any, number: int) -> str:
        place = f"{self.name} {number}"
        if isinstance(row, Mapping):
            row = field_of(row, self.field, place)
        if not isinstance(row, str):
            raise OptionError(
                f"a text must be strings, or rows with a string in a field, got {place}: {type(row).__name__}"
            )
        check_text(row, place)
        return row


def read_dataset(name: str, *, field: str = "text") -> DatasetTexts:
    """Stream a dataset by its name on the command line, `datasets:PATH` or `datasets:PATH:SPLIT`.

    Args:
        name: PATH is a local folder or file, or a name on the hub, as `datasets.load_dataset` takes it.
        field: column that contains the text.
    """
    check_dataset(name)
    path, split = split_of(name)
    datasets = import_module("datasets")
    if int(datasets.__version__.partition(".")[0]) < 4:
        raise OptionError(
            f"a text of {PREFIX} needs datasets 4 or later, which runs no code of a dataset, got "
            f"{datasets.__version__}; pip install --upgrade datasets"
        )
    try:
        rows = datasets.load_dataset(path, split=split, streaming=True)
    except Exception as error:  # of any of its readers and file systems
        raise OptionError(
            f"{PREFIX}PATH:SPLIT must be a dataset that datasets.load_dataset reads, got {path} and split {split}: "
            f"{in_one_line(error)}"
        ) from error
    return DatasetTexts(rows, field, f"{path}:{split}")


def check_dataset(name: str) -> None:
    """Raise if a name has no path, or the package `datasets` is not installed; imports nothing.

    Args:
        name: name on the command line.
    """
    split_of(name)
    spec = find_spec("datasets")
    if spec is None or spec.origin is None:  # a folder of this name is no package
        raise OptionError(f"a text of {PREFIX} needs the package datasets, got {name}; pip install datasets")


def split_of(name: str) -> tuple[str, str]:
    """Return the path and the split of a name on the command line.

    >>> split_of("datasets:corpus/en:validation"), split_of("datasets:corpus/en")
    (('corpus/en', 'validation'), ('corpus/en', 'train'))
    """
    whole = name.removeprefix(PREFIX)
    path, colon, split = whole.rpartition(":")
    if not (colon and re.fullmatch(r"\w+(\[.*\])?", split)):
        path, split = whole, DEFAULT_SPLIT
    if not path:
        raise OptionError(f"a dataset must be {PREFIX}PATH or {PREFIX}PATH:SPLIT, got {name!r}")
    return path, split
