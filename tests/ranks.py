"""Processes that run functions of the tests as the ranks of a gloo group, kept from one test to the next."""

from __future__ import annotations

import datetime
import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception that a rank raised; without a trace, that it did not answer."""

    error: str  # name of the exception's class
    message: str
    trace: str = ""


class RanksError(AssertionError):
    """A rank failed, with the traceback of each that did."""


class Ranks:
    """Up to four processes that import polyhead once and form a new gloo group for each function.

    A function belongs to a module of the tests, takes picklable arguments and returns a picklable value. In it
    `torch.distributed` is initialised with the requested number of ranks.
    """

    def __init__(self) -> None:
        self._processes: list[tuple[subprocess.Popen[bytes], Connection]] = []

    def run(self, function: Callable[..., Any], *arguments: Any, world: int = 4, seconds: float = 300) -> list[Any]:
        """Return the results of all ranks; raises `RanksError` if one fails.

        Args:
            function: called by each rank with the arguments.
            arguments: arguments of the function.
            world: number of ranks.
            seconds: time limit; what still runs then is killed.
        """
        outcomes = self.outcomes(function, *arguments, world=world, seconds=seconds)
        failed = {rank: outcome for rank, outcome in enumerate(outcomes) if isinstance(outcome, Failure)}
        if failed:
            parts = (f"rank {rank}: {x.error}: {x.message}\n{x.trace}" for rank, x in failed.items())
            raise RanksError("\n".join(parts))
        return outcomes

    def outcomes(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        world: int = 4,
        seconds: float = 300,
        collective_seconds: float = 30,
    ) -> list[Any]:
        """Return the result or the `Failure` of each rank.

        Args:
            function, arguments, world, seconds: those of `run`.
            collective_seconds: time limit of each collective.
        """
        while len(self._processes) < world:
            self._processes.append(_start())
        processes = self._processes[:world]
        with tempfile.TemporaryDirectory(prefix="polyhead-ranks.") as folder:
            for rank, (_, connection) in enumerate(processes):
                group = (os.path.join(folder, "store"), rank, world, collective_seconds)
                connection.send_bytes(pickle.dumps((group, function, arguments)))
            outcomes, stop = [], time.monotonic() + seconds
            for process, connection in processes:
                outcomes.append(_received(process, connection, stop))
        if any(isinstance(outcome, Failure) and not outcome.trace for outcome in outcomes):
            self.close()  # a rank did not answer
        return outcomes

    def close(self) -> None:
        """End all processes; the next function starts others."""
        for process, connection in self._processes:
            connection.close()
            process.kill()
            process.wait()
        self._processes.clear()


def _start() -> tuple[subprocess.Popen[bytes], Connection]:
    ours, theirs = Pipe()
    with theirs:
        paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        descriptor = theirs.fileno()
        process = subprocess.Popen(
            [sys.executable, "-c", f"from tests.ranks import serve; serve({descriptor})"],
            cwd=ROOT,
            env=environment,
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
        )
    return process, ours


def _received(process: subprocess.Popen[bytes], connection: Connection, stop: float) -> Any:
    try:
        if connection.poll(max(stop - time.monotonic(), 0)):
            return pickle.loads(connection.recv_bytes())
    except (EOFError, ConnectionError):
        return Failure("ProcessEnded", f"exit status {process.wait()}")
    return Failure("TimeoutError", "the rank did not finish in time")


def serve(descriptor: int) -> None:
    """Run the functions that arrive, as a rank of the group that comes with each, until the other end is closed.

    Args:
        descriptor: file descriptor of the connection.
    """
    import torch
    import torch.distributed as dist

    connection = Connection(descriptor)
    torch.set_num_threads(1)
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            return
        try:
            (path, rank, world, seconds), function, arguments = pickle.loads(request)
            store = dist.FileStore(path, world)  # type: ignore[attr-defined]
            # Others may still be importing, for longer than a collective may take.
            store.set(f"rank {rank}", "ready")
            store.wait([f"rank {other}" for other in range(world)], datetime.timedelta(seconds=300))
            limit = datetime.timedelta(seconds=seconds)
            store.set_timeout(limit)  # `init_process_group` does so for the stores that it creates
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
            try:
                dist.barrier()  # a rank that ends without a collective would close connections that others still open
                torch.manual_seed(0)
                outcome = function(*arguments)
            finally:
                dist.destroy_process_group()
            answer = pickle.dumps(outcome)
        except Exception as error:  # noqa: BLE001 - whatever a test raises is its result
            answer = pickle.dumps(Failure(type(error).__name__, str(error), traceback.format_exc()))
        connection.send_bytes(answer)
