"""Job queue of the viewer: bounded, with one worker thread and cancellation.

A computation is a generator of messages. Between two messages the worker reschedules: interactive jobs run before the
next part of a background job, cancelled jobs are closed, and jobs whose client does not read are suspended.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from polyhead.out_of_memory import is_out_of_memory
from polyhead.report.viewer.failures import RequestError, busy, cancelled, closing, request_error

logger = logging.getLogger("polyhead.view")

Message = dict[str, Any]
Work = Callable[["Job"], Iterator[Message]]

INTERACTIVE, BACKGROUND = 0, 1  # interactive jobs run between the parts of background jobs
UNREAD_MESSAGES = 8  # unread messages after which a job is suspended
CLOSE_SECONDS = 1.0  # for the current layer to finish when the viewer is closed
UNREAD_SECONDS = 30.0  # without a read, after which the client of a suspended job is considered gone


class Job:
    """A running or queued computation; the worker sends its messages, one client reads them."""

    def __init__(
        self, work: Work, loop: asyncio.AbstractEventLoop, priority: int, wake_worker: Callable[[], None]
    ) -> None:
        self.priority = priority
        self.order = 0  # lowest first: the job that has waited longest
        self.last_read = time.monotonic()  # when its client last read a message, or the job was created
        self.finished = False
        self.cancelled = threading.Event()
        self._work = work
        self._parts: Iterator[Message] | None = None
        self._loop = loop
        self._arrived = asyncio.Event()
        self._outbox: deque[Message | RequestError | None] = deque()
        self._wake_worker = wake_worker

    # ---- for the worker

    def check(self) -> None:
        """Raise if the job was cancelled."""
        if self.cancelled.is_set():
            raise cancelled()

    def send(self, message: Message | RequestError | None) -> None:
        """Send a message to the client, from any thread; None ends the job."""
        self._outbox.append(message)
        try:
            self._loop.call_soon_threadsafe(self._arrived.set)
        except RuntimeError:  # the event loop is closed
            self.cancelled.set()

    @property
    def is_suspended(self) -> bool:
        """True while `UNREAD_MESSAGES` or more messages are unread."""
        return len(self._outbox) >= UNREAD_MESSAGES

    def advance(self) -> bool:
        """Compute and send the next message, or what ends the job; return False if memory ran out."""
        try:
            self.check()
            if self._parts is None:
                self._parts = iter(self._work(self))
            message = next(self._parts, None)
            self.check()
        except Exception as error:  # no error of a computation may stop the viewer
            reported = request_error(error)
            if reported.status == 500:
                logger.exception("a computation of the viewer failed")
            self._end(reported)
            return not is_out_of_memory(error)
        self.send(message)
        self.finished = message is None
        return True

    def _end(self, error: RequestError) -> None:
        close = getattr(self._parts, "close", None)
        if close is not None:
            close()
        self._parts = None
        self.finished = True
        self.send(error)

    # ---- for the client

    def cancel(self) -> None:
        """Cancel the job."""
        self.cancelled.set()
        self._wake_worker()

    async def messages(self) -> AsyncIterator[Message | RequestError]:
        """Yield the messages until the end; an error is the last."""
        while True:
            while not self._outbox:
                self._arrived.clear()
                if not self._outbox:
                    await self._arrived.wait()
            message = self._outbox.popleft()
            self.last_read = time.monotonic()
            self._wake_worker()
            if message is not None:
                yield message
            if message is None or isinstance(message, RequestError):
                return


class Jobs:
    """The queue and its worker thread.

    Args:
        limit: maximum number of open requests.
        on_out_of_memory: called after a computation ran out of memory, to free some.
    """

    def __init__(self, limit: int, *, on_out_of_memory: Callable[[], None] = lambda: None) -> None:
        self.limit = limit
        self._on_out_of_memory = on_out_of_memory
        self._open = 0
        self._waiting: list[Job] = []
        self._running: Job | None = None
        self._order = itertools.count()
        self._condition = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="polyhead view", daemon=True)
        self._thread.start()

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Occupy one of the `limit` slots, from before a request's body is read until it is answered."""
        with self._condition:
            if self._closed:
                raise closing()
            if self._open >= self.limit:
                raise busy(self.limit)
            self._open += 1
        try:
            yield
        finally:
            with self._condition:
                self._open -= 1

    def submit(self, work: Work, *, priority: int = INTERACTIVE) -> Job:
        """Queue a computation."""
        job = Job(work, asyncio.get_running_loop(), priority, self._wake)
        with self._condition:
            if self._closed:
                raise closing()
            job.order = next(self._order)
            self._waiting.append(job)
            self._condition.notify_all()
        return job

    def cancel_all(self) -> None:
        """Accept no more jobs, cancel all of them, and answer their clients immediately."""
        with self._condition:
            if self._closed:
                return
            self._closed = True
            for job in [*self._waiting, *([] if self._running is None else [self._running])]:
                job.cancelled.set()
                job.send(closing())
            self._condition.notify_all()

    def close(self) -> None:
        """Cancel all jobs and end the thread; a forward pass stops after its current layer."""
        self.cancel_all()
        self._thread.join(timeout=CLOSE_SECONDS)

    @property
    def is_closed(self) -> bool:
        return self._closed

    @property
    def is_computing(self) -> bool:
        """True while the thread is alive; after `close`, only in a layer that takes longer than `CLOSE_SECONDS`."""
        return self._thread.is_alive()

    def _wake(self) -> None:
        with self._condition:
            self._condition.notify_all()

    # ---- the worker

    def _run(self) -> None:
        while True:
            with self._condition:
                job = self._next()
                while job is None:
                    if self._closed and not self._waiting:
                        return
                    self._condition.wait(timeout=1.0 if self._waiting else None)
                    job = self._next()
                self._waiting.remove(job)
                self._running = job
            if not job.advance():
                self._free_memory()
            with self._condition:
                self._running = None
                if not job.finished:
                    job.order = next(self._order)
                    self._waiting.append(job)

    def _free_memory(self) -> None:
        try:
            self._on_out_of_memory()
        except RuntimeError:  # an unusable GPU raises here again; the next job reports it to its client
            logger.exception("memory could not be freed")

    def _next(self) -> Job | None:
        """Return the next job: a cancelled one, which costs nothing, else the longest waiting, interactive ones first.

        Suspended jobs are not returned.
        """
        now = time.monotonic()
        for job in self._waiting:
            if job.is_suspended and now - job.last_read > UNREAD_SECONDS:
                job.cancelled.set()
            if job.cancelled.is_set():
                return job
        ready = [job for job in self._waiting if not job.is_suspended]
        return min(ready, key=lambda job: (job.priority, job.order), default=None)
