"""Redundancy: the share of a head that the others of its layer predict: planted heads, and a plain regression."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from polyhead.analysis.redundancy import PredictableShares, predictable_shares, tokens_needed
from polyhead.analysis.relations import cka, cosine
from polyhead.errors import OptionError, ShapeError
from polyhead.observation.head_moments import HeadMoments

HEADS, DIM, WIDTH, TOKENS = 7, 5, 41, 6000
COPY, NEGATIVE, MAPPED, SUM, UNRELATED = 2, 3, 4, 5, 6  # of heads 0, 0, 1, and of 0 and 1


def planted(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Outputs [tokens, heads, dim] and rows of W_O, in which a copy has another basis."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    outputs, weights = draw(TOKENS, HEADS, DIM) + 3 * draw(HEADS, DIM), draw(HEADS, DIM, WIDTH)
    basis = torch.linalg.qr(draw(DIM, DIM)).Q
    outputs[:, COPY], weights[COPY] = outputs[:, 0] @ basis, basis.T @ weights[0]
    outputs[:, NEGATIVE], weights[NEGATIVE] = -outputs[:, 0], weights[0]
    outputs[:, MAPPED] = outputs[:, 1] @ basis
    outputs[:, SUM] = outputs[:, 0] + outputs[:, 1]
    return outputs, weights


def halves_of(outputs: Tensor) -> list[HeadMoments]:
    return [HeadMoments.empty(*outputs.shape[1:]).update(half) for half in outputs.chunk(2)]


def shares_of(outputs: Tensor, weights: Tensor) -> PredictableShares:
    return predictable_shares(*halves_of(outputs), weights)


def regression(outputs: Tensor, weights: Tensor, head: int, predictors: list[int]) -> list[float]:
    """R² of a head's contribution, by least squares on explicit rows: one half is fitted, the other predicted.

    On all rows, on those of the first half, and on those of the second.
    """
    unit = (outputs - outputs.mean(0)).square().mean((0, 2)).sqrt()
    written = outputs[:, head] @ weights[head]
    sums = []
    halves = torch.arange(len(outputs)).chunk(2)
    for train, test in (halves[::-1], halves):
        x = (outputs / unit[:, None])[:, predictors].flatten(1)
        mean, target = x[train].mean(0), written[train].mean(0)
        ridge = (x.shape[1]) ** 0.5 * torch.eye(x.shape[1], dtype=torch.float64)  # predictors per token, times tokens
        left = torch.cat([x[train] - mean, ridge])
        right = torch.cat([written[train] - target, torch.zeros(x.shape[1], WIDTH, dtype=torch.float64)])
        fitted = torch.linalg.lstsq(left, right).solution
        error = written[test] - target - (x[test] - mean) @ fitted
        sums.append(torch.stack([y.square().sum() for y in (error, written[test] - written[test].mean(0))]))
    return [float(1 - error / total) for error, total in (sums[0] + sums[1], *sums)]


def test_planted_heads_are_predicted_whatever_the_sign_and_the_basis() -> None:
    outputs, weights = planted()
    shares = shares_of(outputs, weights)
    assert (shares.by_others[:UNRELATED] > 0.999).all()
    assert -0.02 < shares.by_others[UNRELATED] <= 0
    moments = HeadMoments.empty(HEADS, DIM).update(outputs)
    alike = cosine(moments, weights)
    assert alike[COPY, 0] > 0.999
    assert alike[NEGATIVE, 0] < -0.999
    for head, source in ((COPY, 0), (NEGATIVE, 0), (MAPPED, 1), (1, MAPPED)):
        assert shares.by_head[head, source] > 0.999
    assert abs(alike[MAPPED, 1]) < 0.35  # rotated, into other directions of the residual stream
    assert cka(moments, weights)[MAPPED, 1] > 0.5
    assert shares.by_head[SUM, 0] == pytest.approx(0.5, abs=0.02)  # the other half needs head 1
    assert (shares.by_head[:UNRELATED, UNRELATED].abs() < 0.01).all()
    torch.testing.assert_close(shares.by_head.diagonal(), torch.ones(HEADS).double(), rtol=0, atol=1e-5)


def test_a_prediction_is_not_symmetric() -> None:
    outputs, weights = planted()
    outputs[:, UNRELATED, :2], outputs[:, UNRELATED, 2:] = outputs[:, 1, :2], 0.0  # two channels of head 1
    shares = shares_of(outputs, weights).by_head
    assert shares[UNRELATED, 1] > 0.999
    assert shares[1, UNRELATED] < 0.7


@pytest.mark.parametrize("tokens", [TOKENS, 250])
def test_shares_are_those_of_a_regression_on_explicit_rows(tokens: int) -> None:
    outputs, weights = planted(1)
    noise = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    outputs = (outputs + noise)[:tokens] * torch.linspace(0.1, 9, HEADS)[:, None]
    outputs[tokens // 2 :] += 1.7  # documents differ in their mean, and
    outputs[: tokens // 2, COPY] += 3 * noise[: tokens // 2, 0]  # in what a head writes
    shares = shares_of(outputs, weights)
    for head in range(HEADS):
        others = [other for other in range(HEADS) if other != head]
        by_others = [shares.by_others[head], *shares.halves[:, head]]
        assert by_others == pytest.approx(regression(outputs, weights, head, others), abs=1e-9)
        alone = {other: regression(outputs, weights, head, [other]) for other in others}
        for other in others:
            assert float(shares.by_head[head, other]) == pytest.approx(alone[other][0], abs=1e-9)
        best = max(alone.values(), key=lambda x: x[0])
        assert shares.alone_halves[:, head].tolist() == pytest.approx(best[1:], abs=1e-9)
    assert abs(shares.halves[0, COPY] - shares.halves[1, COPY]) > 0.02  # a swap of the halves would fail above


@pytest.mark.parametrize("seed", range(5))
def test_unrelated_heads_are_at_most_zero_with_any_number_of_tokens(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(HEADS, DIM, WIDTH, generator=generator)
    for tokens in (250, 600, 2000):
        outputs = torch.randn(tokens, HEADS, DIM, generator=generator)
        assert shares_of(outputs, weights).by_others.mean() < 0


def test_heads_without_a_finite_varying_output_have_no_share_and_change_no_other() -> None:
    outputs, weights = planted()
    without = shares_of(outputs[:, :5], weights[:5])
    outputs[:, 5], outputs[7, 6] = 2.0, torch.nan
    shares = shares_of(outputs, weights)
    assert shares.by_others[5:].isnan().all()
    assert shares.by_head[5:].isnan().all()
    assert shares.by_head[:, 5:].isnan().all()
    torch.testing.assert_close(shares.by_others[:5], without.by_others, rtol=0, atol=1e-4)
    torch.testing.assert_close(shares.by_head[:5, :5], without.by_head)


def test_fewer_tokens_than_predictors_and_other_shapes_are_refused() -> None:
    outputs, weights = planted()
    needed = tokens_needed(halves_of(outputs)[0])
    assert needed == 4 * (HEADS - 1) * DIM
    shares_of(outputs[: 2 * needed], weights)
    with pytest.raises(OptionError, match=r"needs 120 tokens in each half of the documents, got 120 and 119"):
        shares_of(outputs[: 2 * needed - 1], weights)
    with pytest.raises(ShapeError, match=r"of the same heads, got \[7, 5\], \[7, 5\] and \[6, 5, 41\]"):
        shares_of(outputs, weights[1:])
