"""Counts of routed heads equal those of built layers, PyTorch's FLOP counter and real caches."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from polyhead import Mask
from polyhead.costs import Workload, estimate_cost
from polyhead.layers.kv_cache import PreallocatedCache
from polyhead.layers.positions.config import ALiBiConfig, LearnedConfig, RotaryConfig
from polyhead.layers.variants.routed.config import RoutedConfig
from tests.costs.pytorch_counts import BATCH, EMBED, HEADS, PAST, QUERIES, built_parameters, counted_flops, workloads


def routed(**options: Any) -> RoutedConfig:
    return RoutedConfig(EMBED, HEADS, **{"backend": "reference", **options})


ALL = 1e-12  # a threshold that every head passes
CONFIGS: dict[str, RoutedConfig] = {
    "shared": routed(top_k=2),
    "shared, dims": routed(top_k=3, head_dim=5, value_dim=7, num_kv_heads=2, bias=False),
    "shared, rotary": routed(top_k=1, positions=RotaryConfig(), qk_norm="rms", output_bias=False),
    "shared, at most": routed(threshold=ALL, k_max=4, always_on=1),
    "full": routed(shape="full", top_k=2, causal=True),
    "full, grouped": routed(shape="full", top_k=2, num_kv_heads=2, always_on=2, sinks=True, qk_norm="layer"),
    "full, learned": routed(shape="full", top_k=4, positions=LearnedConfig(29), value_dim=7),
    "full, at most": routed(shape="full", threshold=ALL, k_max=3, positions=ALiBiConfig(learnable=True)),
}
configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


@configs
def test_parameters_are_those_of_the_built_layer(config):
    assert estimate_cost(config, Workload.forward(QUERIES)).parameters == built_parameters(config)


@workloads
@configs
def test_matrix_flops_are_those_that_pytorch_counts(config, work):
    # Where a mask hides keys from all rows of a piece, even the formula leaves them out.
    unmasked = dataclasses.replace(config, causal=False)
    assert estimate_cost(config, work, form="materialised").matrix_flops == counted_flops(unmasked, work)


def test_what_falls_with_the_heads_of_a_token_and_what_does_not():
    work = Workload.forward(QUERIES, batch=BATCH)
    for shape in ("shared", "full"):
        few, many = (estimate_cost(routed(shape=shape, top_k=k), work).forward for k in (2, 6))
        assert (3 * few.scores, 3 * few.values, 3 * few.output) == (many.scores, many.values, many.output)
        kept = 3 * few.projection - many.projection  # twice the gate, the keys and the values
        kv_heads = 1 if shape == "shared" else HEADS
        assert kept == 2 * 2 * BATCH * QUERIES * EMBED * (HEADS + kv_heads * 2 * EMBED // HEADS)


def test_a_causal_mask_spares_scores_and_values_alone():
    for config in CONFIGS.values():
        work = Workload.forward(QUERIES)
        full = estimate_cost(config, work, form="materialised").forward
        causal = estimate_cost(config, work, mask=Mask.causal()).forward
        pairs, seen = QUERIES**2, QUERIES * (QUERIES + 1) // 2
        assert (causal.scores * pairs, causal.values * pairs) == (full.scores * seen, full.values * seen)
        assert (causal.projection, causal.output) == (full.projection, full.output)


def test_exponentials_and_weights_are_of_chosen_rows():
    work = Workload.forward(QUERIES, batch=BATCH)
    pairs = BATCH * QUERIES**2
    cost = estimate_cost(CONFIGS["full, grouped"], work, form="materialised", dtype=torch.float32)
    assert cost.exponentials == 4 * (pairs + BATCH * QUERIES)
    assert cost.weights_bytes == 4 * 4 * pairs
    assert estimate_cost(CONFIGS["shared, dims"], work).exponentials == 3 * 2 * pairs


@configs
def test_a_cache_takes_so_many_bytes(config):
    cost = estimate_cost(config, Workload.prefill(QUERIES, past=PAST, batch=BATCH), dtype=torch.float32)
    cache = PreallocatedCache.for_layout(config.layout, capacity=PAST + QUERIES, batch_size=BATCH, dtype=torch.float32)
    assert cost.cache_bytes == cache.nbytes
