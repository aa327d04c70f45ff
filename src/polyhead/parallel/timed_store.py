"""`TimedStore`: a store of `torch.distributed` whose every call ends.

The stores themselves wait without a limit if the process that holds the values is there and does not answer, or if its
machine was disconnected.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")
_Call = tuple[Callable[[], Any], SimpleQueue[tuple[Any, BaseException | None]]]


class TimedStore:
    """Calls of a store, in a thread of its own that is abandoned if one of them takes too long.

    Args:
        store: the store.
        seconds: time limit of a call.
    """

    def __init__(self, store: Store, seconds: float) -> None:
        self._store, self._seconds = store, seconds
        self._calls: SimpleQueue[_Call | None] | None = None
        self._is_dead = False

    def set(self, key: str, value: str) -> None:
        self.call(self._store.set, key, value)

    def get(self, key: str) -> bytes:
        return self.call(self._store.get, key)

    def check(self, keys: Sequence[str]) -> bool:
        return self.call(self._store.check, list(keys))

    def add(self, key: str, number: int) -> int:
        return self.call(self._store.add, key, number)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        return self.call(self._store.compare_set, key, expected, value)

    def call(self, function: Callable[..., T], *positional: Any, **keywords: Any) -> T:
        """Return the result of a function that uses the store.

        Raises:
            torch.distributed.DistNetworkError: it has no result within the time limit, or an earlier one had none.
        """
        if self._is_dead:
            raise dist.DistNetworkError("it did not answer before")
        if self._calls is None:
            self._calls = SimpleQueue()
            threading.Thread(target=_serve, args=(self._calls,), daemon=True).start()
        answers: SimpleQueue[tuple[T, BaseException | None]] = SimpleQueue()
        self._calls.put((lambda: function(*positional, **keywords), answers))
        try:
            result, error = answers.get(timeout=self._seconds)
        except Empty:
            self._is_dead = True
            raise dist.DistNetworkError(f"no answer within {self._seconds:g} s") from None
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        """End the thread; a later call starts another."""
        if self._calls is not None:
            self._calls.put(None)
            self._calls = None


def _serve(calls: SimpleQueue[_Call | None]) -> None:
    while (call := calls.get()) is not None:
        function, answers = call
        try:
            answers.put((function(), None))
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            answers.put((None, error))
