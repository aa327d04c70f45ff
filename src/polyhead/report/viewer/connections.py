"""Limits on connections to the viewer: their number, and the time until a request's headers have arrived."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 10.0
MAX_CONNECTIONS = 128


class BoundedProtocol(H11Protocol):
    """HTTP/1.1 protocol that closes a connection if its headers take too long or the limit is reached.

    At the limit, the connection that has been idle longest without a complete request is closed, so that incomplete
    requests cannot lock others out.
    """

    _began = 0.0
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._began = self.loop.time()
        self._watch()
        if len(self.connections) > MAX_CONNECTIONS:
            waiting = [x for x in self.connections if isinstance(x, BoundedProtocol) and x is not self and x.is_waiting]
            victim = min(waiting, key=lambda x: x._began, default=self)
            self.connections.discard(victim)  # immediately: more may arrive before connection_lost
            victim.transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_deadline()
        super().connection_lost(exc)

    @property
    def is_waiting(self) -> bool:
        """True if no request is being read or answered."""
        return self.cycle is None or self.cycle.response_complete

    def _watch(self) -> None:
        if not self.is_waiting:
            self._forget_deadline()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEADER_SECONDS, self._expire)

    def _expire(self) -> None:
        self._deadline = None
        if self.is_waiting:
            self.transport.abort()

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
