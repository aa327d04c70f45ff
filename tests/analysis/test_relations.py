"""Relations of heads from second moments equal those of the contributions themselves, and known truths come out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from polyhead.analysis.relations import (
    cka,
    contribution_norm,
    cosine,
    effective_rank,
    mutual_information,
    subspace_overlap,
    total_correlation,
)
from polyhead.errors import OptionError, ShapeError
from polyhead.observation.head_moments import HeadMoments

HEADS, DIM, WIDTH, TOKENS = 4, 3, 11, 501


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def moments_of(outputs: Tensor) -> HeadMoments:
    return HeadMoments.empty(*outputs.shape[1:]).update(outputs)


def mixed(tokens: int = TOKENS, seed: int = 0) -> Tensor:
    """Outputs of heads that have something in common, and a mean each."""
    mixing = normal(HEADS * DIM, HEADS * DIM, seed=seed + 1)
    return (normal(tokens, HEADS * DIM, seed=seed) @ mixing + 5).view(tokens, HEADS, DIM)


@pytest.fixture
def outputs() -> Tensor:
    return mixed()


@pytest.fixture
def weights() -> Tensor:
    return normal(HEADS, DIM, WIDTH, seed=3)


def contributions(outputs: Tensor, weights: Tensor) -> Tensor:
    return torch.einsum("tia,iae->tie", outputs, weights)


def test_cosine_and_norm_are_those_of_the_contributions(outputs: Tensor, weights: Tensor) -> None:
    written = contributions(outputs, weights)
    centred = written - written.mean(0)
    together = torch.einsum("tie,tje->ij", centred, centred)
    expected = together / torch.outer(together.diagonal().sqrt(), together.diagonal().sqrt())
    torch.testing.assert_close(cosine(moments_of(outputs), weights), expected)
    norm = written.square().sum(-1).mean(0).sqrt()
    torch.testing.assert_close(contribution_norm(moments_of(outputs), weights), norm)


def test_cka_is_that_of_the_contributions(outputs: Tensor, weights: Tensor) -> None:
    centred = contributions(outputs, weights)
    centred = centred - centred.mean(0)
    cross = torch.einsum("tie,tjf->ijef", centred, centred).square().sum((2, 3))
    expected = cross / torch.outer(cross.diagonal().sqrt(), cross.diagonal().sqrt())
    torch.testing.assert_close(cka(moments_of(outputs), weights), expected)


def test_effective_rank_counts_directions(weights: Tensor) -> None:
    outputs = normal(20_000, HEADS, DIM, seed=4)
    outputs[:, 1, 1:] = 0.0  # one direction
    outputs[:, 2] = 0.0  # none
    orthonormal = torch.linalg.qr(weights.mT).Q.mT
    found = effective_rank(moments_of(outputs), orthonormal)
    assert found[0] == pytest.approx(DIM, rel=1e-3)
    assert found[1] == pytest.approx(1.0, rel=1e-9)
    assert found[2].isnan()
    samples = normal(50, 6, seed=5)
    variances = torch.linalg.svdvals(samples - samples.mean(0)).square()
    shares = variances / variances.sum()
    expected = math.exp(float(-(shares * shares.log()).sum()))
    whole = torch.eye(6, dtype=torch.float64)[None]
    assert float(effective_rank(moments_of(samples[:, None]), whole)[0]) == pytest.approx(expected)


def test_a_head_that_was_turned_inside_writes_the_same(outputs: Tensor, weights: Tensor) -> None:
    """A rotation between a head's values and its rows of the output projection changes nothing that is written."""
    turn = torch.linalg.qr(normal(DIM, DIM, seed=6)).Q
    outputs, weights = outputs.clone(), weights.clone()
    outputs[:, 3], weights[3] = outputs[:, 0] @ turn, turn.T @ weights[0]
    moments = moments_of(outputs)
    for relation in (cosine(moments, weights), cka(moments, weights), subspace_overlap(weights)):
        assert relation[0, 3] == pytest.approx(1.0, abs=1e-9)
        assert relation[0, 1] < 0.9
    assert mutual_information(moments)[0, 3] == torch.inf
    assert total_correlation(moments) == torch.inf
    weights[3] *= -2.0
    assert cosine(moments, weights)[0, 3] == pytest.approx(-1.0, abs=1e-9)


