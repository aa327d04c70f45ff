"""Failures of requests to the viewer as plain values: HTTP status, kind and message."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from polyhead.errors import PolyheadError

_MEMORY_WORDS = ("out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory")


@dataclass(frozen=True, slots=True)
class Failure:
    """An error response."""

    status: int
    kind: str
    message: str

    def to_dict(self) -> dict[str, dict[str, object]]:
        return {"error": {"status": self.status, "kind": self.kind, "message": self.message}}


class Refused(PolyheadError):
    """A request that is rejected with a `Failure`."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.failure = Failure(status, kind, message)


def invalid(message: str) -> Refused:
    return Refused(422, "invalid", message)


def superseded() -> Refused:
    return Refused(409, "superseded", "The request was replaced by a newer one of the same page, or cancelled.")


def busy(limit: int) -> Refused:
    return Refused(
        429, "busy", f"The viewer accepts {limit} requests at a time, and all slots are taken; try again in a moment."
    )


def closing() -> Refused:
    return Refused(503, "closing", "The viewer is shutting down; start it again with: polyhead view")


def gone(reading: int) -> Refused:
    return Refused(
        410, "gone", f"The text must be loaded in the viewer, got reading {reading}, which was removed; request "
        "api/state and run the text again"
    )  # fmt: skip


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means out of memory; the CPU allocator raises a plain RuntimeError."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _MEMORY_WORDS)


def failure_of(error: BaseException) -> Failure:
    """Return the failure to report for an error that stopped a computation."""
    if isinstance(error, Refused):
        return error.failure
    if is_out_of_memory(error):
        return Failure(
            507,
            "out-of-memory",
            "The computation ran out of memory and was stopped; use a shorter text, close the other one, or start the "
            "viewer with a smaller --context.",
        )
    if isinstance(error, PolyheadError):
        return Failure(422, "invalid", str(error))
    return Failure(
        500, "failed", f"The computation failed with {type(error).__name__}; see the terminal of the viewer."
    )
