"""The process in which kernels are interpreted: it imports once, then runs each check in a copy of itself.

A fork is unaffected by what an earlier check left: seeds, mocks, default dtypes, compiled graphs.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import pickle
import pkgutil
import random
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import IO, Any, NamedTuple, NoReturn

TIME_LIMIT = 900.0  # seconds; a check takes a few


class Request(NamedTuple):
    module: str  # module of the check; imported once for all checks of that file
    call: bytes  # the pickled check, its arguments and its options
    environment: dict[str, str]
    seed: int
    time_limit: float


class Answer(NamedTuple):
    exit_code: int  # 0 when the check passed, -signal when it died
    output: str


def call_of(check: Callable[..., object], arguments: tuple[Any, ...], options: dict[str, Any]) -> bytes:
    return pickle.dumps((check, arguments, options))


def _import_what_checks_use() -> None:
    """Import and rewrite every kernel, and other slow modules, before the first fork."""
    import torch  # noqa: F401
    from triton.runtime.interpreter import InterpretedFunction

    import polyhead.ops
    from tests.ops.interpreter import quick_interpreter

    quick_interpreter.install()
    modules = pkgutil.walk_packages(polyhead.ops.__path__, "polyhead.ops.")
    kernels = [module.name for module in modules if ".kernels." in module.name]
    for name in ("hypothesis", "torch._dynamo", "torch._inductor.compile_fx", *kernels):
        # A missing module is reported by the check that needs it.
        with suppress(ImportError):
            module = importlib.import_module(name)
            for member in list(vars(module).values()):
                if isinstance(member, InterpretedFunction):
                    member.rewrite()


def serve(descriptor: int, imports: int) -> None:
    """Answer requests until the other end closes."""
    connection = Connection(descriptor)
    if imports:
        _import_what_checks_use()
    while True:
        try:
            request: Request = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        connection.send_bytes(pickle.dumps(_answer(request, connection)))


def _answer(request: Request, connection: Connection) -> Answer:
    try:
        importlib.import_module(request.module)
    except Exception:  # noqa: BLE001 - whoever asked is told
        return Answer(1, traceback.format_exc())
    gc.freeze()
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if child == 0:
            connection.close()
            _run(request, output)
        _, status = os.waitpid(child, 0)
        output.seek(0)
        return Answer(os.waitstatus_to_exitcode(status), output.read().decode(errors="replace"))


def _run(request: Request, output: IO[bytes]) -> NoReturn:
    """Run the check in this fork and exit; crashes and timeouts leave a traceback too."""
    exit_code = 1
    try:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        faulthandler.enable()
        faulthandler.dump_traceback_later(request.time_limit, exit=True)
        os.environ.clear()
        os.environ.update(request.environment)
        random.seed(request.seed)
        if torch := sys.modules.get("torch"):
            torch.manual_seed(request.seed)
            sys.modules["numpy"].random.seed(request.seed)
        check, arguments, options = pickle.loads(request.call)
        check(*arguments, **options)
        exit_code = 0
    except BaseException:  # noqa: BLE001 - whoever asked is told
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
