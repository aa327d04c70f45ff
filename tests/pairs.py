"""Some cases of a product of parameters, in which every pair of values that matters occurs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def latin(first: Iterable[Any], second: Iterable[Any], third: Iterable[Any], *, each: int = 1) -> list[tuple[Any, ...]]:
    """Return each pair of `first` and `second` with `each` values of `third`, which change from pair to pair.

    Each value of `first` meets all of `third` if `second` has at least as many values as `third` divided by `each`.
    """
    values = list(third)
    step = len(values) // each
    assert step * each == len(values), f"each must divide {len(values)}, got {each}"
    return [
        (one, other, values[(i + j + k * step) % len(values)])
        for i, one in enumerate(first)
        for j, other in enumerate(second)
        for k in range(each)
    ]
