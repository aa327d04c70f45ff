"""Convolutional heads against PyTorch's convolutions: equal, with an error that falls as the sharpness grows."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyhead import Mask, MultiHeadAttention
from polyhead.errors import OptionError, ShapeError
from polyhead.layers import AttentionConfig, config_of, convolutional_heads, set_convolution
from polyhead.layers.positions import QuadraticRelative1D, QuadraticRelative2D

BATCH, LENGTH, GRID = 3, 17, (7, 11)
DOUBLE = torch.float64


def line(channels_in: int, channels_out: int, kernel: int = 3, **options: Any) -> nn.Conv1d:
    return nn.Conv1d(channels_in, channels_out, kernel, dtype=DOUBLE, **{"padding": "same", **options})


def plane(channels_in: int, channels_out: int, kernel: Any = 3, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(channels_in, channels_out, kernel, dtype=DOUBLE, **{"padding": "same", **options})


def convolved(conv: nn.Conv1d | nn.Conv2d, x: Tensor) -> Tensor:
    """x [batch, tokens, channels], the cells of a grid row by row."""
    tokens = x.mT.unflatten(-1, GRID) if isinstance(conv, nn.Conv2d) else x.mT
    return conv(tokens).flatten(2).mT


def attended(layer: MultiHeadAttention, conv: nn.Conv1d | nn.Conv2d, x: Tensor) -> Tensor:
    width = layer.layout.embed_dim
    return layer(nn.functional.pad(x, (0, width - conv.in_channels))).output[..., : conv.out_channels]


def of_the_kind(conv: nn.Conv1d | nn.Conv2d, **options: Any) -> MultiHeadAttention:
    return convolutional_heads(conv, grid=GRID if isinstance(conv, nn.Conv2d) else None, **options)


def tokens(conv: nn.Conv1d | nn.Conv2d) -> Tensor:
    length = math.prod(GRID) if isinstance(conv, nn.Conv2d) else LENGTH
    return torch.randn(BATCH, length, conv.in_channels, dtype=DOUBLE)


REPLICATE = {"padding_mode": "replicate"}
CONVOLUTIONS: dict[str, Any] = {
    "line": lambda: line(6, 6, **REPLICATE),
    "line, padding in numbers": lambda: line(6, 6, 5, padding=2, **REPLICATE),
    "line, widening": lambda: line(4, 7, 5, **REPLICATE),
    "line, narrowing": lambda: line(7, 4, 5, **REPLICATE),
    "line, without bias": lambda: line(6, 6, bias=False, **REPLICATE),
    "line, an even kernel": lambda: line(5, 5, 4, **REPLICATE),
    "line, dilated": lambda: line(5, 5, 3, dilation=2, **REPLICATE),
    "line, one tap": lambda: line(5, 5, 1, **REPLICATE),
    "line, zeros": lambda: line(6, 6, 5),
    "line, zeros, dilated": lambda: line(6, 5, 3, dilation=3),
    "plane": lambda: plane(4, 4, **REPLICATE),
    "plane, oblong": lambda: plane(4, 6, (3, 5), **REPLICATE),
    "plane, dilated": lambda: plane(4, 4, 3, dilation=(1, 2), padding=(1, 2), **REPLICATE),
    "plane, zeros": lambda: plane(4, 3),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_the_heads_are_the_convolution_border_included(name: str) -> None:
    conv = CONVOLUTIONS[name]()
    layer, x = of_the_kind(conv, sharpness=80.0), tokens(conv)
    torch.testing.assert_close(attended(layer, conv, x), convolved(conv, x), rtol=1e-12, atol=1e-12)


def leak(sharpness: float, axes: int, sink: bool) -> float:
    """At most so much of a head's weight is not where its tap reads.

    Along a line the tokens at distance m have exp(-sharpness m²) of the right one's weight, two of each. A sink has
    exp(-sharpness / 2) of it; beyond the border it is the other way round.
    """
    beside = 1 + 2 * sum(math.exp(-sharpness * m * m) for m in range(1, 50))
    return beside**axes - 1 + (math.exp(-sharpness / 2) * beside**axes if sink else 0.0)


@pytest.mark.parametrize("name", ["line, widening", "line, zeros", "plane, oblong", "plane, zeros"])
def test_the_error_falls_as_the_sharpness_grows(name: str) -> None:
    conv = CONVOLUTIONS[name]()
    x = tokens(conv)
    expected, sink = convolved(conv, x), conv.padding_mode == "zeros"
    largest = float(conv.weight.detach().abs().sum(tuple(range(1, conv.weight.ndim))).max() * x.abs().max())
    errors = []
    for sharpness in (2.0, 4.0, 8.0, 16.0, 32.0):
        layer = of_the_kind(conv, sharpness=sharpness)
        errors.append(float((attended(layer, conv, x) - expected).detach().abs().max()))
        assert errors[-1] <= 2 * leak(sharpness, conv.weight.ndim - 2, sink) * largest
    assert all(later < earlier for earlier, later in itertools.pairwise(errors))
    assert errors[-1] < 1e-4 * errors[0]


@pytest.mark.parametrize("name", ["line, zeros", "plane, zeros"])
def test_without_a_sink_padding_with_zeros_is_equal_in_the_interior_alone(name: str) -> None:
    conv = CONVOLUTIONS[name]()
    layer, x = of_the_kind(conv, sharpness=80.0, outside="nearest"), tokens(conv)
    assert layer.sinks is None
    difference = (attended(layer, conv, x) - convolved(conv, x)).detach().abs()
    edge = conv.kernel_size[0] // 2
    if conv.weight.ndim == 4:
        difference = difference.unflatten(1, GRID)
        inside = difference[:, edge:-edge, edge:-edge]
    else:
        inside = difference[:, edge:-edge]
    assert inside.max() < 1e-12
    assert difference.max() > 1e-3


def test_mean_weights_are_toeplitz() -> None:
    """A head of a convolution weighs by distance: its weights, over any texts, are the same along each diagonal."""
    conv = line(6, 6, 5, **REPLICATE)
    weights = of_the_kind(conv, sharpness=3.0)(tokens(conv), weights=True).weights.detach().mean(0)
    for head, shift in zip(weights, range(-2, 3), strict=True):
        # Rows whose right token and its neighbours lie within the text: further ones have less than exp(-3 * 16).
        rows = range(4 + max(0, -shift), LENGTH - 4 - max(0, shift))
        for distance in range(shift - 3, shift + 4):
            diagonal = torch.stack([head[row, row + distance] for row in rows if 0 <= row + distance < LENGTH])
            torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-10, atol=1e-14)
        assert head.diagonal(shift).min() > 0.8


def test_content_can_learn_a_say() -> None:
    """The query projection is zero and has a gradient; the layer is a convolution only until it learns more."""
    conv = line(6, 6, **REPLICATE)
    layer, x = of_the_kind(conv, sharpness=1.0), tokens(conv)
    layer(x).output.square().sum().backward()
    assert not layer.q_proj.weight.any()
    assert layer.q_proj.weight.grad.abs().max() > 1e-6
    assert layer.positions.center.grad.abs().max() > 1e-6


def test_wider_values_and_other_options_are_taken() -> None:
    conv = line(4, 6, **REPLICATE)
    layer, x = of_the_kind(conv, sharpness=80.0, value_dim=9, head_dim=5, dropout=0.1), tokens(conv)
    assert (layer.layout.value_dim, layer.layout.head_dim, layer.dropout) == (9, 5, 0.1)
    torch.testing.assert_close(attended(layer.eval(), conv, x), convolved(conv, x), rtol=1e-12, atol=1e-12)
    lengths = Mask.lengths([17, 11, 5])
    short = layer(nn.functional.pad(x, (0, 2)), mask=lengths).output[1, :11]
    torch.testing.assert_close(short, convolved(conv, x[1:2, :11])[0], rtol=1e-12, atol=1e-12)


def test_it_is_a_layer_like_any_other() -> None:
    layer = of_the_kind(CONVOLUTIONS["plane"]())
    config = config_of(layer)
    assert AttentionConfig.from_json(config.to_json()) == config
    twin = config.build(dtype=DOUBLE)
    twin.load_state_dict(layer.state_dict())
    x = torch.randn(2, math.prod(GRID), 4, dtype=DOUBLE)
    assert torch.equal(twin(x).output, layer(x).output)


def test_a_layer_of_ones_own_is_set_in_place() -> None:
    conv = line(6, 6, **REPLICATE)
    layer = MultiHeadAttention(6, 3, value_dim=6, positions=QuadraticRelative1D(3), dtype=DOUBLE)
    assert set_convolution(layer, conv, sharpness=80.0) is layer
    x = tokens(conv)
    torch.testing.assert_close(layer(x).output, convolved(conv, x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("conv", "options", "error", "words"),
    [
        (lambda: nn.Linear(3, 3), {}, OptionError, "made of a Conv1d or a Conv2d, got Linear"),
        (lambda: line(4, 6), {"value_dim": 3}, ShapeError, "at least 4 channels, got value_dim 3"),
        (lambda: plane(6, 5), {"value_dim": 4, "grid": GRID}, ShapeError, "at least 5 channels, got value_dim 4"),
        (lambda: line(4, 4, padding=0, stride=2), {}, OptionError, r"without stride.*got stride \(2,\)"),
        (lambda: line(4, 4, groups=2), {}, OptionError, "one group, got stride .* and groups 2"),
        (lambda: line(4, 4, 5, padding=1), {}, OptionError, r"padding must be 2 on either side.*got \(1,\)"),
        (lambda: line(4, 4, 4, padding=1), {}, OptionError, r"padding must be 1\.5 on either side"),
        (lambda: line(4, 4, padding="valid"), {}, OptionError, "got 'valid'"),
        (lambda: line(4, 4, padding_mode="circular"), {}, OptionError, "'replicate' or 'zeros', got 'circular'"),
        (lambda: plane(4, 4), {}, OptionError, "give grid="),
        (lambda: line(4, 4), {"outside": "wrap"}, OptionError, "outside must be 'nearest' or 'sink', got 'wrap'"),
        (lambda: line(4, 4), {"grid": GRID}, OptionError, "leave it out"),
        (lambda: line(4, 4), {"sharpness": 0.0}, OptionError, r"sharpness must be positive"),
        (lambda: line(4, 4), {"num_kv_heads": 1}, ShapeError, "each of its 3 taps, got 3 heads and 1 of values"),
        (lambda: line(4, 4), {"output_bias": False}, OptionError, "needs a layer with an output bias"),
    ],
)
def test_what_is_no_such_convolution_is_refused(conv: Any, options: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        convolutional_heads(conv(), **options)


def test_a_layer_that_does_not_fit_is_refused() -> None:
    conv = line(6, 6)
    with pytest.raises(OptionError, match="made of a Conv1d or a Conv2d, got Conv3d"):
        set_convolution(MultiHeadAttention(6, 3, positions=QuadraticRelative1D(3)), nn.Conv3d(6, 6, 3))
    with pytest.raises(OptionError, match="by QuadraticRelative1D, got QuadraticRelative2D"):
        set_convolution(MultiHeadAttention(6, 3, positions=QuadraticRelative2D(3, 2, 2)), conv)
    with pytest.raises(ShapeError, match="each of its 3 taps, got 2 heads"):
        set_convolution(MultiHeadAttention(6, 2, positions=QuadraticRelative1D(2)), conv)
    with pytest.raises(ShapeError, match="needs a layer 6 wide, got 9"):
        set_convolution(MultiHeadAttention(9, 3, positions=QuadraticRelative1D(3)), conv)
