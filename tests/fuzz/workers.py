"""Worker processes that run cases, one after the other, and are replaced when they die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import IO, Any

import torch

from tests.fuzz.calls import Outcome, run_case
from tests.fuzz.cases import CaseId, draw_case

ROOT = Path(__file__).resolve().parents[2]
CASE_SECONDS = 240.0  # the longest that a case may take: kernels of a GPU are compiled in it
LOST_DEVICE = 3  # exit status of a worker whose CUDA context is unusable


@dataclass(frozen=True)
class Run:
    """Settings of a run: seed, sizes, device, seconds and processes."""

    seed: int
    sizes: str
    device: str
    seconds: float
    jobs: int
    case_seconds: float = CASE_SECONDS

    def command(self, case: object) -> str:
        """Return the command that repeats one case."""
        return f"python -m tests.fuzz_attention --device {self.device} --case {case}"


@dataclass
class Tally:
    """Sums over all workers."""

    cases: int = 0
    ran: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    findings: int = 0
    lost: int = 0  # workers that died

    def add(self, ended: dict[str, Any]) -> None:
        self.cases += 1
        self.ran.update(ended["ran"])
        self.refused.update(ended["refused"])

    def lines(self) -> list[str]:
        """Return the summary."""
        ran = ", ".join(f"{name} {number}" for name, number in self.ran.most_common()) or "none"
        lines = [f"{self.cases} cases; calls by backend: {ran}"]
        lines += [f"refused {number:5}  {message}" for message, number in self.refused.most_common()]
        lines += [f"{self.lost} workers died and were replaced"] if self.lost else []
        return [*lines, f"{self.findings} findings"]


# ---- in a worker


def finding_line(case: object, outcome: Outcome, command: str) -> str:
    """Return one line: the case, its first problems, how to repeat it, and its arguments."""
    shown = "; ".join(map(str, outcome.problems[:4]))
    more = f"; and {len(outcome.problems) - 4} more" if len(outcome.problems) > 4 else ""
    ran = "+".join(outcome.ran) or "no backend"
    return f"FINDING {case} [{ran}] {shown}{more} | {command} | {outcome.text}"


def work(run: Run, stream: int) -> int:
    """Run the cases of a stream until the time is over; report to stdout in JSON, one line per event."""
    end = time.monotonic() + run.seconds
    for position in count():
        if time.monotonic() >= end:
            return 0
        case = CaseId(run.sizes, run.seed, stream, position)
        _report(begin=str(case))
        outcome = run_case(draw_case(case), run.device)
        finding = finding_line(case, outcome, run.command(case)) if outcome.problems else None
        _report(end=str(case), ran=outcome.ran, refused=outcome.refused, finding=finding)
        if outcome.lost_device:
            return LOST_DEVICE
    return 0


def _report(**event: object) -> None:
    print(json.dumps(event), flush=True)


# ---- in the process that starts workers


class Pool:
    """Workers of one run, each read by a thread; every process has a stream of its own, also a replacement."""

    def __init__(self, run: Run, show: Callable[[str], None], starter: Callable[[Run, int], list[str]]) -> None:
        self.run, self.show, self.starter = run, show, starter
        self.tally = Tally()
        self._end = time.monotonic() + run.seconds
        self._streams = count()
        self._lock = threading.Lock()

    def wait(self) -> Tally:
        """Run all workers until the time is over."""
        threads = [threading.Thread(target=self._keep_working) for _ in range(self.run.jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self.tally

    def _keep_working(self) -> None:
        while (left := self._end - time.monotonic()) > 0:
            with self._lock:
                stream = next(self._streams)
            begun = time.monotonic()
            self._work_once(stream, left)
            if time.monotonic() - begun < 1:  # what cannot start is not started in a loop
                time.sleep(1)

    def _work_once(self, stream: int, seconds: float) -> None:
        """Run one worker to its end, and report the case that it did not finish."""
        run = Run(self.run.seed, self.run.sizes, self.run.device, seconds, 1, self.run.case_seconds)
        with tempfile.TemporaryFile("w+") as errors:
            options: dict[str, Any] = {
                "stdout": subprocess.PIPE,
                "stderr": errors,
                "text": True,
                "cwd": ROOT,
                "env": _environment(),
            }
            with subprocess.Popen(self.starter(run, stream), **options) as process:
                begun = self._read(process)
            status = process.returncode
            if begun is not None or status not in (0, LOST_DEVICE):
                self._died(begun, stream, status, errors)
            elif status == LOST_DEVICE:
                with self._lock:
                    self.tally.lost += 1

    def _read(self, process: subprocess.Popen[str]) -> str | None:
        """Add up the events of a worker; return the case that it has begun and not ended."""
        begun = None
        for event in _events(process, self.run.case_seconds):
            begun = event.get("begin")
            if "end" in event:
                with self._lock:
                    self.tally.add(event)
                    if event["finding"] is not None:
                        self._finding(event["finding"])
        return begun

    def _died(self, case: str | None, stream: int, status: int, errors: IO[str]) -> None:
        errors.seek(0)
        said = " / ".join(errors.read().splitlines()[-6:])[-600:]
        how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        if case is None:
            line = f"FINDING stream {stream} died between cases with {how}: {said}"
        else:
            line = f"FINDING {case} the process died or hung in this case: {how}: {said} | {self.run.command(case)}"
        with self._lock:
            self.tally.lost += 1
            self._finding(line)

    def _finding(self, line: str) -> None:
        self.tally.findings += 1
        self.show(line)


def _events(process: subprocess.Popen[str], patience: float) -> Iterator[dict[str, Any]]:
    """Yield the events that a worker reports; kill it if there is none for so many seconds."""
    assert process.stdout is not None
    while True:
        timer = threading.Timer(patience, process.kill)
        timer.start()
        try:
            line = process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            return
        try:
            yield json.loads(line)
        except json.JSONDecodeError:  # a library has printed something, or the worker died in the middle of a line
            continue


def _environment() -> dict[str, str]:
    """Return the environment of a worker, which imports the packages that this process has imported."""
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(x for x in paths if x), "OMP_NUM_THREADS": "1"}


def start_worker(run: Run, stream: int) -> list[str]:
    """Return the command line of a worker."""
    return [
        *(sys.executable, "-m", "tests.fuzz_attention", "--worker", str(stream)),
        *("--seed", str(run.seed), "--sizes", run.sizes, "--device", run.device, "--seconds", str(run.seconds)),
    ]


def prepare() -> None:
    """Set what results depend on: threads, and exact products in float32."""
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False
