"""One harness for every accumulator: any split, merged in any order, equals one pass."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyhead.errors import OptionError, ShapeError
from polyhead.observation.accumulators import Histogram, Maximum, MeanAndStd

SHAPE = (2, 3)
EMPTY = {
    "mean": lambda: MeanAndStd.empty(SHAPE),
    "maximum": lambda: Maximum.empty(SHAPE),
}


def results(value):
    computed = value.compute()
    return tuple(computed) if isinstance(computed, tuple) else (computed,)


def assert_equal(one, other, bound=1e-12):
    """Within what float64 rounds when the order of a sum changes; counts and maxima to the bit."""
    for a, b in zip(results(one), results(other), strict=True):
        if isinstance(one, MeanAndStd):
            torch.testing.assert_close(a, b, rtol=bound, atol=bound, equal_nan=True)
        else:
            assert torch.equal(a, b)
    if isinstance(one, MeanAndStd):
        assert torch.equal(one.count, other.count)


@st.composite
def pieces(draw):
    """Samples with integer weights (many of them zero), in up to five pieces of up to seven."""
    seed = draw(st.integers(0, 2**20))
    generator = torch.Generator().manual_seed(seed)
    offset = draw(st.sampled_from([0.0, -3.0, 100.0]))
    found = []
    for size in draw(st.lists(st.integers(0, 7), min_size=1, max_size=5)):
        values = torch.randn(*SHAPE, size, generator=generator, dtype=torch.float64) + offset
        weights = torch.randint(0, 3, values.shape, generator=generator)
        found.append((torch.where(weights > 0, values, torch.nan), weights))  # what has no weight is never read
    return found


@pytest.mark.parametrize("kind", EMPTY)
@given(parts=pieces(), order=st.randoms(use_true_random=False))
@settings(max_examples=40)
def test_any_split_merged_in_any_order_equals_one_pass(kind, parts, order):
    empty = EMPTY[kind]()
    whole = empty.update(*(torch.cat(tensors, -1) for tensors in zip(*parts, strict=True)))
    one_by_one = empty
    for values, weights in parts:
        one_by_one = one_by_one.update(values, weights)
    assert_equal(one_by_one, whole, 1e-10)
    waiting = [empty.update(*part) for part in parts]
    while len(waiting) > 1:
        order.shuffle(waiting)
        waiting.append(waiting.pop().merge(waiting.pop()))
    assert_equal(waiting[0], whole, 1e-10)


@pytest.mark.parametrize("kind", EMPTY)
@given(parts=st.tuples(pieces(), pieces(), pieces()))
@settings(max_examples=25)
def test_merging_is_associative_commutative_and_an_empty_one_is_neutral(kind, parts):
    empty = EMPTY[kind]()
    a, b, c = (empty.update(*part[0]) for part in parts)
    assert_equal(a.merge(b).merge(c), a.merge(b.merge(c)), 1e-10)
    for one, other in ((a.merge(b), b.merge(a)), (a.merge(empty), a), (empty.merge(a), a)):
        for name, tensor in one.state().items():
            assert torch.equal(tensor, other.state()[name]), name


@pytest.mark.parametrize("kind", EMPTY)
def test_state_goes_through_a_file_and_back(kind, tmp_path):
    from safetensors.torch import load_file, save_file

    values = torch.randn(*SHAPE, 13)
    before = EMPTY[kind]().update(values)
    save_file({name: tensor.contiguous() for name, tensor in before.state().items()}, tmp_path / "state.safetensors")
    after = EMPTY[kind]().with_state(load_file(tmp_path / "state.safetensors"))
    more = torch.randn(*SHAPE, 5)
    assert_equal(after.update(more), before.update(more), 0.0)
    with pytest.raises(OptionError, match=r"a saved .* must contain .*, got none for"):
        before.with_state({})


def test_mean_and_std_match_the_formula():
    values = torch.randn(*SHAPE, 101, dtype=torch.float64) * 3 + 7
    weights = torch.rand(values.shape, dtype=torch.float64)
    count, mean, spread = MeanAndStd.empty(SHAPE).update(values, weights).compute()
    expected = (values * weights).sum(-1) / weights.sum(-1)
    torch.testing.assert_close(count, weights.sum(-1))
    torch.testing.assert_close(mean, expected)
    variance = ((values - expected[..., None]) ** 2 * weights).sum(-1) / weights.sum(-1)
    torch.testing.assert_close(spread, variance.sqrt())


def test_std_of_float32_rows_far_from_zero_is_accurate():
    # The textbook's E[x^2] - E[x]^2 in float32 loses all of a spread of 1 beside a mean of 1e4.
    values = torch.randn(1, 5000) + 1e4
    _, mean, spread = MeanAndStd.empty((1,)).update(values).compute()
    torch.testing.assert_close(mean, values.double().mean(-1), rtol=1e-12, atol=0)
    torch.testing.assert_close(spread, values.double().std(-1, correction=0), rtol=1e-6, atol=0)


def test_nothing_seen_is_nan_and_minus_infinity():
    values, none = torch.full((*SHAPE, 4), torch.inf), torch.zeros(*SHAPE, 4, dtype=torch.bool)
    count, mean, spread = MeanAndStd.empty(SHAPE).update(values, none).compute()
    assert count.eq(0).all()
    assert mean.isnan().all()
    assert spread.isnan().all()
    assert Maximum.empty(SHAPE).update(values, none).compute().eq(-torch.inf).all()


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4), share=st.sampled_from([0.0, 0.1, 0.5, 1.0]))
@settings(max_examples=40)
def test_quantiles_of_merged_histograms_are_within_half_a_bin(sizes, share):
    generator = torch.Generator().manual_seed(sum(sizes))
    parts = [torch.rand(*SHAPE, size, generator=generator, dtype=torch.float64).pow(4) for size in sizes]
    counted = [torch.rand(x.shape, generator=generator) < 0.8 for x in parts]
    counted[0][..., 0] = True
    merged = None
    for values, kept in zip(parts, counted, strict=True):
        added = Histogram.of(torch.where(kept, values, torch.nan), kept)
        merged = added if merged is None else merged.merge(added)
    values, kept = torch.cat(parts, -1).flatten(0, 1), torch.cat(counted, -1).flatten(0, 1)
    exact = torch.stack([x[mask].quantile(share) for x, mask in zip(values, kept, strict=True)])
    assert ((merged.quantile(share).flatten() - exact).abs() <= 0.5 / Histogram.BINS + 1e-12).all()


def test_histograms_without_samples_and_with_nan_have_no_quantile():
    values = torch.tensor([[0.0, 0.5, 1.0], [torch.nan, 0.5, 1.0], [0.0, 0.5, 1.0]])
    counted = torch.tensor([[True] * 3] * 2 + [[False] * 3])
    assert Histogram.of(values, counted).quantile(0.5).isnan().tolist() == [False, True, True]
    edges = Histogram.of(torch.tensor([[0.0], [1.0], [1 + 1e-7]]), torch.ones(3, 1, dtype=torch.bool)).quantile(0.5)
    assert edges.tolist() == [0.5 / 256, 255.5 / 256, 255.5 / 256]


def test_what_does_not_fit_is_refused():
    with pytest.raises(ShapeError, match=r"got torch.float32 of shape \[3, 2, 5\]"):
        MeanAndStd.empty(SHAPE).update(torch.zeros(3, 2, 5))
    with pytest.raises(ShapeError, match=r"got \[2, 3, 4\] weights for \[2, 3, 5\] samples"):
        Maximum.empty(SHAPE).update(torch.zeros(2, 3, 5), torch.ones(2, 3, 4))
    with pytest.raises(ShapeError, match=r"got \[2, 3\] and \[3\]"):
        Maximum.empty(SHAPE).merge(Maximum.empty((3,)))


def test_squares_that_half_precision_cannot_hold_are_right() -> None:
    values = torch.tensor([[300.0, -300.0, 300.0, -300.0]], dtype=torch.float16)
    found = MeanAndStd.empty((1,)).update(values).compute()
    assert found.mean.item() == 0
    assert found.std.item() == 300
