"""Bounded reads of untrusted files; errors are one line with the file and the reason."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import os
import stat
import types
import typing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from polyhead.errors import OptionError, PolyheadError

if TYPE_CHECKING:
    from torch import Tensor

MAX_JSON_BYTES = 1 << 28
MAX_TABLE_BYTES, MAX_TABLE_ROWS = 1 << 28, 1 << 20
_MAX_MESSAGE = 300  # characters of another library's error message

T = TypeVar("T")


@contextmanager
def refusing(path: str | os.PathLike[str], rule: str, kind: type[PolyheadError] = OptionError) -> Iterator[None]:
    """Re-raise any exception as a `kind` of one line: the rule, the file, the reason.

    A `PolyheadError` that names the file already is raised as it is.

    >>> with refusing("config.json", "a config names its heads"):
    ...     {}["num_heads"]
    Traceback (most recent call last):
    polyhead.errors.OptionError: a config names its heads, got config.json: it has no 'num_heads'
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, PolyheadError) and os.fspath(path) in str(error):
            raise
        raise kind(f"{rule}, got {os.fspath(path)}: {in_one_line(error)}") from error


def in_one_line(error: BaseException) -> str:
    """Return the first line of an error's message, with its type where that alone is unclear."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    message = next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:_MAX_MESSAGE]
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, KeyError):
        return f"it has no {message}"
    self_explanatory = (
        isinstance(error, PolyheadError | OSError | ValueError) or type(error).__name__ == "SafetensorError"
    )
    if message and self_explanatory:
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def parquet_bytes(table: Any, **options: Any) -> bytes:
    """Return a pyarrow table as a Parquet file."""
    from pyarrow import parquet

    buffer = io.BytesIO()
    parquet.write_table(table, buffer, **options)
    return buffer.getvalue()


def check_regular(path: str | os.PathLike[str], max_bytes: int | None = None) -> None:
    """Check that a path is a regular file, not a folder, device or pipe, of at most `max_bytes` bytes."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is no regular file")
    if max_bytes is not None and status.st_size > max_bytes:
        raise ValueError(f"it has {status.st_size:,} bytes, and at most {max_bytes:,} are read")


def read_json(
    path: Path, rule: str, kind: type[PolyheadError] = OptionError, max_bytes: int = MAX_JSON_BYTES
) -> dict[str, Any]:
    """Return the object in a JSON file."""
    with refusing(path, rule, kind):
        check_regular(path, max_bytes)
        content = json.loads(path.read_bytes().decode("utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"it contains a {type(content).__name__} instead of an object")
    return typing.cast("dict[str, Any]", content)


def read_tensors(
    path: str | os.PathLike[str], rule: str, kind: type[PolyheadError] = OptionError
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and metadata of a safetensors file, whose header must agree with the size of the file."""
    from safetensors import safe_open

    with refusing(path, rule, kind):
        check_regular(path)
        with safe_open(path, framework="pt", device="cpu") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return tensors, file.metadata() or {}


def read_columns(path: Path, rule: str) -> tuple[dict[str, list[Any]], Any]:
    """Return the columns of a Parquet file as lists, and its metadata.

    Rows and unpacked bytes are bounded, because a small file may unpack to a great many equal rows.
    """
    check_pyarrow(path)
    from pyarrow import parquet

    with refusing(path, rule):
        check_regular(path, MAX_TABLE_BYTES)
        with parquet.ParquetFile(path) as file:
            rows = file.metadata.num_rows
            if not 0 <= rows <= MAX_TABLE_ROWS:
                raise ValueError(f"it has {rows:,} rows, and at most {MAX_TABLE_ROWS:,} are read")
            columns: dict[str, list[Any]] = {name: [] for name in file.schema_arrow.names}
            size = 0
            for batch in file.iter_batches(batch_size=1024):
                size += batch.nbytes
                if size > MAX_TABLE_BYTES:
                    raise ValueError(f"it unpacks to more than {MAX_TABLE_BYTES:,} bytes")
                for name in columns:
                    columns[name] += batch.column(name).to_pylist()
            return columns, file.schema_arrow.metadata or {}


def check_pyarrow(path: str | os.PathLike[str]) -> None:
    """Raise if pyarrow, which reads and writes Parquet files, is not installed."""
    if find_spec("pyarrow") is None:
        raise OptionError(f"{os.fspath(path)} needs pyarrow; install it with: pip install 'polyhead[hf]'")


@functools.cache
def _type_hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def build(cls: type[T], content: object) -> T:
    """Return a dataclass instance from a JSON object, checking names and annotated types of its fields.

    >>> @dataclasses.dataclass
    ... class Head:
    ...     layer: int
    ...     role: str | None = None
    >>> build(Head, {"layer": "3"})
    Traceback (most recent call last):
    polyhead.errors.OptionError: layer of a Head must be int, got '3'
    """
    if not isinstance(content, Mapping):
        raise OptionError(f"a {cls.__name__} must be an object with its fields, got {short(content)}")
    hints = _type_hints(cls)  # type: ignore[arg-type]  # classes are hashable
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    unknown = [str(name) for name in content if name not in hints]
    missing = [
        x.name
        for x in fields
        if x.name not in content and x.default is dataclasses.MISSING and x.default_factory is dataclasses.MISSING
    ]
    if unknown or missing:
        raise OptionError(
            f"a {cls.__name__} has the fields {', '.join(x.name for x in fields)}, got "
            + ", ".join([*(f"no {name}" for name in missing[:3]), *(f"{short(name)} as well" for name in unknown[:3])])
        )
    values = {}
    for name, value in content.items():
        values[name] = as_type(value, hints[name], f"{name} of a {cls.__name__}")
    return cls(**values)


def as_type(value: Any, wanted: Any, what: str) -> Any:
    """Convert a JSON value to an annotated type (list to tuple, int to float), or raise."""
    origin, inner = typing.get_origin(wanted), typing.get_args(wanted)
    if wanted is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        for item in inner:
            try:
                return as_type(value, item, what)
            except OptionError:
                continue
    elif origin is typing.Literal:
        if isinstance(value, str | int) and value in inner:
            return value
    elif origin is tuple and isinstance(value, list | tuple):
        if len(inner) == 2 and inner[1] is Ellipsis:
            return tuple(as_type(item, inner[0], what) for item in value)
        if len(inner) == len(value):
            return tuple(as_type(item, kind, what) for item, kind in zip(value, inner, strict=True))
    elif origin is list and isinstance(value, list):
        return [as_type(item, inner[0], what) for item in value]
    elif isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, Mapping):
        return {name: as_type(item, inner[1], what) for name, item in value.items()}
    elif wanted is float and isinstance(value, int | float) and not isinstance(value, bool):
        return _as_float(value, what)
    elif isinstance(wanted, type) and isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool)):
        return value
    raise OptionError(f"{what} must be {getattr(wanted, '__name__', None) or wanted}, got {short(value)}")


def _as_float(value: float, what: str) -> float:
    try:
        return float(value)
    except OverflowError:
        raise OptionError(
            f"{what} must be a number within the range of a float, got one of {len(str(value))} digits"
        ) from None


def short(value: object) -> str:
    """Return the repr of a value for an error message, truncated where it is long."""
    text = repr(value) if not isinstance(value, list | dict) or len(value) < 50 else f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."
