"""Cache of computed tiles, limited in bytes, with least-recently-used eviction."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable

from torch import Tensor

from polyhead.errors import OptionError


class TileCache:
    """LRU cache of tensors, bounded in bytes and thread-safe; a key starts with the number of its trace."""

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 0:
            raise OptionError(f"max_bytes must be at least 0, got {max_bytes}")
        self.max_bytes = max_bytes
        self._bytes = 0
        self._tiles: OrderedDict[tuple[Hashable, ...], Tensor] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def bytes(self) -> int:
        return self._bytes

    def __len__(self) -> int:
        return len(self._tiles)

    def get(self, *key: Hashable) -> Tensor | None:
        with self._lock:
            tile = self._tiles.get(key)
            if tile is not None:
                self._tiles.move_to_end(key)
            return tile

    def put(self, tile: Tensor, *key: Hashable) -> None:
        """Store a tile, unless it is larger than the limit itself."""
        size = _bytes(tile)
        if size > self.max_bytes:
            return
        if tile.untyped_storage().nbytes() > size:  # a view would keep its base tensor alive
            tile = tile.clone()
        with self._lock:
            self._drop(key)
            self._tiles[key] = tile
            self._bytes += size
            while self._bytes > self.max_bytes:
                self._drop(next(iter(self._tiles)))

    def forget(self, trace: int) -> None:
        """Remove all tiles of one trace."""
        with self._lock:
            for key in [key for key in self._tiles if key[0] == trace]:
                self._drop(key)

    def clear(self) -> None:
        with self._lock:
            self._tiles.clear()
            self._bytes = 0

    def _drop(self, key: tuple[Hashable, ...]) -> None:
        tile = self._tiles.pop(key, None)
        if tile is not None:
            self._bytes -= _bytes(tile)


def _bytes(tile: Tensor) -> int:
    return tile.numel() * tile.element_size()
