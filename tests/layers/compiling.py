"""Settings and helpers for tests of compiled layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Inductor otherwise builds four programs to find out whether the vector instructions of this CPU can be compiled, and
# starts a pool of processes, which takes longer than the few kernels of a test. Neither choosing vectors for a loop nor
# compiling them is quick, and both are PyTorch's own.
QUICK_INDUCTOR = {"cpp.vec_isa_ok": True, "cpp.simdlen": 1, "compile_threads": 1}


def with_dynamic_sizes(call: Callable[[Tensor], Any], *dims: int) -> Callable[[Tensor], Any]:
    """Mark these dimensions of the input as dynamic: a graph that takes one of them for a constant is an error.

    `dynamic=True` marks the others as well, proves in twice the time that they are constants, and compiles another
    graph where a size turns out to be constant that should not be.
    """

    def marked(x: Tensor) -> Any:
        for dim in dims:
            torch._dynamo.mark_dynamic(x, dim)
        return call(x)

    return marked
