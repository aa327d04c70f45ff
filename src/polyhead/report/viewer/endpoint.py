"""Request handling: read the bounded body, stream the messages of a computation, and cancel it on a disconnect."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from polyhead.report.packing import plain
from polyhead.report.viewer.failures import RequestError
from polyhead.report.viewer.jobs import Job, Jobs, Message, Work
from polyhead.report.viewer.request_fields import RequestFields

JSON = "application/json"
JSON_LINES = b"application/x-ndjson"

BODY_SECONDS = 30.0  # an incomplete request would otherwise occupy a slot forever


def as_json(value: Any) -> bytes:
    # ASCII with escapes, so that texts may contain lone surrogates and separators such as U+2028.
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:  # a non-finite number, of a model that computes NaN
        return json.dumps(plain(value), allow_nan=False, separators=(",", ":")).encode()


def json_response(value: Any) -> Response:
    return Response(as_json(value), media_type=JSON)


def error_response(error: RequestError) -> Response:
    headers = {"Retry-After": "1"} if error.status == 429 else {}
    return Response(as_json(error.to_dict()), error.status, headers, JSON)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Return the body if it is JSON of at most `max_bytes`; never buffer more than that."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != JSON:
        raise RequestError(415, "invalid", f"a request must have the content type {JSON}, got {kind[:80]!r}")
    too_large = RequestError(413, "too-large", f"a request must have at most {max_bytes} bytes, got more")
    length = request.headers.get("content-length", "0")
    if not length.isascii() or not length.isdecimal():
        raise RequestError(400, "invalid", f"Content-Length must be a number of bytes, got {length[:80]!r}")
    if len(length) > 15 or int(length) > max_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise too_large
    except TimeoutError:
        raise RequestError(
            408, "slow", f"a request must arrive within {BODY_SECONDS} seconds, got {len(body)} bytes of it"
        ) from None
    return bytes(body)


class Endpoint:
    """ASGI app of one route. `handle` maps the fields of a request to a computation, or to an immediate answer."""

    def __init__(
        self, jobs: Jobs, handle: Callable[[RequestFields], Work | Message], *, priority: int, max_bytes: int
    ) -> None:
        self.jobs, self.handle, self.priority, self.max_bytes = jobs, handle, priority, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            with self.jobs.slot():
                fields = RequestFields.parse(await read_body(request, self.max_bytes))
                work = self.handle(fields)
                fields.end()
                if isinstance(work, dict):
                    await json_response(work)(scope, receive, send)
                    return
                job = self.jobs.submit(work, priority=self.priority)
                async with _cancelled_on_disconnect(receive, job):
                    await self._respond(job, scope, receive, send)
        except RequestError as error:
            await error_response(error)(scope, receive, send)
        except ClientDisconnect:
            return
        except asyncio.CancelledError:
            if not self.jobs.is_closed:
                raise  # otherwise the viewer is closing, and this client is not reading

    async def _respond(self, job: Job, scope: Scope, receive: Receive, send: Send) -> None:
        """Send one line per message; an error before the first line is an error response."""
        started = False
        async for message in job.messages():
            if isinstance(message, RequestError) and not started:
                raise message
            if not message:  # a pause, which lets another job run
                continue
            if not started:
                await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", JSON_LINES)]})
                started = True
            line = as_json(message.to_dict() if isinstance(message, RequestError) else message) + b"\n"
            await send({"type": "http.response.body", "body": line, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@asynccontextmanager
async def _cancelled_on_disconnect(receive: Receive, job: Job) -> AsyncIterator[None]:
    """Cancel the job when the client disconnects or the block ends."""

    async def watch() -> None:
        # The body has been read, so that only a disconnect can still arrive.
        while (await receive())["type"] != "http.disconnect":
            await asyncio.sleep(0)
        job.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        job.cancel()
        watcher.cancel()
        with suppress(asyncio.CancelledError):
            await watcher