def test_a_head_that_writes_nothing_has_no_relation(outputs: Tensor, weights: Tensor) -> None:
    weights = weights.clone()
    weights[2] = 0.0
    found = cosine(moments_of(outputs), weights)
    assert found[2].isnan().all()
    assert found[:2, :2].isfinite().all()
    assert contribution_norm(moments_of(outputs), weights)[2] == 0


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_one_head_that_is_not_finite_leaves_all_others_as_they_are(
    outputs: Tensor, weights: Tensor, bad: float
) -> None:
    broken, broken_weights = outputs.clone(), weights.clone()
    broken[7, 2, 1] = bad
    broken_weights[2, 0, 3] = bad
    others = [0, 1, 3]
    moments, broken_moments = moments_of(outputs), moments_of(broken)
    for matrix in (cosine, cka):
        found, expected = matrix(broken_moments, weights), matrix(moments, weights)
        assert found[2].isnan().all()
        assert torch.equal(found[others][:, others], expected[others][:, others])
    found, expected = mutual_information(broken_moments), mutual_information(moments)
    assert found[2, others].isnan().all()
    assert torch.equal(found[others][:, others], expected[others][:, others])
    assert total_correlation(broken_moments).isnan()
    found, expected = effective_rank(broken_moments, weights), effective_rank(moments, weights)
    assert found[2].isnan()
    assert torch.equal(found[others], expected[others])
    found, expected = subspace_overlap(broken_weights), subspace_overlap(weights)
    assert found[2].isnan().all()
    assert torch.equal(found[others][:, others], expected[others][:, others])


def gaussian_information(covariance: Tensor, parts: list[slice]) -> float:
    whole = torch.linalg.slogdet(covariance).logabsdet
    return float(0.5 * (sum(torch.linalg.slogdet(covariance[part, part]).logabsdet for part in parts) - whole))


def test_mutual_information_and_total_correlation_are_unbiased() -> None:
    """At 60 tokens the plain estimate is far too high; over many samples the corrected one has the true mean."""
    heads, dim, tokens, samples = 3, 3, 60, 400
    mixing = torch.eye(heads * dim, dtype=torch.float64) + 0.25 * normal(heads * dim, heads * dim, seed=1)
    covariance = mixing.T @ mixing
    first, second = slice(0, dim), slice(dim, 2 * dim)
    pair = covariance[: 2 * dim, : 2 * dim]
    truth = gaussian_information(pair, [first, second])
    everything = gaussian_information(covariance, [slice(i * dim, (i + 1) * dim) for i in range(heads)])
    found: dict[str, list[float]] = {"corrected": [], "plain": [], "total": [], "plain total": []}
    for seed in range(samples):
        moments = moments_of((normal(tokens, heads * dim, seed=100 + seed) @ mixing).view(tokens, heads, dim))
        found["corrected"].append(float(mutual_information(moments)[0, 1]))
        found["plain"].append(float(mutual_information(moments, corrected=False)[0, 1]))
        found["total"].append(float(total_correlation(moments)))
        found["plain total"].append(float(total_correlation(moments, corrected=False)))
    means = {name: sum(values) / samples for name, values in found.items()}
    errors = {name: torch.tensor(values).std().item() / samples**0.5 for name, values in found.items()}
    assert abs(means["corrected"] - truth) < 4 * errors["corrected"]
    assert abs(means["total"] - everything) < 4 * errors["total"]
    assert means["plain"] - truth > 10 * errors["plain"]
    assert means["plain total"] - everything > 10 * errors["plain total"]


