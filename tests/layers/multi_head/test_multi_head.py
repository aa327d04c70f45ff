"""Every option of the layer against the formula in float64, written once more for itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyhead import (
    Mask,
    MultiHeadAttention,
)
from polyhead.errors import BackendUnsupported, OptionError, ShapeError
from polyhead.layers import LatentAttention
from polyhead.layers.positions import (
    ALiBi,
    DynamicNTKScaling,
    Learned,
    QuadraticRelative1D,
    QuadraticRelative2D,
    Rotary,
    Sinusoidal,
    T5Bias,
)
from tests.gradients import FAST

BATCH, LENGTH, KEYS, EMBED, HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM = 3, 11, 13, 23, 6, 2, 10, 7
KEY_WIDTH, VALUE_WIDTH = 19, 17
DOUBLE = torch.float64


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def make(**options: Any) -> MultiHeadAttention:
    """A float64 layer of awkward sizes in which no parameter, bias or norm has its neutral value."""
    layer = MultiHeadAttention(EMBED, HEADS, **{"head_dim": HEAD_DIM, "dtype": DOUBLE, **options}).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return layer


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=DOUBLE)


@pytest.fixture
def x() -> Tensor:
    return randn(BATCH, LENGTH, EMBED)


# ---- the formula, written for itself


def formula(
    layer: MultiHeadAttention,
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    *,
    visible: Tensor | None = None,  # [queries, keys], True = may attend
    bias: Callable[[int], Tensor] | None = None,  # head -> [queries, keys]
    turn: Callable[[Tensor], Tensor] = lambda t: t,
    norm: Callable[[Tensor, str], Tensor] = lambda t, name: t,
    gate: Tensor | None = None,  # [batch, queries, heads, value_dim or 1]
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Concat(head_1 .. head_h) W_O, one head after the other."""
    parameters = dict(layer.named_parameters())
    key = query if key is None else key
    value = key if value is None else value

    def project(name: str, y: Tensor) -> Tensor:
        return y @ parameters[f"{name}.weight"].T + parameters.get(f"{name}.bias", 0.0)

    queries, keys, values = project("q_proj", query), project("k_proj", key), project("v_proj", value)
    layout = layer.layout
    heads = []
    for h in range(layout.num_heads):
        shared = h * layout.num_kv_heads // layout.num_heads
        q = queries[..., h * layout.head_dim : (h + 1) * layout.head_dim]
        k = keys[..., shared * layout.head_dim : (shared + 1) * layout.head_dim]
        v = values[..., shared * layout.value_dim : (shared + 1) * layout.value_dim]
        q, k = turn(norm(q, "q_norm")), turn(norm(k, "k_norm"))
        logits = torch.einsum("bqd,bkd->bqk", q, k) * (1 / math.sqrt(layout.head_dim) if scale is None else scale)
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        if bias is not None:
            logits = logits + bias(h)
        numerators = torch.exp(logits)
        if visible is not None:
            numerators = numerators * visible
        total = numerators.sum(-1, keepdim=True)
        if "sinks" in parameters:
            total = total + torch.exp(parameters["sinks"][h])
        head = numerators / total @ v
        heads.append(head if gate is None else head * gate[:, :, h])
    return project("out_proj", torch.cat(heads, -1))


def causal(queries: int = LENGTH, keys: int = LENGTH, window: int | None = None) -> Tensor:
    visible = torch.zeros(queries, keys, dtype=torch.bool)
    for i in range(queries):
        for j in range(keys):
            distance = i + keys - queries - j
            visible[i, j] = distance >= 0 and (window is None or distance < window)
    return visible


HEAD_LAYOUTS: dict[str, dict[str, Any]] = {
    "multi-head": {},
    "grouped": {"num_kv_heads": KV_HEADS},
    "multi-query": {"num_kv_heads": 1},
    "wider values": {"value_dim": 13, "num_kv_heads": 3},
    "narrower values": {"value_dim": VALUE_DIM},
    "without bias": {"bias": False},
    "with output bias alone": {"bias": False, "output_bias": True},
    "without output bias": {"bias": True, "output_bias": False},
}


