"""Request handling: read the bounded body, await the computation, and cancel it when the client disconnects."""

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
from polyhead.report.viewer.failures import Failure, Refused
from polyhead.report.viewer.jobs import Job, Jobs
from polyhead.report.viewer.questions import Question

JSON = "application/json"
LINES = b"application/x-ndjson"

BODY_SECONDS = 30.0  # an incomplete request would otherwise occupy a slot forever

Value = dict[str, Any]


def as_json(value: Any) -> bytes:
    # ASCII with escapes, so that no character of a text has a special meaning.
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:  # a non-finite number, of a model that computes NaN
        return json.dumps(plain(value), allow_nan=False, separators=(",", ":")).encode()


def answer(value: Any, status: int = 200) -> Response:
    return Response(as_json(value), status, media_type=JSON)


def refuse(failure: Failure) -> Response:
    headers = {"Retry-After": "1"} if failure.status == 429 else {}
    return Response(as_json(failure.to_dict()), failure.status, headers, JSON)


async def read_body(request: Request, most: int) -> bytes:
    """Return the body if it is JSON of at most `most` bytes; never buffer more than that."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != JSON:
        raise Refused(415, "invalid", f"a request must have the content type {JSON}, got {kind[:80]!r}")
    too_large = Refused(413, "too-large", f"a request must have at most {most} bytes, got more")
    length = request.headers.get("content-length", "0")
    if not length.isascii() or not length.isdecimal() or len(length) > 15 or int(length) > most:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most:
                    raise too_large
    except TimeoutError:
        raise Refused(
            408, "slow", f"a request must arrive within {BODY_SECONDS} seconds, got {len(body)} bytes of it"
        ) from None
    return bytes(body)


class Ask:
    """ASGI app of one route. `handle` maps a request to a job, or to an immediate answer."""

    def __init__(
        self, jobs: Jobs, handle: Callable[[Question], Job | Value], *, streams: bool, most_bytes: int
    ) -> None:
        self.jobs, self.handle, self.streams, self.most_bytes = jobs, handle, streams, most_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            with self.jobs.place():
                body = await read_body(request, self.most_bytes)
                result = self.handle(Question.of(body))
                if not isinstance(result, Job):
                    await answer(result)(scope, receive, send)
                    return
                async with _cancelled_on_disconnect(receive, result):
                    await self._respond(result, scope, receive, send)
        except Refused as error:
            await refuse(error.failure)(scope, receive, send)
        except ClientDisconnect:
            return
        except asyncio.CancelledError:
            if not self.jobs.is_closed:
                raise  # otherwise the viewer is closing, and this client is not reading

    async def _respond(self, job: Job, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        async for message in job.messages():
            if isinstance(message, Failure) and not started:
                await refuse(message)(scope, receive, send)
                return
            if not message:
                continue
            if not self.streams:
                await answer(message)(scope, receive, send)
                return
            if not started:
                await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", LINES)]})
                started = True
            line = as_json(message.to_dict() if isinstance(message, Failure) else message) + b"\n"
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
