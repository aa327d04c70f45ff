"""Run the unfinished trainings of the comparison, several at a time if requested."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring.json_lines import append_result
from benchmarks.training.loop import train
from benchmarks.training.text import Text
from benchmarks.training.trials import Contest, Result, Trial, next_trial, read_results


@dataclass(frozen=True)
class Comparison:
    """A contest over a text on a device, and the file in which finished trainings are kept."""

    contest: Contest
    text: Path
    device: torch.device
    output: Path
    facts: Mapping[str, Any] = field(default_factory=dict)

    def run(
        self,
        *,
        processes: int = 1,
        minutes: float | None = None,
        began: Callable[[Trial], None] = lambda trial: None,
        step: Callable[[int, int], None] | None = None,
    ) -> Iterator[Result]:
        """Yield the result of each training as it ends; none starts after `minutes`.

        `began` is called with each trial that starts, and `step` with the steps of a trial if one runs at a time.
        """
        start = time.monotonic()
        running: dict[Future[Result], Trial] = {}
        with _executor(processes) as executor:
            while True:
                while len(running) < processes and (minutes is None or time.monotonic() - start < 60 * minutes):
                    trial = next_trial(self.contest, read_results(self.output), running.values())
                    if trial is None:
                        break
                    running[executor.submit(_train, self, trial, step if processes == 1 else None)] = trial
                    began(trial)
                if not running:
                    return
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    running.pop(done)
                    append_result(self.output, done.result())
                    yield done.result()


def _executor(processes: int) -> Executor:
    """Return an executor: a process per training, since the GIL would serialise them; a thread for a single one."""
    if processes == 1:
        return ThreadPoolExecutor(1)
    return ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))


def _train(comparison: Comparison, trial: Trial, step: Callable[[int, int], None] | None) -> Result:
    contest, device = comparison.contest, comparison.device
    text = _text(comparison.text, contest.sizes.context)
    return train(contest, trial, text, device, facts=comparison.facts, report=step or (lambda done, steps: None))


@cache
def _text(path: Path, context: int) -> Text:
    return Text.read(path, context)
