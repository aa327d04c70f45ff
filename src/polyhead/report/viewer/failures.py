"""What can go wrong with a request of the viewer, as plain values: a status, a kind, and a sentence that teaches."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from polyhead.errors import PolyheadError

_MEMORY_WORDS = ("out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory")


@dataclass(frozen=True, slots=True)
class Failure:
    """What a client is told."""

    status: int
    kind: str
    message: str

    def to_dict(self) -> dict[str, dict[str, object]]:
        return {"error": {"status": self.status, "kind": self.kind, "message": self.message}}


class Refused(PolyheadError):
    """A request that is answered with a failure."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.failure = Failure(status, kind, message)


def invalid(message: str) -> Refused:
    return Refused(422, "invalid", message)


def superseded() -> Refused:
    return Refused(
        409, "superseded", "A newer question of the same page took the place of this one, or it was called off."
    )


def busy(limit: int) -> Refused:
    return Refused(
        429, "busy", f"The viewer takes {limit} questions at a time, and as many are waiting; ask again in a moment."
    )


def closing() -> Refused:
    return Refused(503, "closing", "The viewer is being closed; start it again with: polyhead view")


def gone(reading: int) -> Refused:
    return Refused(
        410, "gone", f"A question names a text that the viewer holds, got reading {reading}, which was let go of; "
        "ask for api/state and read the text again"
    )  # fmt: skip


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on a GPU or on the CPU, whose allocator says so with a RuntimeError."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _MEMORY_WORDS)


def failure_of(error: BaseException) -> Failure:
    """What to tell of an error that stopped a computation."""
    if isinstance(error, Refused):
        return error.failure
    if is_out_of_memory(error):
        return Failure(
            507,
            "out-of-memory",
            "The computation needed more memory than there is, and was given up; read a shorter text, close the other "
            "one, or start the viewer with a smaller --context.",
        )
    if isinstance(error, PolyheadError):
        return Failure(422, "invalid", str(error))
    return Failure(
        500, "failed", f"The computation failed with {type(error).__name__}; the terminal of the viewer shows where."
    )
