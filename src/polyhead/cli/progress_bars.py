"""Progress display of commands."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich import progress as bars

    from polyhead.progress import Progress, ProgressCallback

SECONDS_PER_LINE = 5.0


class ProgressBars:
    """Progress of a workflow: a bar per step on a terminal, else a line per step and one every few seconds.

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
        self.began: tuple[float, int] = 0.0, 0  # time and count at the first report of the step
        self.latest: tuple[float, Progress] | None = None  # the last report and its time
        self.stopped = threading.Event()
        self.printer = threading.Thread(target=self._print_lines, daemon=True)

    def __enter__(self) -> ProgressCallback:
        self.progress.start()
        if not self.console.is_terminal:
            self.printer.start()
        return self.report

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        if self.printer.is_alive():
            self.printer.join()
        self.progress.stop()

    def report(self, now: Progress) -> None:
        if now.step not in self.tasks:
            for task in self.tasks.values():
                if self.progress.tasks[task].total is None:  # a step of unknown length ends when the next one starts
                    self.progress.update(task, total=1, completed=1)
            self.tasks[now.step] = self.progress.add_task(now.step, total=now.total, note="")
            self.began = time.monotonic(), now.done
            if not self.console.is_terminal:
                self.console.print(now.step, markup=False)
        self.latest = time.monotonic(), now
        task = self.tasks[now.step]
        self.progress.update(task, completed=now.done, total=now.total)
        speed = self.progress.tasks[task].speed
        rate = f"{speed:,.0f} {now.unit}/s" if speed and now.unit else ""
        self.progress.update(task, note=now.detail or rate)

    def _print_lines(self) -> None:
        while not self.stopped.wait(SECONDS_PER_LINE):
            if self.latest is not None:
                self.console.print(self.line(time.monotonic()), markup=False, soft_wrap=True)

    def line(self, time_now: float) -> str:
        """Return the percentage of the current step and the time left, or the time so far if that is unknown."""
        assert self.latest is not None
        (began, first), (reported, now) = self.began, self.latest
        if now.total is None:
            return f"{now.step}: {_duration(time_now - began)} so far"
        counted = f"{now.step}: {now.done / max(now.total, 1):.0%}, {now.done:,} of {now.total:,} {now.unit}".rstrip()
        if not first < now.done < now.total:  # nothing to estimate from, or what follows the last report takes longer
            return f"{counted}, {_duration(time_now - began)} so far"
        left = (reported - began) * (now.total - now.done) / (now.done - first) - (time_now - reported)
        return f"{counted}, {_duration(max(left, 0.0))} left"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
