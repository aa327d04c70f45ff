"""Read text from a file, a folder or standard input as a stream of named documents."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, BinaryIO

from polyhead.errors import OptionError
from polyhead.files import check_pyarrow, check_regular, in_one_line, short

STANDARD_INPUT = "-"
TOKENS = 65_536  # default of the maximum number of tokens to read
MAX_BYTES = 1 << 29  # maximum size of a document and of a line
_BUFFER_BYTES = 1 << 20  # of a .parquet file
_LONG_NAME = 255  # characters; longer ones are shortened in errors
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Document:
    """One text, never joined to another; `name` is its source: `notes.txt`, `pages.jsonl:12`."""

    name: str
    text: str


def default_documents() -> tuple[Document, ...]:
    """Return the default text: short documents in English and Chinese, written for this package.

    >>> documents = default_documents()
    >>> documents[0].name, documents[-1].name
    ('en_dialogue.txt', 'zh_weather.txt')
    """
    folder = resources.files("polyhead.sources") / "default_texts"
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".txt")), key=lambda file: file.name)
    return tuple(Document(file.name, file.read_text(encoding="utf-8")) for file in files)


class Texts:
    """Iterable of the documents of a file, folder or standard input; created by `read_texts`.

    Each iteration reads the files again. `empty` counts the blank documents that the latest iteration skipped so far.

    Args:
        name: name of the file or folder, for messages.
        files: names and paths of the files.
        ignored: names of files that are not read.
        field: JSON field or column that contains the text.
    """

    def __init__(self, name: str, files: tuple[tuple[str, Path], ...], ignored: tuple[str, ...], field: str) -> None:
        self.name = name
        self.files = files  # (name for documents, path to open), in reading order
        self.ignored = ignored  # files of a folder without a known suffix
        self.field = field
        self.empty = 0
        self._standard_input: bytes | None = None

    def __iter__(self) -> Iterator[Document]:
        self.empty = 0
        for document in self._every_document():
            if document.text.strip():
                yield document
            else:
                self.empty += 1

    def _every_document(self) -> Iterator[Document]:
        if self.name == STANDARD_INPUT:
            # Standard input can only be read once, so it is cached for the next iteration.
            if self._standard_input is None:
                self._standard_input = _read_bounded(sys.stdin.buffer, "standard input")
            yield Document("standard input", _decoded(self._standard_input, "standard input"))
            return
        for name, path in self.files:
            read = _reader_of(path)
            assert read is not None
            try:
                check_regular(path)
                yield from read(path, name, self.field)
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise OptionError(f"a .gz file must be complete gzip data, got {path}: {error}") from error
            except OSError as error:
                raise OptionError(f"{path} cannot be read: {error.strerror or error}") from error
            except OptionError:
                raise
            except (ValueError, RecursionError) as error:
                raise OptionError(f"{path} cannot be read: {in_one_line(error)}") from error


def read_texts(name: str | os.PathLike[str], *, field: str = "text") -> Texts:
    """Return the documents of a file, a folder (recursively, sorted by name) or, for "-", standard input.

    A `.txt` or `.md` file is one document, a `.jsonl` file has one per line, a `.parquet` file one per row; `field` is
    the JSON field or column that contains the text. `.txt`, `.md` and `.jsonl` may be compressed (`.gz`). In a folder,
    other and hidden files are ignored. Text must be UTF-8; errors report the position.

    Args:
        name: path, or "-".
        field: JSON field or column that contains the text.
    """
    if name == STANDARD_INPUT:
        return Texts(STANDARD_INPUT, (), (), field)
    path = Path(os.path.expanduser(name))
    if os.path.isdir(path):  # unlike Path.is_dir, False for a name that is longer than the file system allows
        paths = sorted(_files_below(path), key=lambda file: file.relative_to(path).as_posix())
        named = [(file.relative_to(path).as_posix(), file) for file in paths]
        files = tuple((name, file) for name, file in named if _reader_of(file))
        ignored = tuple(name for name, file in named if not _reader_of(file))
        if not files:
            raise OptionError(
                f"a text folder must contain files that end in {_known_endings()}, "
                f"got {path} with {len(ignored)} other files"
            )
        return Texts(str(path), files, ignored, field)
    if not os.path.exists(path):
        got = str(path) if len(str(path)) <= _LONG_NAME else short(str(path))
        raise OptionError(
            f"text must be a file, a folder or - for standard input, got {got}: there is no such file; in Python, text "
            "itself is passed as a list of documents"
        )
    if _reader_of(path) is None:
        raise OptionError(f"a text file must end in {_known_endings()}, got {path.name}")
    return Texts(str(path), ((path.name, path),), (), field)


def _files_below(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(parent, name) for name in files if not name.startswith("."))


def _open(path: Path) -> BinaryIO:
    return gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb")  # type: ignore[return-value]


def _read_file(path: Path, name: str, field: str) -> Iterator[Document]:
    with _open(path) as file:
        yield Document(name, _decoded(_read_bounded(file, name), name))


def _read_bounded(file: BinaryIO, name: str, line: int | None = None) -> bytes:
    """Read a file, or its next line, up to a limit: a small compressed file may expand beyond the memory."""
    content = file.read(MAX_BYTES + 1) if line is None else file.readline(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        place = name if line is None else f"{name}:{line}"
        raise OptionError(f"a document may have at most {MAX_BYTES:,} bytes, got more in {place}; split it")
    return content


def _read_lines(path: Path, name: str, field: str) -> Iterator[Document]:
    with _open(path) as file:
        start = 0
        for number in itertools.count(1):
            line = _read_bounded(file, name, number)
            if not line:
                return
            place = f"{name}:{number}"
            content = _decoded(line, name, start=start, line=number)
            start += len(line)
            yield Document(place, _text_of(content, place, field) if content.strip() else "")


def _text_of(line: str, place: str, field: str) -> str:
    """Return the text in one line of JSON; null is an empty document."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise OptionError(
            f"each line of a .jsonl file must be one JSON object, got {place}, column {error.colno}: {error.msg}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise OptionError(
            f"each line of a .jsonl file must be one JSON object, got {place}: {in_one_line(error)}"
        ) from error
    if not isinstance(record, dict):
        raise OptionError(f"each line of a .jsonl file must be one JSON object, got {place}: {type(record).__name__}")
    text = field_of(record, field, place)
    if not isinstance(text, str):
        raise OptionError(f"the field {field!r} must be a string, got {place}: {type(text).__name__}")
    check_text(text, place)
    return text