def test_a_head_of_lower_rank_is_compared_by_what_it_has() -> None:
    outputs = normal(3000, 3, 4, seed=2)
    outputs[:, 1, 2:] = 0.0
    outputs[:, 2] = 0.0
    outputs[:, 2, 0] = outputs[:, 0, 0] + normal(3000, seed=3)
    found = mutual_information(moments_of(outputs))
    assert found[0, 2] == pytest.approx(0.5 * math.log(2), abs=0.05)
    assert abs(found[0, 1]) < 0.01
    assert total_correlation(moments_of(outputs)) == pytest.approx(0.5 * math.log(2), abs=0.05)


@pytest.mark.parametrize("noise", [1.0, 0.1, 1e-2, 1e-3, 1e-6, 0.0])
def test_mutual_information_is_exact_up_to_identical_heads(noise: float) -> None:
    """From 1 to 20 nats, the last two of which are more than a single correlation can have, and then inf."""
    outputs = normal(400, 2, 3, seed=4)
    outputs[:, 1] = outputs[:, 0] + noise * outputs[:, 1]
    covariance = torch.cov(outputs.flatten(1).T)
    expected = gaussian_information(covariance, [slice(0, 3), slice(3, 6)]) if noise > 1e-5 else math.inf
    assert float(mutual_information(moments_of(outputs), corrected=False)[0, 1]) == pytest.approx(expected, rel=1e-8)


def test_directions_of_little_variance_count() -> None:
    """A ten-thousandth of the largest deviation is far above the rounding error of float32."""
    outputs = normal(3000, 2, 4, seed=2)
    outputs[:, 1, 3] = outputs[:, 0, 3] + normal(3000, seed=3)
    expected = total_correlation(moments_of(outputs))
    assert expected == pytest.approx(0.5 * math.log(2), abs=0.05)
    outputs[:, :, 3] *= 1e-4
    assert total_correlation(moments_of(outputs.float())) == pytest.approx(float(expected), abs=1e-3)
    assert mutual_information(moments_of(outputs.float()))[0, 1] == pytest.approx(float(expected), abs=1e-3)


def test_too_few_tokens_are_refused(outputs: Tensor) -> None:
    with pytest.raises(OptionError, match="more tokens than dimensions, got 7 tokens for 6 dimensions"):
        mutual_information(moments_of(outputs[:7]))
    with pytest.raises(OptionError, match="got 13 tokens for 12 dimensions"):
        total_correlation(moments_of(outputs[:13]))


def test_principal_angles_of_known_spaces() -> None:
    axes = torch.eye(6, dtype=torch.float64)
    angle = 0.3
    tilted = torch.stack([math.cos(angle) * axes[0] + math.sin(angle) * axes[3], axes[1]])
    bases = torch.stack([axes[:2] * 7, tilted, axes[4:6], torch.stack([axes[0], 2 * axes[0]])])
    overlap = subspace_overlap(bases)
    assert overlap[0, 1] == pytest.approx((1 + math.cos(angle) ** 2) / 2)
    assert overlap[0, 2] == pytest.approx(0.0, abs=1e-9)
    assert overlap[0, 3] == pytest.approx(1.0)  # a line inside a plane
    assert overlap.diagonal().tolist() == pytest.approx([1.0] * 4)


def test_random_spaces_overlap_as_the_null_says() -> None:
    bases = normal(30, 4, 40, seed=9)
    overlap = subspace_overlap(bases)
    apart = overlap[~torch.eye(30, dtype=torch.bool)]
    assert apart.mean() == pytest.approx(4 / 40, rel=0.05)


def test_other_shapes_are_refused(outputs: Tensor) -> None:
    with pytest.raises(ShapeError, match=r"\[4 heads, 3, embed_dim\], got shape \[3, 4, 11\]"):
        cosine(moments_of(outputs), torch.zeros(3, 4, 11))
    with pytest.raises(ShapeError, match=r"\[heads, rows, width\]"):
        subspace_overlap(torch.zeros(3, 4))
