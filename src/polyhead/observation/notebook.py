"""A `HeadProfile` as a notebook shows it: a shaded grid of heads, their cards, and the table of every number."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from polyhead.observation.cards import Cell, Number, card, folded, grids
from polyhead.observation.statistics import AttentionSite

# What a grid is shaded by: the first of these that was gathered.
SHADED_BY = ("normalized_entropy", "entropy", "confidence", "mean_distance", "sink_mass")
MOST_CARDS = 256  # a notebook keeps what it shows; the page of an inspection has one for each of any number


class Table(Protocol):
    """What is read of a `HeadProfile` to show it."""

    @property
    def sites(self) -> tuple[AttentionSite, ...]: ...
    @property
    def heads(self) -> tuple[int, ...]: ...
    @property
    def columns(self) -> Mapping[str, Tensor]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, name: str) -> Tensor: ...
    def cells(self) -> tuple[list[str], list[list[str]]]: ...
    def places_among_all(self, name: str) -> list[float | None]: ...


def profile_html(table: Table) -> str:
    """The fragment; it needs no script, and what opens is folded until then."""
    title = f"<p><strong>{html.escape(repr(table))}</strong></p>"
    if not len(table):
        return title
    shaded = next((name for name in SHADED_BY if name in table.columns), None)
    shading = ""
    if shaded is not None:
        grid = grids(list(dict.fromkeys(table.sites)), _shaded_by(table, shaded))
        shading = f"{grid}<p>shaded by {html.escape(shaded)}, from the smallest of all heads to the largest</p>"
    return f"{title}{shading}{cards_html(table)}{folded('every number', table_html(table))}"


def cards_html(table: Table, said: Callable[[AttentionSite, int], list[str]] = lambda site, head: []) -> str:
    """The cards of all heads, folded by site; `said` gives what is said of a head in words."""
    if len(table) > MOST_CARDS:
        return (
            f"<p>{len(table)} heads are too many for cards here; <code>polyhead inspect --html</code> has them all</p>"
        )
    header, body = table.cells()
    places = {name: table.places_among_all(name) for name in header[1:]}
    found: dict[AttentionSite, list[str]] = {}
    for row, (site, head) in enumerate(zip(table.sites, table.heads, strict=True)):
        numbers = [Number(name, text, places[name][row]) for name, text in zip(header[1:], body[row][1:], strict=True)]
        found.setdefault(site, []).append(
            card(f"layer {site.layer} head {head}{site.original(head)}", said(site, head), numbers)
        )
    return "".join(folded(f"cards of {site.name}, {site.kind}-attention", "".join(x)) for site, x in found.items())


def table_html(table: Table) -> str:
    """Every number of every head."""
    header, body = table.cells()
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in ("site", *header))
    lines = []
    for site, row in zip(table.sites, body, strict=True):
        cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in (site.name, *row))
        lines.append(f"<tr>{cells}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _shaded_by(table: Table, name: str) -> Callable[[AttentionSite, int], Cell | None]:
    numbers, places = table[name].tolist(), table.places_among_all(name)
    rows = {place: row for row, place in enumerate(zip(table.sites, table.heads, strict=True))}

    def cell(site: AttentionSite, head: int) -> Cell | None:
        row = rows.get((site, head))
        if row is None:
            return None
        text = "-" if math.isnan(numbers[row]) else f"{numbers[row]:.2g}"
        return Cell(text, places[row] or 0.0, f"layer {site.layer} head {head}{site.original(head)}: {name} {text}")

    return cell
