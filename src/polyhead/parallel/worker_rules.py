"""Rules for workers of any launcher, without an import of PyTorch: the time limit, and values that must be equal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyhead.errors import CommunicationError, OptionError
from polyhead.files import short

SECONDS = 600.0  # default of the time limit
_MOST_SECONDS = 1e9


def check_seconds(seconds: float) -> None:
    """Raise unless a time limit is a positive number, of no more seconds than clocks can count."""
    if not 0 < seconds <= _MOST_SECONDS:
        raise OptionError(
            f"the time limit of workers must be a positive number of seconds, up to {_MOST_SECONDS:g}, got {seconds:g}"
        )


def check_same(values: Mapping[str, Any], others: Mapping[str, Any], first: str, second: str, every: str) -> None:
    """Raise unless two workers, `first` and `second`, have the same values; `every` is the noun for one of them."""
    for name in {**values, **others}:
        if (one := values.get(name)) != (other := others.get(name)):
            raise CommunicationError(
                f"every {every} must have the same {name}, got {short(one)} on {first} and {short(other)} on {second}"
            )
