"""Progress display and one-line error messages of commands."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich import progress as bars

    from polyhead.progress import Progress, ProgressCallback


class Terminated(SystemExit):
    """Raised on SIGTERM; ends a run as Ctrl-C does, with completed steps saved."""


def end_on_sigterm() -> None:
    """Install a handler that raises `Terminated` on SIGTERM."""

    def end(*_: object) -> None:
        raise Terminated(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)


@contextmanager
def report_errors(verb: str, run_folder: Path | None = None) -> Iterator[None]:
    """Print one line and exit on polyhead's errors (exit code 2), interrupts, SIGTERM and out-of-memory errors.

    `run_folder` is where the run saves its progress, if it does; the message then says how to resume.
    """
    from polyhead.errors import PolyheadError

    def end(reason: str, code: int) -> typer.Exit:
        can_resume = run_folder is not None and run_folder.is_dir() and any(run_folder.iterdir())
        hint = f"; progress is saved, continue with --resume {run_folder}" if can_resume else ""
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


class ProgressBars:
    """Progress of a workflow: a bar per step on a terminal, else a line per step.

    A context manager whose value is the `progress` callback of the workflow.
    """

    def __init__(self) -> None:
        from rich import progress as bars
        from rich.console import Console

        self.console = Console(stderr=True, highlight=False)
        self.progress = bars.Progress(
            bars.TextColumn("{task.description}"),
            bars.BarColumn(),
            bars.TextColumn("{task.fields[note]}"),
            bars.TimeElapsedColumn(),
            bars.TimeRemainingColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self.tasks: dict[str, bars.TaskID] = {}

    def __enter__(self) -> ProgressCallback:
        self.progress.start()
        return self.report

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def report(self, now: Progress) -> None:
        if now.step not in self.tasks:
            for task in self.tasks.values():
                if self.progress.tasks[task].total is None:  # a step of unknown length ends when the next one starts
                    self.progress.update(task, total=1, completed=1)
            self.tasks[now.step] = self.progress.add_task(now.step, total=now.total, note="")
            if not self.console.is_terminal:
                self.console.print(now.step, markup=False)
        task = self.tasks[now.step]
        self.progress.update(task, completed=now.done, total=now.total)
        speed = self.progress.tasks[task].speed
        rate = f"{speed:,.0f} {now.unit}/s" if speed and now.unit else ""
        self.progress.update(task, note=now.detail or rate)
