"""Shared memory, of which a GPU may have less than a tile wants: how much there is, and launches that make do."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

from triton.runtime import driver
from triton.runtime.errors import OutOfResources

Tile = TypeVar("Tile")


class Blocks(NamedTuple):
    """How a kernel is cut: queries and keys of a tile, warps, stages of loading, the most registers a thread takes."""

    rows: int
    columns: int
    warps: int
    stages: int
    registers: int | None = None

    @property
    def options(self) -> dict[str, int]:
        """What Triton is told beside the sizes of a tile."""
        options = {"num_warps": self.warps, "num_stages": self.stages}
        return options if self.registers is None else {**options, "maxnreg": self.registers}

    def smaller(self) -> Blocks | None:
        """The next that takes less shared memory: a shorter queue of tiles first, then narrower ones."""
        if self.stages > 2:
            return self._replace(stages=self.stages - 1)
        if self.columns > 32:
            return self._replace(columns=self.columns // 2)
        if self.stages > 1:
            return self._replace(stages=1)
        if self.columns > 16:
            return self._replace(columns=self.columns // 2)
        return self._replace(rows=self.rows // 2) if self.rows > 16 else None

    def halved(self) -> Blocks | None:
        """The same for tiles that must not become higher than wide."""
        if self.stages > 1:
            return self._replace(stages=self.stages - 1)
        less = self._replace(rows=max(16, self.rows // 2), columns=max(16, self.columns // 2))
        return less if less != self else None


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
) -> Tile:
    """`launch(tile)`; while the machine has too little for it, `launch(smaller(tile))`. Returns the tile that fitted.

    How much a compiled kernel takes is known only then, and differs from one version of Triton to the next. What fitted
    is remembered for all launches of one kind, which is asked for only once some launch has not fitted.
    """
    if len(_found):
        tile = _found.get(kind(), tile)
    while True:
        try:
            launch(tile)
            return tile
        except OutOfResources:
            less = smaller(tile)
            if less is None:
                raise
            _found[kind()] = tile = less
