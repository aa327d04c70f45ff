"""Attention maps of steps over a cache are those of one forward over the whole sequences."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from torch import nn

import polyhead
from polyhead import KVCache, MultiHeadAttention
from polyhead.layers.kv_cache import GrowingCache, PreallocatedCache
from polyhead.observation import AttentionMaps
from polyhead.observation.attention_maps import SiteMaps

TOKENS = 13


def maps_of(model: nn.Module, run: Callable[[], object]) -> SiteMaps:
    with torch.no_grad(), polyhead.observe(model, statistics=False, collect=[AttentionMaps(TOKENS, 5)]) as session:
        run()
    (states,) = session.observations.collected.values()
    return states["maps"]


def assert_same(actual: SiteMaps, expected: SiteMaps) -> None:
    for name, x in expected.state().items():
        torch.testing.assert_close(actual.state()[name], x, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("create", [GrowingCache, lambda: PreallocatedCache(capacity=17)], ids=["growing", "fixed"])
@pytest.mark.parametrize("lengths", [None, [7, 2, 5]], ids=["even", "uneven"])
def test_steps_over_a_cache_of_a_layer(create: Callable[[], KVCache], lengths: list[int] | None) -> None:
    torch.manual_seed(0)
    layer = MultiHeadAttention(24, 6, num_kv_heads=2, causal=True).double().eval()
    prompts, later = (torch.randn(3, count, 24, dtype=torch.float64) for count in (7, TOKENS - 7))
    sequences = [torch.cat([x[:count], y]) for x, y, count in zip(prompts, later, lengths or [7] * 3, strict=True)]

    def in_steps() -> None:
        cache = create()
        layer(prompts, cache=cache, lengths=lengths)
        for tokens in later.split([1, 3, 2], 1):
            layer(tokens, cache=cache)

    assert_same(maps_of(layer, in_steps), maps_of(layer, lambda: [layer(x[None]) for x in sequences]))


@pytest.mark.parametrize("create", [transformers.DynamicCache, transformers.StaticCache])
@pytest.mark.parametrize("padding", [0, 3])
def test_steps_over_a_cache_of_transformers(create: type, padding: int) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=24, intermediate_size=31, num_hidden_layers=1, num_attention_heads=6,
        num_key_value_heads=2,
    )  # fmt: skip
    model, ids = transformers.LlamaForCausalLM(config).eval(), torch.randint(61, (2, TOKENS))
    mask = torch.ones_like(ids)
    mask[1, :padding] = 0

    def in_steps() -> None:
        sizes = {"max_cache_len": 17} if create is transformers.StaticCache else {}
        cache = create(config=config, **sizes)
        for start, stop in ((0, 7), (7, 8), (8, TOKENS)):
            model(ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache)

    assert_same(maps_of(model, in_steps), maps_of(model, lambda: model(ids, attention_mask=mask)))
