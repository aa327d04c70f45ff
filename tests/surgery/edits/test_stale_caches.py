"""A KV cache from before an edit is refused; caches filled since are not."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

import polyhead.integrations.huggingface
from polyhead.errors import CacheError
from polyhead.layers import GrowingCache, KVCache, MultiHeadAttention, PreallocatedCache, RollingCache
from polyhead.surgery import GroupQueries, HeadEdit, MergeHeads, PruneHeads, ReorderHeads, apply, find_layers, undo
from tests.surgery.gated import FAMILIES, build, decoder

CACHES = {
    "growing": GrowingCache,
    "preallocated": lambda: PreallocatedCache(capacity=16),
    "rolling": lambda: RollingCache(window=11),
}
EDITS = {
    "prune": PruneHeads(0, (0, 1)),
    "merge": MergeHeads(0, (0, 1)),
    "group": GroupQueries(0, ((0, 1), (2, 3))),
    "reorder": ReorderHeads(0, (2, 3, 0, 1)),  # of the same shapes
}


@torch.no_grad()
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
@pytest.mark.parametrize("build_cache", CACHES.values(), ids=CACHES)
def test_our_layer_refuses_a_cache_that_it_filled_before_an_edit(build_cache: type[KVCache], edit: HeadEdit):
    layer, cache, x = MultiHeadAttention(28, 4, causal=True).eval(), build_cache(), torch.randn(3, 7, 28)
    whole = layer(x).output
    layer(x[:, :5], cache=cache)
    record = apply(layer, [edit])
    with pytest.raises(CacheError, match="filled before its heads were edited; start with an empty cache"):
        layer(x[:, 5:], cache=cache)
    assert cache.lengths == (5, 5, 5)
    cache.reset()
    for part in x[:, :5], x[:, 5:]:
        last = layer(part, cache=cache).output
    torch.testing.assert_close(last, layer(x).output[:, 5:])
    undo(layer, record)
    with pytest.raises(CacheError, match="before its heads were edited"):
        layer(x[:, :1], cache=cache)
    torch.testing.assert_close(layer(x, cache=build_cache()).output, whole)


@torch.no_grad()
def test_edits_of_queries_leave_the_caches_of_our_layer():
    layer, cache, x = (
        MultiHeadAttention(28, 4, num_kv_heads=2, causal=True).eval(),
        GrowingCache(),
        torch.randn(3, 7, 28),
    )
    layer(x[:, :5], cache=cache)
    apply(layer, [PruneHeads(0, (1,))])
    torch.testing.assert_close(layer(x[:, 5:], cache=cache).output, layer(x).output[:, 5:])


@torch.no_grad()
@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
def test_an_edited_model_of_transformers_refuses_a_cache_of_other_heads(kind):
    model = decoder()
    model.set_attn_implementation(polyhead.integrations.huggingface.register())
    ids, layers = torch.arange(7)[None], find_layers(model)
    assert layers[0].layout.num_kv_heads == 2

    def cache():
        return kind(config=model.config, **({"max_cache_len": 16} if kind is StaticCache else {}))

    before = cache()
    model(ids[:, :5], past_key_values=before)
    group = tuple(range(layers[0].layout.num_heads // 2))
    record = apply(model, [PruneHeads(layer.number, group) for layer in layers])
    rule = r"1 in 'model.layers.0.self_attn' since its heads were edited, got a cache with 2; start with a new cache"
    with pytest.raises(CacheError, match=rule):
        model(ids[:, 5:], past_key_values=before)
    after = cache()
    model(ids[:, :5], past_key_values=after)
    last = model(ids[:, 5:], past_key_values=after).logits
    torch.testing.assert_close(last, model(ids).logits[:, 5:])
    undo(model, record)
    with pytest.raises(CacheError, match=r"2 in .* edited, got a cache with 1"):
        model(ids[:, 5:], past_key_values=after)


@torch.no_grad()
def test_the_two_caches_of_a_decoder_with_cross_attention_are_told_apart():
    model = build(FAMILIES["bart"])
    stack = next(x.stack for x in find_layers(model) if "decoder" in x.stack and "self_attn" in x.stack)
    ids = torch.arange(1, 8)[None]
    states = model.get_encoder()(ids)

    def run(tokens: torch.Tensor, cache: EncoderDecoderCache) -> torch.Tensor:
        return model(encoder_outputs=states, decoder_input_ids=tokens, past_key_values=cache, use_cache=True).logits

    def cache() -> EncoderDecoderCache:
        return EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))

    before = cache()
    run(ids[:, :5], before)
    apply(model, [PruneHeads(layer.number, (0,), stack=stack) for layer in find_layers(model) if layer.stack == stack])
    with pytest.raises(CacheError, match="since its heads were edited"):
        run(ids[:, 5:], before)
    after = cache()
    run(ids[:, :5], after)
    torch.testing.assert_close(run(ids[:, 5:], after), run(ids, cache())[:, 5:])
