"""Positions added to the input: the sinusoids of the paper and a learned table that says where it ends."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch

from polyhead.layers.positions import Learned, Sinusoidal

BATCH, LENGTH = 3, 19


@pytest.mark.parametrize("embed_dim", [1, 2, 13, 26])
@pytest.mark.parametrize("base", [10000.0, 37.0])
def test_sinusoids_are_the_papers_formula(embed_dim: int, base: float) -> None:
    actual = Sinusoidal(embed_dim, base=base)(torch.zeros(BATCH, LENGTH, embed_dim, dtype=torch.float64), 7)
    for position in range(LENGTH):
        for channel in range(embed_dim):
            angle = (position + 7) / base ** ((channel - channel % 2) / embed_dim)
            expected = math.cos(angle) if channel % 2 else math.sin(angle)
            assert actual[0, position, channel].item() == pytest.approx(expected, abs=1e-14)
    assert torch.equal(actual[0], actual[2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_sinusoids_are_added_and_the_dtype_stays(dtype: torch.dtype) -> None:
    x = torch.randn(BATCH, LENGTH, 26).to(dtype)
    encoding = Sinusoidal(26)(torch.zeros_like(x, dtype=torch.promote_types(dtype, torch.float32)))
    actual = Sinusoidal(26)(x)
    assert actual.dtype is dtype
    assert torch.equal(actual, (x + encoding).to(dtype))


@pytest.mark.parametrize("start", [65_533, 10_000_019])
def test_far_sinusoids_are_as_exact_as_near_ones(start: int) -> None:
    positions = torch.arange(start, start + LENGTH)
    exact = Sinusoidal(26)(torch.zeros(1, LENGTH, 26, dtype=torch.float64), positions)
    for given in (start, positions):
        actual = Sinusoidal(26)(torch.zeros(1, LENGTH, 26), given)
        assert (actual - exact).abs().max() < 4 * torch.finfo(torch.float32).eps


def test_a_sinusoid_at_a_distance_is_a_rotation_of_the_one_here() -> None:
    """The property for which the paper chose them: PE(p + k) is a linear function of PE(p) that depends on k alone."""
    zeros = torch.zeros(1, 101, 26, dtype=torch.float64)
    encoding, shifted = Sinusoidal(26)(zeros)[0], Sinusoidal(26)(zeros, 23)[0]
    sin_k, cos_k = encoding[23, 0::2], encoding[23, 1::2]
    sin, cos = encoding[:, 0::2], encoding[:, 1::2]
    torch.testing.assert_close(shifted[:, 0::2], sin * cos_k + cos * sin_k)
    torch.testing.assert_close(shifted[:, 1::2], cos * cos_k - sin * sin_k)


@pytest.mark.parametrize("module", [Sinusoidal(26), Learned(97, 26)], ids=repr)
def test_offset_row_and_row_for_each_sequence_agree(module) -> None:
    x = torch.randn(BATCH, LENGTH, 26)
    row = torch.arange(23, 23 + LENGTH)
    expected = module(x, 23)
    assert torch.equal(module(x, row), expected)
    assert torch.equal(module(x, row.int()), expected)
    assert torch.equal(module(x, row.expand(BATCH, -1)), expected)
    moved = torch.stack([row, row - 23, row + 5])
    assert torch.equal(module(x, moved)[1], module(x)[1])
    assert torch.equal(module(x, moved)[2], module(x, 28)[2])


@pytest.mark.parametrize("module", [Sinusoidal(26), Learned(97, 26)], ids=repr)
def test_copies_encode_alike(module) -> None:
    x = torch.randn(BATCH, LENGTH, 26)
    assert torch.equal(copy.deepcopy(module)(x, 3), module(x, 3))
    assert torch.equal(pickle.loads(pickle.dumps(module))(x, 3), module(x, 3))
    for shape in ((0, LENGTH, 26), (BATCH, 0, 26)):
        assert module(torch.zeros(shape)).shape == shape


def test_sinusoids_hold_no_tensor_and_survive_half_and_meta() -> None:
    x = torch.randn(BATCH, LENGTH, 26)
    expected = Sinusoidal(26)(x, 211)
    assert not Sinusoidal(26).state_dict()
    assert torch.equal(Sinusoidal(26).half()(x, 211), expected)
    with torch.device("meta"):
        module = Sinusoidal(26)
    assert torch.equal(module.to_empty(device="cpu")(x, 211), expected)


def test_learned_positions_are_rows_of_the_weight_and_learn() -> None:
    module = Learned(97, 26)
    x = torch.randn(BATCH, LENGTH, 26)
    torch.testing.assert_close(module(x, 78) - x, module.weight[78:].expand(BATCH, -1, -1))
    module(x, 78).sum().backward()
    assert torch.equal(module.weight.grad, torch.cat((torch.zeros(78, 26), torch.full((19, 26), float(BATCH)))))
    assert module(x.bfloat16()).dtype is torch.bfloat16


def test_learned_reset_after_meta_construction() -> None:
    with torch.device("meta"):
        module = Learned(97, 26)
    module = module.to_empty(device="cpu")
    module.reset_parameters()
    assert 0.015 < module.weight.std() < 0.025
