"""Errors of requests to the viewer: HTTP status, kind and message."""

from __future__ import annotations

from polyhead.errors import PolyheadError
from polyhead.out_of_memory import is_out_of_memory


class RequestError(PolyheadError):
    """Error with which a request is answered; raised, or sent as the last message of a computation."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status, self.kind, self.message = status, kind, message

    def to_dict(self) -> dict[str, dict[str, object]]:
        return {"error": {"status": self.status, "kind": self.kind, "message": self.message}}


def invalid(message: str) -> RequestError:
    return RequestError(422, "invalid", message)


def cancelled() -> RequestError:
    return RequestError(409, "cancelled", "The request was cancelled, or its client stopped reading the answer.")


def busy(limit: int) -> RequestError:
    return RequestError(
        429, "busy", f"The viewer accepts {limit} requests at a time, and all slots are taken; try again in a moment."
    )


def closing() -> RequestError:
    return RequestError(503, "closing", "The viewer is shutting down; start it again with: polyhead view")


def gone(trace: int) -> RequestError:
    return RequestError(
        410, "gone", f"The text of a request must be loaded in the viewer, got trace {trace}, whose text was removed "
        "or replaced; run the text again (api/state lists the loaded ones)"
    )  # fmt: skip


def request_error(error: BaseException) -> RequestError:
    """Convert an exception that ended a computation to the error that is reported to the client."""
    if isinstance(error, RequestError):
        return error
    if is_out_of_memory(error):
        return RequestError(
            507,
            "out-of-memory",
            "The computation ran out of memory and was stopped; use a shorter text, close the other text, or start the "
            "viewer with a smaller --context.",
        )
    if isinstance(error, PolyheadError):
        return invalid(str(error))
    return RequestError(
        500, "failed", f"The computation failed with {type(error).__name__}; see the terminal of the viewer."
    )
