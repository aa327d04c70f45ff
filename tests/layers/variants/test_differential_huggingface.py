"""Differential heads against transformers' DiffLlama attention, its weights copied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DiffLlamaConfig
from transformers.cache_utils import DynamicCache
from transformers.models.diffllama.modeling_diffllama import DiffLlamaAttention, DiffLlamaRotaryEmbedding

from polyhead.layers.kv_cache import GrowingCache
from polyhead.layers.positions import Rotary
from polyhead.layers.variants import DifferentialAttention

BATCH, LENGTH, EMBED, HEADS, HEAD_DIM = 2, 13, 40, 12, 6
DOUBLE = torch.float64
VARIANTS: dict[str, dict[str, Any]] = {
    "multi-head": {"num_key_value_heads": HEADS},
    "grouped": {"num_key_value_heads": 4},
    "one pair of KV heads": {"num_key_value_heads": 2},
    "with bias": {"num_key_value_heads": 4, "attention_bias": True},
}


def theirs(layer_index: int, **options: Any) -> DiffLlamaAttention:
    config = DiffLlamaConfig(
        hidden_size=EMBED,
        num_attention_heads=HEADS,
        head_dim=HEAD_DIM,
        rms_norm_eps=1e-4,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        **options,
    )
    config._attn_implementation = "eager"
    module = DiffLlamaAttention(config, layer_idx=layer_index).to(DOUBLE).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4)
    return module


def ours(module: DiffLlamaAttention) -> DifferentialAttention:
    """The same layer. Their first half of the heads are first maps, and the second half of the value heads second
    halves of values; ours has the parts of a head side by side."""
    config = module.config
    layer = DifferentialAttention(
        config.hidden_size,
        config.num_attention_heads // 2,
        layer_index=module.layer_idx,
        num_kv_heads=config.num_key_value_heads // 2,
        head_dim=2 * config.head_dim,
        bias=config.attention_bias,
        norm_eps=config.rms_norm_eps,
        positions=Rotary(config.head_dim, base=config.rope_parameters["rope_theta"]),
        causal=True,
        dtype=DOUBLE,
    )
    weights = {name.replace("o_proj", "out_proj"): weight for name, weight in module.state_dict().items()}
    for name, weight in weights.items():
        if name.startswith(("q_proj", "k_proj", "v_proj")):
            weights[name] = weight.unflatten(0, (2, -1, config.head_dim)).transpose(0, 1).flatten(0, 2)
    layer.load_state_dict(weights)
    return layer


def run(
    module: DiffLlamaAttention, x: Tensor, start: int = 0, past: DynamicCache | None = None
) -> tuple[Tensor, Tensor]:
    keys = start + x.shape[1]
    visible = torch.arange(start, keys)[:, None] >= torch.arange(keys)
    mask = torch.where(visible, 0.0, -torch.inf).to(DOUBLE)[None, None]
    cos_sin = DiffLlamaRotaryEmbedding(module.config)(x, torch.arange(start, keys)[None])
    with torch.no_grad():
        output, weights = module(x, cos_sin, mask, past_key_values=past)
    return output, weights


def close(actual: Tensor, expected: Tensor) -> None:
    # Their angles, cosines, softmax and the exponent of lambda are float32.
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layer_index", [0, 5])
@pytest.mark.parametrize("variant", VARIANTS)
def test_output_and_weights_of_both_maps_are_theirs(variant: str, layer_index: int) -> None:
    module = theirs(layer_index, **VARIANTS[variant])
    layer, x = ours(module), torch.randn(BATCH, LENGTH, EMBED, dtype=DOUBLE)
    output, weights = run(module, x)
    result = layer(x, weights=True)
    close(result.output, output)
    close(result.weights, weights)


@pytest.mark.parametrize("variant", VARIANTS)
def test_generation_is_theirs(variant: str) -> None:
    module = theirs(3, **VARIANTS[variant])
    layer, x = ours(module), torch.randn(BATCH, LENGTH, EMBED, dtype=DOUBLE)
    past, cache, start = DynamicCache(config=module.config), GrowingCache(), 0
    for block in x.split([6, 1, 1, 5], 1):
        # Their cache keeps its tokens by the number of the layer.
        module.layer_idx = 0
        expected, _ = run(module, block, start, past)
        with torch.no_grad():
            close(layer(block, cache=cache).output, expected)
        start += block.shape[1]
