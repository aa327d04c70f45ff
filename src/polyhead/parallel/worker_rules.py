"""Rules for workers of any launcher, without an import of PyTorch: which process is one, time limit, equal values."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from polyhead.errors import CommunicationError, OptionError
from polyhead.files import short

SECONDS = 600.0  # default of the time limit
_MOST_SECONDS = 1e9
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # that `torchrun` sets


def is_worker(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process is one of several that `torchrun`, or a launcher of the same convention, started."""
    if not all(environment.get(name) for name in _VARIABLES):
        return False
    for name in ("RANK", "WORLD_SIZE"):
        if not environment[name].isdecimal():
            raise OptionError(f"{name}, which torchrun sets, must be an integer, got {environment[name]!r}; unset it")
    return int(environment["WORLD_SIZE"]) > 1


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
