"""Pairs counted by formula are those that one finds by looking at every pair."""

from __future__ import annotations

import itertools

import pytest
import torch

import polyhead
from polyhead import Mask
from polyhead.costs import Workload, visible_pairs
from polyhead.errors import MaskError, OptionError

LENGTHS = [(0, 0), (0, 5), (1, 1), (1, 7), (7, 1), (5, 5), (5, 11), (11, 5), (13, 13), (3, 17)]


def seen(queries: int, keys: int, left: int | None, right: int | None, sinks: int = 0) -> int:
    """The pairs, one by one."""
    found = 0
    for query, key in itertools.product(range(queries), range(keys)):
        distance = key - (query + keys - queries)
        near = (left is None or distance >= -left) and (right is None or distance <= right)
        found += near or (key < sinks and (right is None or distance <= right))
    return found


@pytest.mark.parametrize(("queries", "keys"), LENGTHS)
def test_a_causal_edge(queries, keys):
    assert visible_pairs(queries, keys) == queries * keys
    assert visible_pairs(queries, keys, Mask.causal()) == seen(queries, keys, None, 0)


@pytest.mark.parametrize(("queries", "keys"), LENGTHS)
@pytest.mark.parametrize("sinks", [0, 2, 30])
def test_windows_of_every_size_on_both_sides(queries, keys, sinks):
    for left, right in itertools.product((0, 1, 2, 3, 5, 8, 12, 20), (None, 0, 1, 2, 4, 9, 20)):
        mask = Mask.window(left=left, right=right, sinks=sinks)
        assert visible_pairs(queries, keys, mask) == seen(queries, keys, left, right, sinks), mask


@pytest.mark.parametrize(("queries", "keys"), LENGTHS)
def test_an_edge_on_the_right_alone(queries, keys):
    for right in (0, 1, 3, 20):
        assert visible_pairs(queries, keys, Mask.window(left=None, right=right)) == seen(queries, keys, None, right)


@pytest.mark.parametrize(
    "mask", [Mask.causal(), Mask.window(4), Mask.window(left=2, right=3), Mask.window(left=2, right=1, sinks=2)]
)
@pytest.mark.parametrize(("queries", "keys"), [(5, 11), (11, 5), (7, 7)])
def test_attention_itself_sees_so_many(mask, queries, keys):
    query, key = torch.randn(1, 1, queries, 3), torch.randn(1, 1, keys, 3)
    statistics = polyhead.attention(query, key, key, mask=mask, statistics="visible_keys").statistics
    assert int(statistics.visible_keys.sum()) == visible_pairs(queries, keys, mask)


def test_long_sequences_cost_no_time():
    n = 10**9
    assert visible_pairs(n, n, Mask.causal()) == n * (n + 1) // 2
    assert visible_pairs(n, n, Mask.window(n // 2)) == n // 2 * (n // 2 + 1) // 2 + (n // 2) ** 2


def test_a_mask_that_is_no_band_is_not_counted():
    with pytest.raises(MaskError, match="separately"):
        visible_pairs(3, 3, Mask.lengths([3, 2]))


def test_each_way_to_ask_says_how_many_keys_there_are_and_how_many_are_new():
    requested = {
        Workload.forward(7, batch=3): (7, 7),
        Workload.training_step(7, batch=3): (7, 7),
        Workload.prefill(7, past=11, batch=3): (18, 7),
        Workload.decode(past=11, batch=3): (12, 1),
        Workload.cross(7, 13, batch=3): (13, 13),
        Workload.cross(7, 13, batch=3, remembered=True): (13, 0),
    }
    for work, expected in requested.items():
        assert (work.keys, work.new_keys) == expected
        assert work.batch == 3
    assert [work.training for work in requested] == [False, True, False, False, False, False]
    assert Workload.cross(7, 13, training=True).training


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"queries": -1}, "queries must be a non-negative integer, got -1"),
        ({"queries": 2.0}, "queries must be a non-negative integer, got 2.0"),
        ({"queries": 2, "batch": True}, "batch must be"),
        ({"queries": 2, "source": -3}, "source must be"),
        ({"queries": 2, "past": 3, "source": 4}, "got past 3 and source 4"),
        ({"queries": 2, "remembered": True}, "remembered needs a source, got remembered=True without one"),
        (
            {"queries": 2, "past": 3, "training": True},
            "a cache stores no gradients, got a training step with past 3",
        ),
    ],
)
def test_what_no_call_could_ask_is_refused(options, words):
    with pytest.raises(OptionError, match=words):
        Workload(**options)
