"""Spectra of circuits equal those of the whole matrices, and heads that copy by construction are told from others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from polyhead.analysis.circuits import singular_values
from polyhead.analysis.roles_copying import Words, copying_scores
from polyhead.errors import ShapeError

HEADS, WIDTH, RANK, VOCABULARY = 5, 24, 4, 60


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def copying(value: Tensor, output: Tensor, embedding: Tensor, unembedding: Tensor) -> Tensor:
    """The score of the formula: E W_V W_O U^T has the nonzero eigenvalues of W_O U^T E W_V."""
    between = (unembedding - unembedding.mean(0)).T @ (embedding - embedding.mean(0))
    values = torch.linalg.eigvals(output @ between @ value)
    return values.real.sum(-1) / values.abs().sum(-1)


def test_spectra_are_those_of_the_products() -> None:
    left, right = normal(HEADS, WIDTH, RANK, seed=1), normal(HEADS, RANK, WIDTH, seed=2)
    whole = left @ right
    torch.testing.assert_close(singular_values(left, right), torch.linalg.svdvals(whole)[:, :RANK])
    wide = singular_values(left[:, :3], right)  # fewer rows than rank
    torch.testing.assert_close(wide, torch.linalg.svdvals(left[:, :3] @ right)[:, :3])


def test_one_head_that_is_not_finite_leaves_all_others_as_they_are() -> None:
    left, right = normal(HEADS, WIDTH, RANK, seed=1), normal(HEADS, RANK, WIDTH, seed=2)
    broken, others = left.clone(), [0, 1, 2, 4]
    broken[3, 5, 1] = torch.inf
    embedding = normal(VOCABULARY, WIDTH, seed=3)
    words = Words(embedding, embedding)
    for of in (
        lambda value: singular_values(value, right),
        lambda value: copying_scores(value, right, words).score,
        lambda value: copying_scores(value, right, words).error,
    ):
        found, expected = of(broken), of(left)
        assert found[3].isnan().all()
        assert torch.equal(found[others], expected[others])


def test_a_head_that_copies_is_told_from_one_that_does_the_opposite_and_from_random_ones() -> None:
    embedding = normal(VOCABULARY, WIDTH, seed=3)
    basis = torch.linalg.qr(normal(WIDTH, WIDTH, seed=4)).Q[:, :RANK]
    value = torch.stack([basis, basis, *(normal(WIDTH, RANK, seed=10 + i) for i in range(200))])
    output = torch.stack([basis.T, -basis.T, *(normal(RANK, WIDTH, seed=500 + i) for i in range(200))])
    found = copying_scores(value, output, Words(embedding, embedding)).score
    assert found[0] == pytest.approx(1.0)
    assert found[1] == pytest.approx(-1.0)
    assert abs(found[2:].mean()) < 0.15
    assert found[2:].std() < 1 / RANK**0.5
    words = embedding - embedding.mean(0)
    whole = torch.linalg.eigvals(words @ value[2] @ output[2] @ words.T)
    assert found[2] == pytest.approx(float(whole.real.sum() / whole.abs().sum()))


def test_other_shapes_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"\[heads, rows, rank\] times \[heads, rank, columns\]"):
        singular_values(torch.zeros(2, 3, 4), torch.zeros(2, 3, 4))
    with pytest.raises(ShapeError, match="embedding and unembedding"):
        Words(torch.zeros(7, 3), torch.zeros(7, 4))


def test_a_vocabulary_is_read_as_a_whole_unless_that_takes_too_many_products(monkeypatch: pytest.MonkeyPatch) -> None:
    embedding, unembedding = normal(9000, WIDTH, seed=5), normal(9000, WIDTH, seed=6)
    value, output = normal(HEADS, WIDTH, RANK, seed=1), normal(HEADS, RANK, WIDTH, seed=2)
    whole = copying(value, output, embedding, unembedding)
    torch.testing.assert_close(copying_scores(value, output, Words(embedding, unembedding)).score, whole)
    monkeypatch.setattr("polyhead.analysis.roles_copying.MAX_PRODUCTS", 1)
    sampled = copying_scores(value, output, Words(embedding, unembedding)).score
    assert not torch.allclose(sampled, whole, rtol=1e-4)
    drawn = torch.randperm(9000, generator=torch.Generator().manual_seed(0))[:8192]
    torch.testing.assert_close(sampled, copying(value, output, embedding[drawn], unembedding[drawn]))


@pytest.mark.parametrize("vocabulary", [90, 900])  # fewer words than 5 times the width are multiplied without U^T E
def test_float32_weights_have_the_scores_of_float64(vocabulary: int) -> None:
    embedding, unembedding = normal(vocabulary, WIDTH, seed=5), normal(vocabulary, WIDTH, seed=6)
    value, output = normal(HEADS, WIDTH, RANK, seed=1), normal(HEADS, RANK, WIDTH, seed=2)
    matrices = [x.float() for x in (value, output, embedding, unembedding)]
    exact, single = (
        copying_scores(value, output, Words(embedding, unembedding))
        for value, output, embedding, unembedding in ([x.double() for x in matrices], matrices)
    )
    for name in ("score", "error"):
        found, expected = getattr(single, name), getattr(exact, name)
        assert found.dtype is torch.float64
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert single.null == pytest.approx(exact.null, abs=1e-6)
