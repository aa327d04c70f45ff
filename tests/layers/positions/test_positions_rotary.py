"""Rotary positions say what the papers and the models in use say, to float32 accuracy at any distance."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from polyhead.layers.positions import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    NTKScaling,
    Rotary,
    RotaryScaling,
    YarnScaling,
)
from tests.gradients import FAST

EPS = torch.finfo(torch.float32).eps
BATCH, HEADS, LENGTH, HEAD_DIM = 3, 5, 19, 26

SCALINGS = [
    None,
    LinearScaling(3.0),
    NTKScaling(3.0),
    DynamicNTKScaling(3.0, original_length=7),
    YarnScaling(4.0, original_length=64),
    YarnScaling(4.0, original_length=64, attention_factor=1.3, truncate=False),
    YarnScaling(40.0, original_length=64, beta_fast=16, beta_slow=2, mscale=1.0, mscale_all_dim=0.7),
    Llama3Scaling(8.0, 1.0, 4.0, original_length=64),
]


def tokens(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def by_complex_numbers(x: Tensor, positions: Tensor, rotary: Rotary, length: int | None = None) -> Tensor:
    """The definition: channel pairs are complex numbers, multiplied by exp(i * position * frequency)."""
    rotary_dim = rotary.rotary_dim
    rotary_part, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    if rotary.interleaved:
        real, imaginary = rotary_part[..., 0::2], rotary_part[..., 1::2]
    else:
        real, imaginary = rotary_part[..., : rotary_dim // 2], rotary_part[..., rotary_dim // 2 :]
    angle = positions.double()[..., None] * rotary.inverse_frequencies(length)
    angle = angle if positions.dim() == 1 else angle[:, None]
    magnitude = 1.0 if rotary.scaling is None else rotary.scaling.magnitude
    rotary_part = torch.complex(real, imaginary) * torch.polar(torch.full_like(angle, magnitude), angle)
    pairs = (rotary_part.real, rotary_part.imag)
    rotary_part = torch.stack(pairs, -1).flatten(-2) if rotary.interleaved else torch.cat(pairs, -1)
    return torch.cat((rotary_part, rest), -1)


@pytest.mark.parametrize("scaling", SCALINGS, ids=repr)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [HEAD_DIM, 14])
def test_rotation_is_multiplication_of_complex_numbers(
    scaling: RotaryScaling, interleaved: bool, rotary_dim: int
) -> None:
    rotary = Rotary(HEAD_DIM, base=1000.0, rotary_dim=rotary_dim, interleaved=interleaved, scaling=scaling)
    x = tokens(BATCH, HEADS, LENGTH, HEAD_DIM, dtype=torch.float64)
    exact = by_complex_numbers(x, torch.arange(11, 11 + LENGTH), rotary, length=11 + LENGTH)
    torch.testing.assert_close(rotary(x, 11), exact, rtol=0, atol=1e-13)
    single = rotary(x.float(), 11)
    assert single.dtype is torch.float32
    assert (single - exact).abs().max() <= 4 * EPS * exact.abs().max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once_at_the_end(dtype: torch.dtype) -> None:
    rotary = Rotary(HEAD_DIM)
    x = tokens(BATCH, HEADS, LENGTH, HEAD_DIM, dtype=dtype)
    assert torch.equal(rotary(x, 301), rotary(x.float(), 301).to(dtype))


@pytest.mark.parametrize("start", [0, 65_533, 1_000_003, 100_000_007])
def test_far_positions_are_as_exact_as_near_ones(start: int) -> None:
    rotary = Rotary(HEAD_DIM)
    x = tokens(BATCH, HEADS, LENGTH, HEAD_DIM)
    positions = torch.arange(start, start + LENGTH)
    exact = by_complex_numbers(x.double(), positions, rotary)
    for actual in (rotary(x, start), rotary(x, positions)):
        # float64 itself knows the angle only to start * 2**-53.
        assert (actual - exact).abs().max() <= (4 * EPS + start * 2**-51) * exact.abs().max()


def test_positions_as_an_offset_a_row_and_a_row_for_each_sequence_agree() -> None:
    rotary = Rotary(HEAD_DIM, rotary_dim=14)
    x = tokens(BATCH, HEADS, LENGTH, HEAD_DIM)
    row = torch.arange(23, 23 + LENGTH)
    expected = rotary(x, 23)
    assert torch.equal(rotary(x, row), expected)
    assert torch.equal(rotary(x, row.int()), expected)
    assert torch.equal(rotary(x, row.expand(BATCH, -1)), expected)
    assert torch.equal(rotary(x, row[None]), expected)


def test_each_sequence_may_stand_elsewhere() -> None:
    rotary = Rotary(HEAD_DIM)
    x = tokens(BATCH, HEADS, LENGTH, HEAD_DIM)
    starts = [0, 41, 7]
    positions = torch.stack([torch.arange(start, start + LENGTH) for start in starts])
    rotated = rotary(x, positions)
    for i, start in enumerate(starts):
        assert torch.equal(rotated[i : i + 1], rotary(x[i : i + 1], start))


def test_one_rotation_serves_queries_and_fewer_keys() -> None:
    rotary = Rotary(HEAD_DIM)
    query, key = tokens(BATCH, 6, LENGTH, HEAD_DIM), tokens(BATCH, 2, LENGTH, HEAD_DIM, seed=1)
    rotation = rotary.rotation(query, 5)
    assert torch.equal(rotary.rotate(query, rotation), rotary(query, 5))
    assert torch.equal(rotary.rotate(key, rotation), rotary(key, 5))


def test_decoding_token_by_token_equals_the_whole_sequence() -> None:
    rotary = Rotary(HEAD_DIM)
    x = tokens(BATCH, HEADS, LENGTH, HEAD_DIM)
    steps = [rotary(x[:, :, i : i + 1], i) for i in range(LENGTH)]
    assert torch.equal(torch.cat(steps, 2), rotary(x))


@pytest.mark.parametrize("shape", [(0, 5, 19), (3, 5, 0), (3, 0, 19)])
def test_nothing_rotates_to_nothing(shape: tuple[int, int, int]) -> None:
    assert Rotary(HEAD_DIM)(tokens(*shape, HEAD_DIM)).shape == (*shape, HEAD_DIM)


@settings(max_examples=40, deadline=None)
@given(
    query_position=st.integers(0, 5000),
    distance=st.integers(-5000, 5000),
    shift=st.integers(0, 100_000),
    interleaved=st.booleans(),
    scaling=st.sampled_from([s for s in SCALINGS if not isinstance(s, DynamicNTKScaling)]),
)
def test_logits_depend_on_the_distance_alone(
    query_position: int, distance: int, shift: int, interleaved: bool, scaling: RotaryScaling
) -> None:
    rotary = Rotary(HEAD_DIM, interleaved=interleaved, scaling=scaling)
    query, key = tokens(1, 1, 1, HEAD_DIM, dtype=torch.float64), tokens(1, 1, 1, HEAD_DIM, dtype=torch.float64, seed=1)

    def logit(offset: int) -> Tensor:
        rotated_query = rotary(query, torch.tensor([query_position + offset]))
        return (rotated_query * rotary(key, torch.tensor([query_position + distance + offset]))).sum()

    torch.testing.assert_close(logit(shift), logit(0), rtol=0, atol=1e-8)


@pytest.mark.parametrize("scaling", SCALINGS, ids=repr)
def test_norms_are_kept_but_for_yarns_attention_factor(scaling: RotaryScaling) -> None:
    x = tokens(BATCH, HEADS, LENGTH, HEAD_DIM, dtype=torch.float64)
    factor = 1.0 if scaling is None else scaling.magnitude
    torch.testing.assert_close(Rotary(HEAD_DIM, scaling=scaling)(x, 29).norm(dim=-1), x.norm(dim=-1) * factor)


def test_yarns_attention_factor_follows_from_the_factor() -> None:
    assert YarnScaling(4.0, 64).magnitude == pytest.approx(0.1 * math.log(4.0) + 1.0)
    assert YarnScaling(1.0, 64).magnitude == 1.0
    both = YarnScaling(40.0, 64, mscale=1.0, mscale_all_dim=0.5)
    assert both.magnitude == pytest.approx((0.1 * math.log(40) + 1) / (0.05 * math.log(40) + 1))


def test_static_ntk_keeps_the_fastest_pair_and_interpolates_the_slowest() -> None:
    plain, scaled = Rotary(HEAD_DIM), Rotary(HEAD_DIM, scaling=NTKScaling(5.0))
    ratio = plain.inverse_frequencies() / scaled.inverse_frequencies()
    torch.testing.assert_close(ratio[[0, -1]], torch.tensor([1.0, 5.0], dtype=torch.float64))
    assert (ratio.diff() > 0).all()


def test_dynamic_ntk_is_plain_up_to_the_original_length_and_slower_beyond() -> None:
    scaling = DynamicNTKScaling(2.0, original_length=LENGTH)
    rotary, plain = Rotary(HEAD_DIM, scaling=scaling), Rotary(HEAD_DIM)
    x = tokens(BATCH, HEADS, LENGTH, HEAD_DIM)
    assert torch.equal(rotary(x), plain(x))
    assert not torch.equal(rotary(x, 1), plain(x, 1))
    assert torch.equal(rotary(x, 1), rotary(x, torch.arange(1, 1 + LENGTH), length=1 + LENGTH))
    assert torch.equal(rotary(x), plain(x)), "a long sequence must not leave its frequencies behind"
    assert torch.equal(rotary(x, length=31), rotary(x, torch.arange(LENGTH), length=31))


def test_gradients_are_the_inverse_rotation() -> None:
    rotary = Rotary(HEAD_DIM, rotary_dim=14, scaling=YarnScaling(4.0, 64))
    x = tokens(1, 2, 5, HEAD_DIM, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: rotary(x, 3), x, **FAST)
    assert torch.autograd.gradgradcheck(lambda x: rotary(x, 3), x, **FAST)


# ---- against transformers


def llama_rotation(
    rope: dict[str, object], x: Tensor, positions: Tensor, head_dim: int
) -> tuple[Tensor, Tensor, float]:
    """Rotated x, inverse frequencies and attention factor as transformers' Llama computes them."""
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = llama.LlamaConfig(
        hidden_size=head_dim * HEADS,
        num_attention_heads=HEADS,
        head_dim=head_dim,
        max_position_embeddings=64,
        rope_parameters={"rope_theta": 10000.0, **rope},
    )
    embedding = llama.LlamaRotaryEmbedding(config)
    cos, sin = embedding(x, positions[None])
    rotated, _ = llama.apply_rotary_pos_emb(x, x, cos, sin)
    return rotated, embedding.inv_freq, embedding.attention_scaling


