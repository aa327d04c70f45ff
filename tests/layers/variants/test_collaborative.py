"""Collaborative heads against their formula in float64, and as plain heads in another form."""

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
from polyhead.errors import BackendUnsupported, OptionError, ShapeError
from polyhead.layers import AttentionConfig, build_attention, config_of
from polyhead.layers.kv_cache import GrowingCache, PagedCache, PreallocatedCache, RollingCache
from polyhead.layers.multi_head.config import HeadsConfig
from polyhead.layers.positions import ALiBi, Learned, Rotary, T5Bias
from polyhead.layers.positions.config import RotaryConfig
from polyhead.layers.variants import CollaborativeAttention, CollaborativeConfig
from polyhead.observation.projections import find_projections
from tests.error_budget import Compared, assert_draws_within_error_budget, token_orders
from tests.layers.head_formula import earlier, project
from tests.ops.oracle import ON_THE_CPU

BATCH, LENGTH, KEYS, EMBED, HEADS, SHARED, HEAD_DIM, VALUE = 3, 13, 17, 23, 5, 8, 11, 7
DOUBLE = torch.float64
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def close(actual: Any, expected: Any, tolerance: float = 1e-11) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=DOUBLE)


def stirred(layer: Any) -> Any:
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return layer


def make(**options: Any) -> CollaborativeAttention:
    sizes = {"shared_dim": SHARED, "head_dim": HEAD_DIM, "value_dim": VALUE, "dtype": DOUBLE}
    return stirred(CollaborativeAttention(EMBED, HEADS, **{**sizes, **options}).double())


@pytest.fixture
def x() -> Tensor:
    return randn(BATCH, LENGTH, EMBED)


