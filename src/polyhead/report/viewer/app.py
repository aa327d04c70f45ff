"""Routes of the viewer: the page, its assets and the JSON API; `viewing` computes the answers."""

from __future__ import annotations

import html
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from polyhead.inspection.vocabulary import Language
from polyhead.report.page import Assets, policy_of
from polyhead.report.training_page import training_html
from polyhead.report.viewer.endpoint import Endpoint, error_response, json_response
from polyhead.report.viewer.failures import RequestError, request_error
from polyhead.report.viewer.guard import Guard
from polyhead.report.viewer.handlers import RequestHandlers
from polyhead.report.viewer.jobs import BACKGROUND, INTERACTIVE, Jobs, logger
from polyhead.report.viewer.request_fields import TEXT_BYTES
from polyhead.report.viewer.state import state_of
from polyhead.report.viewer.viewing import Viewer
from polyhead.training import load_run

ASSETS = Path(__file__).parents[1] / "assets"
FILES = {"view.js": "text/javascript", "view.css": "text/css"}  # the only files that are served
QUEUE = 64
REQUEST_BYTES = 64 << 10
# POST routes, each with a handler of the same name.
_ROUTES = {
    INTERACTIVE: ("trace", "retrace", "close", "step", "undo", "effect", "compare", "word", "tile", "window"),
    BACKGROUND: ("heads", "picture", "distance"),
}

_SHELL = """<!doctype html>
<html lang="{lang}">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="view.css">
<script src="view.js" defer></script>
</head>
<body>
<div id="polyhead-view" data-lang="{lang}"></div>
<noscript>This page needs JavaScript.</noscript>
</body>
</html>
"""


def create_app(viewer: Viewer, *, token: str, assets: Path = ASSETS, jobs: Jobs | None = None) -> ASGIApp:
    """Return the viewer as an ASGI application at `/TOKEN/`; `jobs` runs its computations."""
    jobs = Jobs(QUEUE, on_out_of_memory=viewer.forget) if jobs is None else jobs
    handlers = RequestHandlers(viewer)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        jobs.close()

    async def shell(request: Request) -> Response:
        title = html.escape(f"{viewer.model.loaded.name} · polyhead")
        return Response(_SHELL.format(lang=html.escape(viewer.lang), title=title), media_type="text/html")

    async def asset(request: Request) -> Response:
        name = request.url.path.rpartition("/")[2]
        path = assets / name
        if name not in FILES or not path.is_file():
            return error_response(RequestError(404, "unknown", f"{name} not found; build it with: make frontend"))
        return Response(path.read_bytes(), media_type=FILES[name])

    async def state(request: Request) -> Response:
        return json_response(state_of(viewer))

    async def run(request: Request) -> Response:
        if viewer.run is None:
            message = "The viewer was opened on a model, not on a run of inspect."
            return error_response(RequestError(404, "unknown", message))
        return json_response(dict(viewer.run))

    def endpoint(name: str, priority: int) -> Route:
        max_bytes = TEXT_BYTES if name == "trace" else REQUEST_BYTES
        app = Endpoint(jobs, getattr(handlers, name), priority=priority, max_bytes=max_bytes)
        return Route(f"/api/{name}", app, methods=["POST"])

    app = Starlette(
        routes=[
            Route("/", shell),
            *(Route(f"/{name}", asset) for name in FILES),
            Route("/api/state", state),
            Route("/api/run", run),
            *(endpoint(name, priority) for priority, names in _ROUTES.items() for name in names),
        ],
        exception_handlers={HTTPException: _unknown, 500: _failed},
        lifespan=lifespan,
    )
    return Guard(app, token=token)


def create_run_app(folder: Path, *, token: str, language: Language = "en") -> ASGIApp:
    """Return the page of a training run as an ASGI application at `/TOKEN/`; each request reads the run again."""

    def page(request: Request) -> Response:  # in a thread, since it is not async
        html = training_html(load_run(folder), folder.resolve().name, language=language)
        return Response(html, media_type="text/html")

    app = Starlette(routes=[Route("/", page)], exception_handlers={HTTPException: _unknown, 500: _failed})
    return Guard(app, token=token, policy=policy_of(Assets.load(name="plan")))


async def _unknown(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    message = f"The viewer has no such address: {request.method} {request.url.path[:200]}"
    return error_response(RequestError(status, "unknown", message))


async def _failed(request: Request, error: Exception) -> Response:
    logger.error("a request to the viewer failed", exc_info=error)
    return error_response(request_error(error))