@pytest.mark.parametrize("backend", ["auto", "reference", "blockwise", "sdpa"])
@pytest.mark.parametrize("layout", HEAD_LAYOUTS)
def test_every_head_layout_is_the_formula(layout: str, backend: str, x: Tensor) -> None:
    layer = make(**HEAD_LAYOUTS[layout])
    close(layer(x, backend=backend).output, formula(layer, x))
    close(layer(x, mask=Mask.causal(), backend=backend).output, formula(layer, x, visible=causal()))


@pytest.mark.parametrize("backend", ["auto", "reference", "blockwise", "sdpa"])
@pytest.mark.parametrize("num_kv_heads", [HEADS, KV_HEADS])
def test_cross_attention_with_three_input_widths_is_the_formula(num_kv_heads: int, backend: str, x: Tensor) -> None:
    layer = make(num_kv_heads=num_kv_heads, value_dim=VALUE_DIM, key_input_dim=KEY_WIDTH, value_input_dim=VALUE_WIDTH)
    key, value = randn(BATCH, KEYS, KEY_WIDTH), randn(BATCH, KEYS, VALUE_WIDTH)
    expected = formula(layer, x, key, value)
    close(layer(x, key, value, backend=backend).output, expected)
    close(layer(x, layer.remember(key, value), backend=backend).output, expected)


def test_a_key_stands_for_the_value(x: Tensor) -> None:
    layer, source = make(key_input_dim=KEY_WIDTH), randn(BATCH, KEYS, KEY_WIDTH)
    close(layer(x, source).output, formula(layer, x, source))
    close(layer(x, source, source).output, formula(layer, x, source))
    close(layer(x, layer.remember(source)).output, formula(layer, x, source))


def test_a_source_of_nothing_gives_the_output_bias_alone(x: Tensor) -> None:
    layer = make()
    output = layer(x, randn(BATCH, 0, EMBED)).output
    assert torch.equal(output, layer.out_proj.bias.expand_as(output))


@pytest.mark.parametrize("num_kv_heads", [HEADS, KV_HEADS])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_qk_norm_is_the_formula(kind: str, num_kv_heads: int, x: Tensor) -> None:
    layer = make(qk_norm=kind, num_kv_heads=num_kv_heads)
    parameters = dict(layer.named_parameters())

    def norm(t: Tensor, name: str) -> Tensor:
        if kind == "rms":
            return (
                t / (t.square().mean(-1, keepdim=True) + torch.finfo(DOUBLE).eps).sqrt() * parameters[f"{name}.weight"]
            )
        centred = t - t.mean(-1, keepdim=True)
        normed = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return normed * parameters[f"{name}.weight"] + parameters[f"{name}.bias"]

    close(layer(x).output, formula(layer, x, norm=norm))
    source = randn(BATCH, KEYS, EMBED)
    close(layer(x, source).output, formula(layer, x, source, norm=norm))
    close(layer(x, layer.remember(source)).output, formula(layer, x, source, norm=norm))


@pytest.mark.parametrize("kind", ["head", "channel"])
def test_the_output_gate_is_the_formula(kind: str, x: Tensor) -> None:
    layer = make(output_gate=kind, value_dim=VALUE_DIM)
    assert layer.gate_proj is not None
    width = 1 if kind == "head" else VALUE_DIM
    gate = torch.sigmoid(x @ layer.gate_proj.weight.T + layer.gate_proj.bias).reshape(BATCH, LENGTH, HEADS, width)
    close(layer(x).output, formula(layer, x, gate=gate))


