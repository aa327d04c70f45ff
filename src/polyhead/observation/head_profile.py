"""`HeadProfile`: the table of what is known of each head, one row a head."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from polyhead.errors import OptionError
from polyhead.observation.notebook import profile_html
from polyhead.observation.statistics import AttentionSite


@dataclass(frozen=True, slots=True, eq=False)
class HeadProfile:
    """One row a head: where it is, over how many tokens it was watched, and each statistic.

    In tables that are handed on, `original_head` is its number in the unedited model: `5`, `2+7` for a merged head,
    `new` for one that an edit grew.

    `table["entropy"]` is the mean over tokens, `table["entropy_std"]` the standard deviation, `table["entropy_max"]`
    the largest, each a float64 tensor of as many numbers as there are heads. NaN where a statistic has no meaning, as
    reach has none in a cross-attention. `print(table)` shows it, a notebook shows cards; `to_arrow`, `to_pandas` and
    `to_polars` hand it on.
    """

    sites: tuple[AttentionSite, ...]  # of each row
    heads: tuple[int, ...]  # of each row
    names: tuple[str, ...]  # the statistics
    columns: Mapping[str, Tensor]

    def __len__(self) -> int:
        return len(self.heads)

    def __getitem__(self, column: str) -> Tensor:
        if column not in self.columns:
            raise OptionError(f"a column is one of {', '.join(self.columns)}; got {column!r}")
        return self.columns[column]

    def rows(self) -> Iterator[dict[str, Any]]:
        """Every row as a plain dict: what `pandas.DataFrame(table.rows())` or `pyarrow.Table.from_pylist` takes."""
        numbers = {name: column.tolist() for name, column in self.columns.items()}
        for index, (site, head) in enumerate(zip(self.sites, self.heads, strict=True)):
            place = {"site": site.name, "kind": site.kind, "stack": site.stack, "layer": site.layer, "head": head}
            place["original_head"] = site.label(head)
            yield {**place, **{name: column[index] for name, column in numbers.items()}}

    def __repr__(self) -> str:
        tokens = int(self.columns["tokens"].max()) if len(self) else 0
        return f"HeadProfile({len(self)} heads, {tokens:,} tokens: {', '.join(self.names) or 'nothing'})"

    def __str__(self) -> str:
        header, body = self.cells()
        widths = [max(len(row[index]) for row in (header, *body)) for index in range(len(header))]
        lines = []
        previous = None
        for site, row in zip((None, *self.sites), (header, *body), strict=True):
            if site is not None and (site.stack, site.kind) != previous:
                previous = (site.stack, site.kind)
                lines.append(f"{site.stack}, {site.kind}-attention")
            lines.append("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        return "\n".join(lines)

    # ---- for other tools

    def to_arrow(self) -> Any:
        """A `pyarrow.Table`, a row a head."""
        return _package("pyarrow", "polyhead[hf]").table(self._arrays())

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame`, a row a head."""
        return _package("pandas", "pandas").DataFrame(self._arrays())

    def to_polars(self) -> Any:
        """A `polars.DataFrame`, a row a head."""
        return _package("polars", "polars").DataFrame(self._arrays())

    def _arrays(self) -> dict[str, Any]:
        places = {name: [getattr(site, name) for site in self.sites] for name in ("kind", "stack", "layer")}
        place = {"site": [site.name for site in self.sites], **places, "head": list(self.heads)}
        place["original_head"] = [site.label(head) for site, head in zip(self.sites, self.heads, strict=True)]
        return {**place, **{name: column.numpy() for name, column in self.columns.items()}}

    def _repr_html_(self) -> str:
        return profile_html(self)

    def places_among_all(self, name: str) -> list[float | None]:
        """Where each head's number lies between the smallest of all heads, 0, and the largest, 1; None: it has none."""
        column = self[name]
        finite = column[column.isfinite()]
        if not len(finite):
            return [None] * len(self)
        low, high = float(finite.min()), float(finite.max())
        width = high - low
        return [((x - low) / width if width > 0 else 0.5) if math.isfinite(x) else None for x in column.tolist()]

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """The header, and each row as text: `mean ±spread`, and for the largest logit its maximum."""
        header, shown = ["head", "tokens"], []
        for name in self.names:
            header.append(name)
            spread = f"{name}_std" if f"{name}_std" in self.columns else f"{name}_error"
            shown.append((name, spread if spread in self.columns else ""))
            if name in ("max_logit", "max_abs_logit"):
                header.append(f"{name}_max")
                shown.append((f"{name}_max", ""))
        body = []
        for site, row in zip(self.sites, self.rows(), strict=True):
            cells = [f"{row['layer']}.{row['head']}{site.original(row['head'])}", f"{row['tokens']:,.0f}"]
            for name, spread in shown:
                number = row[name]
                text = "-" if math.isnan(number) else f"{number:.3g}"
                cells.append(f"{text} ±{row[spread]:.2g}" if spread and text != "-" else text)
            body.append(cells)
        return header, body


def _package(name: str, install: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise OptionError(
            f"a table for {name} needs the package {name}; install it with: pip install '{install}'"
        ) from None
