"""Counts from a config equal those of built layers, PyTorch's FLOP counter and real caches."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Self

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from polyhead import Mask
from polyhead.costs import (
    CostEstimate,
    LayerDescription,
    MatrixFlops,
    Workload,
    describe,
    estimate_cost,
    estimate_memory,
    layer_work,
)
from polyhead.costs.descriptions import DESCRIPTIONS
from polyhead.costs.recording.recorder import Heads, Recorder
from polyhead.costs.recording.tape import Block
from polyhead.errors import DtypeError, MaskError, OptionError, ShapeError
from polyhead.layers import AttentionConfig, MultiHeadConfig, build_attention
from polyhead.layers.kv_cache import GrowingCache, PagedCache, PreallocatedCache, QuantizedCache, RollingCache
from polyhead.layers.positions import LinearScaling
from polyhead.layers.positions.config import (
    ALiBiConfig,
    LearnedConfig,
    QuadraticRelative1DConfig,
    QuadraticRelative2DConfig,
    RotaryConfig,
    SinusoidalConfig,
    T5BiasConfig,
)

BATCH, QUERIES, KEYS, PAST = 3, 7, 11, 5
PLAIN = {"embed_dim": 24, "num_heads": 6}

LAYOUTS: dict[str, dict[str, Any]] = {
    "multi-head": {},
    "one head": {"num_heads": 1},
    "grouped in pairs": {"num_kv_heads": 3},
    "grouped in threes": {"num_kv_heads": 2},
    "multi-query": {"num_kv_heads": 1},
    "head_dim": {"head_dim": 10},
    "value_dim": {"value_dim": 7},
    "both dims": {"head_dim": 10, "value_dim": 7},
    "both dims, grouped": {"head_dim": 10, "value_dim": 13, "num_kv_heads": 2},
    "both dims, multi-query": {"head_dim": 10, "value_dim": 13, "num_kv_heads": 1},
    "odd width": {"embed_dim": 23, "head_dim": 5},
    "no bias": {"bias": False},
    "output bias alone": {"bias": False, "output_bias": True},
    "input bias alone": {"output_bias": False},
    "no bias, grouped": {"bias": False, "num_kv_heads": 2, "value_dim": 5},
    "rms norm": {"qk_norm": "rms", "head_dim": 10},
    "layer norm": {"qk_norm": "layer", "num_kv_heads": 2},
    "gate a head": {"output_gate": "head", "value_dim": 5},
    "gate a channel": {"output_gate": "channel", "value_dim": 5},
    "sinks": {"sinks": True},
    "softcap and scale": {"softcap": 30.0, "scale": 0.3},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 4},
    "everything": {
        "num_kv_heads": 2, "head_dim": 10, "value_dim": 13, "qk_norm": "layer", "output_gate": "channel", "sinks": True,
        "causal": True, "window": 4, "positions": RotaryConfig(scaling=LinearScaling(2.0)),
    },
    "rotary": {"positions": RotaryConfig()},
    "alibi": {"positions": ALiBiConfig()},
    "learned alibi": {"positions": ALiBiConfig(learnable=True), "num_kv_heads": 2},
    "t5": {"positions": T5BiasConfig(num_buckets=8, max_distance=9)},
    "sinusoids": {"positions": SinusoidalConfig()},
    "learned": {"positions": LearnedConfig(29), "value_dim": 5},
    "quadratic 1d": {"positions": QuadraticRelative1DConfig()},
    "quadratic 2d": {"positions": QuadraticRelative2DConfig(1, QUERIES)},
}  # fmt: skip
CROSS: dict[str, dict[str, Any]] = {
    "wider source": {"key_input_dim": 31, "num_kv_heads": 2},
    "keys and values of their own": {"key_input_dim": 19, "value_input_dim": 17, "value_dim": 5},
    "multi-query over a source": {"key_input_dim": 19, "num_kv_heads": 1, "bias": False},
}
ALL = {**LAYOUTS, **CROSS}


def config_for(options: dict[str, Any]) -> MultiHeadConfig:
    return MultiHeadConfig(**{**PLAIN, **options, "backend": "reference"})


def inputs(*shape: int) -> torch.Tensor:
    return torch.randn(shape, requires_grad=True)


def counted(config: MultiHeadConfig, work: Workload) -> int:
    """Return the FLOPs that PyTorch counts while the layer runs."""
    layer, layout = build_attention(config), config.layout
    x = inputs(work.batch, work.queries, layout.embed_dim)
    source = []
    if work.source is not None:
        source = [inputs(work.batch, work.source, width) for width in (layout.key_input_dim, layout.value_input_dim)]
    cache = GrowingCache()
    with torch.set_grad_enabled(work.training):
        if work.past:
            layer(inputs(work.batch, work.past, layout.embed_dim), cache=cache)
        if work.remembered:
            source = [layer.remember(*source)]
        with FlopCounterMode(display=False) as counter:
            output = layer(x, *source, cache=cache if work.past else None).output
            if work.training:
                output.sum().backward()
    return counter.get_total_flops()


def test_there_are_at_least_thirty_layouts():
    assert len({config_for(options) for options in ALL.values()}) == len(ALL) >= 30


@pytest.mark.parametrize("options", ALL.values(), ids=ALL)
def test_parameters_are_those_of_the_built_layer(options):
    config = config_for(options)
    built = sum(parameter.numel() for parameter in build_attention(config, device="meta").parameters())
    work = Workload.cross(QUERIES, KEYS)
    assert estimate_cost(config, work).parameters == built


# ---- matrix FLOPs


@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("options", LAYOUTS.values(), ids=LAYOUTS)
def test_self_attention_has_the_flops_that_pytorch_counts(options, training):
    config = config_for(options)
    work = Workload(QUERIES, BATCH, training=training)
    cost = estimate_cost(config, work, form="materialised")
    assert cost.matrix_flops == counted(config, work)
    if config.mask is None and not training:
        assert estimate_cost(config, work).forward == cost.forward


@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("options", {**CROSS, "multi-head": {}, "grouped": {"num_kv_heads": 2}}.values())
def test_cross_attention_has_the_flops_that_pytorch_counts(options, training):
    config = config_for(options)
    work = Workload.cross(QUERIES, KEYS, batch=BATCH, training=training)
    assert estimate_cost(config, work, form="materialised").matrix_flops == counted(config, work)
    if not training:
        remembered = Workload.cross(QUERIES, KEYS, batch=BATCH, remembered=True)
        assert estimate_cost(config, remembered, form="materialised").matrix_flops == counted(config, remembered)


@pytest.mark.parametrize("name", ["multi-head", "both dims, grouped", "multi-query", "gate a channel", "everything"])
@pytest.mark.parametrize(
    "work", [Workload.prefill(QUERIES, past=PAST, batch=BATCH), Workload.decode(PAST, batch=BATCH)]
)
def test_generation_has_the_flops_that_pytorch_counts(name, work):
    config = config_for(LAYOUTS[name])
    assert estimate_cost(config, work, form="materialised").matrix_flops == counted(config, work)


@pytest.mark.parametrize("name", ["multi-head", "value_dim", "multi-query"])
def test_the_fused_form_has_the_flops_of_pytorch_s_fused_kernels(name):
    config = config_for(LAYOUTS[name])
    layout = config.layout
    cost = estimate_cost(config, Workload.training_step(QUERIES, batch=BATCH))
    query = key = (BATCH, layout.num_heads, QUERIES, layout.head_dim)
    value = output = (BATCH, layout.num_heads, QUERIES, layout.value_dim)
    assert cost.forward.scores + cost.forward.values == sdpa_flop_count(query, key, value)
    assert cost.backward.scores + cost.backward.values == sdpa_backward_flop_count(output, query, key, value)


def test_each_phase_is_the_product_its_name_says():
    config = MultiHeadConfig(23, 6, num_kv_heads=2, head_dim=10, value_dim=13, output_gate="head")
    cost = estimate_cost(config, Workload.prefill(QUERIES, past=PAST, batch=BATCH))
    tokens, pairs = BATCH * QUERIES, BATCH * QUERIES * (PAST + QUERIES)
    assert cost.forward == MatrixFlops(
        projection=2 * tokens * 23 * (6 * 10 + 2 * 10 + 2 * 13 + 6),
        scores=2 * pairs * 6 * 10,
        values=2 * pairs * 6 * 13,
        mixing=0,
        output=2 * tokens * 6 * 13 * 23,
    )
    assert cost.pairs == pairs
    assert cost.backward == MatrixFlops()


def test_decoding_token_by_token_and_in_chunks_costs_what_the_causal_forward_does():
    for window in (None, 4):
        config = MultiHeadConfig(**PLAIN, causal=True, window=window)
        whole = estimate_cost(config, Workload.forward(QUERIES + PAST))
        steps = [estimate_cost(config, Workload.decode(past)) for past in range(QUERIES + PAST)]
        chunks = [estimate_cost(config, w) for w in (Workload.prefill(PAST), Workload.prefill(QUERIES, past=PAST))]
        for parts in (steps, chunks):
            assert sum((part.forward for part in parts), MatrixFlops()) == whole.forward
            assert sum(part.exponentials for part in parts) == whole.exponentials


def test_only_visible_pairs_are_met_unless_the_weights_are_materialised():
    config = MultiHeadConfig(**PLAIN, causal=True)
    work = Workload.forward(QUERIES, batch=BATCH)
    own, window = estimate_cost(config, work), estimate_cost(config, work, mask=Mask.window(2))
    assert own.pairs == BATCH * QUERIES * (QUERIES + 1) // 2
    assert window.pairs == BATCH * (2 * QUERIES - 1)
    assert window == estimate_cost(MultiHeadConfig(**PLAIN), work, mask=Mask.window(2))
    full = estimate_cost(config, work, mask=Mask.window(2), form="materialised")
    assert full.pairs == BATCH * QUERIES * QUERIES
    assert full.forward.scores * own.pairs == own.forward.scores * full.pairs


# ---- what depends on the number of heads and what does not

HEAD_COUNTS = (1, 2, 4, 8, 16, 32, 64)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_matrix_flops_do_not_depend_on_the_number_of_heads(causal, training):
    work = Workload(19, BATCH, training=training)
    costs = [estimate_cost(MultiHeadConfig(64, h, causal=causal), work) for h in HEAD_COUNTS]
    assert len({(cost.forward, cost.backward, cost.parameters) for cost in costs}) == 1


def test_exponentials_are_h_n_squared():
    n = 19
    for h in HEAD_COUNTS:
        cost = estimate_cost(MultiHeadConfig(64, h), Workload.forward(n, batch=BATCH))
        assert cost.exponentials == BATCH * h * n**2
        assert estimate_cost(MultiHeadConfig(64, h), Workload.training_step(n)).exponentials == 2 * h * n**2
        sinks = estimate_cost(MultiHeadConfig(64, h, sinks=True), Workload.forward(n, batch=BATCH))
        assert sinks.exponentials == BATCH * h * (n**2 + n)


# Said once by PyTorch on a CPU without bfloat16 instructions.
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")
@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 4), (torch.float64, 8)])
def test_materialised_weights_take_memory_in_proportion_to_the_heads(dtype, size):
    n = 19
    for h in HEAD_COUNTS[:4]:
        config = MultiHeadConfig(64, h, causal=True, backend="reference")
        cost = estimate_cost(config, Workload.forward(n, batch=BATCH), form="materialised", dtype=dtype)
        layer = build_attention(config, dtype=dtype)
        weights = layer(torch.randn(BATCH, n, 64, dtype=dtype), weights=True).weights
        assert cost.weights_bytes == weights.nbytes == size * BATCH * h * n**2
        assert estimate_cost(config, Workload.forward(n, batch=BATCH), dtype=dtype).weights_bytes == 0


def test_exponentials_are_taken_once_in_a_materialised_training_step():
    config = MultiHeadConfig(**PLAIN, causal=True)
    work = Workload.training_step(QUERIES, batch=BATCH)
    assert estimate_cost(config, work, form="materialised").exponentials == BATCH * 6 * QUERIES**2


# ---- caches


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", LAYOUTS.values(), ids=LAYOUTS)
def test_cache_bytes_are_those_of_real_caches(options, dtype):
    config = config_for(options)
    tokens = PAST + QUERIES
    cost = estimate_cost(config, Workload.prefill(QUERIES, past=PAST, batch=BATCH), dtype=dtype)
    held = {"batch_size": BATCH, "dtype": dtype}
    cache = PreallocatedCache.for_layout(config.layout, capacity=tokens, **held)
    assert cost.cache_bytes == cache.nbytes
    rolling = RollingCache.for_layout(config.layout, window=4, sinks=1, **held)
    assert cost.cache_bytes_per_token * BATCH * 5 == rolling.nbytes
    paged = PagedCache.for_layout(config.layout, num_pages=2, page_size=3, **held)
    assert cost.cache_bytes_per_token * 6 == paged.pool.nbytes
    quantized = QuantizedCache.for_layout(config.layout, capacity=tokens, **held)
    work = Workload.decode(tokens - 1, batch=BATCH)
    assert estimate_cost(config, work, dtype=dtype, cache_dtype=torch.int8).cache_bytes == quantized.nbytes


def test_a_layer_leaves_so_many_bytes_in_its_cache():
    config = config_for(LAYOUTS["both dims, grouped"])
    layer, cache = build_attention(config), GrowingCache()
    with torch.no_grad():
        layer(torch.randn(BATCH, PAST, config.embed_dim), cache=cache)
    assert estimate_cost(config, Workload.prefill(PAST, batch=BATCH), dtype=torch.float32).cache_bytes == cache.nbytes


def test_a_memory_takes_the_bytes_of_the_cache_of_its_source():
    config = config_for(CROSS["keys and values of their own"])
    memory = build_attention(config).remember(torch.randn(BATCH, KEYS, 19), torch.randn(BATCH, KEYS, 17))
    cost = estimate_cost(config, Workload.cross(1, KEYS, batch=BATCH, remembered=True), dtype=torch.float32)
    assert cost.cache_bytes == memory.key.nbytes + memory.value.nbytes


# ---- the value, the registry, the errors


def test_an_estimate_goes_through_json_unchanged():
    for form, training in itertools.product(("fused", "materialised"), (False, True)):
        cost = estimate_cost(config_for(LAYOUTS["everything"]), Workload(QUERIES, training=training), form=form)
        assert CostEstimate.from_json(cost.to_json()) == cost


@dataclass(frozen=True)
class MixedConfig(AttentionConfig):
    """A kind of its own."""

    size: int

    @property
    def embed_dim(self) -> int:
        return self.size

    def build(self, *, device: Any = None, dtype: Any = None) -> nn.Module:
        return nn.Linear(self.size, self.size, bias=False)

    @classmethod
    def of(cls, layer: Any) -> Self:
        return cls(layer.in_features)


class MixedHeads(LayerDescription[MixedConfig]):
    """One head with one channel, and a matrix for every token."""

    projections = (0, 0, 0, 0)
    cache_elements = 3

    @property
    def other_parameters(self) -> int:
        return self.config.size**2

    def record(self, call: Recorder) -> Block:
        call.core(Heads(1, 1, 1, 2))
        return call.linear("mixing", call.x, self.config.size, self.config.size)


def test_another_kind_brings_its_own_description(monkeypatch):
    with pytest.raises(OptionError, match="no description of MixedConfig; add one"):
        estimate_cost(MixedConfig(5), Workload.forward(QUERIES))
    monkeypatch.setitem(DESCRIPTIONS, MixedConfig, MixedHeads)
    assert isinstance(describe(MixedConfig(5)), MixedHeads)
    work, pairs, product = Workload.training_step(QUERIES), 2 * QUERIES**2, 2 * QUERIES * 5**2
    cost = estimate_cost(MixedConfig(5), work)
    assert cost.forward == MatrixFlops(scores=pairs, values=2 * pairs, mixing=product)
    assert cost.backward == MatrixFlops(scores=3 * pairs, values=4 * pairs, mixing=2 * product)
    assert (cost.parameters, cost.exponentials, cost.cache_bytes_per_token) == (25, pairs, 6)
    assert layer_work(MixedConfig(5), work).flops == cost.matrix_flops
    memory = estimate_memory(MixedConfig(5), work)
    assert (memory.parameters, memory.inputs) == (2 * 25, 3 * 2 * QUERIES * 5)
    with pytest.raises(OptionError, match=r"no int8 cache, got cache_dtype torch\.int8; a QuantizedCache"):
        estimate_cost(MixedConfig(5), Workload.forward(QUERIES), cache_dtype=torch.int8)


def test_what_cannot_be_counted_is_refused():
    config, work = MultiHeadConfig(**PLAIN), Workload.forward(QUERIES)
    with pytest.raises(OptionError, match="form must be 'fused' or 'materialised', got 'flash'"):
        estimate_cost(config, work, form="flash")
    with pytest.raises(DtypeError, match=r"int8 \(with scales\), got torch\.int16"):
        estimate_cost(config, work, cache_dtype=torch.int16)
    with pytest.raises(MaskError, match="lengths of 2 sequences"):
        estimate_cost(config, work, mask=Mask.lengths([3, 2]))
    with pytest.raises(ShapeError, match=r"width 24, 19 and 17; count it with Workload\.cross"):
        estimate_cost(config_for(CROSS["keys and values of their own"]), work)
