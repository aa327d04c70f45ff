"""Read a GGUF file once: transformers parses it for the config, for the weights and for the tokenizer."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

_LOCK = threading.RLock()  # two threads that restored each other's functions would leave one of them in place


@contextmanager
def reading_once() -> Iterator[None]:
    """While active, gguf parses each file once, and builds each table of tensor names once, instead of per layer."""
    import gguf

    module: Any = gguf
    with _LOCK:
        reader: Any = module.GGUFReader
        name_map = module.get_tensor_name_map

        class ArrayReader(reader):
            """Reader of a plain array: every element read from a `numpy.memmap` is a call of Python code."""

            @property
            def data(self) -> Any:
                return self._array

            @data.setter
            def data(self, mapped: np.memmap[Any, Any]) -> None:
                self._array = mapped.view(np.ndarray)

        module.GGUFReader, module.get_tensor_name_map = functools.cache(ArrayReader), functools.cache(name_map)
        try:
            yield
        finally:
            module.GGUFReader, module.get_tensor_name_map = reader, name_map
