"""HTML fragments for notebooks: a grid of heads and a card per head; no scripts, all text escaped."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from polyhead.observation.statistics import AttentionSite

# Translucent, to work in light and dark themes; the text keeps the notebook's colour.
_GROUND = "rgba(64, 120, 200, {:.2f})"
_LINE = "1px solid rgba(128, 128, 128, 0.35)"


@dataclass(frozen=True, slots=True)
class Cell:
    """One head in a grid: its text, the strength of its shading (0 to 1), and its tooltip."""

    text: str
    shade: float
    about: str


@dataclass(frozen=True, slots=True)
class Number:
    """One line of a card: name, formatted value, and its position between the min (0) and the max (1) of all heads."""

    name: str
    text: str
    place: float | None = None


def grids(sites: Sequence[AttentionSite], cell: Callable[[AttentionSite, int], Cell | None]) -> str:
    """Return one HTML table per stack, with one row per layer and one cell per head; None gives an empty cell."""
    stacks: dict[tuple[str, str], list[AttentionSite]] = {}
    for site in sites:
        stacks.setdefault((site.stack, site.kind), []).append(site)
    return "".join(_grid(f"{stack}, {kind}-attention", members, cell) for (stack, kind), members in stacks.items())


def _grid(title: str, sites: list[AttentionSite], cell: Callable[[AttentionSite, int], Cell | None]) -> str:
    heads = range(max(site.num_heads for site in sites))
    header = "".join(f'<th scope="col">{head}</th>' for head in heads)
    lines = []
    for site in sites:
        cells = "".join(_cell(cell(site, head) if head < site.num_heads else None) for head in heads)
        lines.append(f'<tr><th scope="row">{site.layer}</th>{cells}</tr>')
    return (
        f'<table><caption style="white-space: nowrap">{html.escape(title)}: one row per layer, '
        "one column per head</caption>"
        f'<thead><tr><th scope="col">layer</th>{header}</tr></thead><tbody>{"".join(lines)}</tbody></table>'
    )


def _cell(cell: Cell | None) -> str:
    if cell is None:
        return "<td></td>"
    ground = _GROUND.format(0.75 * min(1.0, max(0.0, cell.shade)))
    return (
        f'<td style="text-align: center; background: {ground}" title="{html.escape(cell.about)}">'
        f"{html.escape(cell.text)}</td>"
    )


def card(title: str, lines: Sequence[str], numbers: Sequence[Number]) -> str:
    """Return the card of a head: title, lines of text, and a table of numbers, each with a bar for its position."""
    items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    rows = "".join(
        f'<tr><th scope="row">{html.escape(x.name)}</th><td>{html.escape(x.text)}</td><td>{_bar(x.place)}</td></tr>'
        for x in numbers
    )
    return (
        f'<div style="display: inline-block; vertical-align: top; max-width: 30em; margin: 4px; padding: 8px; '
        f'border: {_LINE}; border-radius: 6px"><strong>{html.escape(title)}</strong>'
        f"{f'<ul>{items}</ul>' if items else ''}<table><tbody>{rows}</tbody></table></div>"
    )


def _bar(place: float | None) -> str:
    return "" if place is None else f'<meter value="{min(1.0, max(0.0, place)):.2f}"></meter>'


def html_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return an HTML table of text cells."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    lines = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def folded(summary: str, content: str) -> str:
    """Return collapsible content (a `<details>` element)."""
    return f"<details><summary>{html.escape(summary)}</summary>{content}</details>"
