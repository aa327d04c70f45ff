"""Shared memory of a GPU, and launches that fall back to smaller tiles where it does not suffice."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

from triton.runtime import driver
from triton.runtime.errors import OutOfResources

Tile = TypeVar("Tile")


class Blocks(NamedTuple):
    """Launch configuration: tile rows and columns, warps, pipeline stages, maximum registers per thread."""

    rows: int
    columns: int
    warps: int
    stages: int
    registers: int | None = None

    @property
    def options(self) -> dict[str, int]:
        """Triton's launch options, apart from the tile sizes."""
        options = {"num_warps": self.warps, "num_stages": self.stages}
        return options if self.registers is None else {**options, "maxnreg": self.registers}

    def smaller(self) -> Blocks | None:
        """Return the next configuration with less shared memory: fewer stages first, then narrower tiles."""
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
        """Return the next smaller configuration for tiles that must not become taller than wide."""
        if self.stages > 1:
            return self._replace(stages=self.stages - 1)
        reduced = self._replace(rows=max(16, self.rows // 2), columns=max(16, self.columns // 2))
        return reduced if reduced != self else None


# Tiles that fit, by the kind of launch whose first choice did not.
_fitting_tiles: dict[Hashable, Any] = {}


@functools.cache
def shared_memory(device: int | None) -> int:
    """Return the bytes of shared memory per program: for the interpreter (None), as many as on Hopper."""
    return 232448 if device is None else driver.active.utils.get_device_properties(device)["max_shared_mem"]


def launch_fitting(
    launch: Callable[[Tile], None],
    tile: Tile,
    smaller: Callable[[Tile], Tile | None],
    kind: Callable[[], Hashable],
) -> Tile:
    """Launch with `tile`, or with smaller tiles while resources do not suffice; return the tile used.

    A kernel's resources are known only once it is compiled, and differ between versions of Triton. The tile that fitted
    is cached for all launches of one kind; `kind` is called only after some launch has failed.
    """
    if len(_fitting_tiles):
        tile = _fitting_tiles.get(kind(), tile)
    while True:
        try:
            launch(tile)
            return tile
        except OutOfResources:
            reduced = smaller(tile)
            if reduced is None:
                raise
            _fitting_tiles[kind()] = tile = reduced
