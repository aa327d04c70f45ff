"""Stacked bar charts and line charts as SVG text, coloured by classes of the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 760, 330
LEFT, RIGHT, TOP, BOTTOM = 92, 16, 14, 44
_INSET = 18  # horizontal margin of line charts, so that the first point is clear of the axis
_INNER, _DEEP = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM


@dataclass(frozen=True, slots=True)
class Axis:
    """The vertical axis: its name, number format, and whether ticks are powers of two."""

    name: str
    written: Callable[[float], str]
    binary: bool = False


@dataclass(frozen=True, slots=True)
class Series:
    """One series of a chart: a value at each position of the horizontal axis, None where there is none."""

    name: str
    values: tuple[float | None, ...]
    colour: int  # of the style's classes c0, c1, ...
    dashed: bool = False


def stacked(title: str, places: Sequence[str], series: Sequence[Series], axis: Axis, along: str) -> str:
    """Return a stacked bar chart, with tooltips."""
    totals = [sum(one.values[i] or 0.0 for one in series) for i in range(len(places))]
    top, ticks = _linear(max(totals, default=0.0), axis.binary)
    written = axis.written
    step = _INNER / max(len(places), 1)
    parts = [_frame(axis.name, along, [(tick / top, written(tick)) for tick in ticks])]
    for i, place in enumerate(places):
        x, below = LEFT + i * step + step * 0.14, 0.0
        for one in series:
            value = one.values[i] or 0.0
            if value:
                y, height = TOP + _DEEP * (1 - (below + value) / top), _DEEP * value / top
                tooltip = f"{escape(place)} {escape(along)}: {escape(one.name)} {escape(written(value))}"
                parts.append(
                    f'<rect class="c{one.colour}" x="{x:.1f}" y="{y:.2f}" width="{step * 0.72:.1f}" '
                    f'height="{max(height, 0.4):.2f}"><title>{tooltip}</title></rect>'
                )
                below += value
        parts.append(_text(x + step * 0.36, HEIGHT - BOTTOM + 16, place, "middle"))
    return _figure(title, series, parts)


def lines(title: str, places: Sequence[str], series: Sequence[Series], axis: Axis, along: str) -> str:
    """Return a line chart with a logarithmic vertical axis."""
    positive = [value for one in series for value in one.values if value is not None and value > 0]
    ticks = _ratios(positive, 16.0 if axis.binary else 10.0)
    low, span, written = ticks[0], math.log(ticks[-1] / ticks[0]), axis.written
    first, step = LEFT + _INSET, (_INNER - 2 * _INSET) / max(len(places) - 1, 1)
    parts = [_frame(axis.name, along, [(math.log(tick / low) / span, written(tick)) for tick in ticks])]
    for i, place in enumerate(places):
        parts.append(_text(first + i * step, HEIGHT - BOTTOM + 16, place, "middle"))
    for one in series:
        points = [
            (first + i * step, TOP + _DEEP * (1 - math.log(value / low) / span), value, places[i])
            for i, value in enumerate(one.values)
            if value is not None and value > 0
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _, _ in points)
        dashed = ' stroke-dasharray="6 4"' if one.dashed else ""
        parts.append(f'<polyline class="l{one.colour}" points="{path}"{dashed}/>')
        for x, y, value, place in points:
            tooltip = f"{escape(place)} {escape(along)}: {escape(one.name)} {escape(written(value))}"
            parts.append(
                f'<circle class="c{one.colour}" cx="{x:.1f}" cy="{y:.1f}" r="3.4"><title>{tooltip}</title></circle>'
            )
    return _figure(title, series, parts)


def _figure(title: str, series: Sequence[Series], parts: Sequence[str]) -> str:
    keys = "".join(f'<li><span class="key k{one.colour}"></span>{escape(one.name)}</li>' for one in series)
    drawn = "".join(parts)
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><ul class="legend">{keys}</ul>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{drawn}</svg></figure>'
    )


def _frame(axis: str, along: str, ticks: Sequence[tuple[float, str]]) -> str:
    drawn = []
    for share, words in ticks:
        y = TOP + _DEEP * (1 - share)
        drawn.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        drawn.append(_text(LEFT - 8, y + 4, words, "end"))
    drawn.append(_text(LEFT + _INNER / 2, HEIGHT - 8, along, "middle", "name"))
    middle = TOP + _DEEP / 2
    drawn.append(
        f'<text class="name" x="14" y="{middle:.1f}" text-anchor="middle" '
        f'transform="rotate(-90 14 {middle:.1f})">{escape(axis)}</text>'
    )
    return "".join(drawn)


def _text(x: float, y: float, words: str, anchor: str, kind: str = "tick") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _linear(largest: float, binary: bool) -> tuple[float, list[float]]:
    """Return the maximum of an axis that starts at zero, and its ticks at round numbers."""
    if largest <= 0:
        return 1.0, [0.0, 1.0]
    rough = largest / 4
    unit = 2.0 ** math.floor(math.log2(rough)) if binary else 10.0 ** math.floor(math.log10(rough))
    factors = (1, 2) if binary else (1, 2, 2.5, 5, 10)
    step = next(unit * factor for factor in factors if unit * factor >= rough * 0.999)
    count = math.ceil(largest / step * 0.999)
    return step * count, [step * i for i in range(count + 1)]


def _ratios(values: Sequence[float], base: float) -> list[float]:
    """Return powers of a base that enclose all values."""
    if not values:
        return [1.0, base]
    low = math.floor(math.log(min(values), base) + 1e-9)
    high = math.ceil(math.log(max(values), base) - 1e-9)
    return [base**power for power in range(low, max(high, low + 1) + 1)]
