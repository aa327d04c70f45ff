"""Errors over texts, Student's distribution and the false discovery rate, against their definitions."""

from __future__ import annotations

import math

import pytest
import torch

from polyhead.analysis.intervals import adjusted, halves, influence, influence_error, ratio_of_sums, student_tail


def test_the_error_of_texts_of_one_length_is_that_of_a_mean():
    draws = torch.randn(13, 3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    one, two = (influence(7.0 * x, torch.full_like(x, 7.0)) for x in draws.unbind(-1))
    for head in range(3):
        means = draws[:, head]
        error = influence_error(one[:, head])
        assert error == pytest.approx(float(means[:, 0].std() / math.sqrt(13)), rel=1e-12)
        paired = influence_error(two[:, head] - one[:, head])
        assert paired == pytest.approx(float((means[:, 1] - means[:, 0]).std() / math.sqrt(13)), rel=1e-12)


def test_the_error_of_texts_of_different_lengths_is_that_of_their_ratio():
    draw = torch.Generator().manual_seed(1)
    counts = torch.randint(1, 40, (11, 1), generator=draw).double().expand(11, 2)
    sums = counts * torch.rand(11, 2, generator=draw, dtype=torch.float64)
    ratio, low, _ = ratio_of_sums(sums, counts, deviations=1.0)
    # A text without counts is no sample.
    effects = influence(torch.cat([sums, torch.zeros(1, 2)]), torch.cat([counts, torch.zeros(1, 2)]))
    assert effects.shape == (11, 2)
    for head in range(2):
        assert influence_error(effects[:, head]) == pytest.approx(float(ratio[head] - low[head]), rel=1e-9)
    assert math.isnan(influence_error(effects[:1, 0]))


@pytest.mark.parametrize(
    ("t", "degrees", "tail"),
    [(12.706, 1, 0.025), (2.571, 5, 0.025), (2.571, 5.9, 0.025), (2.042, 30, 0.025), (1.959964, math.inf, 0.025)],
)
def test_tails_are_those_of_the_tables(t, degrees, tail):
    assert student_tail(t, degrees) == pytest.approx(tail, abs=2e-5)


def test_the_false_discovery_rate_is_that_of_the_step_up_procedure():
    p = torch.rand(53, generator=torch.Generator().manual_seed(2)).square().tolist()
    q = adjusted(p)
    for rate in (0.01, 0.05, 0.2, 0.7):
        ranks = [rank for rank, x in enumerate(sorted(p), 1) if x <= rate * rank / len(p)]
        rejected = sorted(p)[: max(ranks, default=0)]
        assert sorted(x for x, y in zip(p, q, strict=True) if y <= rate) == rejected
    assert adjusted([]) == []


def test_halves_are_the_ratios_of_the_even_and_the_odd_documents():
    sums = torch.tensor([[1.0, 5.0], [2.0, 0.0], [4.0, 7.0], [9.0, 3.0]])
    counts = torch.tensor([[2.0], [5.0], [3.0], [6.0]])
    found = halves(sums, counts, torch.tensor([0, 3, 4, 7]))
    torch.testing.assert_close(found, torch.tensor([[5 / 5, 12 / 5], [11 / 11, 3 / 11]]))
    assert halves(sums[:1], counts[:1], torch.tensor([2]))[1].isnan().all(), "one document has no second half"
