"""Groups of heads that say the same: what is planted is found, chance is not, and chains do not pass for groups."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from polyhead.analysis.redundancy import complete_groups, redundancy
from polyhead.analysis.relations import cosine
from polyhead.errors import OptionError, ShapeError
from polyhead.observation.head_moments import HeadMoments

HEADS, DIM, WIDTH, TOKENS = 8, 4, 32, 300


def random_heads(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(TOKENS, HEADS, DIM, generator=generator, dtype=torch.float64),
        torch.randn(HEADS, DIM, WIDTH, generator=generator, dtype=torch.float64),
    )


def similarity(outputs: Tensor, weights: Tensor) -> Tensor:
    return cosine(HeadMoments.empty(HEADS, DIM).update(outputs), weights)


@pytest.mark.parametrize("seed", range(20))
def test_planted_duplicates_are_found_and_nothing_else(seed: int) -> None:
    outputs, weights = random_heads(seed)
    turn = torch.linalg.qr(torch.randn(DIM, DIM, dtype=torch.float64)).Q
    outputs[:, 5], weights[5] = outputs[:, 1] @ turn, turn.T @ weights[1]
    outputs[:, 6], weights[6] = outputs[:, 1] + 0.1 * outputs[:, 6], weights[1]
    null = [similarity(*random_heads(1000 + 10 * seed + i)) for i in range(3)]
    found = redundancy(similarity(outputs, weights), null)
    assert found.groups == ((1, 5, 6),)
    assert redundancy(similarity(*random_heads(5000 + seed)), null).groups == ()


def test_a_chain_is_no_group() -> None:
    angles = torch.tensor([0.0, 0.3, 0.6, 0.9, 1.2])
    chain = torch.cos(angles[:, None] - angles)
    groups = complete_groups(chain, 0.9)
    assert groups == ((0, 1), (2, 3))


@given(st.integers(2, 9), st.floats(0.1, 0.9), st.integers(0, 10_000))
def test_groups_are_complete_disjoint_and_maximal(heads: int, threshold: float, seed: int) -> None:
    drawn = torch.rand(heads, heads, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    alike = (drawn + drawn.T) / 2
    groups = complete_groups(alike, threshold)
    members = [head for group in groups for head in group]
    assert len(members) == len(set(members))
    for group in groups:
        assert all(alike[i, j] >= threshold for i, j in itertools.combinations(group, 2))
    parts = [*groups, *((head,) for head in range(heads) if head not in members)]
    for one, other in itertools.combinations(parts, 2):
        assert not all(alike[i, j] >= threshold for i in one for j in other)


def test_a_head_that_writes_nothing_belongs_to_no_group() -> None:
    alike = torch.full((3, 3), torch.nan)
    alike[:2, :2] = 1.0
    assert complete_groups(alike, 0.5) == ((0, 1),)


def test_a_null_of_equal_heads_and_other_shapes_are_refused() -> None:
    with pytest.raises(OptionError, match="of unrelated heads, got a similarity of 1"):
        redundancy(torch.eye(3), torch.ones(3, 3))
    with pytest.raises(OptionError, match="pairs of heads"):
        redundancy(torch.eye(1), torch.eye(1))
    with pytest.raises(ShapeError, match=r"got shape \[2, 3\]"):
        complete_groups(torch.zeros(2, 3), 0.5)
