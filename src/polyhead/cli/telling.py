"""What a verb tells while it works: an error in one line, and how far it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer


@contextmanager
def errors_told(verb: str) -> Iterator[None]:
    """An error of ours is one line and exit code 2."""
    from polyhead.errors import PolyheadError

    try:
        yield
    except PolyheadError as error:
        typer.echo(f"polyhead {verb}: {error}", err=True)
        raise typer.Exit(2) from None


@contextmanager
def working(description: str) -> Iterator[None]:
    """Something moves on a terminal while it lasts, and one line is written elsewhere."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        with console.status(description):
            yield
    else:
        console.print(description, markup=False)
        yield


@contextmanager
def bar(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, one line elsewhere; what it gives is told how far each step went."""
    from rich import progress as bars
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        console.print(description, markup=False)
    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.TimeElapsedColumn(),
        bars.TimeRemainingColumn(),
    )
    with bars.Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(description, total=total)
        yield lambda steps: progress.advance(task, steps)
