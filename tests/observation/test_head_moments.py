"""The second moments of a layer's heads: any split of the tokens, merged in any order, equals one pass."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from polyhead.errors import ShapeError
from polyhead.observation.head_moments import HeadMoments

HEADS, DIM = 3, 2


def drawn(tokens: int, seed: int = 0) -> Tensor:
    """Far from zero, so that sums of squares would lose what distances from the mean keep."""
    return torch.randn(tokens, HEADS, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 1e4


def assert_same(one: HeadMoments, other: HeadMoments) -> None:
    for name, expected in other.state().items():
        torch.testing.assert_close(one.state()[name], expected, rtol=1e-9, atol=1e-9)


def test_covariance_is_that_of_numpy() -> None:
    values = drawn(41)
    found = HeadMoments.empty(HEADS, DIM).update(values)
    expected = torch.cov(values.flatten(1).T).view(HEADS, DIM, HEADS, DIM)
    torch.testing.assert_close(found.covariance, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.mean, values.mean(0))


@given(cuts=st.lists(st.integers(0, 41), max_size=5), order=st.randoms())
def test_any_split_merged_in_any_order_is_one_pass(cuts: list[int], order) -> None:
    values = drawn(41)
    edges = [0, *sorted(cuts), 41]
    parts = [HeadMoments.empty(HEADS, DIM).update(values[a:b]) for a, b in pairwise(edges)]
    order.shuffle(parts)
    total = HeadMoments.empty(HEADS, DIM)
    for part in parts:
        total = total.merge(part)
    assert_same(total, HeadMoments.empty(HEADS, DIM).update(values))


def test_tokens_without_weight_are_never_read() -> None:
    values = drawn(13)
    weights = torch.arange(13) % 3 > 0
    broken = torch.where(weights[:, None, None], values, torch.nan)
    found = HeadMoments.empty(HEADS, DIM).update(broken, weights)
    assert_same(found, HeadMoments.empty(HEADS, DIM).update(values[weights]))
    twice = HeadMoments.empty(HEADS, DIM).update(values, torch.full((13,), 2.0))
    assert_same(twice, HeadMoments.empty(HEADS, DIM).update(torch.cat([values, values])))


def test_nothing_seen_is_neutral_and_has_no_covariance() -> None:
    nothing = HeadMoments.empty(HEADS, DIM)
    assert nothing.covariance.isnan().all()
    assert_same(nothing.merge(nothing), nothing)
    some = nothing.update(drawn(7))
    assert_same(some.merge(nothing), some)
    assert_same(nothing.merge(some), some)
    assert_same(some.update(drawn(0)), some)


def test_moments_are_merged_on_the_device_of_the_first() -> None:
    on_meta = HeadMoments.empty(HEADS, DIM, "meta").update(drawn(5).to("meta"))
    merged = on_meta.merge(HeadMoments.empty(HEADS, DIM).update(drawn(5)))
    assert {x.device.type for x in merged.state().values()} == {"meta"}


def test_a_state_comes_back() -> None:
    found = HeadMoments.empty(HEADS, DIM).update(drawn(7))
    assert_same(HeadMoments(**found.state()), found)


def test_other_shapes_are_refused() -> None:
    empty = HeadMoments.empty(HEADS, DIM)
    with pytest.raises(ShapeError, match=r"\[tokens, 3 heads, 2\], got shape \[5, 2, 3\]"):
        empty.update(torch.zeros(5, 2, 3))
    with pytest.raises(ShapeError, match="one per token"):
        empty.update(torch.zeros(5, 3, 2), torch.ones(4))
    with pytest.raises(ShapeError, match="3 heads of 2 and 4 of 2"):
        empty.merge(HeadMoments.empty(4, 2))
