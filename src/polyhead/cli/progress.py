"""Output of a running command: progress, and errors in one line."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import typer


class Terminated(SystemExit):
    """SIGTERM has come; it ends a run as Ctrl-C does, with what is whole kept."""


def end_on_sigterm() -> None:
    """Raise `Terminated` where SIGTERM comes, for the rest of the process."""

    def end(*_: object) -> None:
        raise Terminated(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)


@contextmanager
def errors_told(verb: str, kept: Path | None = None) -> Iterator[None]:
    """Print one line for an error of ours (exit code 2), an interrupt, an end from outside, or a lack of memory.

    `kept` is the folder from which what was done can be taken up again.
    """
    from polyhead.errors import PolyheadError

    def end(words: str, code: int) -> typer.Exit:
        again = kept is not None and kept.is_dir() and any(kept.iterdir())
        rest = f"; what was done is kept, go on with --resume {kept}" if again else ""
        typer.echo(f"polyhead {verb}: {words}{rest}", err=True)
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
        if not _lacks_memory(error):
            raise
        raise end(f"out of memory ({str(error).partition(chr(10))[0] or type(error).__name__})", 1) from None


def _lacks_memory(error: Exception) -> bool:
    torch = sys.modules.get("torch")
    on_device = torch is not None and isinstance(error, torch.OutOfMemoryError)
    return isinstance(error, MemoryError) or on_device or "can't allocate memory" in str(error)


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
