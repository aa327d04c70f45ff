"""Validated access to the fields of a JSON request: names, types and ranges."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from polyhead.report.viewer.failures import RequestError, invalid

TEXT_BYTES = 4 << 20  # maximum size of a text, and of the request with it; also its maximum number of characters
_MISSING = object()


class RequestFields:
    """The JSON object of a request; each field is read once, and `end` rejects unknown fields."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = dict(fields)
        self._known: list[str] = []
        self._parts: list[RequestFields] = []

    @classmethod
    def parse(cls, body: bytes) -> RequestFields:
        try:
            fields = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise RequestError(400, "malformed", "a request must be a JSON object, got invalid JSON") from error
        if not isinstance(fields, dict):
            raise RequestError(400, "malformed", f"a request must be a JSON object, got {_kind(fields)}")
        return cls(fields)

    def integer(self, name: str, least: int, most: int, default: Any = _MISSING) -> Any:
        value = self._take(name, default)
        if value is not default and (type(value) is not int or not least <= value <= most):
            raise invalid(f"{name} must be an integer from {least} to {most}, got {_shown(value)}")
        return value

    def text(self, name: str, most: int) -> str:
        value = self._take(name, _MISSING)
        if not isinstance(value, str):
            raise invalid(f"{name} must be a text, got {_kind(value)}")
        if len(value) > most:
            raise RequestError(413, "too-large", f"{name} must have at most {most} characters, got {len(value)}")
        return value

    def choice(self, name: str, options: Collection[str], default: Any = _MISSING) -> Any:
        value = self._take(name, default)
        if value is not default and (not isinstance(value, str) or value not in options):
            raise invalid(f"{name} must be one of {', '.join(options)}, got {_shown(value)}")
        return value

    def span(self, name: str, size: int, most: int) -> tuple[int, int]:
        value = self._take(name, _MISSING)
        is_pair = isinstance(value, list) and len(value) == 2 and all(type(x) is int for x in value)
        if not is_pair or not 0 <= value[0] < value[1] <= size:
            raise invalid(f"{name} must be [first, one past the last] within {size} tokens, got {_shown(value)}")
        if value[1] - value[0] > most:
            raise RequestError(413, "too-large", f"{name} must have at most {most} tokens, got {value[1] - value[0]}")
        return value[0], value[1]

    def heads(self, name: str, sizes: Sequence[int], default: Any = _MISSING) -> Any:
        """Return the set of heads (layer, head), or the default; `sizes` has the number of heads of each layer."""
        value = self._take(name, default)
        if value is default:
            return value
        if not isinstance(value, list) or len(value) > sum(sizes):
            raise invalid(f"{name} must be a list of at most {sum(sizes)} heads [layer, head], got {_shown(value)}")
        for pair in value:
            is_pair = isinstance(pair, list) and len(pair) == 2 and all(type(x) is int for x in pair)
            if not is_pair or not 0 <= pair[0] < len(sizes) or not 0 <= pair[1] < sizes[pair[0]]:
                raise invalid(f"{name} must be heads [layer, head] that this model has, got {_shown(pair)}")
        return frozenset((layer, head) for layer, head in value)

    def part(self, name: str) -> RequestFields:
        """Return a nested object."""
        value = self._take(name, _MISSING)
        if not isinstance(value, dict):
            raise invalid(f"{name} must be an object, got {_kind(value)}")
        self._parts.append(RequestFields(value))
        return self._parts[-1]

    def end(self) -> None:
        """Raise if there are fields that were not read, also in nested objects."""
        for part in self._parts:
            part.end()
        unknown = [name for name in self._fields if name not in self._known]
        if unknown:
            raise invalid(f"this request has the fields {', '.join(self._known)}, got {_shown(unknown[0])} as well")

    def _take(self, name: str, default: Any) -> Any:
        self._known.append(name)
        value = self._fields.get(name, default)
        if value is _MISSING:
            raise invalid(f"{name} is required, and is missing")
        return value


def _kind(x: object) -> str:
    number = "a number"
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", int: number, float: number}
    return names.get(type(x), "nothing")


def _shown(x: object) -> str:
    """Return a value as JSON, truncated for a message."""
    text = json.dumps(x)
    return text if len(text) <= 80 else f"{text[:80]}…"
