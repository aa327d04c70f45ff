"""Recognition of out-of-memory errors, which have no common class."""

from __future__ import annotations

import sys

_MEMORY_WORDS = ("out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is a lack of memory, for which the CPU allocator raises a plain RuntimeError."""
    torch = sys.modules.get("torch")  # the command line may not have imported it
    if isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _MEMORY_WORDS)
