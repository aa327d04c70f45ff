"""Runs each model in a process of its own, forked from one that has imported everything, within limits."""

from __future__ import annotations

import json
import os
import resource
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
SECONDS, BYTES = 120, 6 << 30


def forked(
    tasks: Iterable[T], work: Callable[[T], dict[str, Any]], *, jobs: int, seconds: int = SECONDS, limit: int = BYTES
) -> Iterator[tuple[T, dict[str, Any]]]:
    """Yield each task and what `work` returns for it, in the order in which they finish.

    A process that takes too long, needs too much memory, raises or dies yields a refusal with the reason.

    Args:
        tasks: what to work on.
        work: called in a process of its own; its result is JSON.
        jobs: number of processes at a time.
        seconds: CPU time of each.
        limit: bytes of data of each.
    """
    running: dict[int, tuple[T, Path, float]] = {}
    pending = iter(tasks)
    with tempfile.TemporaryDirectory() as folder:
        exhausted = False
        while running or not exhausted:
            while not exhausted and len(running) < jobs:
                task = next(pending, None)
                if task is None:
                    exhausted = True
                    break
                path = Path(folder) / str(time.monotonic_ns())
                process = os.fork()
                if not process:
                    _child(task, work, path, seconds, limit)
                running[process] = (task, path, time.monotonic())
            if not running:
                continue
            process, status = os.waitpid(-1, os.WNOHANG)
            if process in running:
                task, path, _ = running.pop(process)
                yield task, _result(path, status, seconds)
                continue
            for process, (_, _, start) in running.items():
                if time.monotonic() - start > 10 * seconds:
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.02)


def _child(task: T, work: Callable[[T], dict[str, Any]], path: Path, seconds: int, limit: int) -> None:
    """Work on one task, write its result and end the process."""
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 2))
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        try:
            result = work(task)
        except MemoryError:
            result = _failed(f"needs more than {limit >> 30} GiB")
        except BaseException as error:  # noqa: BLE001 - whatever it is, the other models go on
            result = _failed(f"{type(error).__name__}: {error}")
        path.write_text(json.dumps(result), encoding="utf-8")
    finally:
        os._exit(0)


def _failed(reason: str) -> dict[str, Any]:
    return {"verdict": "refused", "built": False, "reason": reason}


def _result(path: Path, status: int, seconds: int) -> dict[str, Any]:
    if path.exists():
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return result
    ended = os.waitstatus_to_exitcode(status)
    if ended == -signal.SIGXCPU:
        return _failed(f"takes more than {seconds} s of CPU time")
    return _failed(f"its process ended with {ended}")
