"""Shared by the kernel tests: checks in Triton's interpreter, and fresh memory without zeros."""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.ops.interpreter.interpreter import TIME_LIMIT, Answer, Request, call_of

ROOT = Path(__file__).resolve().parents[3]


def in_the_interpreter(check: Callable[..., object], /, *arguments: Any, **options: Any) -> None:
    """Run a module-level check in the interpreter process; it fails with its traceback.

    It runs in another process, because Triton reads its settings on import.
    """
    pytest.importorskip("triton")
    call, seed = call_of(check, arguments, options), torch.initial_seed()
    request = Request(check.__module__, call, _environment(), seed, TIME_LIMIT)
    answer = _interpreter.ask(request)
    if answer.exit_code:
        pytest.fail(f"{check.__name__} in the interpreter, exit code {answer.exit_code}:\n{answer.output}")


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    # A process that has started threads cannot be copied safely, so nothing that it imports may start any.
    # Nor may it use a GPU, which its forks could not.
    alone = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **alone, "TRITON_INTERPRET": "1", "PYTHONPATH": path}


class Interpreter:
    """Process that runs all checks, started on first use and replaced if it has died.

    `imports`: import the kernels first, which takes seconds and is only worth it before many checks.
    """

    def __init__(self, *, imports: bool = True) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._imports = imports

    def ask(self, request: Request) -> Answer:
        process = self._process or self._start()
        try:
            self._connection.send_bytes(pickle.dumps(request))
            return pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            exit_code = process.wait()
            self._log.seek(0)
            told = self._log.read().decode()
            self.close()
            return Answer(exit_code or 1, f"the interpreter's process ended:\n{told}")
        except BaseException:
            # A late answer would be mistaken for that of the next request.
            self.close()
            raise

    def _start(self) -> subprocess.Popen[bytes]:
        self._connection, theirs = Pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        code = "import sys; from tests.ops.interpreter.interpreter import serve; serve(*map(int, sys.argv[1:]))"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code, str(theirs.fileno()), str(int(self._imports))],
                cwd=ROOT,
                env=_environment(),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self._process

    def close(self) -> None:
        """End the process and any check that it is running."""
        if self._process is not None:
            process, self._process = self._process, None
            self._connection.close()
            self._log.close()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


_interpreter = Interpreter()
atexit.register(_interpreter.close)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill fresh tensors with NaN, or -77 for integers, so that missing writes show."""

    def poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def fresh(*sizes: object, **options: object) -> Tensor:
            tensor = make(*sizes, **options)
            if tensor.device.type == "meta":
                return tensor
            return tensor.fill_(torch.nan if tensor.is_floating_point() else -77)

        return fresh

    if torch.cuda.is_available():
        # Dynamo makes a table of torch's functions when it is imported, which must not be one of these: to what the
        # same process compiles later the true ones would be strangers. Without a GPU no process does both.
        from torch._dynamo.trace_rules import get_torch_obj_rule_map

        get_torch_obj_rule_map()
    with (
        mock.patch.object(torch, "empty", poisoned(torch.empty)),
        mock.patch.object(torch, "empty_like", poisoned(torch.empty_like)),
        mock.patch.object(Tensor, "new_empty", poisoned(Tensor.new_empty)),
    ):
        yield
