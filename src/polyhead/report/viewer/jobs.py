"""One heavy computation at a time: a bounded queue, one worker thread, and a way to call off what nobody waits for.

A computation is a generator of messages. Between two of its messages the worker looks around: a small computation goes
before the next part of a long one, what was called off is closed, and what its client does not read is not continued.
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

from polyhead.report.viewer.failures import Failure, busy, closing, failure_of, is_out_of_memory, superseded

logger = logging.getLogger("polyhead.view")

Message = dict[str, Any]
Work = Callable[["Job"], Iterator[Message]]

QUICK, PATIENT = 0, 1  # small computations go between the parts of patient ones
UNREAD_MESSAGES = 8  # that a client may leave unread before its computation waits for it
CLOSE_SECONDS = 1.0  # for a layer to be finished when the viewer is closed
UNREAD_SECONDS = 30.0  # after which nobody is thought to listen


class Job:
    """A computation on its way: the worker fills it, one client reads it."""

    def __init__(
        self, work: Work, loop: asyncio.AbstractEventLoop, *, client: str, lane: str, turn: int, urgency: int
    ) -> None:
        self.client, self.lane, self.turn, self.urgency = client, lane, turn, urgency
        self.order = 0  # who waits longest goes first
        self.waits_since = time.monotonic()  # when its client last took a message, or it was made
        self.over = False
        self._work = work
        self._parts: Iterator[Message] | None = None
        self._loop = loop
        self._arrived = asyncio.Event()
        self._outbox: deque[Message | Failure | None] = deque()
        self.called_off = threading.Event()
        self.on_taken: Callable[[], None] = lambda: None

    # ---- for the worker

    def check(self) -> None:
        """Give up here if nobody waits for the rest."""
        if self.called_off.is_set():
            raise superseded()

    def send(self, message: Message | Failure | None) -> None:
        """To the client, from any thread; None ends the computation."""
        self._outbox.append(message)
        try:
            self._loop.call_soon_threadsafe(self._arrived.set)
        except RuntimeError:  # the loop is closed: there is nobody to tell
            self.called_off.set()

    @property
    def is_unread(self) -> bool:
        return len(self._outbox) >= UNREAD_MESSAGES

    def advance(self) -> bool:
        """Compute up to the next message; every end is told to the client. False where memory ran out."""
        try:
            self.check()
            if self._parts is None:
                self._parts = iter(self._work(self))
            message = next(self._parts, None)
            self.check()
        except Exception as error:  # whatever stops a computation, the viewer goes on
            failure = failure_of(error)
            if failure.status == 500:
                logger.exception("a computation of the viewer failed")
            self.end(failure)
            return not is_out_of_memory(error)
        self.send(message)
        self.over = message is None
        return True

    def end(self, failure: Failure) -> None:
        close = getattr(self._parts, "close", None)
        if close is not None:
            close()
        self._parts = None
        self.over = True
        self.send(failure)

    # ---- for the client

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        self.called_off.set()
        self.on_taken()

    async def messages(self) -> AsyncIterator[Message | Failure]:
        """What is sent, until the end; a failure is the last."""
        while True:
            while not len(self._outbox):
                self._arrived.clear()
                if not len(self._outbox):
                    await self._arrived.wait()
            message = self._outbox.popleft()
            self.waits_since = time.monotonic()
            self.on_taken()
            if message is not None:
                yield message
            if message is None or isinstance(message, Failure):
                return


class Jobs:
    """The queue and its worker thread; `limit` is how many questions are waiting or being answered at most."""

    def __init__(self, limit: int, *, on_memory: Callable[[], None] = lambda: None) -> None:
        self.limit = limit
        self._on_memory = on_memory
        self._places = 0
        self._waiting: list[Job] = []
        self._running: Job | None = None
        self._order = itertools.count()
        self._condition = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="polyhead view", daemon=True)
        self._thread.start()

    @contextmanager
    def place(self) -> Iterator[None]:
        """One of the places there are, from before a request's body is read until it is answered."""
        with self._condition:
            if self._closed:
                raise closing()
            if self._places >= self.limit:
                raise busy(self.limit)
            self._places += 1
        try:
            yield
        finally:
            with self._condition:
                self._places -= 1

    def submit(self, work: Work, *, client: str = "", lane: str = "", turn: int = 0, urgency: int = QUICK) -> Job:
        """Put a computation in line; the same client's older ones of the same lane are called off."""
        job = Job(work, asyncio.get_running_loop(), client=client, lane=lane, turn=turn, urgency=urgency)
        job.on_taken = self._wake
        with self._condition:
            if self._closed:
                raise closing()
            alike = [x for x in self._all() if client and (x.client, x.lane) == (client, lane)]
            if any(x.turn > turn for x in alike):
                raise superseded()
            for older in alike:
                if older.turn < turn:
                    older.called_off.set()
            job.order = next(self._order)
            self._waiting.append(job)
            self._condition.notify_all()
        return job

    def cancel(self, client: str, lane: str | None = None) -> int:
        """Call off what a client asked for; how many computations that were."""
        with self._condition:
            found = [x for x in self._all() if x.client == client and lane in (None, x.lane)]
            for job in found:
                job.called_off.set()
            self._condition.notify_all()
        return len(found)

    def call_off(self) -> None:
        """Take no more computations, and end every client's wait for one at once."""
        with self._condition:
            if self._closed:
                return
            self._closed = True
            for job in self._all():
                job.called_off.set()
                job.send(closing().failure)
            self._condition.notify_all()

    def close(self) -> None:
        """Call off everything and let the thread end; a model in the middle of a layer finishes that layer."""
        self.call_off()
        self._thread.join(timeout=CLOSE_SECONDS)

    @property
    def is_closed(self) -> bool:
        return self._closed

    @property
    def is_computing(self) -> bool:
        """Whether the thread is there: after `close`, in the middle of a layer that takes longer than is waited."""
        return self._thread.is_alive()

    def _all(self) -> list[Job]:
        return [*self._waiting, *([] if self._running is None else [self._running])]

    def _wake(self) -> None:
        with self._condition:
            self._condition.notify_all()

    # ---- the worker

    def _run(self) -> None:
        while True:
            with self._condition:
                job = self._next()
                while job is None:
                    if self._closed and not len(self._waiting):
                        return
                    self._condition.wait(timeout=1.0 if len(self._waiting) else None)
                    job = self._next()
                self._waiting.remove(job)
                self._running = job
            if not job.advance():
                self._let_go()
            with self._condition:
                self._running = None
                if not job.over:
                    job.order = next(self._order)
                    self._waiting.append(job)

    def _let_go(self) -> None:
        try:
            self._on_memory()
        except RuntimeError:  # a GPU that is beyond help says so here again; the next computation will tell its client
            logger.exception("memory could not be let go of")

    def _next(self) -> Job | None:
        """Whose turn it is: first what was called off, which costs nothing, then small before long, then by age."""
        now = time.monotonic()
        for job in self._waiting:
            if job.is_unread and now - job.waits_since > UNREAD_SECONDS:
                job.called_off.set()
            if job.called_off.is_set():
                return job
        ready = [job for job in self._waiting if not job.is_unread]
        return min(ready, key=lambda job: (job.urgency, job.order), default=None)
