"""Matrices and heat maps for a terminal, in colour or, where there is none, in characters."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size
from rich.columns import Columns
from rich.console import Console, Group
from rich.text import Text
from torch import Tensor

HEAD_STYLES = ("cyan", "magenta")
_SHADES = " ░▒▓█"
_ASCII_SHADES = " .:-=+*#%@"


def matrix(title: str, values: Tensor, console: Console, *, styles: Sequence[str] = ("",)) -> Group:
    """Return a drawing of a 2-D tensor under its title; `styles` are distributed evenly over the columns.

    Values have four decimal places, or fewer if the terminal is too narrow.
    """
    for places in (4, 3, 2, 1):
        rows = [[number(value, places) for value in row] for row in values.tolist()]
        width = max(len(entry) for row in rows for entry in row)
        if (width + 1) * len(rows[0]) + 3 <= console.width:
            break
    per_style = max(1, -(-values.shape[1] // len(styles)))
    left, right = _brackets(len(rows), console)
    lines = [Text(title, style="bold")]
    for row, opening, closing in zip(rows, left, right, strict=True):
        line = Text(opening + " ", no_wrap=True, overflow="crop")
        for column, entry in enumerate(row):
            line.append(entry.rjust(width) + " ", style=styles[min(column // per_style, len(styles) - 1)])
        lines.append(line.append(closing))
    return Group(*lines)


def side_by_side(*drawings: Group) -> Columns:
    """Arrange drawings side by side if the terminal is wide enough, else below each other."""
    return Columns(drawings, padding=(1, 3))


def number(value: float, places: int = 4) -> str:
    """Format integers without decimals, other numbers with `places` decimal places.

    >>> number(5.0), number(5 / 2**0.5)
    ('5', '3.5355')
    """
    return str(int(value)) if value == int(value) else f"{value:.{places}f}"


def heat_map(weights: Tensor, tokens: Sequence[str], console: Console) -> Group:
    """Return a heat map of attention weights, [tokens, tokens]: queries in rows, keys in columns, brighter is more.

    Shades are relative to the maximum weight. Column labels are vertical. Keys that do not fit the terminal are
    omitted, and the last line reports it.
    """
    labels = [_printable(token, index, console) for index, token in enumerate(tokens)]
    longest = max(cell_len(label) for label in labels)
    cell = 2 if longest + 1 + 2 * len(labels) <= console.width or any(map(_is_wide, labels)) else 1
    side = min(longest, max(4, console.width - 1 - cell * len(labels)))
    shown = labels[: max(1, (console.width - 1 - side) // cell)]
    lines = []
    for depth in range(max(map(len, shown))):
        letters = (label[depth] if depth < len(label) else "" for label in shown)
        header = "".join(set_cell_size(letter, cell) for letter in letters)
        lines.append(Text(" " * (side + 1) + header, style="dim", no_wrap=True, overflow="crop"))
    top = max(float(weights.max()), 1e-30)
    for label, row in zip(labels, weights.tolist(), strict=True):
        line = Text(set_cell_size(label, side) + " ", no_wrap=True, overflow="crop")
        for weight in row[: len(shown)]:
            _add_cell(line, weight / top, cell, console)
        lines.append(line)
    if len(shown) < len(labels):
        lines.append(Text(f"(first {len(shown)} of {len(labels)} keys; widen the terminal for more)", style="dim"))
    return Group(*lines)


def _add_cell(line: Text, share: float, cell: int, console: Console) -> None:
    if console.color_system in ("256", "truecolor") and not console.no_color:
        # From dark blue to yellow: brightness also increases with the weight, for colour-blind readers.
        red, green, blue = (int(low + (high - low) * share) for low, high in ((20, 255), (20, 220), (70, 60)))
        line.append(" " * cell, style=f"on rgb({red},{green},{blue})")
    else:
        shades = _SHADES if _encodes(_SHADES, console) else _ASCII_SHADES
        line.append(shades[round(share * (len(shades) - 1))] * cell)


def _printable(token: str, index: int, console: Console) -> str:
    """Return the token, or its index if the terminal cannot encode it."""
    return token if _encodes(token, console) else str(index)


def _encodes(text: str, console: Console) -> bool:
    try:
        text.encode(console.encoding)
    except UnicodeEncodeError:
        return False
    return True


def _is_wide(label: str) -> bool:
    return cell_len(label) > len(label)


def _brackets(rows: int, console: Console) -> tuple[str, str]:
    if rows == 1 or not _encodes("⎡⎢⎣⎤⎥⎦", console):
        return "[" * rows, "]" * rows
    return "⎡" + "⎢" * (rows - 2) + "⎣", "⎤" + "⎥" * (rows - 2) + "⎦"
