"""The dtypes that the cases of a GPU test run in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def in_two_dtypes(cases: Iterable[Any], first: torch.dtype = torch.bfloat16, *, float32: bool = True) -> list[Any]:
    """Pair every case, a value or several, with float32 and with bfloat16 or float16, in turn from `first` on.

    Kernels that do not serve `float32` are tested in the other dtype alone. A kernel has the same constexpr arguments
    in bfloat16 and in float16, and nearly all the time of a GPU test is Triton's compiler's. A case that two tests
    share begins with another dtype in each.
    """
    pairs = []
    for place, case in enumerate(cases):
        parts = case if isinstance(case, tuple) else (case,)
        half = DTYPES[(place + DTYPES.index(first)) % 2]
        for dtype in (half, torch.float32) if float32 else (half,):
            pairs.append(pytest.param(*parts, dtype, id="-".join([*map(str, parts), f"dtype{DTYPES.index(dtype)}"])))
    return pairs
