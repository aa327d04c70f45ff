"""Processes that run functions of the tests as the ranks of a gloo group, kept from one test to the next."""

from __future__ import annotations

import datetime
import gc
import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# What functions of the tests use, imported once for all ranks.
IMPORTS = (
    "polyhead.exports",
    "polyhead.inspection.exports",
    "polyhead.layers.transformer",
    "polyhead.parallel.exports",
    "polyhead.surgery.exports",
    "polyhead.training.exports",
    "polyhead.training.trainer_callbacks",
    "polyhead.workflows.sharded_inspecting",
    "pytest",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "pandas",  # imported by the first table that PyArrow makes
    "pyarrow.parquet",
    "transformers.models.bert.modeling_bert",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
)


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception that a rank raised; without a trace, that it did not answer."""

    error: str  # name of the exception's class
    message: str
    trace: str = ""


class RanksError(AssertionError):
    """A rank failed, with the traceback of each that did."""


class Ranks:
    """Up to four forks of a process that has imported polyhead, which form a new gloo group for each function.

    A function belongs to a module of the tests, takes picklable arguments and returns a picklable value. In it
    `torch.distributed` is initialised with the requested number of ranks.
    """

    def __init__(self) -> None:
        self._template: _Template | None = None
        self._processes: list[tuple[int, Connection]] = []

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
        if self._template is None:
            self._template = _Template()
        template = self._template
        while len(self._processes) < world:
            self._processes.append(template.fork())
        processes = self._processes[:world]
        with tempfile.TemporaryDirectory(prefix="polyhead-ranks.") as folder:
            for rank, (_, connection) in enumerate(processes):
                group = (os.path.join(folder, "store"), rank, world, collective_seconds)
                connection.send_bytes(pickle.dumps((group, function, arguments)))
            outcomes, stop = [], time.monotonic() + seconds
            for process, connection in processes:
                outcomes.append(_received(template, process, connection, stop))
        if any(isinstance(outcome, Failure) and not outcome.trace for outcome in outcomes):
            self._end_ranks(template)  # one did not answer
        return outcomes

    def close(self) -> None:
        """End all processes; the next function starts others."""
        if self._template is not None:
            self._end_ranks(self._template)
            self._template.close()
            self._template = None

    def _end_ranks(self, template: _Template) -> None:
        for process, connection in self._processes:
            connection.close()
            template.end(process)
        self._processes.clear()


class _Template:
    """The process that imports, and of which the ranks are forks."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        self._statuses: dict[int, int] = {}
        with theirs:
            paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
            # A process that has started threads cannot be copied safely, so nothing that it imports may start any.
            alone = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from tests.ranks import fork_ranks; fork_ranks({theirs.fileno()})"],
                cwd=ROOT,
                env={**os.environ, **alone, "PYTHONPATH": paths},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )

    def fork(self) -> tuple[int, Connection]:
        """Return the number of a new process that serves as a rank, and the connection to it."""
        ours, theirs = Pipe()
        with theirs:
            self._connection.send(None)
            send_handle(self._connection, theirs.fileno(), self._process.pid)
            return self._connection.recv(), ours

    def end(self, process: int) -> int:
        """Kill a rank, if it has not ended by itself, and return its exit status."""
        if process not in self._statuses:
            self._connection.send(process)
            self._statuses[process] = self._connection.recv()
        return self._statuses[process]

    def close(self) -> None:
        self._connection.close()
        self._process.wait()


def _received(template: _Template, process: int, connection: Connection, stop: float) -> Any:
    try:
        if connection.poll(max(stop - time.monotonic(), 0)):
            return pickle.loads(connection.recv_bytes())
    except (EOFError, ConnectionError):
        return Failure("ProcessEnded", f"exit status {template.end(process)}")
    return Failure("TimeoutError", "the rank did not finish in time")


def fork_ranks(descriptor: int) -> None:
    """Import, then start and end the ranks that are requested, until the other end is closed.

    Args:
        descriptor: file descriptor of the connection.
    """
    connection = Connection(descriptor)
    for name in IMPORTS:
        with suppress(ImportError):  # whatever is missing is reported by the function that needs it
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # collections of the ranks would write to, and so copy, all that they share
    while True:
        try:
            process = connection.recv()
        except EOFError:
            return
        if process is None:
            rank = recv_handle(connection)
            process = os.fork()
            if not process:
                connection.close()
                serve(rank)
                os._exit(0)
            os.close(rank)
            connection.send(process)
        else:
            # One that has ended stays until it is waited for, so that its number is nobody else's.
            ended, status = os.waitpid(process, os.WNOHANG)
            if not ended:
                os.kill(process, signal.SIGKILL)
                _, status = os.waitpid(process, 0)
            connection.send(os.waitstatus_to_exitcode(status))


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