def formula(
    layer: CollaborativeAttention, x: Tensor, source: Tensor | None = None, *, visible: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The output and the weights, one head after the other."""
    source = x if source is None else source
    queries, keys = project(layer, "q_proj", x), project(layer, "k_proj", source)
    values = project(layer, "v_proj", source)
    heads, maps = [], []
    for i in range(HEADS):
        logits = queries @ torch.diag(layer.mixing[i]) @ keys.mT / HEAD_DIM**0.5
        if visible is not None:
            logits = logits.masked_fill(~visible, -torch.inf)
        if layer.sinks is not None:
            sink = layer.sinks[i].expand(*logits.shape[:-1], 1)
            maps.append(torch.softmax(torch.cat((logits, sink), -1), -1)[..., :-1])
        else:
            maps.append(torch.softmax(logits, -1))
        heads.append(maps[-1] @ values[..., i * VALUE : (i + 1) * VALUE])
    return project(layer, "out_proj", torch.cat(heads, -1)), torch.stack(maps, 1)


@pytest.mark.parametrize("backend", [None, *ON_THE_CPU])
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"shared_dim": 31}, {"sinks": True}])
def test_every_option_is_the_formula(options: dict[str, Any], backend: str | None, x: Tensor) -> None:
    layer = make(**options)
    if backend == "sdpa" and "sinks" in options:
        with pytest.raises(BackendUnsupported, match="no learned sinks"):
            layer(x, backend=backend)
        return
    close(layer(x, backend=backend).output, formula(layer, x)[0])
    close(layer(x, mask=Mask.causal(), backend=backend).output, formula(layer, x, visible=earlier(LENGTH))[0])


def test_cross_attention_and_a_source_remembered(x: Tensor) -> None:
    layer, source = make(), randn(BATCH, KEYS, EMBED)
    expected = formula(layer, x, source)[0]
    close(layer(x, source).output, expected)
    memory = layer.remember(source)
    assert (memory.key.shape, memory.value.shape) == ((BATCH, 1, KEYS, SHARED), (BATCH, 1, KEYS, HEADS * VALUE))
    close(layer(x, memory).output, expected)


def test_padding_is_not_seen(x: Tensor) -> None:
    layer, lengths = make(causal=True), [13, 11, 3]
    real = torch.arange(LENGTH) < torch.tensor(lengths)[:, None]
    expected = formula(layer, x, visible=earlier(LENGTH) & real[:, None, :])[0]
    x = torch.where(real[..., None], x, torch.nan)
    close(layer(x, mask=Mask.lengths(lengths)).output[real], expected[real])


def test_no_key_is_repeated_in_memory(x: Tensor) -> None:
    layer, told = make(), []
    layer._listener = told.append
    layer(x)
    assert told[0].key.shape == (BATCH, HEADS, LENGTH, SHARED)
    assert told[0].key.stride(1) == 0
    assert told[0].value._base is not None


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


def test_rotary_positions_turn_the_shared_space(x: Tensor) -> None:
    layer, rotary = make(positions=Rotary(SHARED)), Rotary(SHARED)
    told: list[Any] = []
    layer._listener = told.append
    layer(x)
    mixed = project(layer, "q_proj", x)[:, None] * layer.mixing[:, None]
    close(told[0].query, rotary(mixed))
    close(told[0].key, rotary(project(layer, "k_proj", x)[:, None]).expand(-1, HEADS, -1, -1))
    close(layer(x, token_positions=torch.arange(LENGTH) + 29).output, layer(x).output)


# ---- plain heads in another form

LAYERS: dict[str, dict[str, Any]] = {
    "multi-head": {},
    "grouped": {"num_kv_heads": 2},
    "uneven": {"key_heads": (0, 1, 0, 0, 2, 0)},
    "everything": {
        "num_kv_heads": 3, "head_dim": 5, "value_dim": 7, "causal": True, "window": 6, "output_gate": "channel",
        "softcap": 9.0, "scale": 0.4, "sinks": True, "output_bias": False, "positions": "ALiBi", "dropout": 0.1,
    },
    "other inputs": {"key_input_dim": 19, "value_input_dim": 17},
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_a_trained_layer_is_converted_exactly(name: str) -> None:
    options = {**LAYERS[name]}
    if "positions" in options:
        options["positions"] = ALiBi(6)
    plain = stirred(MultiHeadAttention(24, 6, dtype=DOUBLE, **options)).eval()
    made = CollaborativeAttention.from_multi_head(plain)
    assert made.shared_dim == 6 * plain.layout.head_dim
    assert not made.training
    inputs = [randn(BATCH, LENGTH, 24)]
    if "key_input_dim" in options:
        inputs += [randn(BATCH, KEYS, 19), randn(BATCH, KEYS, 17)]
    close(made(*inputs).output, plain(*inputs).output)
    requested = {"statistics": ("entropy", "max_logit"), "logsumexp": True}
    ours, theirs = made(*inputs, **requested), plain(*inputs, **requested)
    close(ours.logsumexp, theirs.logsumexp)
    close(dict(ours.statistics.items()), dict(theirs.statistics.items()))


def test_a_converted_layer_has_the_head_gate_and_positions_of_its_own(x: Tensor) -> None:
    plain = stirred(MultiHeadAttention(EMBED, HEADS, head_dim=4, positions=T5Bias(HEADS), dtype=DOUBLE).double())
    plain.head_gate = torch.tensor([1.0, 0.0, -0.5, 2.0, 1.0], dtype=DOUBLE)
    expected = plain(x).output
    made = CollaborativeAttention.from_multi_head(plain)
    close(made(x).output, expected)
    with torch.no_grad():
        made.positions.weight.zero_()
        made.head_gate.zero_()
    close(plain(x).output, expected)


def test_a_new_layer_of_full_width_is_plain_attention() -> None:
    layer = CollaborativeAttention(24, 6, dtype=DOUBLE)
    plain = MultiHeadAttention(24, 6, dtype=DOUBLE)
    plain.load_state_dict({name: weight for name, weight in layer.state_dict().items() if name != "mixing"})
    x = randn(BATCH, LENGTH, 24)
    close(layer(x).output, plain(x).output)


def test_a_narrower_mixing_starts_with_logits_of_the_same_size() -> None:
    layer = CollaborativeAttention(256, 64, shared_dim=128)
    assert layer.mixing.square().sum(-1).mean().item() == pytest.approx(layer.layout.head_dim, rel=0.1)


def test_torchs_layer_is_converted_too(x: Tensor) -> None:
    module = torch.nn.MultiheadAttention(24, 6, batch_first=True, dtype=DOUBLE).eval()
    x = randn(BATCH, LENGTH, 24)
    expected = module(x, x, x, need_weights=False)[0]
    close(CollaborativeAttention.from_torch(module)(x).output, expected)
    causal = Mask.causal()
    made = CollaborativeAttention.from_torch(module, shared_dim=24, causal=True)
    close(made(x).output, CollaborativeAttention.from_torch(module)(x, mask=causal).output, 1e-7)
    assert CollaborativeAttention.from_torch(module, shared_dim=SHARED).cache_layout.head_dim == SHARED


# ---- generating

CACHES: dict[str, tuple[type[KVCache], dict[str, int]]] = {
    "growing": (GrowingCache, {}),
    "preallocated": (PreallocatedCache, {"capacity": 31}),
    "paged": (PagedCache, {"num_pages": 31, "page_size": 4}),
    "rolling": (RollingCache, {"window": 31}),
}


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize(
    "positions", [lambda: None, lambda: Rotary(SHARED), lambda: ALiBi(HEADS), lambda: Learned(31, EMBED)]
)
def test_generation_equals_one_forward(positions: Any, kind: str, x: Tensor) -> None:
    layer = make(positions=positions(), causal=True)
    build, own = CACHES[kind]
    cache = build.for_layout(layer.cache_layout, batch_size=BATCH, dtype=DOUBLE, **own)
    with torch.no_grad():
        parts = [layer(block, cache=cache).output for block in x.split([5, 1, 1, 4, 2], 1)]
        close(torch.cat(parts, 1), layer(x).output)
    view = cache.view()
    assert view.key.shape[1:] == (1, LENGTH, SHARED)
    assert view.value.shape[1:] == (1, LENGTH, HEADS * VALUE)


# ---- what is told


def test_statistics_are_those_of_the_weights(x: Tensor) -> None:
    layer = make(causal=True)
    weights = formula(layer, x, visible=earlier(LENGTH))[1]
    result = layer(x, statistics=True, weights=True)
    close(result.weights, weights)
    close(layer(x, statistics=True).statistics.entropy, -torch.special.xlogy(weights, weights).sum(-1))
    with polyhead.observe(layer, statistics=("entropy", "confidence")) as session:
        close(layer(x).output, result.output)
    found = torch.tensor([row["confidence"] for row in session.profile.rows()], dtype=DOUBLE)
    close(found, weights.amax(-1).mean((0, 2)), 1e-5)


def test_the_wiring_of_a_head_has_its_mixing_in_it(x: Tensor) -> None:
    layer, told = make(bias=False), []
    (head_projections,) = find_projections(layer, lambda: layer(x)).values()
    layer._listener = told.append
    output = layer(x).output
    close(torch.einsum("bne,hed->bhnd", x, head_projections.query), told[0].query)
    close(torch.einsum("bne,hed->bhnd", x, head_projections.key), told[0].key)
    close(torch.einsum("bne,hed->bhnd", x, head_projections.value), told[0].value)
    close(torch.einsum("bhnd,hde->bne", told[0].result.output, head_projections.output), output)


def test_a_gate_multiplies_the_heads(x: Tensor) -> None:
    layer, gate = make(bias=False), randn(HEADS)
    scaled = copy.deepcopy(layer)
    with torch.no_grad():
        scaled.out_proj.weight.mul_(gate.repeat_interleave(VALUE))
    close(layer(x, head_gate=gate).output, scaled(x).output)


# ---- configs, programs, refusals

CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "narrow": {"shared_dim": 10},
    "everything": {
        "shared_dim": 10, "head_dim": 3, "value_dim": 5, "bias": False, "causal": True, "window": 5, "softcap": 20.0,
        "output_gate": "head", "scale": 0.25, "sinks": True, "dropout": 0.125, "finite": True, "backend": "blockwise",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_builds_the_layer_and_goes_through_json(name: str) -> None:
    config, layer = CollaborativeConfig(24, 6, **CONFIGS[name]), CollaborativeAttention(24, 6, **CONFIGS[name])
    assert config_of(layer) == config == AttentionConfig.from_json(config.to_json())
    built = build_attention(config)
    assert config_of(built) == config
    built.load_state_dict(layer.state_dict())
    x = torch.randn(2, 7, 24)
    assert torch.equal(built.eval()(x).output, layer.eval()(x).output)


def test_the_config_has_every_option_of_the_layer() -> None:
    own = set(inspect.signature(CollaborativeAttention.__init__).parameters) - {"self", "device", "dtype", "options"}
    fields = {field.name for field in dataclasses.fields(CollaborativeConfig)}
    assert fields == own | {field.name for field in dataclasses.fields(HeadsConfig)}


def test_a_config_fits_rotary_positions_to_the_shared_space() -> None:
    config = CollaborativeConfig(24, 6, shared_dim=10, positions=RotaryConfig())
    layer = build_attention(config)
    assert layer.positions.head_dim == 10
    assert config_of(layer) == config == AttentionConfig.from_json(config.to_json())


def test_it_compiles_in_one_graph() -> None:
    layer = make(causal=True, positions=Rotary(SHARED)).float()
    x = torch.randn(BATCH, LENGTH, EMBED)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x).output, layer(x).output)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"shared_dim": 0}, ShapeError, "shared_dim must be at least 1, got 0"),
        ({"num_kv_heads": 2}, OptionError, "one key and as many values as heads, got num_kv_heads 2"),
        ({"key_heads": (0, 0, 0, 0, 0, 1)}, OptionError, "leave both out"),
        ({"qk_norm": "layer"}, OptionError, "do not support qk_norm.*'layer'"),
    ],
)
def test_a_wrong_option_is_refused_by_layer_and_config(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    for kind in (CollaborativeAttention, CollaborativeConfig):
        with pytest.raises(error, match=words):
            kind(24, 6, **options)


def test_what_has_no_counterpart_is_refused() -> None:
    layer = CollaborativeAttention(24, 6)
    assert not {"heads", "from_heads", "to_torch"} & set(dir(layer))
    for options, words in (({"positions": Rotary(4)}, "rotary positions"), ({"qk_norm": "rms"}, "qk_norm")):
        with pytest.raises(OptionError, match=f"does not support a layer with {words}"):
            CollaborativeAttention.from_multi_head(MultiHeadAttention(24, 6, **options))
    adapted = MultiHeadAttention(24, 6)
    adapted.v_proj = type("Adapter", (torch.nn.Linear,), {})(24, 24)
    with pytest.raises(OptionError, match="does not support a layer with a projection that is not a plain"):
        CollaborativeAttention.from_multi_head(adapted)
    with pytest.raises(OptionError, match="takes a plain MultiHeadAttention, got CollaborativeAttention"):
        CollaborativeAttention.from_multi_head(layer)
