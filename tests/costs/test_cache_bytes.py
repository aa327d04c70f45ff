"""Cache bytes of every variant equal those of the cache objects after a layer has written to them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from polyhead.costs import LayerGroup, ModelLayout, Workload, estimate_cost, planning
from polyhead.costs.phases import PhaseSizes, rolling_cache_bytes
from polyhead.layers import (
    AttentionConfig,
    GrowingCache,
    KVCache,
    LatentCache,
    LatentConfig,
    MultiHeadConfig,
    PagedCache,
    PreallocatedCache,
    PreallocatedLatentCache,
    QuantizedCache,
    RollingCache,
    build_attention,
)
from polyhead.layers.config import CONFIGS
from polyhead.layers.positions.config import QuadraticRelative1DConfig, RotaryConfig
from polyhead.layers.variants import (
    CollaborativeConfig,
    DifferentialConfig,
    GroupedHeadsConfig,
    HeadMixConfig,
    RoutedConfig,
    TalkingHeadsConfig,
)

EMBED, HEADS, BATCH, TOKENS, PAGE, WINDOW = 24, 6, 3, 14, 7, 5
CAUSAL = {"causal": True}
ARRANGEMENTS: dict[str, AttentionConfig] = {
    "multi-head": MultiHeadConfig(EMBED, HEADS, **CAUSAL),
    "grouped queries": MultiHeadConfig(EMBED, HEADS, num_kv_heads=2, value_dim=5, **CAUSAL),
    "uneven groups": MultiHeadConfig(EMBED, HEADS, key_heads=(0, 1, 1, 1, 2, 2), **CAUSAL),
    "convolutional": MultiHeadConfig(EMBED, HEADS, positions=QuadraticRelative1DConfig(), sinks=True, **CAUSAL),
    "grouped heads": GroupedHeadsConfig(EMBED, HEADS, num_groups=3, **CAUSAL),
    "across heads": HeadMixConfig(EMBED, HEADS, num_rows=4, value_dim=7, **CAUSAL),
    "talking": TalkingHeadsConfig(EMBED, HEADS, num_kv_heads=3, **CAUSAL),
    "differential": DifferentialConfig(EMBED, HEADS, num_kv_heads=2, head_dim=10, **CAUSAL),
    "collaborative": CollaborativeConfig(EMBED, HEADS, shared_dim=10, value_dim=7, **CAUSAL),
    "routed": RoutedConfig(EMBED, HEADS, top_k=2, num_kv_heads=2, **CAUSAL),
    "routed, full": RoutedConfig(EMBED, HEADS, top_k=2, shape="full", value_dim=7, **CAUSAL),
}
LATENT = LatentConfig(
    EMBED, HEADS, kv_lora_rank=9, qk_rope_head_dim=4, positions=RotaryConfig(interleaved=True), **CAUSAL
)
CACHES: dict[str, tuple[type[KVCache], dict[str, int]]] = {
    "preallocated": (PreallocatedCache, {"capacity": TOKENS}),
    "rolling": (RollingCache, {"window": TOKENS}),
    "paged": (PagedCache, {"num_pages": 8, "page_size": PAGE}),
    "int8": (QuantizedCache, {"capacity": TOKENS}),
}


def filled(config: AttentionConfig, cache: Any, dtype: torch.dtype) -> int:
    """Bytes of the cache when a layer has read all tokens."""
    layer = build_attention(config, dtype=dtype)
    with torch.no_grad():
        layer(torch.randn(BATCH, TOKENS, EMBED, dtype=dtype), cache=cache)
    assert cache.lengths == (TOKENS,) * BATCH
    return cache.nbytes


def planned(config: AttentionConfig, **options: Any) -> int:
    return estimate_cost(config, Workload.decode(TOKENS - 1, batch=BATCH), **options).cache_bytes


def test_every_kind_of_layer_is_here():
    assert {type(config) for config in (*ARRANGEMENTS.values(), LATENT)} == set(CONFIGS._classes.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_a_cache_holds_the_bytes_that_are_planned(name, kind, dtype):
    config, (cache_type, options) = ARRANGEMENTS[name], CACHES[kind]
    layout = getattr(build_attention(config, device="meta"), "cache_layout", config.layout)  # type: ignore[attr-defined]
    cache = cache_type.for_layout(layout, batch_size=BATCH, dtype=dtype, **options)
    numbers = torch.int8 if kind == "int8" else dtype
    assert filled(config, cache, dtype) == planned(config, dtype=dtype, cache_dtype=numbers)


@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_a_growing_cache_shows_the_bytes_that_are_planned_and_has_room_for_more(name):
    cache = GrowingCache()
    held, expected = filled(ARRANGEMENTS[name], cache, torch.float32), planned(ARRANGEMENTS[name], dtype=torch.float32)
    seen = cache.view()
    assert 4 * (seen.key.numel() + seen.value.numel()) == expected <= held


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_latents_take_the_bytes_that_are_planned(dtype):
    expected = planned(LATENT, dtype=dtype)
    sizes = {"capacity": TOKENS, "batch_size": BATCH, "dtype": dtype}
    assert filled(LATENT, PreallocatedLatentCache.for_layout(LATENT.layout.absorbed, **sizes), dtype) == expected
    growing = LatentCache(value_dim=LATENT.kv_lora_rank)
    filled(LATENT, growing, dtype)
    assert dtype.itemsize * growing.view().key.numel() == expected == dtype.itemsize * BATCH * TOKENS * (9 + 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_a_rolling_cache_of_a_windowed_layer_holds_the_bytes_that_are_planned(name, dtype):
    config = dataclasses.replace(ARRANGEMENTS[name], window=WINDOW)  # type: ignore[call-arg]
    layout = getattr(build_attention(config, device="meta"), "cache_layout", config.layout)  # type: ignore[attr-defined]
    sizes = {"batch_size": BATCH, "dtype": dtype}
    rolling = filled(config, RollingCache.for_layout(layout, window=WINDOW, **sizes), dtype)
    full = filled(ARRANGEMENTS[name], PreallocatedCache.for_layout(layout, capacity=TOKENS, **sizes), dtype)
    model = ModelLayout("mixed", (LayerGroup(config, 3), LayerGroup(ARRANGEMENTS[name], 2)))
    assert rolling_cache_bytes(model, PhaseSizes(BATCH, TOKENS, dtype, dtype)) == 3 * rolling + 2 * full < 5 * full
    plan = planning.plan(model, context=TOKENS, batch=BATCH, dtype=dtype, phases=["decode"])
    assert plan.rolling_cache_bytes == plan["decode"].rolling_cache == 3 * rolling + 2 * full


def test_no_rolling_cache_holds_int8_numbers_or_latents():
    heads, latent = (dataclasses.replace(x, window=WINDOW) for x in (ARRANGEMENTS["multi-head"], LATENT))  # type: ignore[call-arg]
    for config, dtype in ((heads, torch.int8), (latent, torch.float32)):
        expected = planned(config, dtype=torch.float32, cache_dtype=dtype)
        assert rolling_cache_bytes(ModelLayout.of(config), PhaseSizes(BATCH, TOKENS, dtype, dtype)) == expected


def test_a_cache_of_keys_and_values_keeps_latents_twice():
    cache = PreallocatedCache.for_layout(LATENT.layout.absorbed, capacity=TOKENS, batch_size=BATCH, dtype=torch.float32)
    held = filled(LATENT, cache, torch.float32)
    assert held == planned(LATENT, dtype=torch.float32) + 4 * BATCH * TOKENS * LATENT.kv_lora_rank
