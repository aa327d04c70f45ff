"""`HeadProfile`: table of per-head statistics, one row per head."""

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
    """Table with one row per head: its site, the number of observed tokens, and each statistic.

    In exported tables, `original_head` is the index in the unedited model: `5`, `2+7` for a merged head, `new` for a
    head that an edit added.

    `table["entropy"]` is the mean over tokens, `table["entropy_std"]` the standard deviation, `table["entropy_max"]`
    the maximum; each is a float64 tensor with one entry per head. NaN where a statistic is undefined, such as
    mean_distance in a cross-attention. `print(table)` prints it, a notebook shows cards; `to_arrow`, `to_pandas` and
    `to_polars` export it.
    """

    sites: tuple[AttentionSite, ...]  # of each row
    heads: tuple[int, ...]  # of each row
    names: tuple[str, ...]  # the statistics
    columns: Mapping[str, Tensor]

    def __len__(self) -> int:
        return len(self.heads)

    def __getitem__(self, column: str) -> Tensor:
        if column not in self.columns:
            raise OptionError(f"the columns are {', '.join(self.columns)}; got {column!r}")
        return self.columns[column]

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield rows as dicts, e.g. for `pandas.DataFrame(table.rows())` or `pyarrow.Table.from_pylist`."""
        values = {name: column.tolist() for name, column in self.columns.items()}
        for index, (site, head) in enumerate(zip(self.sites, self.heads, strict=True)):
            location = {"site": site.name, "kind": site.kind, "stack": site.stack, "layer": site.layer, "head": head}
            location["original_head"] = site.label(head)
            yield {**location, **{name: column[index] for name, column in values.items()}}

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

    # ---- export

    def to_arrow(self) -> Any:
        """Return a `pyarrow.Table` with one row per head."""
        return _package("pyarrow", "polyhead[hf]").table(self._arrays())

    def to_pandas(self) -> Any:
        """Return a `pandas.DataFrame` with one row per head."""
        return _package("pandas", "pandas").DataFrame(self._arrays())

    def to_polars(self) -> Any:
        """Return a `polars.DataFrame` with one row per head."""
        return _package("polars", "polars").DataFrame(self._arrays())

    def _arrays(self) -> dict[str, Any]:
        fields = {name: [getattr(site, name) for site in self.sites] for name in ("kind", "stack", "layer")}
        location = {"site": [site.name for site in self.sites], **fields, "head": list(self.heads)}
        location["original_head"] = [site.label(head) for site, head in zip(self.sites, self.heads, strict=True)]
        return {**location, **{name: column.numpy() for name, column in self.columns.items()}}

    def _repr_html_(self) -> str:
        return profile_html(self)

    def scaled_column(self, name: str) -> list[float | None]:
        """Return a column scaled to [0, 1] over all heads; None for non-finite entries."""
        column = self[name]
        finite = column[column.isfinite()]
        if not len(finite):
            return [None] * len(self)
        low, high = float(finite.min()), float(finite.max())
        width = high - low
        return [((x - low) / width if width > 0 else 0.5) if math.isfinite(x) else None for x in column.tolist()]

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """Return the header and each row as text: `mean ±std`, plus the maximum for logit statistics."""
        header, displayed = ["head", "tokens"], []
        for name in self.names:
            header.append(name)
            std = f"{name}_std" if f"{name}_std" in self.columns else f"{name}_error"
            displayed.append((name, std if std in self.columns else ""))
            if name in ("max_logit", "max_abs_logit"):
                header.append(f"{name}_max")
                displayed.append((f"{name}_max", ""))
        body = []
        for site, row in zip(self.sites, self.rows(), strict=True):
            cells = [f"{row['layer']}.{row['head']}{site.original(row['head'])}", f"{row['tokens']:,.0f}"]
            for name, std in displayed:
                number = row[name]
                text = "-" if math.isnan(number) else f"{number:.3g}"
                cells.append(f"{text} ±{row[std]:.2g}" if std and text != "-" else text)
            body.append(cells)
        return header, body


def _package(name: str, install: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise OptionError(
            f"export to {name} needs the package {name}; install it with: pip install '{install}'"
        ) from None