def field_of(row: Mapping[str, Any], field: str, place: str) -> Any:
    """Return the field of a row that contains its text; None is an empty text."""
    if field not in row:
        raise OptionError(
            f"{place} has no field {field!r}, only {join_names(row)}; pass the field that contains the text"
        )
    return "" if row[field] is None else row[field]


def check_text(text: str, place: str) -> None:
    """Raise for a document of more than `MAX_BYTES`, or with half of a surrogate pair, which no tokenizer takes."""
    try:
        size = len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise OptionError(
            f"text must be Unicode characters, got half of a surrogate pair in {place}, character {error.start}"
        ) from error
    if size > MAX_BYTES:
        raise OptionError(f"a document may have at most {MAX_BYTES:,} bytes, got more in {place}; split it")


def _read_rows(path: Path, name: str, field: str) -> Iterator[Document]:
    check_pyarrow(name)
    import pyarrow as arrow
    from pyarrow import parquet

    try:
        # A buffer, instead of whole row groups: those of a large file may not fit into memory.
        with parquet.ParquetFile(path, buffer_size=_BUFFER_BYTES) as file:
            _check_column(file.schema_arrow, name, field)
            row = 0
            for batch in file.iter_batches(batch_size=1024, columns=[field]):
                for value in batch.column(0):
                    row += 1
                    yield Document(f"{name}:{row}", _text_in(value, f"{name}:{row}"))
    except (arrow.ArrowException, OSError) as error:
        raise OptionError(f"a .parquet file must be Parquet data, got {path}: {in_one_line(error)}") from error


def _text_in(value: Any, place: str) -> str:
    """Return the text in one table cell, which may be invalid UTF-8; null is an empty document."""
    try:
        text: str = value.as_py() or ""
    except UnicodeDecodeError as error:
        raise OptionError(
            f"text must be UTF-8, got 0x{error.object[error.start]:02x} in {place} at byte {error.start}"
        ) from error
    check_text(text, place)
    return text


def _check_column(columns: Any, name: str, field: str) -> None:
    if field not in columns.names:
        raise OptionError(
            f"{name} has no column {field!r}, only {join_names(columns.names)}; pass the column that contains the text"
        )
    kind = columns.field(field).type
    if not _is_text(kind):
        raise OptionError(f"the column {field!r} must contain strings, got {name}: {kind}")


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    if types.is_dictionary(kind):
        kind = kind.value_type
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _decoded(content: bytes, name: str, *, start: int = 0, line: int = 1) -> str:
    """Decode UTF-8, without a byte order mark at the start of the file."""
    skipped = len(_BYTE_ORDER_MARK) if start == 0 and content.startswith(_BYTE_ORDER_MARK) else 0
    try:
        return content[skipped:].decode("utf-8")
    except UnicodeDecodeError as error:
        at = skipped + error.start
        place = f"byte {start + at}, line {line + content[:at].count(10)}"
        raise OptionError(
            f"text must be UTF-8, got 0x{content[at]:02x} in {name} at {place}; convert the file first, "
            "for example with: iconv -f FROM -t UTF-8"
        ) from error


def join_names(names: Any) -> str:
    """Return the first eight names, quoted, for an error."""
    names = list(names)
    text = ", ".join(repr(name) for name in names[:8])
    return text + f" and {len(names) - 8} more" if len(names) > 8 else text or "none at all"


_Reader = Callable[[Path, str, str], Iterator[Document]]
_READERS: dict[str, _Reader] = {
    ".txt": _read_file,
    ".md": _read_file,
    ".jsonl": _read_lines,
    ".txt.gz": _read_file,
    ".md.gz": _read_file,
    ".jsonl.gz": _read_lines,
    ".parquet": _read_rows,
}


def _reader_of(path: Path) -> _Reader | None:
    return next((read for ending, read in _READERS.items() if path.name.lower().endswith(ending)), None)


def _known_endings() -> str:
    return ", ".join(_READERS)
