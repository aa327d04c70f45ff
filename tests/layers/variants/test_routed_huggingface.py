"""Routed heads against transformers' JetMoe attention, its weights copied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import JetMoeConfig
from transformers.cache_utils import DynamicCache
from transformers.models.jetmoe.modeling_jetmoe import JetMoeAttention, JetMoeRotaryEmbedding

from polyhead.layers.kv_cache import GrowingCache
from polyhead.layers.positions import Rotary
from polyhead.layers.variants import RoutedHeads

BATCH, LENGTH, EMBED, HEADS = 2, 13, 28, 5
DOUBLE = torch.float64
VARIANTS: dict[str, dict[str, Any]] = {
    "one KV head": {"num_key_value_heads": 1, "num_experts_per_tok": 3},
    "as published": {"num_key_value_heads": 2, "num_experts_per_tok": 2},
    "every head": {"num_key_value_heads": 2, "num_experts_per_tok": 5},
}


def theirs(**options: Any) -> JetMoeAttention:
    config = JetMoeConfig(
        hidden_size=EMBED,
        kv_channels=6,
        num_local_experts=HEADS,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        **options,
    )
    config._attn_implementation = "eager"
    config.head_dim = config.kv_channels
    module = JetMoeAttention(config, layer_idx=0).to(DOUBLE).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4)
    return module


def ours(module: JetMoeAttention) -> RoutedHeads:
    config = module.config
    layer = RoutedHeads(
        EMBED,
        HEADS,
        shape="shared",
        top_k=config.num_experts_per_tok,
        normalise="chosen",
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.kv_channels,
        bias=False,
        output_bias=True,
        positions=Rotary(config.kv_channels, base=500.0),
        causal=True,
        dtype=DOUBLE,
    )
    key, value = module.kv_proj.weight.chunk(2)
    experts = module.experts
    layer.load_state_dict(
        {
            "router.gate.weight": experts.router.layer.weight,
            "query_weight": experts.input_linear.weight.mT,
            "k_proj.weight": key,
            "v_proj.weight": value,
            "output_weight": experts.output_linear.weight.mT,
            "output_bias": experts.bias,
        }
    )
    return layer


def run(module: JetMoeAttention, x: Tensor, start: int = 0, past: DynamicCache | None = None) -> tuple[Tensor, ...]:
    keys = start + x.shape[1]
    visible = torch.arange(start, keys)[:, None] >= torch.arange(keys)
    mask = torch.where(visible, 0.0, -torch.inf).to(DOUBLE)[None, None]
    cos_sin = JetMoeRotaryEmbedding(module.config)(x, torch.arange(start, keys)[None])
    with torch.no_grad():
        return module(x, mask, cos_sin, past_key_values=past)


def close(actual: Tensor, expected: Tensor) -> None:
    # Their angles, their gate's softmax and their weights are float32.
    torch.testing.assert_close(actual, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_output_weights_and_gate_are_theirs(variant: str) -> None:
    module = theirs(**VARIANTS[variant])
    layer, x = ours(module), torch.randn(BATCH, LENGTH, EMBED, dtype=DOUBLE)
    output, weights, logits = run(module, x)
    result = layer(x, weights=True)
    close(result.output, output)
    close(result.routing.logits.flatten(0, 1).float(), logits)
    # Theirs go by slot, [batch, slots, kv_heads]; ours by head under each KV head.
    slots, kv_heads = layer.router.top_k, layer.layout.num_kv_heads
    by_slot = weights.unflatten(1, (slots, kv_heads)).transpose(1, 2)
    index = result.routing.heads.transpose(1, 2)[:, None, ..., None].expand(by_slot.shape)
    close(result.weights.unflatten(1, (kv_heads, HEADS)).gather(2, index), by_slot)


@pytest.mark.parametrize("variant", VARIANTS)
def test_generation_is_theirs_with_a_cache_as_large(variant: str) -> None:
    module = theirs(**VARIANTS[variant])
    layer, x = ours(module), torch.randn(BATCH, LENGTH, EMBED, dtype=DOUBLE)
    past, cache, start = DynamicCache(config=module.config), GrowingCache(), 0
    for block in x.split([6, 1, 1, 5], 1):
        expected, *_ = run(module, block, start, past)
        with torch.no_grad():
            close(layer(block, cache=cache).output, expected)
        start += block.shape[1]
    held, view = past.layers[0], cache.view()
    close(view.key, held.keys)
    close(view.value, held.values)
