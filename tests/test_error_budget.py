"""The error budget itself: what counts, what only adds to the estimate, and the record of shares."""

from __future__ import annotations

import math

import pytest
import torch

from tests import budget_report
from tests.error_budget import Compared, assert_draws_within_error_budget, budget_used, token_orders
from tests.ops.oracle import Scene, Who, normal, result_and_gradients

EXACT, LOOSE = torch.tensor([1.0, -2.0], dtype=torch.float64), torch.tensor([1.0, -2.0 + 1e-3])


def test_the_bound_is_twice_the_largest_error_of_the_formula_and_two_roundings() -> None:
    share, bound, error = budget_used(Compared(EXACT.float() + 1e-3, EXACT, LOOSE))
    assert bound == pytest.approx(2e-3 + 4 * torch.finfo(torch.float32).eps, rel=1e-3)
    assert (share, error) == pytest.approx((0.5, 1e-3), rel=1e-3)


def test_a_sample_without_ours_adds_to_the_estimate_alone() -> None:
    own = Compared(EXACT.float() + 1e-3, EXACT, EXACT.float())
    assert budget_used(own).share > 1
    assert budget_used(own, Compared(None, EXACT, LOOSE)).share < 1


def test_no_error_fits_into_a_budget_of_zero(monkeypatch) -> None:
    monkeypatch.delenv("POLYHEAD_BUDGETS", raising=False)
    nothing = torch.zeros(3, dtype=torch.float64)
    sample = Compared(torch.tensor([0.0, 1e-30, 0.0]), nothing, nothing.float())
    assert budget_used(sample).share == math.inf
    with pytest.raises(AssertionError, match="exceeds"):
        assert_draws_within_error_budget([{"output": sample}])
    assert budget_used(sample._replace(actual=nothing.float())).share == 0


def test_nan_in_the_exact_result_is_no_small_error() -> None:
    exact = torch.tensor([1.0, math.nan], dtype=torch.float64)
    with pytest.raises(AssertionError, match="what is exact has NaN"):
        budget_used(Compared(torch.ones(2), exact, torch.ones(2)))


def test_shares_are_recorded_and_the_largest_are_summed_up(tmp_path, monkeypatch) -> None:
    file = tmp_path / "budgets.jsonl"
    monkeypatch.setenv("POLYHEAD_BUDGETS", str(file))
    for size in (1e-4, 1.8e-3):
        assert_draws_within_error_budget([{"output": Compared(EXACT.float() + size, EXACT, LOOSE)}], name=f"{size}")
    first, second = budget_report.read(file)
    assert first["share"] > budget_report.MOST > second["share"]
    assert "test_shares_are_recorded" in first["test"]
    head, worst = budget_report.summary([first, second], count=1)
    assert head == "2 results of 1 tests were held to an error budget; 1 used more than 0.7 of it"
    assert worst.startswith("0.9")


def test_other_orders_and_draws_are_the_same_attention() -> None:
    who = Who(causal=True, left=5)
    scene = Scene(
        *(normal(2, heads, 11, 5, seed=heads) for heads in (4, 2, 2)), who=who, sinks=normal(4, seed=9),
        table=normal(4, 7, seed=8), zero=4, bias=normal(1, 1, 11, 11, seed=7), scale=normal(4, seed=6),
    )  # fmt: skip
    own, other = result_and_gradients(scene), result_and_gradients(scene.reordered(3))
    for head in range(12):
        right, found = own.logsumexp[:, head % 4], other.logsumexp[:, head]
        torch.testing.assert_close(found.sort(-1).values, right.sort(-1).values)
    assert not torch.allclose(other.logsumexp[:, :4], own.logsumexp)
    with torch.no_grad():
        ours = scene.reordered(3).run("blockwise").output
    torch.testing.assert_close(ours, other.output)
    draws = result_and_gradients(scene.redrawn(3))
    torch.testing.assert_close(draws.output[:, :4], own.output)
    assert not torch.allclose(draws.output[:, 4:8], own.output)


def test_tokens_in_other_orders_see_whom_they_saw() -> None:
    x, visible = torch.arange(2 * 7.0).view(2, 7, 1), torch.ones(7, 7, dtype=torch.bool).tril()
    others, seen = token_orders(x, visible)
    order = others[..., 0] % 7
    assert torch.equal(seen, order[:, :, None] >= order[:, None])
    assert len(order.unique(dim=0)) == 32
