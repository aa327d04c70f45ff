"""Forks of this process, in which nothing is imported again: the command line, as signals reach it, and bystanders."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import torch

PATIENCE = 240.0  # seconds; nothing here takes more than a few


class Forked:
    """`polyhead ARGUMENTS` in a child that computes with one thread; what it writes is read when it has ended.

    `before` is called in the child, before the command.
    """

    def __init__(self, arguments: Sequence[object], before: Callable[[], object] = lambda: None) -> None:
        self._files = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115 - closed by `end`
        self.returncode: int | None = None
        self.pid = os.fork()
        if not self.pid:
            self._run([str(x) for x in arguments], before)

    def _run(self, arguments: list[str], before: Callable[[], object]) -> None:
        code = 1
        try:
            for number, file in zip((1, 2), self._files, strict=True):
                os.dup2(file.fileno(), number)
            sys.stdout, sys.stderr = (os.fdopen(os.dup(number), "w", encoding="utf-8") for number in (1, 2))
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.environ.update(COLUMNS="250", NO_COLOR="1")
            torch.set_num_threads(1)  # the threads of the parent are not here
            before()
            from polyhead.cli import main

            sys.argv = ["polyhead", *arguments]
            main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:  # noqa: BLE001 - read by the parent
            traceback.print_exc()
        finally:
            threading._shutdown()  # threads that still run are waited for, as at the end of any process
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def printed(self) -> str:
        """Return the text written to stdout so far."""
        return os.pread(self._files[0].fileno(), 1 << 20, 0).decode()

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait_for(self, done: Callable[[], bool]) -> Self:
        """Wait until something has happened, or the command has ended."""
        until = time.monotonic() + PATIENCE
        while not done() and self.poll() is None and time.monotonic() < until:
            time.sleep(0.001)
        return self

    def end(self, sent: signal.Signals | None = None) -> tuple[str, str]:
        """Send a signal, wait for the end, and return what was written to stdout and stderr."""
        if sent is not None and self.poll() is None:
            os.kill(self.pid, sent)
        self.wait_for(lambda: False)
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait_for(lambda: False)
        written = []
        for file in self._files:
            file.seek(0)
            written.append(file.read().decode())
            file.close()
        return written[0], written[1]


def stopped_when(exists: Path, sent: signal.Signals, arguments: Sequence[object]) -> tuple[int | None, str, str]:
    """Send a signal to a command once a file exists: its exit code, stdout and stderr."""
    command = Forked(arguments).wait_for(exists.exists)
    out, said = command.end(sent)
    return command.returncode, out, said


class Bystander:
    """A fork that has nothing but what this process had when it was made: "another process", without its imports.

    Make it before whatever it must not know.
    """

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        self._process = get_context("fork").Process(target=_stand_by, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def run(self, function: Callable[..., Any], *arguments: object) -> Any:
        """The result of a function at the top of its module, called there; or a failure with its traceback."""
        self._connection.send((function, arguments))
        found, failed = self._connection.recv()
        assert failed is None, failed
        return found

    def end(self) -> None:
        self._process.kill()  # it would wait on: other forks hold this end of the connection as well
        self._process.join()
        self._connection.close()


def _stand_by(connection: Connection) -> None:
    torch.set_num_threads(1)  # the threads of the parent are not here
    while True:
        function, arguments = connection.recv()
        try:
            connection.send((function(*arguments), None))
        except Exception:  # noqa: BLE001 - read by the parent
            connection.send((None, traceback.format_exc()))
