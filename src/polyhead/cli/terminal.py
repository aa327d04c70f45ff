"""Consoles, texts and tables of commands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def plain_console() -> Console:
    """Return a console that prints numbers and names without colours of its own."""
    from rich.console import Console

    return Console(highlight=False)


def wide_console() -> Console:
    """Return a console for tables: files and pipes have no width, and a fixed one keeps tables from wrapping."""
    from rich.console import Console

    console = plain_console()
    return console if console.is_terminal else Console(width=120, highlight=False)


def say(console: Console, text: str, style: str | None = None) -> None:
    """Print a text as it is: without markup, and broken into lines by the terminal alone."""
    console.print(text, style=style, markup=False, soft_wrap=True)


def plain_table(left: Sequence[str], right: Sequence[str], *, no_wrap: bool = False, title: str | None = None) -> Table:
    """Return a table without lines, of columns that are aligned left and then columns that are aligned right."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, title=title)
    for column in left:
        table.add_column(column, no_wrap=no_wrap)
    for column in right:
        table.add_column(column, justify="right", no_wrap=no_wrap)
    return table