@pytest.mark.parametrize("backend", ["auto", "reference", "blockwise"])
@pytest.mark.parametrize("num_kv_heads", [HEADS, KV_HEADS])
def test_softcap_and_sinks_are_the_formula(num_kv_heads: int, backend: str, x: Tensor) -> None:
    for options in ({"softcap": 1.5}, {"sinks": True}, {"softcap": 1.5, "sinks": True}):
        layer = make(num_kv_heads=num_kv_heads, **options)
        softcap = options.get("softcap")
        close(layer(x, backend=backend).output, formula(layer, x, softcap=softcap))
        visible = causal()
        close(layer(x, mask=Mask.causal(), backend=backend).output, formula(layer, x, softcap=softcap, visible=visible))


@pytest.mark.parametrize("backend", ["auto", "reference", "blockwise", "sdpa"])
@pytest.mark.parametrize("num_kv_heads", [HEADS, KV_HEADS])
def test_a_scale_of_ones_own_is_the_formula(num_kv_heads: int, backend: str, x: Tensor) -> None:
    layer = make(scale=0.07, num_kv_heads=num_kv_heads)
    close(layer(x, backend=backend).output, formula(layer, x, scale=0.07))


@pytest.mark.parametrize("backend", ["auto", "reference", "blockwise", "sdpa"])
def test_causal_and_window_are_masks_of_the_layers_own(backend: str, x: Tensor) -> None:
    layer = make(causal=True)
    close(layer(x, backend=backend).output, formula(layer, x, visible=causal()))
    windowed = make(causal=True, window=3)
    close(windowed(x, backend=backend).output, formula(windowed, x, visible=causal(window=3)))
    hidden = torch.rand(LENGTH, LENGTH) < 0.3
    hidden.fill_diagonal_(False)
    both = Mask.dense(~hidden)
    close(layer(x, mask=both, backend=backend).output, formula(layer, x, visible=causal() & ~hidden))
    close(windowed(x, mask=both, backend=backend).output, formula(windowed, x, visible=causal(window=3) & ~hidden))


def test_a_window_without_causal_is_refused() -> None:
    with pytest.raises(OptionError, match="needs causal=True, got window 5 without"):
        make(window=5)


# ---- positions