AS_TRANSFORMERS = [
    ({"rope_type": "default"}, None),
    ({"rope_type": "linear", "factor": 3.0}, LinearScaling(3.0)),
    ({"rope_type": "dynamic", "factor": 3.0}, DynamicNTKScaling(3.0, original_length=64)),
    (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        YarnScaling(4.0, original_length=64),
    ),
    (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False},
        YarnScaling(4.0, original_length=64, truncate=False),
    ),
    (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "attention_factor": 0.9},
        YarnScaling(4.0, original_length=4096, attention_factor=0.9),
    ),
    (
        {
            "rope_type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 16,
            "beta_slow": 2,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
        },
        YarnScaling(40.0, original_length=4096, beta_fast=16, beta_slow=2, mscale=1.0, mscale_all_dim=0.7),
    ),
    (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
        Llama3Scaling(8.0, 1.0, 4.0, original_length=256),
    ),
]


@pytest.mark.parametrize(("rope", "scaling"), AS_TRANSFORMERS, ids=lambda value: repr(value)[:40])
@pytest.mark.parametrize("start", [0, 83])
def test_every_scaling_equals_transformers(rope: dict[str, object], scaling: RotaryScaling | None, start: int) -> None:
    head_dim = 64
    rotary = Rotary(head_dim, scaling=scaling)
    x = tokens(BATCH, HEADS, LENGTH, head_dim)
    positions = torch.arange(start, start + LENGTH)
    expected, inverse_frequencies, factor = llama_rotation(rope, x, positions, head_dim)
    torch.testing.assert_close(
        rotary.inverse_frequencies(start + LENGTH), inverse_frequencies.double(), rtol=8 * EPS, atol=0
    )
    assert factor == pytest.approx(1.0 if scaling is None else scaling.magnitude)
    # transformers multiplies position and frequency in float32: its angles are off by some position * eps.
    assert (rotary(x, start) - expected).abs().max() <= (4 + 4 * (start + LENGTH)) * EPS * x.abs().max()


