"""Routes of the viewer: the page, its assets and the JSON API; `viewing` computes the answers."""

from __future__ import annotations

import html
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from polyhead.report.viewer.answering import Ask, Value, answer, refuse
from polyhead.report.viewer.asking import TEXT_BYTES, RequestHandlers
from polyhead.report.viewer.failures import Failure, failure_of
from polyhead.report.viewer.guard import Guard, content_security_policy
from polyhead.report.viewer.jobs import Job, Jobs, logger
from polyhead.report.viewer.questions import Question
from polyhead.report.viewer.state import state_of
from polyhead.report.viewer.viewing import Viewer

ASSETS = Path(__file__).parents[1] / "assets"
FILES = {"view.js": "text/javascript", "view.css": "text/css"}  # the only files that are served
QUEUE = 64
QUESTION_BYTES = 64 << 10

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


def create_app(
    viewer: Viewer, *, token: str, assets: Path = ASSETS, queue: int = QUEUE, jobs: Jobs | None = None
) -> ASGIApp:
    """Return the viewer as an ASGI application at `/TOKEN/`; `jobs` runs its computations."""
    jobs = Jobs(queue, on_memory=viewer.forget) if jobs is None else jobs
    questions = RequestHandlers(viewer, jobs)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        jobs.close()

    async def shell(request: Request) -> Response:
        title = html.escape(f"{viewer.model.loaded.name} · polyhead")
        page = _SHELL.format(lang=html.escape(viewer.lang), title=title)
        return Response(page, media_type="text/html")

    async def asset(request: Request) -> Response:
        name = request.url.path.rpartition("/")[2]
        path = assets / name
        if name not in FILES or not path.is_file():
            return refuse(Failure(404, "unknown", f"{name} not found; build it with: make frontend"))
        return Response(path.read_bytes(), media_type=FILES[name])

    async def state(request: Request) -> Response:
        return answer(state_of(viewer, text_bytes=TEXT_BYTES, queue=queue))

    async def run(request: Request) -> Response:
        if viewer.run is None:
            return refuse(Failure(404, "unknown", "The viewer was opened on a model, not on a run of inspect."))
        return answer(dict(viewer.run))

    async def unknown(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        return refuse(
            Failure(status, "unknown", f"The viewer has no such address: {request.method} {request.url.path[:200]}")
        )

    async def failed(request: Request, error: Exception) -> Response:
        logger.error("a request to the viewer failed", exc_info=error)
        return refuse(failure_of(error))

    def ask(
        path: str, handle: Callable[[Question], Job | Value], *, streams: bool, bytes_: int = QUESTION_BYTES
    ) -> Route:
        return Route(path, Ask(jobs, handle, streams=streams, most_bytes=bytes_), methods=["POST"])

    app = Starlette(
        routes=[
            Route("/", shell),
            *(Route(f"/{name}", asset) for name in FILES),
            Route("/api/state", state),
            Route("/api/run", run),
            ask("/api/read", questions.read, streams=True, bytes_=TEXT_BYTES),
            ask("/api/again", questions.again, streams=True),
            ask("/api/close", questions.close, streams=True),
            ask("/api/step", questions.step, streams=True),
            ask("/api/back", questions.back, streams=True),
            ask("/api/heads", questions.heads, streams=True),
            ask("/api/word", questions.word, streams=True),
            ask("/api/picture", questions.picture, streams=True),
            ask("/api/effect", questions.effect, streams=True),
            ask("/api/tile", questions.tile, streams=False),
            ask("/api/window", questions.window, streams=False),
            ask("/api/distance", questions.distance, streams=True),
            ask("/api/compare", questions.compare, streams=False),
            ask("/api/cancel", questions.cancel, streams=False),
        ],
        exception_handlers={HTTPException: unknown, 500: failed},
        lifespan=lifespan,
    )
    return Guard(app, token=token, policy=content_security_policy(_style_hashes(assets)))


def _style_hashes(assets: Path) -> tuple[str, ...]:
    """Return the hashes of styles that the charting library adds at run time, as listed by the build."""
    path = assets / "csp.json"
    hashes: Any = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return tuple(str(x).strip("'") for x in hashes.get("styles", ()))
