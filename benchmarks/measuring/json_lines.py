"""Files of results, one JSON line each; finished ones, which several processes may share and a run resumes from."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Writable(Protocol):
    def to_json(self) -> str: ...


def read_lines(path: Path, parse: Callable[[str], T]) -> list[T]:
    """Return the parsed lines of a file, if it exists; a last line that was cut short is left out."""
    if not path.exists():
        return []
    return [parse(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1] if line]


def write_rows(path: Path, facts: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write the facts of a run, then a line for each row."""
    path.write_text("".join(json.dumps(x) + "\n" for x in ({"facts": facts}, *rows)), encoding="utf-8")


def append_result(path: Path, result: Writable) -> None:
    """Append a line in a single write, since several processes may share the file."""
    with path.open("ab", buffering=0) as file:
        file.write((result.to_json() + "\n").encode())
