"""Read a GGUF file once: transformers parses it for the config, for the weights and for the tokenizer."""

from __future__ import annotations

import functools
import struct
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

            def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
                """Read an array, such as a vocabulary, without several calls and arrays for each of its elements."""
                array, string = gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING
                if raw_type != array or self.byte_order != "I":
                    return super()._get_field_parts(orig_offs, raw_type)
                parts: list[Any] = [self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)]
                kind, count, offset = gguf.GGUFValueType(parts[0][0]), int(parts[1][0]), orig_offs + 12
                if kind in self.gguf_scalar_to_np:
                    values = self._get(offset, self.gguf_scalar_to_np[kind], count)
                    parts += (values[index : index + 1] for index in range(len(values)))
                    return 12 + values.nbytes, parts, list(range(2, len(parts))), [array, kind]
                if kind != string:
                    return super()._get_field_parts(orig_offs, raw_type)
                data = self._array.data
                for _ in range(count):
                    end = offset + 8 + struct.unpack_from("=Q", data, offset)[0]
                    parts += data[offset : offset + 8], data[offset + 8 : end]
                    offset = end
                return offset - orig_offs, parts, list(range(3, len(parts), 2)), [array, kind]

        module.GGUFReader, module.get_tensor_name_map = functools.cache(ArrayReader), functools.cache(name_map)
        try:
            yield
        finally:
            module.GGUFReader, module.get_tensor_name_map = reader, name_map
