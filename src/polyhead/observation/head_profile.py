"""`HeadProfile`: table of per-head statistics, one row per head, and its rendering in notebooks."""

from __future__ import annotations

import html
import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from polyhead.errors import OptionError
from polyhead.observation.cards import Cell, Number, card, folded, grids, html_table
from polyhead.observation.statistics import LOCATION, AttentionSite

# The grid is shaded by the first of these columns that was collected.
SHADED_BY = ("normalized_entropy", "entropy", "confidence", "mean_distance", "sink_mass")
MAX_CARDS = 256  # limits the size of the notebook file, which stores its outputs; the HTML report shows all


@dataclass(frozen=True, slots=True, eq=False)
class HeadProfile:
    """Table with one row per head: its site, the number of observed tokens, and each statistic.

    In exported tables, `original_head` is the index in the unedited model: `5`, `2+7` for a merged head, `new` for a
    head that an edit added.

    `table["entropy"]` is the mean over tokens, `table["entropy_std"]` the standard deviation, `table["entropy_max"]`
    the maximum; each is a float64 tensor with one entry per head, NaN where a statistic is undefined, such as
    mean_distance in a cross-attention. `print(table)` prints it, a notebook shows cards; `to_arrow`, `to_pandas`,
    `to_polars` and `to_xarray` export it.

    >>> import torch, polyhead
    >>> layer = polyhead.MultiHeadAttention(16, 2)
    >>> with torch.no_grad(), polyhead.observe(layer, statistics=("entropy", "mean_distance")) as session:
    ...     output = layer(torch.randn(1, 5, 16))
    >>> session.profile
    HeadProfile(2 heads, 5 tokens: entropy, mean_distance)
    >>> session.profile["entropy"].shape, len(session.profile)
    (torch.Size([2]), 2)
    """

    sites: tuple[AttentionSite, ...]  # of each row
    heads: tuple[int, ...]  # of each row
    names: tuple[str, ...]  # the statistics
    columns: Mapping[str, Tensor]
    note: str = ""  # about how the statistics were obtained; part of the text and the repr

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
            yield {**site.location(head), **{name: column[index] for name, column in values.items()}}

    def __repr__(self) -> str:
        tokens = int(self.columns["tokens"].max()) if len(self) else 0
        note = f"; {self.note}" if self.note else ""
        return f"HeadProfile({len(self)} heads, {tokens:,} tokens: {', '.join(self.names) or 'nothing'}{note})"

    def __str__(self) -> str:
        return self.to_text() + (f"\n{self.note}" if self.note else "")

    def to_text(self, width: int | None = None) -> str:
        """Return the table as text; columns that do not fit in `width` characters are in further tables below.

        Args:
            width: width of a line; None for unlimited.
        """
        header, body = self.cells()
        widths = [max(len(row[index]) for row in (header, *body)) for index in range(len(header))]
        parts: list[list[int]] = [[0]]
        for index in range(1, len(header)):
            used = sum(widths[x] + 2 for x in parts[-1])
            if width is not None and used + widths[index] > width and len(parts[-1]) > 1:
                parts.append([0])
            parts[-1].append(index)
        tables = []
        for part in parts:
            lines = []
            previous = None
            for site, row in zip((None, *self.sites), (header, *body), strict=True):
                if site is not None and (site.stack, site.kind) != previous:
                    previous = (site.stack, site.kind)
                    lines.append(f"{site.stack}, {site.kind}-attention")
                lines.append("  ".join(row[index].rjust(widths[index]) for index in part).rstrip())
            tables.append("\n".join(lines))
        return "\n\n".join(tables)

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

    def to_xarray(self) -> Any:
        """Return an `xarray.Dataset` with the dimensions stack, layer and head.

        Each statistic is a variable, NaN where a stack has no such layer or a layer no such head. `kind` (by stack),
        `site` (by stack and layer) and `original_head` are coordinates, empty where there is no such head.

        >>> import torch, polyhead
        >>> layer = polyhead.MultiHeadAttention(16, 2)
        >>> with torch.no_grad(), polyhead.observe(layer, statistics="entropy") as session:
        ...     output = layer(torch.randn(1, 5, 16))
        >>> dataset = session.profile.to_xarray()
        >>> dict(dataset.sizes), dataset["entropy"].dims
        ({'stack': 1, 'layer': 1, 'head': 2}, ('stack', 'layer', 'head'))
        """
        dataset = _package("xarray", "xarray").Dataset
        stacks = list(dict.fromkeys((site.stack, site.kind) for site in self.sites))
        layers, heads = sorted({site.layer for site in self.sites}), sorted({*self.heads})
        location = [
            (stacks.index((site.stack, site.kind)), layers.index(site.layer), heads.index(head))
            for site, head in zip(self.sites, self.heads, strict=True)
        ]
        index = tuple(np.array(location, dtype=np.int64).reshape(-1, 3).T)
        shape = (len(stacks), len(layers), len(heads))

        def filled(values: Any, empty: Any, axes: int = 3) -> tuple[tuple[str, ...], Any]:
            array = np.full(shape[:axes], empty, dtype=object if empty == "" else None)
            array[index[:axes]] = values
            return ("stack", "layer", "head")[:axes], array.astype(str) if empty == "" else array

        return dataset(
            {name: filled(column.numpy(), np.nan) for name, column in self.columns.items()},
            {
                "stack": [stack for stack, _ in stacks],
                "layer": np.array(layers, dtype=np.int64),
                "head": np.array(heads, dtype=np.int64),
                "kind": ("stack", [kind for _, kind in stacks]),
                "site": filled([site.name for site in self.sites], "", 2),
                "original_head": filled([*self._arrays()["original_head"]], ""),
            },
        )

    def _arrays(self) -> dict[str, Any]:
        locations = [site.location(head) for site, head in zip(self.sites, self.heads, strict=True)]
        arrays: dict[str, Any] = {name: [location[name] for location in locations] for name in LOCATION}
        return {**arrays, **{name: column.numpy() for name, column in self.columns.items()}}

    def _repr_html_(self) -> str:
        return profile_html(self)

    def scaled_column(self, name: str) -> list[float | None]:
        """Return a column scaled to [0, 1] over all heads; None for non-finite entries.

        Args:
            name: name of a column.
        """
        column = self[name]
        finite = column[column.isfinite()]
        if not len(finite):
            return [None] * len(self)
        low, high = float(finite.min()), float(finite.max())
        width = high - low
        return [((x - low) / width if width > 0 else 0.5) if math.isfinite(x) else None for x in column.tolist()]

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """Return the header and each row as text: `mean ±std` or `±error`, plus the maximum for logit statistics."""
        header, displayed = ["head", "tokens"], []
        for name in self.names:
            header.append(name)
            error = f"{name}_std" if f"{name}_std" in self.columns else f"{name}_error"
            displayed.append((name, error if error in self.columns else ""))
            if name in ("max_logit", "max_abs_logit"):
                header.append(f"{name}_max")
                displayed.append((f"{name}_max", ""))
        body = []
        for site, row in zip(self.sites, self.rows(), strict=True):
            cells = [site.name_with_origin(row["head"]), f"{row['tokens']:,.0f}"]
            for name, error in displayed:
                number = row[name]
                text = "-" if math.isnan(number) else f"{number:.3g}"
                cells.append(f"{text} ±{row[error]:.2g}" if error and text != "-" else text)
            body.append(cells)
        return header, body


