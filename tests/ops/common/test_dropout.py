"""Dropout as a hash of (seed, batch, head, query, key): equal in our backends, and random enough."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from polyhead import Mask, attention
from polyhead.ops.common import tiles
from tests.ops.oracle import Scene, Who, normal, result_and_gradients

OURS = ("reference", "blockwise")


def kept(
    seed: int | Tensor | None,
    rate: float = 0.5,
    *,
    batch: int = 3,
    heads: int = 4,
    queries: int = 53,
    keys: int = 61,
    backend: str = "blockwise",
) -> Tensor:
    """Return the kept weights [batch, heads, queries, keys], using unit vectors as values."""
    query, key = torch.zeros(batch, heads, queries, 1), torch.zeros(batch, 1, keys, 1)
    value = torch.eye(keys).expand(batch, 1, keys, keys)
    output = attention(query, key, value, dropout=rate, seed=seed, backend=backend).output
    assert ((output == 0) | ((output * keys * (1 - rate) - 1).abs() < 1e-4)).all()
    return output != 0


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("tile", [(7, 1), (13, 2000), (512, 1 << 20)], ids=str)
def test_our_backends_drop_the_same_weights_whatever_the_tiles(
    monkeypatch: pytest.MonkeyPatch, rate: float, tile: tuple[int, int]
) -> None:
    monkeypatch.setattr(tiles, "TILE_COLUMNS", tile[0])
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", tile[1])
    for seed in (0, 17, -1, (1 << 63) - 1):
        assert torch.equal(kept(seed, rate), kept(seed, rate, backend="reference"))


@pytest.mark.parametrize("backend", OURS)
def test_dropout_and_its_gradients_are_the_formula_over_the_kept_weights(backend: str) -> None:
    scene = Scene(
        normal(2, 6, 23, 5, seed=1),
        normal(2, 2, 31, 5, seed=2),
        normal(2, 2, 31, 7, seed=3),
        who=Who(causal=True, left=19),
        sinks=normal(6, seed=4),
        table=normal(6, 9, seed=5),
        zero=6,
        softcap=4.0,
    )
    keep = kept(29, 0.3, batch=2, heads=6, queries=23, keys=31)
    exact = result_and_gradients(scene, everything=True, keep=keep, rate=0.3)
    actual = result_and_gradients(scene, backend, everything=True, dropout=0.3, seed=29)
    torch.testing.assert_close(actual.output, exact.output, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(actual.weights, exact.weights, rtol=1e-11, atol=1e-11)  # before dropout
    torch.testing.assert_close(actual.logsumexp, exact.logsumexp, rtol=1e-11, atol=1e-11)
    for name, grad in exact.gradients.items():
        torch.testing.assert_close(actual.gradients[name], grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("rate", [0.03, 0.1, 0.5, 0.9])
def test_the_rate_is_right_and_binomially_distributed(rate: float) -> None:
    """Counts along every axis are binomial: mean and variance within five standard errors."""
    keep = kept(5, rate).double()
    total = keep.numel()
    spread = math.sqrt(rate * (1 - rate))
    assert abs(float(keep.mean()) - (1 - rate)) < 5 * spread / math.sqrt(total)
    for axis in (2, 3):
        counts = keep.sum(axis).flatten()
        size = keep.shape[axis]
        scores = (counts - size * (1 - rate)) / (spread * math.sqrt(size))
        chi_square = float(scores.square().sum())
        assert abs(chi_square - len(counts)) < 6 * math.sqrt(2 * len(counts))


def test_rows_columns_heads_and_batches_are_uncorrelated() -> None:
    signs = kept(11).double() * 2 - 1  # [batch, heads, queries, keys]
    for axis, lag in itertools.chain([(0, 1), (0, 2), (1, 1), (1, 2), (1, 3)], itertools.product((2, 3), range(1, 20))):
        size = signs.shape[axis]
        product = signs.narrow(axis, 0, size - lag) * signs.narrow(axis, lag, size - lag)
        assert abs(float(product.mean())) < 5 / math.sqrt(product.numel()), (axis, lag)
    # A shift in two axes at once: a hash that only adds rows and columns up would repeat itself along diagonals.
    for down, along in itertools.product((1, 2, 3), (1, 2, 3)):
        product = signs[:, :, down:, along:] * signs[:, :, :-down, :-along]
        assert abs(float(product.mean())) < 5 / math.sqrt(product.numel())
        product = signs[:, :, down:, :-along] * signs[:, :, :-down, along:]
        assert abs(float(product.mean())) < 5 / math.sqrt(product.numel())


def test_pairs_of_rows_agree_no_more_often_than_coins() -> None:
    signs = kept(13, queries=61, keys=127).double() * 2 - 1
    rows = signs.flatten(0, 2)  # [732, 127]
    agreement = (rows @ rows.T / rows.shape[1]).fill_diagonal_(0)
    assert float(agreement.abs().max()) < 6.5 / math.sqrt(rows.shape[1])


@pytest.mark.parametrize("other", [1, 2, 1 << 31, 1 << 32, 1 << 40, 1 << 62, -(1 << 63)])
def test_seeds_that_differ_anywhere_drop_independently(other: int) -> None:
    first, second = (kept(seed).double() * 2 - 1 for seed in (0, other))
    assert abs(float((first * second).mean())) < 5 / math.sqrt(first.numel())


def test_a_seed_replays_and_leaves_the_generator_alone() -> None:
    state = torch.get_rng_state()
    first = kept(23)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    assert torch.equal(first, kept(23))
    assert torch.equal(first, kept(torch.tensor([23])))
    assert torch.equal(first, kept(torch.tensor(23)))


@pytest.mark.parametrize("backend", OURS)
def test_without_a_seed_the_generator_decides(backend: str) -> None:
    torch.manual_seed(3)
    first, second = kept(None, backend=backend), kept(None, backend=backend)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(first, kept(None, backend=backend))


def test_a_weight_stays_dropped_or_kept_when_the_sequence_grows() -> None:
    small, large = kept(31, queries=19, keys=23), kept(31, queries=43, keys=59)
    assert torch.equal(small, large[:, :, :19, :23])


def test_the_mean_over_seeds_is_the_output_without_dropout() -> None:
    query, key, value = normal(1, 2, 7, 5, seed=1), normal(1, 2, 11, 5, seed=2), normal(1, 2, 11, 3, seed=3)
    mask = Mask.causal()
    draws = torch.stack([attention(query, key, value, mask=mask, dropout=0.4, seed=seed).output for seed in range(400)])
    expected = attention(query, key, value, mask=mask).output
    scores = (draws.mean(0) - expected) / (draws.std(0) / math.sqrt(len(draws))).clamp(min=1e-9)
    assert float(scores.abs().max()) < 5


@pytest.mark.parametrize("backend", OURS)
def test_the_backward_drops_what_the_forward_dropped(backend: str) -> None:
    """The output is linear in the values, so the gradient must reproduce it exactly."""
    query, key = normal(2, 4, 19, 5, seed=1), normal(2, 2, 23, 5, seed=2)
    value = normal(2, 2, 23, 3, seed=3).requires_grad_()
    output = attention(query, key, value, dropout=0.5, backend=backend).output
    direction = torch.randn_like(output)
    (grad,) = torch.autograd.grad(output, value, direction)
    torch.testing.assert_close((grad * value).sum(), (output * direction).sum())
