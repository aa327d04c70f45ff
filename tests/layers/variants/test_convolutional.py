"""Convolutional heads against PyTorch's convolutions: equal, with an error that falls as the sharpness grows."""

from __future__ import annotations

import copy
import itertools
import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyhead import Mask, MultiHeadAttention
from polyhead.errors import DeviceError, OptionError, ShapeError
from polyhead.geometry import HeadLayout
from polyhead.layers import AttentionConfig, LatentAttention, MultiHeadConfig, build_attention, config_of
from polyhead.layers.config import CONFIGS
from polyhead.layers.positions import QuadraticRelative1D, QuadraticRelative2D, Rotary
from polyhead.layers.positions.config import QuadraticRelative1DConfig, QuadraticRelative2DConfig, RotaryConfig
from polyhead.layers.variants import (
    CollaborativeAttention,
    DifferentialAttention,
    GroupedHeads,
    HeadMix,
    RoutedHeads,
    TalkingHeads,
    convolutional_heads,
    set_convolution,
)
from polyhead.layers.variants.grouped import HeadGroups

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


def recovered(layer: MultiHeadAttention) -> nn.Conv1d | nn.Conv2d:
    """The convolution that the layer starts as, read off its heads."""
    width, heads = layer.layout.embed_dim, layer.layout.num_heads
    kind, side = (plane, math.isqrt(heads)) if isinstance(layer.positions, QuadraticRelative2D) else (line, heads)
    conv = kind(width, width, side, padding_mode="zeros" if layer.sinks is not None else "replicate")
    taps = torch.stack([head.value @ head.output for head in layer.heads])  # [taps, in, out]
    with torch.no_grad():
        conv.weight.copy_(taps.permute(2, 1, 0).view_as(conv.weight))
        conv.bias.zero_() if layer.out_proj.bias is None else conv.bias.copy_(layer.out_proj.bias)
    return conv


FRESH: dict[str, tuple[Any, dict[str, Any]]] = {
    "line": (QuadraticRelative1DConfig(), {"num_heads": 5}),
    "line, an even kernel": (QuadraticRelative1DConfig(), {"num_heads": 4}),
    "line, zeros": (QuadraticRelative1DConfig(), {"num_heads": 3, "sinks": True}),
    "line, other options": (
        QuadraticRelative1DConfig(alpha=2.0),
        {"num_heads": 3, "head_dim": 4, "value_dim": 9, "qk_norm": "rms", "bias": False, "dropout": 0.5},
    ),
    "plane": (QuadraticRelative2DConfig(*GRID), {"num_heads": 9}),
    "plane, zeros": (QuadraticRelative2DConfig(*GRID), {"num_heads": 9, "sinks": True, "output_bias": False}),
}


@pytest.mark.parametrize("name", FRESH)
def test_init_conv_builds_a_fresh_convolution_from_json(name: str) -> None:
    positions, options = FRESH[name]
    config = MultiHeadConfig(7, **{"head_dim": 2, "value_dim": 7, **options}, positions=positions, init="conv")
    assert json.loads(config.to_json())["init"] == "conv"
    again = AttentionConfig.from_json(config.to_json())
    assert again == config
    torch.manual_seed(3)
    layer = build_attention(again, dtype=DOUBLE)
    assert isinstance(layer, MultiHeadAttention)
    assert config_of(layer) == config
    conv = recovered(layer.eval())
    x = tokens(conv)
    expected = convolved(conv, x)
    assert expected.std() > 0.1
    # exp(-32) of it is elsewhere, exp(-16) in a sink.
    atol = 1e-6 if layer.sinks is not None else 1e-12
    torch.testing.assert_close(attended(layer, conv, x), expected, rtol=0, atol=atol)
    bound = 1 / math.sqrt(7 * len(conv.weight[0, 0].flatten()))  # of PyTorch's own initialisation
    assert 0.9 * bound < conv.weight.abs().max() <= bound
    before = conv.weight.clone()
    layer.reset_parameters()
    assert not torch.equal(recovered(layer).weight, before)
    assert layer.k_proj.weight.any()


def test_init_conv_keeps_parameters_and_their_count() -> None:
    options: dict[str, Any] = {"value_dim": 6, "positions": QuadraticRelative1DConfig()}
    conv, plain = (build_attention(MultiHeadConfig(6, 3, **options, init=init)) for init in ("conv", "xavier"))
    assert {n: x.shape for n, x in conv.named_parameters()} == {n: x.shape for n, x in plain.named_parameters()}
    assert conv.state_dict().keys() == plain.state_dict().keys()
    assert copy.deepcopy(conv).init == "conv"
    meta = build_attention(MultiHeadConfig(6, 3, **options, init="conv"), device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in meta.parameters()} == {("meta", torch.bfloat16)}


