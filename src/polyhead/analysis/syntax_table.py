"""`SyntaxTable`: the best head of each dependency relation and the best fixed offset as its baseline."""

from __future__ import annotations

import html
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from polyhead.analysis.intervals import wilson
from polyhead.errors import OptionError
from polyhead.files import as_type, build, check_pyarrow, parquet_bytes, read_columns, read_json, refusing, short
from polyhead.geometry import name_with_origin
from polyhead.observation.cards import html_table
from polyhead.observation.saving import write_atomically

FEW_WORDS = 30  # in a half: with fewer, neither the choice of a head nor its accuracy is reliable


@dataclass(frozen=True, slots=True)
class SyntaxRow:
    """One relation in one direction, measured on the held-out texts.

    From a dependent, the target is its governor. From a governor, it is any of its dependents with that relation. Only
    visible words count: in a causal model, no later ones.
    """

    relation: str
    direction: str
    count: int  # words in the held-out texts
    site: str  # of the best head in the choosing half
    layer: int
    head: int
    accuracy: float
    low: float  # 95% Wilson interval
    high: float
    offset: int  # in words, the best in the choosing half
    baseline: float  # accuracy of that offset
    baseline_low: float
    baseline_high: float
    head_only: int  # words for which the head is right and the offset is wrong
    baseline_only: int
    chosen_count: int  # words in the choosing half
    chosen_accuracy: float  # of the head there: biased upwards
    chosen_baseline: float
    original_head: str | None = None  # its number in the unedited model; None in older tables

    @property
    def verdict(self) -> str:
        """The head compared with the offset: "better", "worse", or "" if there is no significant difference.

        Significant if the 95% Wilson interval of the head's share of the words on which they differ excludes one half.
        If no head is better, about one row in forty is "better" by chance.
        """
        low, high = wilson(self.head_only, self.head_only + self.baseline_only)
        return "better" if low > 0.5 else "worse" if high < 0.5 else ""


@dataclass(frozen=True, slots=True)
class SyntaxTable:
    """The best head of each relation and direction, the most frequent first; `print(table)` prints it."""

    entries: tuple[SyntaxRow, ...]
    left_out: tuple[tuple[str, str, int], ...]  # relation, direction and held-out count of those below the minimum
    heads: int  # among which the best was chosen
    texts: tuple[int, int]  # that chose, and held out
    minimum: int
    seed: int

    def __len__(self) -> int:
        return len(self.entries)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield rows as plain dicts, for `pandas.DataFrame(table.rows())` or `pyarrow.Table.from_pylist`."""
        for entry in self.entries:
            yield {**asdict(entry), "verdict": entry.verdict}

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """Return the header and the rows as text."""
        header = ["relation", "direction", "words", "head", "accuracy", "95%", "offset", "baseline", "95%", "head is"]
        body = []
        for row in self.entries:
            accuracy, baseline = (
                [f"{share:.3f}", f"{low:.3f}-{high:.3f}"]
                for share, low, high in (
                    (row.accuracy, row.low, row.high),
                    (row.baseline, row.baseline_low, row.baseline_high),
                )
            )
            head = name_with_origin(row.layer, row.head, row.original_head)
            place = [row.relation, row.direction, str(row.count), head]
            body.append([*place, *accuracy, f"{row.offset:+d}", *baseline, row.verdict or "-"])
        return header, body

    def notes(self) -> str:
        """Return a few sentences on how the numbers were computed."""
        better = sum(row.verdict == "better" for row in self.entries)
        worse = sum(row.verdict == "worse" for row in self.entries)
        few = sum(min(row.count, row.chosen_count) < FEW_WORDS for row in self.entries)
        unreliable = f" Unreliable: {few} with fewer than {FEW_WORDS}." if few else ""
        return (
            f"Each head is the best of {self.heads} on {self.texts[0]:,} texts; all numbers are from {self.texts[1]:,} "
            f"held-out texts (seed {self.seed}). {better} of {len(self)} beat the best fixed offset, {worse} do worse. "
            f"Excluded: {len(self.left_out)} with fewer than {self.minimum} words in a half (--minimum).{unreliable}"
        )

    def __str__(self) -> str:
        header, body = self.cells()
        widths = [max(len(row[index]) for row in (header, *body)) for index in range(len(header))]
        lines = []
        for row in (header, *body):
            words = [cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True)]
            numbers = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
            lines.append("  ".join([*words, *numbers]).rstrip())
        return "\n".join([*lines, self.notes()])

    def _repr_html_(self) -> str:
        return f"{html_table(*self.cells())}<p>{html.escape(self.notes())}</p>"

    def save(self, path: str | os.PathLike[str], **metadata: Any) -> None:
        """Write the table and metadata, as the name of the model, to a `.json` or `.parquet` file, atomically."""
        file = Path(path)
        metadata |= {name: getattr(self, name) for name in _FACTS}
        if file.suffix == ".json":
            text = json.dumps(_finite({**metadata, "rows": list(self.rows())}), ensure_ascii=False, indent=1)
            write_atomically(file, f"{text}\n".encode())
        elif file.suffix == ".parquet":
            check_pyarrow(file)
            write_atomically(file, _parquet(list(self.rows()), metadata))
        else:
            raise OptionError(f"a table must be written to a .json or a .parquet file, got {file.name!r}")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> SyntaxTable:
        """Read a table that `save` wrote."""
        file, rule = Path(path), "a syntax table is read as `polyhead syntax --output` wrote it"
        if file.suffix == ".json":
            facts = read_json(file, rule)
            rows = facts.get("rows")
        elif file.suffix == ".parquet":
            rows, facts = _read_parquet(file, rule)
        else:
            raise OptionError(f"a table must be read from a .json or a .parquet file, got {file.name!r}")
        with refusing(file, rule):
            if not isinstance(rows, list):
                raise OptionError(f"rows must be a list of objects, got {short(rows)}")
            entries = tuple(build(SyntaxRow, _fields_of(row)) for row in rows)
            return build(cls, {"entries": entries, **{name: facts[name] for name in _FACTS}})


# ---- files

_FACTS = ("heads", "texts", "minimum", "seed", "left_out")  # fields of a table beside its rows


def _finite(x: Any) -> Any:
    """Return a JSON value with null for NaN, which JSON does not have."""
    if isinstance(x, Mapping):
        return {name: _finite(value) for name, value in x.items()}
    if isinstance(x, list | tuple):
        return [_finite(value) for value in x]
    return None if isinstance(x, float) and math.isnan(x) else x


def _fields_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a saved row; a null number is NaN."""
    numbers = {x.name for x in fields(SyntaxRow) if x.type == "float"}
    row = {name: math.nan if x is None and name in numbers else x for name, x in row.items()}
    return {name: x for name, x in row.items() if name != "verdict"}


def _parquet(rows: list[dict[str, Any]], facts: dict[str, Any]) -> bytes:
    import pyarrow

    metadata = {"polyhead": json.dumps(_finite(facts), ensure_ascii=False)}
    return parquet_bytes(pyarrow.Table.from_pylist(rows).replace_schema_metadata(metadata))


def _read_parquet(file: Path, rule: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    columns, metadata = read_columns(file, rule)
    with refusing(file, rule):
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        facts: dict[str, Any] = as_type(json.loads(metadata[b"polyhead"]), Mapping[str, Any], "its facts")
    return rows, facts
