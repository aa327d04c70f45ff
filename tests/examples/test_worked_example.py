"""The worked example against a derivation on paper: integers, square roots and exponentials, nothing taken from a run.

Write t = exp(1 / sqrt(2)). A score is an integer over sqrt(2), so its exponential is a power of t, and every weight is
a quotient of small polynomials in t.
"""

from __future__ import annotations

import math

import pytest
import torch

import polyhead
from examples import worked_example
from examples.worked_example import WorkedExample, work_through
from polyhead.errors import PolyheadError

T = math.exp(1 / math.sqrt(2))

# The second token is (0, 2, 0, 1): twice the second row of W_Q and once the fourth,
# 2 (0, 1, 0, 1) + (0, 0, 1, 1) = (0, 2, 1, 3). The others likewise.
QUERIES = [[2, 1, 1, 0], [0, 2, 1, 3], [1, 1, 4, 4]]
KEYS = [[2, 1, 1, 0], [0, 1, 2, 3], [1, 4, 1, 4]]
VALUES = QUERIES  # W_V is W_Q

# Head 0 reads columns 0-1. Its first query (2, 1) meets the keys (2, 1), (0, 1), (1, 4): 5, 1, 6.
# Head 1 reads columns 2-3. Its second query (1, 3) meets the keys (1, 0), (2, 3), (1, 4): 1, 11, 13.
PRODUCTS = [
    [[5, 1, 6], [2, 2, 8], [3, 1, 5]],
    [[1, 2, 1], [1, 11, 13], [4, 20, 20]],
]

# Softmax of (5, 1, 6) / sqrt(2): t^5, t, t^6 over their sum; divided by t, that is t^4, 1, t^5 over N1.
N1 = T**4 + 1 + T**5
N2 = 2 + T**6  # from 2, 2, 8
N3 = T**2 + 1 + T**4  # from 3, 1, 5
M1 = 2 + T  # from 1, 2, 1
M2 = 1 + T**10 + T**12  # from 1, 11, 13
M3 = 1 + 2 * T**16  # from 4, 20, 20
WEIGHTS = [
    [[T**4 / N1, 1 / N1, T**5 / N1], [1 / N2, 1 / N2, T**6 / N2], [T**2 / N3, 1 / N3, T**4 / N3]],
    [[1 / M1, T / M1, 1 / M1], [1 / M2, T**10 / M2, T**12 / M2], [1 / M3, T**16 / M3, T**16 / M3]],
]

# Head 0's values are (2, 1), (0, 2), (1, 1). Second column: 1, 2, 1, so one plus the weight of the middle key.
# In the second row the first column is (2 + t^6) / N2, which is 1.
# Head 1's values are (1, 0), (1, 3), (4, 4).
HEAD_OUTPUTS = [
    [[(2 * T**4 + T**5) / N1, 1 + 1 / N1], [1.0, 1 + 1 / N2], [(2 * T**2 + T**4) / N3, 1 + 1 / N3]],
    [
        [(5 + T) / M1, (3 * T + 4) / M1],
        [(1 + T**10 + 4 * T**12) / M2, (3 * T**10 + 4 * T**12) / M2],
        [(1 + 5 * T**16) / M3, 7 * T**16 / M3],
    ],
]


def through_w_o(a: float, b: float, c: float, d: float) -> list[float]:
    """(a, b, c, d) W_O, read off its columns: (1, 0, 2, 0), (2, 1, 0, 0), (0, 0, 1, 1), (0, 3, 0, 1)."""
    return [a + 2 * c, 2 * a + b, c + d, 3 * b + d]


OUTPUT = [through_w_o(*first, *second) for first, second in zip(*HEAD_OUTPUTS, strict=True)]


@pytest.fixture(scope="module")
def example() -> WorkedExample:
    return work_through()


def assert_equal_to_rounding(found: torch.Tensor, by_hand: list) -> None:
    expected = torch.tensor(by_hand, dtype=torch.float64)
    assert found.dtype is torch.float64
    assert found.shape == expected.shape
    # Powers up to t^16 on paper, as many roundings in the library: 64 halves of a unit in the last place.
    torch.testing.assert_close(found, expected, rtol=64 * 2**-53, atol=0)


def test_the_example_is_the_one_that_was_asked_for(example):
    assert example.tokens.tolist() == [[1, 0, 1, 0], [0, 2, 0, 1], [1, 1, 0, 3]]
    assert example.query_weight.tolist() == [[1, 0, 1, 0], [0, 1, 0, 1], [1, 1, 0, 0], [0, 0, 1, 1]]
    assert example.value_weight.tolist() == example.query_weight.tolist()
    assert example.key_weight.tolist() == [[1, 1, 0, 0], [0, 0, 1, 1], [1, 0, 1, 0], [0, 1, 0, 1]]
    assert example.output_weight.tolist() == [[1, 2, 0, 0], [0, 1, 0, 3], [2, 0, 1, 0], [0, 0, 1, 1]]


def test_projections_are_the_integers_of_the_derivation(example):
    assert example.queries.tolist() == QUERIES
    assert example.keys.tolist() == KEYS
    assert example.values.tolist() == VALUES


def test_heads_take_columns_0_1_and_2_3(example):
    assert example.head_queries.tolist() == [[row[:2] for row in QUERIES], [row[2:] for row in QUERIES]]
    assert example.head_keys.tolist() == [[row[:2] for row in KEYS], [row[2:] for row in KEYS]]
    assert example.head_values.tolist() == [[row[:2] for row in VALUES], [row[2:] for row in VALUES]]


def test_scores_are_integers_over_the_square_root_of_two(example):
    assert example.products.tolist() == PRODUCTS
    assert example.head_dim == 2
    over_root = [[[score / math.sqrt(2) for score in row] for row in head] for head in PRODUCTS]
    assert_equal_to_rounding(example.scores, over_root)


def test_weights_are_the_exponentials_of_the_derivation(example):
    assert_equal_to_rounding(example.weights, WEIGHTS)
    # The same of one row, written out as the softmax it is.
    exponentials = [math.exp(score / math.sqrt(2)) for score in (5, 1, 6)]
    assert example.weights[0, 0].tolist() == pytest.approx([e / sum(exponentials) for e in exponentials], rel=1e-15)


def test_heads_and_their_concatenation_are_the_derived_quotients(example):
    assert_equal_to_rounding(example.head_outputs, HEAD_OUTPUTS)
    side_by_side = [first + second for first, second in zip(*HEAD_OUTPUTS, strict=True)]
    assert_equal_to_rounding(example.concatenated, side_by_side)


def test_output_is_the_concatenation_through_w_o(example):
    assert_equal_to_rounding(example.output, OUTPUT)


def test_the_layer_gives_the_derived_output(example):
    assert_equal_to_rounding(example.layer_output, OUTPUT)
    assert example.backend in ("sdpa", "blockwise", "reference")
    assert example.largest_difference <= 16 * 2**-52 * max(max(row) for row in OUTPUT)


def test_a_library_that_computes_something_else_is_refused(monkeypatch):
    exact = polyhead.attention

    def wrong(*args, **kwargs):
        return exact(*args, **kwargs, scale=1.0)

    monkeypatch.setattr(worked_example.polyhead, "attention", wrong)
    with pytest.raises(PolyheadError, match=r"attention's output must equal the formula's to within rounding .* got"):
        work_through()
