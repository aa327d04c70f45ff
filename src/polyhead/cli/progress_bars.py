"""Progress display of commands."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich import progress as bars

    from polyhead.progress import Progress, ProgressCallback

SECONDS_PER_LINE = 5.0


class ProgressBars:
    """Progress of a workflow: a bar per step on a terminal, else a line per step and every few seconds.

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
        self.printed = 0.0  # time of the last line

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
            self._print(now.step)
        elif now.total is not None and time.monotonic() >= self.printed + SECONDS_PER_LINE:
            self._print(f"{now.step}: {now.done:,} of {now.total:,} {now.unit}".rstrip())
        task = self.tasks[now.step]
        self.progress.update(task, completed=now.done, total=now.total)
        speed = self.progress.tasks[task].speed
        rate = f"{speed:,.0f} {now.unit}/s" if speed and now.unit else ""
        self.progress.update(task, note=now.detail or rate)

    def _print(self, line: str) -> None:
        if not self.console.is_terminal:
            self.console.print(line, markup=False)
            self.printed = time.monotonic()
