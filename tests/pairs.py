"""Cases in which every pair of two options occurs, where their product would only repeat the same paths."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def in_turn(first: Iterable[Any], second: Iterable[Any], third: Iterable[Any]) -> list[tuple[Any, Any, Any]]:
    """Combine every value of the first with every one of the second, each with one of the third in turn.

    >>> in_turn("ab", "xyz", [0, 1])
    [('a', 'x', 0), ('a', 'y', 1), ('a', 'z', 0), ('b', 'x', 1), ('b', 'y', 0), ('b', 'z', 1)]
    """
    lists = [*first], [*second], [*third]
    if min(map(len, lists[:2])) < len(lists[2]):
        raise ValueError(f"the third must have no more values than the others, got {[*map(len, lists)]}")
    return [
        (one, two, lists[2][(row + column) % len(lists[2])])
        for row, one in enumerate(lists[0])
        for column, two in enumerate(lists[1])
    ]