def test_making_a_config_of_init_conv_draws_no_random_numbers() -> None:
    before = torch.get_rng_state()
    MultiHeadConfig(6, 3, value_dim=6, positions=QuadraticRelative1DConfig(), init="conv")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_the_config_of_convolutional_heads_builds_a_fresh_one_where_one_fits(name: str) -> None:
    conv = CONVOLUTIONS[name]()
    layer = of_the_kind(conv)
    config = config_of(layer)
    assert config.init == ("conv" if conv.in_channels == conv.out_channels else "xavier")
    assert AttentionConfig.from_json(config.to_json()) == config
    assert config_of(build_attention(config)) == config
    wide = of_the_kind(conv, value_dim=7)
    assert config_of(wide).init == ("xavier" if "oblong" in name else "conv")
    assert config_of(build_attention(config_of(wide))) == config_of(wide)


QUADRATIC = QuadraticRelative1DConfig()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"positions": None}, OptionError, "or QuadraticRelative2D, got positions None"),
        ({"positions": RotaryConfig()}, OptionError, "got positions Rotary"),
        ({"value_dim": None}, ShapeError, "at least 6, got 2; use value_dim=6"),
        ({"num_kv_heads": 1}, ShapeError, "each of its 3 taps, got 3 heads and 1 KV heads"),
        ({"causal": True}, OptionError, "with causal or window; leave it out"),
        ({"output_gate": "head"}, OptionError, "with an output gate; leave it out"),
        ({"key_input_dim": 5, "value_input_dim": 6}, ShapeError, r"6 wide, got \(6, 5, 6\)"),
        ({"positions": QuadraticRelative2DConfig(2, 3)}, ShapeError, r"K \* K taps .* got 3 heads; use 1 or 4"),
        ({"init": "zeros"}, OptionError, "init must be 'xavier' or 'conv', got 'zeros'"),
        ({"init": None}, OptionError, "init must be 'xavier' or 'conv', got None"),
    ],
)
def test_init_conv_refuses_what_does_not_fit(options: Any, error: type[Exception], words: str) -> None:
    requested = {"value_dim": 6, "positions": QUADRATIC, "init": "conv", **options}
    with pytest.raises(error, match=words):
        MultiHeadConfig(6, 3, **requested)
    described = requested["positions"]
    requested["positions"] = None if described is None else described.build(HeadLayout(6, 3))
    with pytest.raises(error, match=words):
        MultiHeadAttention(6, 3, **requested)


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        (CollaborativeAttention, {}),
        (DifferentialAttention, {}),
        (GroupedHeads, {"num_groups": 3, "hidden_dim": 5}),
        (HeadMix, {}),
        (TalkingHeads, {}),
    ],
)
def test_other_arrangements_have_no_init_conv(kind: Any, own: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=f"written into MultiHeadAttention.*got {kind.__name__}"):
        kind(6, 3, value_dim=6, positions=QuadraticRelative1D(3), init="conv", **own)
    name = next(x for x in CONFIGS.names if CONFIGS._classes[x].layer is kind)
    with pytest.raises(OptionError, match="has no field init"):
        AttentionConfig.from_dict({"kind": name, "embed_dim": 6, "num_heads": 3, "init": "conv"})


def test_a_reset_that_is_refused_changes_nothing() -> None:
    layer = MultiHeadAttention(6, 3, value_dim=6, positions=QuadraticRelative1D(3), init="conv")
    layer.mask = Mask.causal()
    before = [x.detach().clone() for x in layer.parameters()]
    with pytest.raises(OptionError, match="with causal or window"):
        layer.reset_parameters()
    assert all(torch.equal(now, then) for now, then in zip(layer.parameters(), before, strict=True))


