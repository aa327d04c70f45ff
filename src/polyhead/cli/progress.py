"""Progress display and one-line error messages of commands."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import typer


class Terminated(SystemExit):
    """Raised on SIGTERM; ends a run as Ctrl-C does, with completed steps saved."""


def end_on_sigterm() -> None:
    """Install a handler that raises `Terminated` on SIGTERM."""

    def end(*_: object) -> None:
        raise Terminated(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)


@contextmanager
def errors_told(verb: str, kept: Path | None = None) -> Iterator[None]:
    """Print one line and exit on polyhead's errors (exit code 2), interrupts, SIGTERM and out-of-memory errors.

    `kept` is the folder from which the run can be resumed.
    """
    from polyhead.errors import PolyheadError

    def end(reason: str, code: int) -> typer.Exit:
        can_resume = kept is not None and kept.is_dir() and any(kept.iterdir())
        hint = f"; progress is saved, continue with --resume {kept}" if can_resume else ""
        typer.echo(f"polyhead {verb}: {reason}{hint}", err=True)
        return typer.Exit(code)

    try:
        yield
    except PolyheadError as error:
        typer.echo(f"polyhead {verb}: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        raise end("interrupted", 128 + signal.SIGINT) from None
    except Terminated:
        raise end("terminated", 128 + signal.SIGTERM) from None
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        raise end(f"out of memory ({str(error).partition(chr(10))[0] or type(error).__name__})", 1) from None


def _is_out_of_memory(error: Exception) -> bool:
    torch = sys.modules.get("torch")
    on_device = torch is not None and isinstance(error, torch.OutOfMemoryError)
    return isinstance(error, MemoryError) or on_device or "can't allocate memory" in str(error)


@contextmanager
def working(description: str) -> Iterator[None]:
    """Show a spinner on a terminal, else print one line."""
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
    """Show a progress bar on a terminal, else print one line; yields a function that advances it."""
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
