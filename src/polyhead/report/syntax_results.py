"""Syntax tables of `polyhead syntax` as part of a page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyhead.analysis.dependency_accuracy import UPWARD
from polyhead.analysis.syntax_table import SyntaxTable
from polyhead.errors import OptionError
from polyhead.files import read_json
from polyhead.geometry import HeadId, original_name
from polyhead.observation import AttentionSite
from polyhead.report.packing import clipped


@dataclass(frozen=True, slots=True)
class Syntax:
    """A syntax table and the treebank it was computed on."""

    treebank: str
    table: SyntaxTable

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Syntax:
        """Read a file that `polyhead syntax --output` wrote."""
        file = Path(path)
        if file.suffix not in (".json", ".parquet"):
            raise OptionError(
                f"a syntax table must be a .json or .parquet file of `polyhead syntax --output`, got {file.name!r}"
            )
        if not file.is_file():
            raise OptionError(f"file {file} not found; `polyhead syntax --treebank T --output {file}` writes it")
        table = SyntaxTable.load(file)
        about = read_json(file, "a syntax table is a JSON object") if file.suffix == ".json" else {}
        return cls(str(about.get("treebank", file.name)), table)

    def to_dict(self, sites: Sequence[AttentionSite]) -> dict[str, Any]:
        """Return the part `syntax` of a page with these sites."""
        numbers = {site.name: number for number, site in enumerate(sites) if site.kind == "self"}
        rows = []
        for row in self.table.entries:
            if row.site not in numbers or not 0 <= row.head < sites[numbers[row.site]].num_heads:
                raise OptionError(
                    "a syntax table and an inspection must be of the same model, "
                    f"got head {row.head} of {row.site!r} in the table, which the inspection does not have"
                )
            site = sites[numbers[row.site]]
            if row.original_head and row.original_head != site.label(row.head):
                raise OptionError(
                    "a syntax table and an inspection must be of the same model, with the same edits, got "
                    f"{HeadId(site.layer, row.head)}, originally {original_name(site.layer, row.original_head)} in the "
                    f"table, {site.original_name(row.head)} in the inspection"
                )
            rows.append(
                {
                    "relation": clipped(row.relation),
                    "direction": "head" if row.direction == UPWARD else "dependent",
                    "head": [numbers[row.site], row.head],
                    "accuracy": row.accuracy,
                    "low": row.low,
                    "high": row.high,
                    "baseline": row.baseline,
                    "offset": row.offset,
                    "words": row.count,
                    "verdict": row.verdict,
                }
            )
        return {"treebank": clipped(self.treebank), "rows": rows}