def test_a_layer_of_ones_own_is_set_in_place() -> None:
    conv = line(6, 6, **REPLICATE)
    layer = MultiHeadAttention(6, 3, value_dim=6, positions=QuadraticRelative1D(3), dtype=DOUBLE)
    assert set_convolution(layer, conv, sharpness=80.0) is layer
    x = tokens(conv)
    torch.testing.assert_close(layer(x).output, convolved(conv, x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("conv", "options", "error", "words"),
    [
        (lambda: nn.Linear(3, 3), {}, OptionError, "take a Conv1d or a Conv2d, got Linear"),
        (lambda: line(4, 6), {"value_dim": 3}, ShapeError, "at least 4, got 3"),
        (lambda: plane(6, 5), {"value_dim": 4, "grid": GRID}, ShapeError, "at least 5, got 4"),
        (lambda: line(4, 4, padding=0, stride=2), {}, OptionError, r"require stride 1.*got stride \(2,\)"),
        (lambda: line(4, 4, groups=2), {}, OptionError, "one group, got stride .* and groups 2"),
        (lambda: line(4, 4, 5, padding=1), {}, OptionError, r"padding must be 2 on either side.*got \(1,\)"),
        (lambda: line(4, 4, 4, padding=1), {}, OptionError, r"padding must be 1\.5 on either side"),
        (lambda: line(4, 4, padding="valid"), {}, OptionError, "got 'valid'"),
        (lambda: line(4, 4, padding_mode="circular"), {}, OptionError, "'replicate' or 'zeros', got 'circular'"),
        (lambda: plane(4, 4), {}, OptionError, "pass grid="),
        (lambda: line(4, 4), {"outside": "wrap"}, OptionError, "outside must be 'nearest' or 'sink', got 'wrap'"),
        (lambda: line(4, 4), {"grid": GRID}, OptionError, "leave it out"),
        (lambda: line(4, 4), {"sharpness": 0.0}, OptionError, r"sharpness must be positive"),
        (lambda: line(4, 4), {"num_kv_heads": 1}, ShapeError, "each of its 3 taps, got 3 heads and 1 KV heads"),
        (lambda: line(4, 4), {"output_bias": False}, OptionError, "needs a layer with an output bias"),
        (lambda: line(4, 4), {"output_gate": "head"}, OptionError, "got a layer with an output gate; leave it out"),
        (lambda: line(4, 4), {"causal": True}, OptionError, "got a layer with causal or window; leave it out"),
        (lambda: line(4, 4), {"sinks": True}, OptionError, "determines sinks, got sinks=True; .* outside='sink'"),
        (lambda: line(4, 4), {"init": "conv"}, OptionError, "determines init, got init='conv'; leave it out"),
        (lambda: line(4, 4), {"num_heads": 3}, OptionError, "determines num_heads, got num_heads=3; leave it out"),
        (lambda: line(4, 4), {"key_input_dim": 5}, ShapeError, r"4 wide, got \(4, 5, 5\) for queries, keys"),
        (lambda: plane(4, 4), {"grid": (2,)}, OptionError, r"grid must be \(height, width\), got \(2,\)"),
        (lambda: plane(4, 4), {"grid": 7}, OptionError, r"grid must be \(height, width\), got 7"),
        (lambda: plane(4, 4), {"grid": (2, 0)}, ShapeError, "width must be at least 1, got 0"),
    ],
)
def test_what_is_no_such_convolution_is_refused(conv: Any, options: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        convolutional_heads(conv(), **options)


def made(**options: Any) -> MultiHeadAttention:
    """A layer that fits `line(6, 6, **REPLICATE)` but for its options."""
    return MultiHeadAttention(**{**FITTING, "positions": QuadraticRelative1D(3), **options})


def replaced(name: str, module: Any) -> MultiHeadAttention:
    layer = made()
    setattr(layer, name, module)
    return layer


FITTING: dict[str, Any] = {"embed_dim": 6, "num_heads": 3, "value_dim": 6}
LINE = QuadraticRelative1D
UNFIT: dict[str, tuple[Any, type[Exception], str]] = {
    "no output bias": (lambda: made(output_bias=False), OptionError, "needs a layer with an output bias"),
    "positions of a plane": (
        lambda: made(positions=QuadraticRelative2D(3, 2, 2)), OptionError, "QuadraticRelative1D, got QuadraticRel",
    ),
    "no positions": (lambda: made(positions=None), OptionError, "or QuadraticRelative2D, got positions None"),
    "rotary": (lambda: made(positions=Rotary(2)), OptionError, "got positions Rotary"),
    "heads": (lambda: made(num_heads=2, positions=LINE(2)), ShapeError, "each of its 3 taps, got 2 heads"),
    "shared values": (lambda: made(num_kv_heads=1), ShapeError, "got 3 heads and 1 KV heads"),
    "width": (lambda: made(embed_dim=9), ShapeError, "needs a layer 6 wide, got 9"),
    "narrow values": (lambda: made(value_dim=5), ShapeError, "got 5; use value_dim=6"),
    "gate": (lambda: made(output_gate="channel"), OptionError, "with an output gate"),
    "head_gate": (lambda: replaced("head_gate", torch.ones(3)), OptionError, "with a head_gate"),
    "window": (lambda: made(causal=True, window=5), OptionError, "with causal or window"),
    "combined": (
        lambda: made(combine=HeadGroups(HeadLayout(6, 3, value_dim=6), 3, 6)), OptionError, "with a combine module",
    ),
    "sinks": (lambda: made(sinks=True), OptionError, "outside='nearest' requires a layer without learned sinks"),
    "no Linear": (lambda: replaced("v_proj", nn.Bilinear(2, 2, 2)), OptionError, "got Bilinear as v_proj"),
    "grouped": (
        lambda: GroupedHeads(**FITTING, num_groups=3, hidden_dim=6, output_bias=False, positions=LINE(3)),
        OptionError, "got GroupedHeads",
    ),
    "mixed": (lambda: HeadMix(**FITTING, positions=LINE(3)), OptionError, "got HeadMix"),
    "differential": (lambda: DifferentialAttention(**FITTING, positions=LINE(3)), OptionError, "got DifferentialAtt"),
    "collaborative": (lambda: CollaborativeAttention(**FITTING, positions=LINE(3)), OptionError, "got Collaborative"),
    "latent": (lambda: LatentAttention(6, 3, kv_lora_rank=2, positions=LINE(3)), OptionError, "got LatentAttention"),
    "routed": (lambda: RoutedHeads(6, 3, top_k=2), OptionError, "got RoutedHeads"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "error", "words"), UNFIT.values(), ids=UNFIT)
def test_a_layer_that_does_not_fit_is_refused_and_left_as_it_was(make: Any, error: type[Exception], words: str) -> None:
    layer = make()
    before = [x.detach().clone() for x in layer.parameters()]
    with pytest.raises(error, match=words):
        set_convolution(layer, nn.Conv1d(6, 6, 3, padding=1, **REPLICATE))
    assert all(torch.equal(now, then) for now, then in zip(layer.parameters(), before, strict=True))


def test_a_convolution_that_does_not_fit_leaves_the_layer_as_it_was() -> None:
    layer = made()
    before = [x.detach().clone() for x in layer.parameters()]
    fitting = nn.Conv1d(6, 6, 3, padding=1, **REPLICATE)
    with pytest.raises(OptionError, match="take a Conv1d or a Conv2d, got Conv3d"):
        set_convolution(layer, nn.Conv3d(6, 6, 3))
    with pytest.raises(OptionError, match="sharpness must be positive"):
        set_convolution(layer, fitting, sharpness=-1.0)
    with pytest.raises(OptionError, match="'replicate' or 'zeros', got 'circular'"):
        set_convolution(layer, nn.Conv1d(6, 6, 3, padding=1, padding_mode="circular"))
    with pytest.raises(OptionError, match="outside='sink' requires a layer with learned sinks, got one without"):
        set_convolution(layer, nn.Conv1d(6, 6, 3, padding=1))
    with pytest.raises(DeviceError, match="got one on the meta device"):
        set_convolution(layer, nn.Conv1d(6, 6, 3, padding=1, device="meta", **REPLICATE))
    assert all(torch.equal(now, then) for now, then in zip(layer.parameters(), before, strict=True))
    set_convolution(layer, nn.Conv1d(6, 6, 3, padding=1), outside="nearest")  # in the interior alone, as asked for


@pytest.mark.parametrize(
    "options",
    [{"qk_norm": "rms"}, {"qk_norm": "layer"}, {"softcap": 2.0}, {"scale": 3.0}, {"key_heads": (2, 0, 1)}],
    ids=str,
)
def test_what_has_no_say_in_a_convolution_is_taken(options: dict[str, Any]) -> None:
    conv = line(6, 6, **REPLICATE)
    layer = made(**options).double()
    for norm in (layer.q_norm, layer.k_norm):
        for parameter in () if norm is None else norm.parameters():
            nn.init.normal_(parameter)
    x = tokens(conv)
    torch.testing.assert_close(
        set_convolution(layer, conv, sharpness=80.0)(x).output, convolved(conv, x), rtol=1e-12, atol=1e-12
    )


def test_a_kernel_of_one_tap_has_no_outside() -> None:
    conv = line(5, 5, 1)  # it pads with zeros, nowhere
    layer = MultiHeadAttention(5, 1, positions=QuadraticRelative1D(1), dtype=DOUBLE)
    x = tokens(conv)
    torch.testing.assert_close(
        set_convolution(layer, conv, sharpness=80.0)(x).output, convolved(conv, x), rtol=1e-12, atol=1e-12
    )
