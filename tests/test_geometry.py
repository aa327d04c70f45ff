"""Head ids and head layouts: plain values that compare, print, save and refuse nonsense."""

from __future__ import annotations

import dataclasses
import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyhead import HeadId
from polyhead.errors import OptionError, ShapeError
from polyhead.geometry import (
    HeadLayout,
    HeadOrigins,
    name_with_origin,
    original_name,
    parse_head_groups,
    parse_heads,
)


@given(layer=st.integers(0, 10**6), head=st.integers(0, 10**6))
def test_a_head_is_written_and_read_back(layer: int, head: int) -> None:
    assert HeadId.parse(str(HeadId(layer, head))) == HeadId(layer, head) == (layer, head)


def test_heads_sort_by_layer_then_head() -> None:
    assert sorted([HeadId(10, 0), HeadId(2, 11), HeadId(2, 3)]) == [(2, 3), (2, 11), (10, 0)]


def test_a_head_is_written_as_in_papers_and_read_in_lower_case_too() -> None:
    assert str(HeadId(11, 7)) == f"{HeadId(11, 7)}" == "L11H7"
    assert HeadId.parse("l11h7") == HeadId.parse("L11H7") == (11, 7)
    assert parse_heads("L0H3, l1h7") == parse_heads(["L0H3", (1, 7)]) == [(0, 3), (1, 7)]
    assert parse_head_groups("L1H3+l1h7,L2H0+L2H4") == [[(1, 3), (1, 7)], [(2, 0), (2, 4)]]


@pytest.mark.parametrize(("text", "meant"), [("5.10", (5, 10)), ("0.3", (0, 3)), ("11.07", (11, 7))])
def test_a_head_written_as_a_number_is_refused_with_how_that_head_is_written(text: str, meant: tuple[int, int]) -> None:
    layer, head = meant
    with pytest.raises(OptionError) as refused:
        HeadId.parse(text)
    assert str(refused.value) == f"a head is written L{layer}H{head}, for layer {layer} and head {head}; got {text!r}"


OTHER_TEXTS = [
    "", "3", "L3", "H7", "L3H", "LH7", "3H7", "L3.7", "L3H7H1", "L-1H2", "L3H-7", "LaHb", "L3,H7", " L3H7", "L3H7 ",
    "L3H7\n", "L３H7", "-1.2", "3.7.1", ".7", "3.",
]  # fmt: skip


@pytest.mark.parametrize("thing", [*OTHER_TEXTS, 3.7, None, (3, 7)])
def test_other_things_are_no_heads(thing: object) -> None:
    with pytest.raises(OptionError, match=r"^a head is written L5H3, for layer 5 and head 3; got ") as refused:
        HeadId.parse(thing)
    assert str(refused.value).endswith(f"; got {thing!r}")


def test_original_heads_are_written_as_heads_of_their_layer() -> None:
    origins = HeadOrigins(((0,), (1, 3), (-1,), ()), total=4)
    names = [original_name(2, origins.label(head)) for head in range(4)]
    assert names == ["L2H0", "L2H1+L2H3", "new", "padding"]
    assert name_with_origin(2, 1, origins.label(1)) == "L2H1 (originally L2H1+L2H3)"
    assert name_with_origin(2, 0, origins.label(0)) == name_with_origin(2, 0, None) == "L2H0"
    assert original_name(2, "9" * 5000) == "9" * 5000  # of a damaged file


def test_a_layout_fills_in_what_follows() -> None:
    layout = HeadLayout(30, 5)
    assert dataclasses.astuple(layout) == (30, 5, 5, 6, 6, 30, 30, None)
    layout = HeadLayout(30, 6, num_kv_heads=2, head_dim=7, value_dim=11, key_input_dim=13)
    assert dataclasses.astuple(layout) == (30, 6, 2, 7, 11, 13, 13, None)
    assert layout.group_size == 3
    assert HeadLayout(30, 5, key_input_dim=13, value_input_dim=17).value_input_dim == 17
    assert HeadLayout(30, 5, value_input_dim=17).key_input_dim == 30


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 12])
def test_parameters_are_four_squares_whatever_the_heads(heads: int) -> None:
    assert HeadLayout(12, heads).num_parameters == 4 * 12**2


def test_parameters_count_every_projection() -> None:
    layout = HeadLayout(30, 6, num_kv_heads=2, head_dim=7, value_dim=11, key_input_dim=13, value_input_dim=17)
    assert layout.num_parameters == 30 * 6 * 7 + 13 * 2 * 7 + 17 * 2 * 11 + 6 * 11 * 30


def test_a_layout_is_a_value() -> None:
    layout = HeadLayout(30, 6, num_kv_heads=2)
    assert layout == HeadLayout(30, 6, 2, 5, 5, 30, 30)
    assert len({layout, HeadLayout(30, 6, num_kv_heads=2), HeadLayout(30, 6)}) == 2
    assert pickle.loads(pickle.dumps(layout)) == layout
    assert HeadLayout.from_dict(json.loads(json.dumps(layout.to_dict()))) == layout
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.num_heads = 3


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"embed_dim": 512, "num_heads": 7}, "multiple of num_heads when head_dim is not given, got 512 and 7"),
        ({"embed_dim": 512, "num_heads": 12, "num_kv_heads": 5, "head_dim": 8}, "num_kv_heads, got 12 and 5"),
        ({"embed_dim": 512, "num_heads": 4, "num_kv_heads": 8}, "num_kv_heads, got 4 and 8"),
        ({"embed_dim": 0, "num_heads": 4}, "embed_dim must be at least 1, got 0"),
        ({"embed_dim": 512, "num_heads": 0}, "num_heads must be at least 1, got 0"),
        ({"embed_dim": 512, "num_heads": -4}, "num_heads must be at least 1, got -4"),
        ({"embed_dim": 512, "num_heads": 4, "value_dim": -1}, "value_dim must be at least 0, got -1"),
        ({"embed_dim": 512.0, "num_heads": 4}, r"embed_dim must be an integer, got 512.0"),
        ({"embed_dim": 512, "num_heads": True}, "num_heads must be an integer, got True"),
        ({"embed_dim": 512, "num_heads": "8"}, "num_heads must be an integer, got '8'"),
        ({"embed_dim": 512, "heads": 8}, r"unknown names \['heads'\] and missing names \['num_heads'\]"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(sizes: dict[str, int], words: str) -> None:
    with pytest.raises(ShapeError, match=words):
        HeadLayout.from_dict(sizes)