def test_partial_rotation_equals_transformers_gpt_neox() -> None:
    neox = pytest.importorskip("transformers.models.gpt_neox.modeling_gpt_neox")
    rotary = Rotary(HEAD_DIM, rotary_dim=14)
    x = tokens(BATCH, HEADS, LENGTH, HEAD_DIM)
    angle = torch.arange(LENGTH)[:, None] * rotary.inverse_frequencies().float()
    angle = torch.cat((angle, angle), -1)[None]
    expected, _ = neox.apply_rotary_pos_emb(x, x, angle.cos(), angle.sin())
    assert (rotary(x) - expected).abs().max() <= (4 + 4 * LENGTH) * EPS * x.abs().max()


def test_interleaved_rotation_equals_transformers_gptj() -> None:
    gptj = pytest.importorskip("transformers.models.gptj.modeling_gptj")
    rotary = Rotary(HEAD_DIM, interleaved=True)
    x = tokens(BATCH, HEADS, LENGTH, HEAD_DIM)
    sin, cos = gptj.create_sinusoidal_positions(LENGTH, HEAD_DIM)[None].chunk(2, -1)
    expected = gptj.apply_rotary_pos_emb(x.transpose(1, 2), sin, cos).transpose(1, 2)
    assert (rotary(x) - expected).abs().max() <= (4 + 4 * LENGTH) * EPS * x.abs().max()
