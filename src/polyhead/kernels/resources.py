"""Shared memory, of which a GPU may have less than a tile wants: how much there is, and launches that make do."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from triton.runtime import driver
from triton.runtime.errors import OutOfResources

Tile = TypeVar("Tile")

# What was found to fit, by the kind of launch for which the first choice did not.
_found: dict[Hashable, Any] = {}


@functools.cache
def shared_memory(device: int | None) -> int:
    """How many bytes one program may have; None, the interpreter, has as many as Hopper."""
    return 232448 if device is None else driver.active.utils.get_device_properties(device)["max_shared_mem"]


def launch_fitting(
    launch: Callable[[Tile], None],
    tile: Tile,
    smaller: Callable[[Tile], Tile | None],
    kind: Callable[[], Hashable],
) -> None:
    """`launch(tile)`; while the machine has too little for it, `launch(smaller(tile))`.

    How much a compiled kernel takes is known only then, and differs from one version of Triton to the next. What fitted
    is remembered for all launches of one kind, which is asked for only once some launch has not fitted.
    """
    if len(_found):
        tile = _found.get(kind(), tile)
    while True:
        try:
            return launch(tile)
        except OutOfResources:
            less = smaller(tile)
            if less is None:
                raise
            _found[kind()] = tile = less
