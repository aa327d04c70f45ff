"""Differential heads against their formula in float64, and what is told of their two maps."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

import polyhead
from polyhead import KVCache, Mask, MultiHeadAttention
from polyhead.errors import BackendUnsupported, CheckpointError, OptionError, ShapeError
from polyhead.layers import AttentionConfig, build_attention, config_of
from polyhead.layers.kv_cache import GrowingCache, PagedCache, PreallocatedCache, RollingCache
from polyhead.layers.multi_head.config import HeadsConfig
from polyhead.layers.positions import ALiBi, Learned, Rotary
from polyhead.layers.positions.config import ALiBiConfig, RotaryConfig
from polyhead.layers.variants import DifferentialAttention, DifferentialConfig
from polyhead.layers.variants.differential import weights as combined
from polyhead.layers.variants.differential.layer import initial_lambda
from polyhead.observation.projections import find_projections
from tests.error_budget import Compared, assert_draws_within_error_budget, token_orders
from tests.layers.head_formula import earlier, project
from tests.ops.oracle import ON_THE_CPU

BATCH, LENGTH, KEYS, EMBED, HEADS, KV_HEADS, HALF, VALUE = 3, 13, 17, 23, 6, 2, 5, 7
DOUBLE = torch.float64
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-11) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=DOUBLE)


def make(**options: Any) -> DifferentialAttention:
    sizes: dict[str, Any] = {"head_dim": 2 * HALF, "value_dim": VALUE, "num_kv_heads": KV_HEADS, "layer_index": 2}
    layer = DifferentialAttention(EMBED, HEADS, **{**sizes, "dtype": DOUBLE, **options}).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return layer


@pytest.fixture
def x() -> Tensor:
    return randn(BATCH, LENGTH, EMBED)


def formula(
    layer: DifferentialAttention,
    x: Tensor,
    source: Tensor | None = None,
    *,
    visible: Tensor | None = None,
    gate: Tensor | None = None,
    map_gate: tuple[float, float] = (1.0, 1.0),
) -> tuple[Tensor, Tensor]:
    """The output, and the weights of both maps, [batch, 2 * heads, queries, keys]; one head after the other."""
    source = x if source is None else source
    queries = project(layer, "q_proj", x)
    keys, values = project(layer, "k_proj", source), project(layer, "v_proj", source)
    p = dict(layer.named_parameters())
    start = 0.8 - 0.6 * torch.exp(torch.tensor(-0.3 * layer.layer_index, dtype=x.dtype))
    factor = torch.exp(p["lambda_q1"] @ p["lambda_k1"]) - torch.exp(p["lambda_q2"] @ p["lambda_k2"]) + start
    size = layer.layout.head_dim
    heads, maps = [], ([], [])
    for i in range(layer.layout.num_heads):
        shared = layer.layout.key_head(i)
        q, k = queries[..., i * size : (i + 1) * size], keys[..., shared * size : (shared + 1) * size]
        v = values[..., shared * layer.layout.value_dim : (shared + 1) * layer.layout.value_dim]
        parts = []
        for number in range(2):
            half = slice(number * size // 2, (number + 1) * size // 2)
            logits = q[..., half] @ k[..., half].mT / (size / 2) ** 0.5
            if visible is not None:
                logits = logits.masked_fill(~visible, -torch.inf)
            if "sinks" in p:
                sink = p["sinks"][number * layer.layout.num_heads + i].expand(*logits.shape[:-1], 1)
                parts.append(torch.softmax(torch.cat((logits, sink), -1), -1)[..., :-1])
            else:
                parts.append(torch.softmax(logits, -1))
            maps[number].append(parts[-1])
        head = map_gate[0] * (parts[0] @ v) - factor * map_gate[1] * (parts[1] @ v)
        head = (1 - start) * head / (head.square().mean(-1, keepdim=True) + layer.norm_eps).sqrt()
        heads.append(head if gate is None else head * gate[i])
    return project(layer, "out_proj", torch.cat(heads, -1)), torch.stack([*maps[0], *maps[1]], 1)


OPTIONS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "multi-head": {"num_kv_heads": HEADS},
    "uneven": {"num_kv_heads": None, "key_heads": (1, 0, 1, 1, 2, 1)},
    "without bias": {"bias": False},
    "sinks": {"sinks": True},
    "the first layer": {"layer_index": 0, "norm_eps": 1e-3},
}


@pytest.mark.parametrize("backend", [None, *ON_THE_CPU])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_is_the_formula(name: str, backend: str | None, x: Tensor) -> None:
    layer = make(**OPTIONS[name])
    if backend == "sdpa" and name == "sinks":
        with pytest.raises(BackendUnsupported, match="no learned sinks"):
            layer(x, backend=backend)
        return
    close(layer(x, backend=backend).output, formula(layer, x)[0])
    close(layer(x, mask=Mask.causal(), backend=backend).output, formula(layer, x, visible=earlier(LENGTH))[0])


def test_cross_attention_and_a_source_remembered(x: Tensor) -> None:
    layer, source = make(), randn(BATCH, KEYS, EMBED)
    expected = formula(layer, x, source)[0]
    close(layer(x, source).output, expected)
    close(layer(x, layer.remember(source)).output, expected)


def test_padding_is_not_seen(x: Tensor) -> None:
    layer, lengths = make(causal=True), [13, 11, 3]
    real = torch.arange(LENGTH) < torch.tensor(lengths)[:, None]
    expected = formula(layer, x, visible=earlier(LENGTH) & real[:, None, :])[0]
    x = torch.where(real[..., None], x, torch.nan)
    close(layer(x, mask=Mask.lengths(lengths)).output[real], expected[real])


def test_rotary_positions_turn_each_half_for_itself(x: Tensor) -> None:
    layer = make(head_dim=8, positions=Rotary(4), causal=True)
    rotary = Rotary(4)
    plain = make(head_dim=8, causal=True)
    plain.load_state_dict(layer.state_dict())
    plain_heads = MultiHeadAttention(EMBED, HEADS, num_kv_heads=KV_HEADS, head_dim=8, value_dim=VALUE, dtype=DOUBLE)
    plain_heads.load_state_dict({k: v for k, v in layer.state_dict().items() if not k.startswith("lambda")})
    q, k, _ = plain_heads._project_self(x)
    q, k = (torch.cat([rotary(half) for half in t.chunk(2, -1)], -1) for t in (q, k))
    told: list[Any] = []
    layer._listener = told.append
    layer(x)
    close(told[0].query, torch.cat(q.chunk(2, -1), 1))
    close(told[0].key, torch.cat(k.chunk(2, -1), 1))
    moved = layer(x, token_positions=torch.arange(LENGTH) + 29).output
    close(moved, layer(x).output)
    assert (moved - plain(x).output).abs().max() > 1e-3


def test_a_gate_multiplies_a_head_behind_its_norm_and_a_map_before_the_difference(x: Tensor) -> None:
    layer, gate = make(), randn(HEADS)
    close(layer(x, head_gate=gate).output, formula(layer, x, gate=gate)[0])
    close(layer(x, head_gate=gate[None, :, None].expand(BATCH, HEADS, LENGTH)).output, formula(layer, x, gate=gate)[0])
    maps = torch.tensor([0.5, 0.25], dtype=DOUBLE).repeat_interleave(HEADS)
    expected = formula(layer, x, map_gate=(0.5, 0.25))[0]
    for shaped in (maps, maps.expand(BATCH, -1), maps[None, :, None].expand(BATCH, -1, LENGTH)):
        close(layer(x, head_gate=shaped).output, expected)
    layer.head_gate = maps
    close(layer(x).output, expected)
    with pytest.raises(ShapeError, match=r"a gate must have .*: \[6\]"):
        layer(x, head_gate=torch.ones(5))


@pytest.mark.parametrize("seed", [None, 31])
def test_dropout_drops_the_same_weights_of_both_maps(seed: int | None, x: Tensor) -> None:
    layer, told = make(dropout=0.4, bias=False), []
    with torch.no_grad():
        for weight in (layer.q_proj.weight, layer.k_proj.weight):
            halves = weight.view(-1, 2, HALF, EMBED)
            halves[:, 1] = halves[:, 0]
    layer._listener = told.append
    layer(x, seed=seed)
    layer.eval()(x)
    (first, second), (whole, _) = (attended.result.output.chunk(2, 1) for attended in told)
    assert torch.equal(first, second)
    assert (first - whole).abs().max() > 1e-3


def test_gradients_are_those_of_the_formula(x: Tensor) -> None:
    layer, toward = make(causal=True, sinks=True), randn(BATCH, LENGTH, EMBED)
    inputs = [x.requires_grad_(), *layer.parameters()]
    expected = torch.autograd.grad(formula(layer, x, visible=earlier(LENGTH))[0], inputs, toward)
    for found, wanted in zip(torch.autograd.grad(layer(x).output, inputs, toward), expected, strict=True):
        close(found, wanted, 1e-9)


@pytest.mark.numerics
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_stay_within_the_error_budget(dtype: torch.dtype, device: str) -> None:
    draws = []
    for _ in range(8):
        wide = make().to(device, dtype).double()
        layer, x = copy.deepcopy(wide).to(dtype), randn(BATCH, LENGTH, EMBED).to(device, dtype)
        x, _ = token_orders(x, torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=device))
        output, exact, plain = layer(x).output, formula(wide, x.double())[0], formula(layer, x)[0]
        draws.append({"output": Compared(output, exact, plain)})
    assert_draws_within_error_budget(draws)


# ---- generating

CACHES: dict[str, tuple[type[KVCache], dict[str, int]]] = {
    "growing": (GrowingCache, {}),
    "preallocated": (PreallocatedCache, {"capacity": 31}),
    "paged": (PagedCache, {"num_pages": 31, "page_size": 4}),
    "rolling": (RollingCache, {"window": 31}),
}


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize(
    "positions", [lambda: None, lambda: Rotary(4), lambda: ALiBi(HEADS), lambda: Learned(31, EMBED)]
)
def test_generation_equals_one_forward(positions: Any, kind: str, x: Tensor) -> None:
    layer = make(head_dim=8, positions=positions(), causal=True)
    build, own = CACHES[kind]
    cache = build.for_layout(layer.cache_layout, batch_size=BATCH, dtype=DOUBLE, **own)
    with torch.no_grad():
        parts = [layer(block, cache=cache).output for block in x.split([5, 1, 1, 4, 2], 1)]
        close(torch.cat(parts, 1), layer(x).output)


# ---- what is told


@pytest.mark.parametrize("name", ["grouped", "uneven"])
def test_statistics_are_those_of_both_maps(name: str, x: Tensor) -> None:
    layer = make(causal=True, **OPTIONS[name])
    weights = formula(layer, x, visible=earlier(LENGTH))[1]
    result = layer(x, statistics=True, weights=True, logsumexp=True)
    close(result.weights, weights)
    assert layer.num_maps == 2 * HEADS == result.logsumexp.shape[1]
    close(layer(x, statistics=True).statistics.entropy, -torch.special.xlogy(weights, weights).sum(-1))
    close(result.statistics.confidence, weights.amax(-1))
    close(result.statistics.self_mass, weights.diagonal(0, -2, -1))


@pytest.mark.parametrize("options", [{}, {"sinks": True}, OPTIONS["uneven"]], ids=["plain", "sinks", "uneven"])
def test_of_the_difference_three_things_are_told(options: dict[str, Any], x: Tensor, monkeypatch: Any) -> None:
    monkeypatch.setattr(combined, "_TILE_KEYS", 5)
    monkeypatch.setattr(combined, "_TILE_ELEMENTS", 5 * 2 * HEADS * BATCH * 4)
    layer, lengths = make(causal=True, **options), [13, 11, 3]
    real = torch.arange(LENGTH) < torch.tensor(lengths)[:, None]
    visible = (earlier(LENGTH) & real[:, None, :]).masked_fill(~real[..., None], True)
    first, second = formula(layer, x, visible=visible)[1].chunk(2, 1)
    weights = (first - layer.lambda_full * second) * real[:, None, :, None]
    found = layer.combined_weights(x, mask=Mask.lengths(lengths))
    close(found.signed_mass, weights.sum(-1))
    close(found.absolute_mass, weights.abs().sum(-1))
    close(found.largest_weight, weights.abs().amax(-1))
    assert (weights < 0).any()
    alone = layer.combined_weights(x, statistics="largest_weight")
    assert alone.signed_mass is None
    assert layer._listener is None
    assert not found.absolute_mass.requires_grad
    with pytest.raises(OptionError, match=r"need not sum to 1: only signed_mass.*got 'entropy'"):
        layer.combined_weights(x, statistics=("signed_mass", "entropy"))


@pytest.mark.parametrize("kind", ["ALiBi", "bias", "dense"])
def test_a_mask_by_head_is_that_of_both_maps(kind: str, x: Tensor) -> None:
    layer = make(causal=True, positions=ALiBi(HEADS) if kind == "ALiBi" else None)
    masks = {
        "bias": Mask.bias(randn(BATCH, HEADS, LENGTH, LENGTH)),
        "dense": Mask.dense((randn(1, HEADS, 1, LENGTH) > 0) | torch.eye(LENGTH, dtype=torch.bool)),
    }
    mask = masks.get(kind)
    first, second = layer(x, mask=mask, weights=True).weights.chunk(2, 1)
    found = layer.combined_weights(x, mask=mask)
    close(found.signed_mass, (first - layer.lambda_full * second).sum(-1), 1e-7)
    close(found.absolute_mass, (first - layer.lambda_full * second).abs().sum(-1), 1e-7)


@pytest.mark.parametrize("name", ["grouped", "uneven"])
def test_who_watches_sees_both_maps(name: str, x: Tensor) -> None:
    layer = make(causal=True, **OPTIONS[name])
    with polyhead.observe(layer, statistics=("entropy", "confidence", "self_mass")) as session:
        watched = layer(x).output
    close(watched, layer(x).output)
    weights = formula(layer, x, visible=earlier(LENGTH))[1]
    table = session.profile
    expected = {
        "entropy": -torch.special.xlogy(weights, weights).sum(-1),
        "confidence": weights.amax(-1),
        "self_mass": weights.diagonal(0, -2, -1),
    }
    for column, rows in expected.items():
        found = torch.tensor([row[column] for row in table.rows()], dtype=DOUBLE)
        close(found, rows.mean((0, 2)), 1e-5)
    session.gates[layer.__class__.__name__, "self"] = torch.tensor([1.0, 0.0], dtype=DOUBLE).repeat_interleave(HEADS)
    with session:
        close(layer(x).output, formula(layer, x, visible=earlier(LENGTH), map_gate=(1.0, 0.0))[0])


def test_the_wiring_of_a_map_is_half_of_its_head(x: Tensor) -> None:
    layer = make(causal=True)
    (head_projections,) = find_projections(layer, lambda: layer(x)).values()
    told: list[Any] = []
    layer._listener = told.append
    layer(x)
    bias = layer.q_proj.bias.view(HEADS, 2, HALF).transpose(0, 1).flatten(0, 1)
    close(torch.einsum("bne,hed->bhnd", x, head_projections.query) + bias[:, None], told[0].query)
    bias = layer.v_proj.bias.view(KV_HEADS, VALUE).repeat(2, 1)
    close(torch.einsum("bne,hed->bhnd", x, head_projections.value) + bias[:, None], told[0].value)
    assert head_projections.key.shape == (2 * KV_HEADS, EMBED, HALF)
    assert head_projections.output is None


# ---- configs, checkpoints, programs, refusals

CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {
        "num_kv_heads": 2, "head_dim": 8, "value_dim": 5, "layer_index": 7, "norm_eps": 1e-4, "bias": False,
        "causal": True, "window": 5, "output_gate": "head", "softcap": 20.0, "scale": 0.25, "sinks": True,
        "dropout": 0.125, "finite": True, "backend": "blockwise",
    },
    "uneven": {"key_heads": (0, 1, 0, 0, 1, 2)},
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_builds_the_layer_and_goes_through_json(name: str) -> None:
    config, layer = DifferentialConfig(24, 6, **CONFIGS[name]), DifferentialAttention(24, 6, **CONFIGS[name])
    assert config_of(layer) == config == AttentionConfig.from_json(config.to_json())
    built = build_attention(config)
    assert config_of(built) == config
    built.load_state_dict(layer.state_dict())
    x = torch.randn(2, 7, 24)
    assert torch.equal(built.eval()(x).output, layer.eval()(x).output)


def test_the_config_has_every_option_of_the_layer() -> None:
    own = set(inspect.signature(DifferentialAttention.__init__).parameters) - {"self", "device", "dtype", "options"}
    fields = {field.name for field in dataclasses.fields(DifferentialConfig)}
    assert fields == own | {field.name for field in dataclasses.fields(HeadsConfig)}


def test_a_config_fits_rotary_positions_to_a_half() -> None:
    config = DifferentialConfig(24, 2, positions=RotaryConfig())
    layer = build_attention(config)
    assert layer.positions.head_dim == 6
    assert config_of(layer) == config
    assert config_of(build_attention(DifferentialConfig(24, 2, positions=ALiBiConfig()))).positions == ALiBiConfig()


def test_a_checkpoint_of_other_heads_is_refused() -> None:
    with pytest.raises(CheckpointError, match="num_heads 6 where the layer has 3"):
        DifferentialAttention(24, 3).load_state_dict(DifferentialAttention(24, 6).state_dict())


def test_it_compiles_in_one_graph() -> None:
    layer = make(causal=True, head_dim=8, positions=Rotary(4)).float()
    x = torch.randn(BATCH, LENGTH, EMBED)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x).output, layer(x).output)


def test_lambda_starts_by_the_layer() -> None:
    layer = DifferentialAttention(24, 2, layer_index=4)
    with torch.no_grad():
        layer.lambda_q1.zero_()
        layer.lambda_q2.zero_()
    assert layer.lambda_full.item() == pytest.approx(0.8 - 0.6 * 0.30119421191220214)
    assert initial_lambda(4) == layer.lambda_init
    assert "layer_index=4" in repr(layer)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"head_dim": 7}, ShapeError, "head_dim must be even, a half for each of the two maps, got 7"),
        ({"layer_index": -1}, OptionError, "layer_index must be at least 0, got -1"),
        ({"norm_eps": 0.0}, OptionError, "norm_eps must be positive"),
        ({"qk_norm": "rms"}, OptionError, "do not support qk_norm, got 'rms'"),
    ],
)
def test_a_wrong_option_is_refused_by_layer_and_config(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    for kind in (DifferentialAttention, DifferentialConfig):
        with pytest.raises(error, match=words):
            kind(24, 6, **options)


def test_what_has_no_counterpart_is_refused() -> None:
    assert not {"from_torch", "to_torch"} & set(dir(DifferentialAttention(24, 6)))
    with pytest.raises(ShapeError, match=r"Rotary\(head_dim=4\) for a layer with head_dim 2"):
        DifferentialAttention(24, 6, positions=Rotary(4))
