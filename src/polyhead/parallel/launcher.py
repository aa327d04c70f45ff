"""Detect the processes of `torchrun`, without an import of PyTorch."""

from __future__ import annotations

import os
from collections.abc import Mapping

from polyhead.errors import OptionError

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def is_worker(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process is one of several that `torchrun`, or a launcher of the same convention, started."""
    if not all(environment.get(name) for name in _VARIABLES):
        return False
    for name in ("RANK", "WORLD_SIZE"):
        if not environment[name].isdecimal():
            raise OptionError(f"{name}, which torchrun sets, must be an integer, got {environment[name]!r}; unset it")
    return int(environment["WORLD_SIZE"]) > 1
