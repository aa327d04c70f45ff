"""Biases on the logits: ALiBi and T5 as their papers and models have them, quadratic encodings as convolutions."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from polyhead.layers.positions import (
    ALiBi,
    BiasesLogits,
    QuadraticRelative1D,
    QuadraticRelative2D,
    T5Bias,
)
from polyhead.masks import Mask
from polyhead.ops.attention import attention

HEADS, QUERIES, KEYS = 5, 19, 23


def distances(query_length: int, key_length: int) -> Tensor:
    """key position - query position, the last query beside the last key, [queries, keys]."""
    return torch.arange(key_length) - (torch.arange(query_length) + key_length - query_length)[:, None]


def added_to_logits(mask: Mask, query_length: int, key_length: int) -> Tensor:
    """What a backend adds, [heads, queries, keys]: read from the description, not from a backend."""
    assert len(mask.tensors) == 1
    if mask.biases:
        return mask.biases[0][0]
    (bias,) = mask.relative_biases
    column = distances(query_length, key_length) + bias.zero
    return bias.table[:, column.clamp(0, bias.table.shape[1] - 1)]


LENGTHS = [(QUERIES, QUERIES), (QUERIES, KEYS), (KEYS, QUERIES), (1, KEYS), (QUERIES, 1), (301, 307)]


# ---- ALiBi


@pytest.mark.parametrize(("query_length", "key_length"), LENGTHS)
def test_alibi_is_minus_slope_times_distance(query_length: int, key_length: int) -> None:
    mask = ALiBi(8).mask(query_length, key_length)
    slopes = torch.tensor([2.0**-i for i in range(1, 9)])
    expected = -slopes[:, None, None] * distances(query_length, key_length).abs()
    assert torch.equal(added_to_logits(mask, query_length, key_length), expected)


def test_alibi_slopes_of_other_head_counts_are_the_papers() -> None:
    # The paper's get_slopes(12): those of 8 heads, then every other one of 16.
    eight, sixteen = [2.0**-i for i in range(1, 9)], [2.0 ** (-i / 2) for i in range(1, 17)]
    torch.testing.assert_close(ALiBi(12).slopes(), torch.tensor(eight + sixteen[0::2][:4]))
    torch.testing.assert_close(ALiBi(1).slopes(), torch.tensor([2.0**-8]))
    torch.testing.assert_close(ALiBi(3).slopes(), torch.tensor([2.0**-4, 2.0**-8, 2.0**-2]))


@pytest.mark.parametrize("num_heads", [1, 2, 3, 7, 8, 12, 20, 71])
def test_alibi_equals_transformers_bloom(num_heads: int) -> None:
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    expected = bloom.build_alibi_tensor(torch.ones(1, KEYS, dtype=torch.long), num_heads, torch.float32)
    table = added_to_logits(ALiBi(num_heads).mask(1, KEYS), 1, KEYS)
    # Bloom writes slope * key, which differs by a constant a row: the softmax cannot tell.
    table = table - table[:, :, :1]
    torch.testing.assert_close(table, expected.reshape(num_heads, 1, KEYS), rtol=1e-6, atol=1e-6)


def test_learnable_alibi_starts_as_the_fixed_one_and_learns() -> None:
    fixed, learnable = ALiBi(HEADS), ALiBi(HEADS, learnable=True)
    assert not list(fixed.parameters())
    bias = added_to_logits(learnable.mask(QUERIES, KEYS), QUERIES, KEYS)
    torch.testing.assert_close(bias, added_to_logits(fixed.mask(QUERIES, KEYS), QUERIES, KEYS))
    bias.sum().backward()
    torch.testing.assert_close(learnable.weight.grad, -distances(QUERIES, KEYS).abs().sum().float().expand(HEADS))


def test_reach_covers_keys_that_stand_further_away_than_the_lengths_tell() -> None:
    (bias,) = ALiBi(8).mask(1, 4, max_distance=5000).relative_biases
    assert bias.table[0, bias.zero - 5000] == -2500.0
    assert bias.table[0, bias.zero + 5000] == -2500.0
    (bias,) = ALiBi(8).mask(1, 29, max_distance=7).relative_biases
    assert bias.table[0, bias.zero - 28] == -14.0


# ---- T5


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (64, 1000), (12, 17), (8, 5), (320, 800)])
def test_t5_equals_transformers_at_every_distance(bidirectional: bool, num_buckets: int, max_distance: int) -> None:
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    config = t5.T5Config(
        num_heads=HEADS,
        d_model=20,
        d_kv=4,
        relative_attention_num_buckets=num_buckets,
        relative_attention_max_distance=max_distance,
        is_decoder=not bidirectional,
    )
    theirs = t5.T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    ours = T5Bias(HEADS, num_buckets=num_buckets, max_distance=max_distance, bidirectional=bidirectional)
    ours.load_state_dict({"weight": nn.init.normal_(theirs.relative_attention_bias.weight).detach()})
    length = 2 * max_distance + 3
    expected = theirs.compute_bias(length, length)[0]
    mask = ours.mask(length, length)
    assert torch.equal(added_to_logits(mask, length, length), expected)
    # Beyond max_distance the last bucket goes on, so the description stays short.
    assert mask.relative_biases[0].table.shape == (HEADS, 2 * max_distance + 1)
    expected = theirs.compute_bias(QUERIES, KEYS, past_seen_tokens=KEYS - QUERIES)[0]
    assert torch.equal(added_to_logits(ours.mask(QUERIES, KEYS), QUERIES, KEYS), expected)


def test_t5_gradients_reach_every_bucket_in_use() -> None:
    bias = T5Bias(HEADS)
    added = added_to_logits(bias.mask(300, 300), 300, 300)
    added.sum().backward()
    counts = bias.weight.grad[:, 0]
    assert counts.sum() == 300 * 300
    # Bucket 16 would be "0 tokens after"; T5 never uses it.
    assert (counts > 0).sum() == 31
    assert counts[16] == 0


# ---- quadratic encodings


@pytest.mark.parametrize(("query_length", "key_length"), LENGTHS)
def test_quadratic_1d_is_the_formula(query_length: int, key_length: int) -> None:
    bias = QuadraticRelative1D(HEADS, alpha=0.7).double()
    added = added_to_logits(bias.mask(query_length, key_length), query_length, key_length)
    shifted = distances(query_length, key_length).double() - bias.center[:, 0, None, None]
    torch.testing.assert_close(added, -0.7 * shifted.square(), rtol=1e-6, atol=1e-9)


def test_quadratic_2d_is_the_formula_row_by_row() -> None:
    height, width = 3, 5
    bias = QuadraticRelative2D(HEADS, height, width).double()
    added = added_to_logits(bias.mask(15, 15), 15, 15)
    assert added.shape == (HEADS, 15, 15)
    for query in range(15):
        for key in range(15):
            delta = torch.tensor([key // width - query // width, key % width - query % width])
            expected = -bias.alpha * (delta - bias.center).square().sum(-1)
            torch.testing.assert_close(added[:, query, key], expected)


def test_quadratic_2d_takes_another_grid_at_call_time() -> None:
    bias = QuadraticRelative2D(HEADS, 3, 5)
    other = QuadraticRelative2D(HEADS, 7, 2)
    other.load_state_dict(bias.state_dict())
    assert torch.equal(bias.mask(14, 14, grid=(7, 2)).biases[0], other.mask(14, 14).biases[0])


@pytest.mark.parametrize("bias", [QuadraticRelative1D(2), QuadraticRelative2D(2, 2, 3)], ids=repr)
def test_quadratic_gradients_are_right(bias: BiasesLogits) -> None:
    bias = bias.double()

    def added(center: Tensor, log_alpha: Tensor) -> Tensor:
        parameters = {"center": center, "log_alpha": log_alpha}
        return added_to_logits(torch.func.functional_call(bias, parameters, (6, 6)), 6, 6)

    assert torch.autograd.gradcheck(added, (bias.center, bias.log_alpha))


def test_a_narrow_quadratic_head_is_a_shift() -> None:
    shifts = [-2, 0, 3]
    bias = QuadraticRelative1D(3)
    bias.attend_to(shifts, alpha=64.0)
    value = torch.randn(2, 3, QUERIES, 7)
    zeros = torch.zeros(2, 3, QUERIES, 4)
    shifted = attention(zeros, zeros, value, mask=bias.mask(QUERIES, QUERIES)).output
    for head, shift in enumerate(shifts):
        source = (torch.arange(QUERIES) + shift).clamp(0, QUERIES - 1)
        torch.testing.assert_close(shifted[:, head], value[:, head, source])


@pytest.mark.parametrize(("height", "width"), [(5, 7), (3, 11)])
def test_nine_narrow_quadratic_heads_are_a_3x3_convolution(height: int, width: int) -> None:
    cells, channels, filters = height * width, 4, 6
    bias = QuadraticRelative2D(9, 5, 7)
    bias.attend_to([(row, column) for row in (-1, 0, 1) for column in (-1, 0, 1)], alpha=64.0)
    convolution = nn.Conv2d(channels, filters, 3, padding=1, padding_mode="replicate")
    image = torch.randn(2, channels, height, width)

    pixels = image.flatten(2).transpose(1, 2)  # [batch, cells, channels]
    value = pixels[:, None].expand(2, 9, cells, channels)
    zeros = torch.zeros(2, 9, cells, 3)
    heads = attention(zeros, zeros, value, mask=bias.mask(cells, cells, grid=(height, width))).output
    # W_O of head (row, column) is the filter's weight at that offset.
    out = torch.einsum("bhnc,och->bno", heads, convolution.weight.flatten(2)) + convolution.bias
    torch.testing.assert_close(
        out.transpose(1, 2).unflatten(2, (height, width)), convolution(image), rtol=1e-4, atol=1e-5
    )


def test_a_wide_quadratic_head_averages() -> None:
    bias = QuadraticRelative1D(1)
    bias.attend_to([0], alpha=1e-6)
    value = torch.randn(2, 1, QUERIES, 7)
    zeros = torch.zeros(2, 1, QUERIES, 4)
    mean = attention(zeros, zeros, value, mask=bias.mask(QUERIES, QUERIES)).output
    torch.testing.assert_close(mean, value.mean(2, keepdim=True).expand_as(mean), rtol=1e-3, atol=1e-3)


# ---- all of them

BIASES = [
    ALiBi(HEADS),
    ALiBi(HEADS, learnable=True),
    T5Bias(HEADS),
    T5Bias(HEADS, bidirectional=False),
    QuadraticRelative1D(HEADS),
    QuadraticRelative2D(HEADS, 5, 7),
]


@pytest.mark.parametrize("bias", BIASES, ids=repr)
def test_a_bias_is_a_mask_that_combines_and_is_added(bias: BiasesLogits) -> None:
    query, key, value = (torch.randn(2, HEADS, 35, 8, dtype=torch.float64) for _ in range(3))
    mask = bias.mask(35, 35, dtype=torch.float64) & Mask.causal()
    output = attention(query, key, value, mask=mask).output
    logits = query @ key.transpose(2, 3) / math.sqrt(8) + added_to_logits(
        bias.mask(35, 35, dtype=torch.float64), 35, 35
    )
    logits = logits.masked_fill(torch.ones(35, 35, dtype=torch.bool).triu(1), -math.inf)
    torch.testing.assert_close(output, logits.softmax(-1) @ value)


@pytest.mark.parametrize("bias", [b for b in BIASES if list(b.parameters())], ids=repr)
def test_attention_teaches_the_bias(bias: BiasesLogits) -> None:
    bias.zero_grad()
    query, key, value = (torch.randn(2, HEADS, 35, 8) for _ in range(3))
    attention(query, key, value, mask=bias.mask(35, 35)).output.square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in bias.parameters())


@pytest.mark.parametrize("bias", BIASES, ids=repr)
def test_a_bias_is_float32_whatever_the_parameters_are_unless_asked(bias: BiasesLogits) -> None:
    half = copy.deepcopy(bias).half()
    assert half.mask(35, 35).tensors[0].dtype is torch.float32
    assert copy.deepcopy(bias).double().mask(35, 35, dtype=torch.float64).tensors[0].dtype is torch.float64
    assert bias.mask(35, 35, dtype=torch.bfloat16).tensors[0].dtype is torch.bfloat16
    # An overflow to -inf would hide a key that is only unlikely.
    assert bias.mask(35, 35, dtype=torch.float16).tensors[0].isfinite().all()
    assert bias.mask(35, 35, device="meta").tensors[0].is_meta


def test_float16_biases_never_overflow_into_hiding() -> None:
    bias = QuadraticRelative1D(1)
    bias.attend_to([1000.0])
    assert bias.mask(7, 7).tensors[0].max() < torch.finfo(torch.float16).min
    assert bias.mask(7, 7, dtype=torch.float16).tensors[0].isfinite().all()


@pytest.mark.parametrize("bias", BIASES[:5], ids=repr)
@pytest.mark.parametrize(("query_length", "key_length"), [(0, 7), (7, 0), (0, 0)])
def test_empty_lengths_give_a_mask(bias: BiasesLogits, query_length: int, key_length: int) -> None:
    added = added_to_logits(bias.mask(query_length, key_length), query_length, key_length)
    assert added.shape == (HEADS, query_length, key_length)


def test_meta_construction_and_reset_give_the_same_start() -> None:
    with torch.device("meta"):
        built = [ALiBi(HEADS, learnable=True), T5Bias(HEADS), QuadraticRelative2D(HEADS, 5, 7)]
    for bias in built:
        bias = bias.to_empty(device="cpu")
        bias.reset_parameters()
        assert bias.mask(35, 35).tensors[0].isfinite().all()
