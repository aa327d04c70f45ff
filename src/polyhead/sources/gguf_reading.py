"""Read a GGUF file once: transformers parses it for the config, for the weights and for the tokenizer."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_LOCK = threading.RLock()  # two threads that restored each other's functions would leave one of them in place


@contextmanager
def reading_once() -> Iterator[None]:
    """While active, gguf parses each file once, and builds each table of tensor names once, instead of per layer."""
    import gguf

    module: Any = gguf
    with _LOCK:
        before = module.GGUFReader, module.get_tensor_name_map
        module.GGUFReader, module.get_tensor_name_map = (functools.cache(function) for function in before)
        try:
            yield
        finally:
            module.GGUFReader, module.get_tensor_name_map = before
