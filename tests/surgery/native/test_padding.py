"""Placement of heads in a padded layer."""

from __future__ import annotations

import pytest

import polyhead
from polyhead.surgery.native.padding import Padding, place_heads


@pytest.mark.parametrize(
    ("key_heads", "room", "expected"),
    [
        ((0, 0, 1, 1), (4, 2), Padding((0, 1, 2, 3), (0, 1))),
        ((0, 1, 0), (4, 2), Padding((0, 2, 1, None), (0, 1))),
        ((0, 0, 0, 1), (6, 3), Padding((0, 1, 2, None, 3, None), (0, 0, 1))),
        ((0, 0, 0), (3, 3), Padding((0, 1, 2), (0, 0, 0))),
        ((0, 0, 0, 1), (4, 2), None),
    ],
)
def test_readers_of_one_key_head_stand_together(key_heads, room, expected):
    assert (
        place_heads(polyhead.geometry.HeadLayout(48, len(key_heads), key_heads=key_heads, head_dim=8), *room)
        == expected
    )
