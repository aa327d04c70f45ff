"""Notebook rendering of a `HeadProfile`: a shaded grid of heads, one card per head, and the full table."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from polyhead.observation.cards import Cell, Number, card, folded, grids
from polyhead.observation.statistics import AttentionSite

# The grid is shaded by the first of these columns that was collected.
SHADED_BY = ("normalized_entropy", "entropy", "confidence", "mean_distance", "sink_mass")
MOST_CARDS = 256  # limits the size of the notebook file, which stores its outputs; the HTML report shows all


class Table(Protocol):
    """The part of `HeadProfile` that rendering reads."""

    @property
    def sites(self) -> tuple[AttentionSite, ...]: ...
    @property
    def heads(self) -> tuple[int, ...]: ...
    @property
    def columns(self) -> Mapping[str, Tensor]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, name: str) -> Tensor: ...
    def cells(self) -> tuple[list[str], list[list[str]]]: ...
    def scaled_column(self, name: str) -> list[float | None]: ...


def profile_html(table: Table) -> str:
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


def cards_html(table: Table, describe: Callable[[AttentionSite, int], list[str]] = lambda site, head: []) -> str:
    """Return the cards of all heads, collapsed by site; `describe` returns lines of text about a head."""
    if len(table) > MOST_CARDS:
        return (
            f"<p>{len(table)} heads are too many for cards in a notebook; <code>polyhead inspect --html</code> shows "
            "all of them</p>"
        )
    header, body = table.cells()
    scaled = {name: table.scaled_column(name) for name in header[1:]}
    cards: dict[AttentionSite, list[str]] = {}
    for row, (site, head) in enumerate(zip(table.sites, table.heads, strict=True)):
        numbers = [Number(name, text, scaled[name][row]) for name, text in zip(header[1:], body[row][1:], strict=True)]
        cards.setdefault(site, []).append(
            card(f"layer {site.layer} head {head}{site.original(head)}", describe(site, head), numbers)
        )
    return "".join(
        folded(f"cards of {site.name}, {site.kind}-attention", "".join(site_cards))
        for site, site_cards in cards.items()
    )


def table_html(table: Table) -> str:
    """Return the full table as HTML."""
    header, body = table.cells()
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in ("site", *header))
    lines = []
    for site, row in zip(table.sites, body, strict=True):
        cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in (site.name, *row))
        lines.append(f"<tr>{cells}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _shaded_by(table: Table, name: str) -> Callable[[AttentionSite, int], Cell | None]:
    """Return a function from site and head to a grid cell shaded by a column."""
    values, scaled = table[name].tolist(), table.scaled_column(name)
    rows = {location: row for row, location in enumerate(zip(table.sites, table.heads, strict=True))}

    def cell(site: AttentionSite, head: int) -> Cell | None:
        row = rows.get((site, head))
        if row is None:
            return None
        text = "-" if math.isnan(values[row]) else f"{values[row]:.2g}"
        return Cell(text, scaled[row] or 0.0, f"layer {site.layer} head {head}{site.original(head)}: {name} {text}")

    return cell
