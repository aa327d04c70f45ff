"""Line plots for a terminal: one letter per curve, better values at the top."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

STYLES = ("bold cyan", "yellow", "magenta", "green")


def line_plot(
    columns: Sequence[str], curves: Mapping[str, Sequence[float]], *, upwards: bool, height: int = 12, step: int = 7
) -> Text:
    """Plot curves over the same columns, better values at the top; `upwards` means that higher values are better.

    `columns` are labels, `height` is the number of lines and `step` the width of a column in characters. Each curve is
    drawn with the capitalised first letter of its name; where curves overlap, their letters are side by side.
    """
    from rich.text import Text

    values = [value for curve in curves.values() for value in curve]
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    cells: dict[tuple[int, int], list[int]] = {}  # the curves at (row, column)
    for curve_index, curve in enumerate(curves.values()):
        for column, value in enumerate(curve):
            share = (value - low) / span
            row = round((1 - share if upwards else share) * (height - 1))
            cells.setdefault((row, column), []).append(curve_index)
    letters = [name[0].upper() for name in curves]
    drawn = Text()
    for row in range(height):
        share = row / (height - 1)
        label = low + (1 - share if upwards else share) * span
        drawn.append(f"{label:9.4g} ", "dim")
        drawn.append("│", "dim")
        for column in range(len(columns)):
            shown = cells.get((row, column), [])
            left = (step - len(shown)) // 2
            drawn.append(" " * left)
            for curve_index in shown:
                drawn.append(letters[curve_index], STYLES[curve_index % len(STYLES)])
            drawn.append(" " * (step - left - len(shown)))
        drawn.append("\n")
    drawn.append(" " * 10 + "└" + "─" * (step * len(columns)) + "\n", "dim")
    drawn.append(" " * 11 + "".join(column.center(step) for column in columns) + "\n", "dim")
    drawn.append(" " * 11)
    for curve_index, name in enumerate(curves):
        drawn.append(letters[curve_index], STYLES[curve_index % len(STYLES)])
        drawn.append(f" {name}   ")
    return drawn
