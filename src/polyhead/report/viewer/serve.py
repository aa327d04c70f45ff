"""`serve`: run the viewer on a loopback port, at an address with a secret token, until interrupted."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from polyhead.errors import OptionError
from polyhead.inspection.vocabulary import Language
from polyhead.report.viewer.viewing import Viewer

if TYPE_CHECKING:
    from starlette.types import ASGIApp

HOST = "127.0.0.1"


def check_installed() -> None:
    """Raise an OptionError if the packages of the server are not installed."""
    missing = [package for package in ("starlette", "uvicorn") if find_spec(package) is None]
    if missing:
        raise OptionError(f"the viewer needs {' and '.join(missing)}; install with: pip install 'polyhead[report]'")


def serve(
    viewer: Viewer,
    *,
    port: int = 0,
    ready: Callable[[str], None] = lambda address: None,
    assets: Path | None = None,
) -> bool:
    """Serve until an interrupt (Ctrl-C); `ready` is called with the address once it can be opened.

    Returns whether the model is still running: a layer cannot be cancelled, only the end of the process stops it.
    """
    check_installed()
    from polyhead.report.viewer.app import ASSETS, FILES, QUEUE, create_app
    from polyhead.report.viewer.jobs import Jobs

    assets = ASSETS if assets is None else assets
    absent = [name for name in FILES if not (assets / name).is_file()]
    if absent:
        raise OptionError(
            f"the viewer needs the built assets {' and '.join(FILES)}, got {assets} without {absent[0]}; "
            "in a checkout, build them with: make frontend"
        )
    token = secrets.token_urlsafe(24)
    listening = _listen(port)
    jobs = Jobs(QUEUE, on_out_of_memory=viewer.forget)
    _serve(create_app(viewer, token=token, assets=assets, jobs=jobs), token, listening, ready, jobs.cancel_all)
    return jobs.is_computing


def serve_run(
    folder: Path, *, language: Language = "en", port: int = 0, ready: Callable[[str], None] = lambda address: None
) -> None:
    """Serve the page of a training run until an interrupt (Ctrl-C), with the steps that it has when it is loaded."""
    check_installed()
    from polyhead.report.viewer.app import create_run_app
    from polyhead.training import load_run

    load_run(folder)  # raises before anything is served
    token = secrets.token_urlsafe(24)
    _serve(create_run_app(folder, token=token, language=language), token, _listen(port), ready)


def _serve(
    app: ASGIApp,
    token: str,
    listening: socket.socket,
    ready: Callable[[str], None],
    cancel: Callable[[], None] = lambda: None,
) -> None:
    import uvicorn

    from polyhead.report.viewer.connections import BoundedProtocol

    address = f"http://{HOST}:{listening.getsockname()[1]}/{token}/"

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if not self.should_exit:
                ready(address)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            cancel()  # otherwise shutdown waits for long-running requests
            await super().shutdown(sockets)

    config = uvicorn.Config(
        app,
        http=BoundedProtocol,
        lifespan="on",
        log_level="warning",
        access_log=False,  # it would contain the token
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=1,
        h11_max_incomplete_event_size=64 << 10,
    )
    try:
        Server(config).run(sockets=[listening])
    except KeyboardInterrupt:
        pass  # uvicorn has shut down, and raises the interrupt again
    finally:
        listening.close()
        cancel()


def _listen(port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise OptionError(f"port must be from 1 to 65535, or 0 for any free port, got {port}")
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((HOST, port))
    except OSError as error:
        listening.close()
        raise OptionError(f"the port must be free, got {port}: {error.strerror}; 0 takes any free port") from error
    return listening