def _package(name: str, install: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise OptionError(
            f"export to {name} needs the package {name}; install it with: pip install '{install}'"
        ) from None


# ---- notebooks


def profile_html(table: HeadProfile) -> str:
    """Return an HTML fragment without scripts; cards and table are collapsed."""
    title = f"<p><strong>{html.escape(repr(table))}</strong></p>"
    if not len(table):
        return title
    shaded = next((name for name in SHADED_BY if name in table.columns), None)
    shading = ""
    if shaded is not None:
        grid = grids(list(dict.fromkeys(table.sites)), _shaded_by(table, shaded))
        shading = f"{grid}<p>shaded by {html.escape(shaded)}, from the minimum to the maximum over all heads</p>"
    return f"{title}{shading}{cards_html(table)}{folded('full table', table_html(table))}"


def cards_html(table: HeadProfile, describe: Callable[[AttentionSite, int], list[str]] = lambda site, head: []) -> str:
    """Return the cards of all heads, collapsed by site; `describe` returns lines of text about a head."""
    if len(table) > MAX_CARDS:
        return (
            f"<p>{len(table)} heads are too many for cards in a notebook; <code>polyhead inspect --html</code> shows "
            "all of them</p>"
        )
    header, body = table.cells()
    scaled = {name: table.scaled_column(name) for name in header[1:]}
    cards: dict[AttentionSite, list[str]] = {}
    for row, (site, head) in enumerate(zip(table.sites, table.heads, strict=True)):
        numbers = [Number(name, text, scaled[name][row]) for name, text in zip(header[1:], body[row][1:], strict=True)]
        cards.setdefault(site, []).append(card(site.name_with_origin(head), describe(site, head), numbers))
    return "".join(
        folded(f"cards of {site.name}, {site.kind}-attention", "".join(site_cards))
        for site, site_cards in cards.items()
    )


def table_html(table: HeadProfile) -> str:
    """Return the full table as HTML."""
    header, body = table.cells()
    return html_table(("site", *header), ((site.name, *row) for site, row in zip(table.sites, body, strict=True)))


def _shaded_by(table: HeadProfile, name: str) -> Callable[[AttentionSite, int], Cell | None]:
    """Return a function from site and head to a grid cell shaded by a column."""
    values, scaled = table[name].tolist(), table.scaled_column(name)
    rows = {location: row for row, location in enumerate(zip(table.sites, table.heads, strict=True))}

    def cell(site: AttentionSite, head: int) -> Cell | None:
        row = rows.get((site, head))
        if row is None:
            return None
        text = "-" if math.isnan(values[row]) else f"{values[row]:.2g}"
        return Cell(text, scaled[row] or 0.0, f"{site.name_with_origin(head)}: {name} {text}")

    return cell
