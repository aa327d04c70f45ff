"""Counts of differential and collaborative heads equal those of built layers, PyTorch and caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polyhead import Mask
from polyhead.costs import Workload, estimate_cost
from polyhead.layers import AttentionConfig, MultiHeadConfig, build_attention
from polyhead.layers.kv_cache import PreallocatedCache, QuantizedCache
from polyhead.layers.positions.config import ALiBiConfig, LearnedConfig, RotaryConfig
from polyhead.layers.variants import CollaborativeConfig, DifferentialConfig
from tests.costs.pytorch_counts import BATCH, EMBED, HEADS, PAST, QUERIES, built_parameters, counted_flops, workloads


def differential(**options: Any) -> DifferentialConfig:
    return DifferentialConfig(EMBED, HEADS, backend="reference", **options)


def collaborative(**options: Any) -> CollaborativeConfig:
    return CollaborativeConfig(EMBED, HEADS, backend="reference", **options)


CONFIGS: dict[str, AttentionConfig] = {
    "differential": differential(),
    "differential, grouped": differential(num_kv_heads=2, head_dim=10, value_dim=7, bias=False),
    "differential, uneven": differential(key_heads=(0, 0, 1, 2, 2, 2), output_bias=False),
    "differential, sinks and a gate": differential(sinks=True, output_gate="channel", causal=True),
    "differential, rotary": differential(positions=RotaryConfig()),
    "differential, biases": differential(positions=ALiBiConfig(learnable=True)),
    "collaborative": collaborative(),
    "collaborative, narrow": collaborative(shared_dim=10, value_dim=7),
    "collaborative, wide": collaborative(shared_dim=31, head_dim=5, bias=False),
    "collaborative, sinks and a gate": collaborative(shared_dim=10, sinks=True, output_gate="head", causal=True),
    "collaborative, rotary": collaborative(shared_dim=10, positions=RotaryConfig()),
    "collaborative, learned": collaborative(shared_dim=10, positions=LearnedConfig(29)),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_parameters_are_those_of_the_built_layer(config: AttentionConfig) -> None:
    assert estimate_cost(config, Workload.forward(QUERIES)).parameters == built_parameters(config)


@workloads
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_matrix_flops_are_those_that_pytorch_counts(config: AttentionConfig, work: Workload) -> None:
    assert estimate_cost(config, work, form="materialised").matrix_flops == counted_flops(config, work)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_cache_takes_so_many_bytes(config: AttentionConfig, dtype: torch.dtype) -> None:
    work = Workload.prefill(QUERIES, past=PAST, batch=BATCH)
    layout = build_attention(config, device="meta").cache_layout
    sizes = {"capacity": PAST + QUERIES, "batch_size": BATCH}
    cache = PreallocatedCache.for_layout(layout, dtype=dtype, **sizes)
    assert estimate_cost(config, work, dtype=dtype).cache_bytes == cache.nbytes
    quantized = QuantizedCache.for_layout(layout, **sizes)
    assert estimate_cost(config, work, cache_dtype=torch.int8).cache_bytes == quantized.nbytes


def test_what_a_softmax_does_is_done_twice_in_differential_heads() -> None:
    work = Workload.training_step(QUERIES, batch=BATCH)
    plain = estimate_cost(MultiHeadConfig(EMBED, HEADS), work, mask=Mask.causal())
    twice = estimate_cost(differential(), work, mask=Mask.causal())
    assert twice.forward.scores == plain.forward.scores
    assert twice.forward.values == 2 * plain.forward.values
    assert twice.exponentials == 2 * plain.exponentials
    assert twice.cache_bytes == plain.cache_bytes
    assert twice.backward.scores - 2 * twice.forward.scores == plain.forward.scores
    weights = estimate_cost(differential(), work, form="materialised").weights_bytes
    assert weights == 2 * estimate_cost(MultiHeadConfig(EMBED, HEADS), work, form="materialised").weights_bytes


def test_collaborative_heads_meet_the_shared_space_in_full() -> None:
    work = Workload.training_step(QUERIES, batch=BATCH)
    cost = estimate_cost(collaborative(shared_dim=10), work)
    assert cost.forward.scores == 2 * BATCH * QUERIES**2 * HEADS * 10
    assert cost.backward.scores == 3 * cost.forward.scores
    assert cost.cache_bytes_per_token == 2 * (10 + EMBED)