def turn_by_position(t: Tensor, base: float = 10000.0) -> Tensor:
    """Su et al. 2021: channel pairs (i, i + d/2) as complex numbers, rotated by p * base ** (-2 i / d)."""
    half = t.shape[-1] // 2
    frequencies = base ** (-torch.arange(half, dtype=DOUBLE) / half)
    angles = torch.arange(t.shape[-2], dtype=DOUBLE)[:, None] * frequencies
    rotated = torch.complex(t[..., :half], t[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([rotated.real, rotated.imag], -1)


def distances(queries: int, keys: int) -> Tensor:
    return torch.arange(keys) - (torch.arange(queries) + keys - queries)[:, None]


def alibi(h: int) -> Tensor:
    slopes = [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]  # the paper's, for six heads
    return -slopes[h] * distances(LENGTH, LENGTH).abs().double()


def t5_bucket(distance: int, bidirectional: bool) -> int:
    """Raffel et al. 2020, with 32 buckets and a largest distance of 128."""
    buckets, shift = (16, 16 if distance > 0 else 0) if bidirectional else (32, 0)
    away = abs(distance) if bidirectional else max(-distance, 0)
    exact = buckets // 2
    if away < exact:
        return shift + away
    return shift + min(exact + int(math.log(away / exact) / math.log(128 / exact) * (buckets - exact)), buckets - 1)


def test_rotary_positions_turn_queries_and_keys(x: Tensor) -> None:
    for options in ({}, {"num_kv_heads": KV_HEADS}):
        layer = make(positions=Rotary(HEAD_DIM, base=7001.0), causal=True, **options)
        expected = formula(layer, x, turn=lambda t: turn_by_position(t, 7001.0), visible=causal())
        for backend in ("auto", "reference", "blockwise", "sdpa"):
            close(layer(x, backend=backend).output, expected)


def test_rotary_positions_see_distances_alone(x: Tensor) -> None:
    layer = make(positions=Rotary(HEAD_DIM))
    places = torch.arange(LENGTH) + 1009
    close(layer(x, token_positions=places).output, layer(x).output, 1e-10)
    shuffled = torch.randperm(LENGTH)
    close(layer(x[:, shuffled], token_positions=shuffled).output, layer(x).output[:, shuffled])


@pytest.mark.parametrize("name", ["multi-head", "latent"])
def test_in_cross_attention_dynamic_ntk_scales_both_sides_for_the_number_of_keys(name: str, x: Tensor) -> None:
    source = randn(BATCH, KEYS, EMBED)
    stretched = 100.0 * (2.0 * KEYS / 5 - 1) ** (HEAD_DIM / (HEAD_DIM - 2))
    outputs = []
    for positions in (
        Rotary(HEAD_DIM, base=100.0, scaling=DynamicNTKScaling(2.0, 5)),
        Rotary(HEAD_DIM, base=stretched),
    ):
        torch.manual_seed(0)
        if name == "latent":
            sizes = {"kv_lora_rank": 7, "qk_nope_head_dim": 3, "dtype": DOUBLE}
            layer: Any = LatentAttention(EMBED, HEADS, positions=positions, **sizes)  # type: ignore[arg-type]
        else:
            layer = make(positions=positions)
        assert torch.equal(layer(x, source).output, layer(x, layer.remember(source)).output)
        outputs.append(layer(x[:, :3], source).output)
    close(*outputs)


def test_rotary_positions_in_cross_attention_count_each_side_from_its_start(x: Tensor) -> None:
    layer, source = make(positions=Rotary(HEAD_DIM)), randn(BATCH, KEYS, EMBED)
    expected = formula(layer, x, source, turn=turn_by_position)
    close(layer(x, source).output, expected)
    close(layer(x, layer.remember(source)).output, expected)


@pytest.mark.parametrize("causal_edge", [True, False])
def test_alibi_biases_the_logits_by_distance(causal_edge: bool, x: Tensor) -> None:
    layer = make(positions=ALiBi(HEADS), causal=causal_edge, num_kv_heads=KV_HEADS)
    expected = formula(layer, x, bias=alibi, visible=causal() if causal_edge else None)
    for backend in ("auto", "reference", "blockwise", "sdpa"):
        close(layer(x, backend=backend).output, expected)


@pytest.mark.parametrize("num_heads", [3, 5, 7])
def test_alibi_is_exact_in_float64_where_its_slopes_are_no_binary_fractions(num_heads: int, x: Tensor) -> None:
    layer = MultiHeadAttention(EMBED, num_heads, head_dim=4, positions=ALiBi(num_heads), dtype=DOUBLE)
    power = 2 ** (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2.0 ** (-8 * (2 * i + 1) / (2 * power)) for i in range(num_heads - power)]
    gaps = distances(LENGTH, LENGTH).abs().double()
    close(layer(x).output, formula(layer, x, bias=lambda h: -slopes[h] * gaps))


@pytest.mark.parametrize("bidirectional", [True, False])
def test_t5_biases_the_logits_by_bucket(bidirectional: bool) -> None:
    length = 47  # far enough that several distances share a bucket
    layer = make(positions=T5Bias(HEADS, bidirectional=bidirectional), causal=not bidirectional)
    x = randn(2, length, EMBED)
    assert isinstance(layer.positions, T5Bias)
    weight = layer.positions.weight
    buckets = torch.tensor([[t5_bucket(int(d), bidirectional) for d in row] for row in distances(length, length)])
    visible = None if bidirectional else causal(length, length)
    expected = formula(layer, x, bias=lambda h: weight[buckets, h], visible=visible)
    for backend in ("auto", "reference", "blockwise"):
        close(layer(x, backend=backend).output, expected)


def test_learned_and_sinusoidal_positions_are_added_to_the_input(x: Tensor) -> None:
    learned = make(positions=Learned(29, EMBED))
    assert isinstance(learned.positions, Learned)
    close(learned(x).output, formula(learned, x + learned.positions.weight[:LENGTH]))
    places = torch.tensor([[5, 2, 28, 0, 1, 3, 4, 6, 7, 8, 9]]).expand(BATCH, -1)
    close(learned(x, token_positions=places).output, formula(learned, x + learned.positions.weight[places]))
    sinusoidal = make(positions=Sinusoidal(EMBED))
    channel = torch.arange(EMBED)
    angle = torch.arange(LENGTH, dtype=DOUBLE)[:, None] / 10000.0 ** (2 * (channel // 2).double() / EMBED)
    close(sinusoidal(x).output, formula(sinusoidal, x + torch.where(channel % 2 == 0, angle.sin(), angle.cos())))


def test_quadratic_relative_positions_bias_the_logits_on_a_line_and_on_a_grid(x: Tensor) -> None:
    line = make(positions=QuadraticRelative1D(HEADS))
    assert isinstance(line.positions, QuadraticRelative1D)
    alpha, center = line.positions.log_alpha.exp(), line.positions.center
    gaps = distances(LENGTH, LENGTH).double()
    close(line(x).output, formula(line, x, bias=lambda h: -alpha[h] * (gaps - center[h, 0]).square()))
    height, width = 3, 5
    grid = make(positions=QuadraticRelative2D(HEADS, height, width))
    assert isinstance(grid.positions, QuadraticRelative2D)
    alpha, center = grid.positions.log_alpha.exp(), grid.positions.center
    cells = torch.cartesian_prod(torch.arange(height), torch.arange(width)).double()
    apart = cells[None, :] - cells[:, None]  # [queries, keys, 2]
    image = randn(2, height * width, EMBED)
    bias = lambda h: -alpha[h] * (apart - center[h]).square().sum(-1)  # noqa: E731
    close(grid(image).output, formula(grid, image, bias=bias))


def test_positions_of_other_heads_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"Rotary\(head_dim=8\) for a layer with head_dim 10"):
        make(positions=Rotary(8))
    with pytest.raises(ShapeError, match=r"ALiBi\(num_heads=5\) for a layer with num_heads 6"):
        make(positions=ALiBi(5))
    with pytest.raises(OptionError, match=r"positions must be a module of polyhead.layers.positions, got Linear"):
        make(positions=nn.Linear(3, 3))


# ---- what a call may ask for


def test_weights_and_logsumexp_come_when_asked_for_and_change_nothing(x: Tensor) -> None:
    layer = make(num_kv_heads=KV_HEADS, causal=True)
    plain = layer(x)
    assert (plain.weights, plain.statistics, plain.backend) == (None, None, "sdpa")
    watched = layer(x, weights=True, logsumexp=True)
    assert type(watched) is type(plain)
    close(watched.output, plain.output)
    assert watched.weights.shape == (BATCH, HEADS, LENGTH, LENGTH)
    close(watched.weights.sum(-1), torch.ones(BATCH, HEADS, LENGTH, dtype=DOUBLE))
    assert int(watched.weights[..., ~causal()].count_nonzero()) == 0
    assert watched.logsumexp.shape == (BATCH, HEADS, LENGTH)
    assert watched.statistics is None


def test_a_named_backend_is_taken_or_refused_with_reasons(x: Tensor) -> None:
    layer = make(sinks=True, backend="blockwise")
    assert layer(x).backend == "blockwise"
    assert layer(x, backend="reference").backend == "reference"
    with pytest.raises(BackendUnsupported, match="no learned sinks"):
        layer(x, backend="sdpa")
    for backend in ("sdpa", "blockwise", "reference"):
        assert make()(x, backend=backend).backend == backend


def test_dropout_is_for_training_and_a_seed_replays_it(x: Tensor) -> None:
    layer = make(dropout=0.4, num_kv_heads=KV_HEADS)
    layer.eval()
    exact = layer(x).output
    close(exact, formula(layer, x))
    layer.train()
    first, second = layer(x, seed=5).output, layer(x, seed=5).output
    assert torch.equal(first, second)
    assert not torch.allclose(first, layer(x, seed=6).output)
    assert not torch.allclose(first, exact)
    close(layer(x, seed=5, backend="reference").output, layer(x, seed=5, backend="blockwise").output)
    assert not torch.equal(layer(x).output, layer(x).output)  # without a seed every call draws anew
    torch.manual_seed(3)
    drawn = layer(x).output
    torch.manual_seed(3)
    assert torch.equal(layer(x).output, drawn)
    with torch.no_grad():
        samples = torch.stack([layer(x, seed=seed).output for seed in range(400)])
    error = (samples.mean(0) - exact.detach()) / (samples.std(0) / 20)
    assert float(error.abs().max()) < 5.5  # standard errors; 759 numbers stay under 4.5 or so


def test_dropout_has_the_gradient_of_the_weights_it_kept() -> None:
    layer = MultiHeadAttention(4, 2, dropout=0.5, dtype=DOUBLE)
    x = randn(2, 3, 4).requires_grad_()
    for backend in ("reference", "blockwise"):
        assert torch.autograd.gradcheck(lambda y, name=backend: layer(y, seed=11, backend=name).output, (x,))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("dropout", 1.0, "dropout must be at least 0 and less than 1, got 1.0"),
        ("softcap", 0.0, "softcap must be positive and finite, got 0.0"),
        ("qk_norm", "batch", "qk_norm must be 'rms', 'layer' or None, got 'batch'"),
        ("output_gate", "token", "output_gate must be 'head', 'channel' or None, got 'token'"),
    ],
)
def test_an_option_out_of_range_is_refused(name: str, value: object, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        make(**{name: value})


OPTIONS_WITH_GRADIENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped, causal, rotary": {"num_kv_heads": 2, "causal": True, "positions": lambda: Rotary(2)},
    "norms, gate, sinks, softcap": {"qk_norm": "layer", "output_gate": "head", "sinks": True, "softcap": 2.0},
    "T5": {"positions": lambda: T5Bias(4, num_buckets=8, max_distance=5)},
    "window, channel gate": {"causal": True, "window": 2, "output_gate": "channel", "qk_norm": "rms"},
}


def tiny(name: str, **more: Any) -> MultiHeadAttention:
    options = {**OPTIONS_WITH_GRADIENTS[name], **more}
    if "positions" in options:
        options["positions"] = options["positions"]()
    return MultiHeadAttention(3, 4, head_dim=2, dtype=DOUBLE, **options).double()


def as_function(layer: MultiHeadAttention, **call: Any) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """The layer as a function of its input and its own parameters, which gradcheck varies in place."""
    parameters = list(layer.parameters())
    return (lambda y, *_: layer(y, **call).output), [randn(2, 3, 3).requires_grad_(), *parameters]


@pytest.mark.parametrize("backend", ["auto", "blockwise"])
@pytest.mark.parametrize("options", OPTIONS_WITH_GRADIENTS)
def test_every_parameter_has_its_gradient(options: str, backend: str) -> None:
    function, inputs = as_function(tiny(options), backend=backend)
    assert torch.autograd.gradcheck(function, inputs, **FAST)


@pytest.mark.parametrize(("options", "backend"), [("plain", "blockwise"), ("grouped, causal, rotary", "reference")])
def test_every_parameter_has_its_second_derivative(options: str, backend: str) -> None:
    function, inputs = as_function(tiny(options), backend=backend)
    assert torch.autograd.gradgradcheck(function, inputs, **FAST)
