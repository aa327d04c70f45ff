"""Latent heads against transformers' DeepSeek-V3 attention, its weights copied."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config
from transformers.cache_utils import DynamicCache
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from polyhead.layers.kv_cache.latent import LatentCache
from polyhead.layers.latent.layer import LatentAttention
from polyhead.layers.positions import Rotary, YarnScaling

BATCH, LENGTH, EMBED, HEADS = 2, 13, 40, 3
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.8,
    "mscale_all_dim": 1.1,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "as published": {},
    "halves instead of pairs": {"rope_interleave": False},
    "queries as they are": {"q_lora_rank": None},
    "with bias": {"attention_bias": True},
    "yarn": {"rope_parameters": YARN},
}
DOUBLE = torch.float64


def theirs(**options: Any) -> DeepseekV3Attention:
    sizes: dict[str, Any] = {
        "hidden_size": EMBED,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "q_lora_rank": 11,
        "kv_lora_rank": 17,
        "qk_nope_head_dim": 7,
        "qk_rope_head_dim": 6,
        "v_head_dim": 5,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    }
    config = DeepseekV3Config(**{**sizes, **options})
    config._attn_implementation = "eager"
    module = DeepseekV3Attention(config, layer_idx=0).to(DOUBLE).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4)
    return module


def ours(module: DeepseekV3Attention, **options: Any) -> LatentAttention:
    """The same layer: sizes and positions from the config, weights copied by name."""
    config = module.config
    rope, scaling, scale = config.rope_parameters, None, None
    if rope["rope_type"] == "yarn":
        scaling = YarnScaling(
            rope["factor"], rope["original_max_position_embeddings"],
            mscale=rope["mscale"], mscale_all_dim=rope["mscale_all_dim"],
        )  # fmt: skip
        stretch = 0.1 * rope["mscale_all_dim"] * math.log(rope["factor"]) + 1
        scale = stretch**2 / math.sqrt(config.qk_nope_head_dim + config.qk_rope_head_dim)
    layer = LatentAttention(
        config.hidden_size,
        config.num_attention_heads,
        kv_lora_rank=config.kv_lora_rank,
        q_lora_rank=config.q_lora_rank,
        qk_nope_head_dim=config.qk_nope_head_dim,
        value_head_dim=config.v_head_dim,
        bias=config.attention_bias,
        positions=Rotary(
            config.qk_rope_head_dim, base=rope["rope_theta"], interleaved=config.rope_interleave, scaling=scaling
        ),
        scale=scale,
        causal=True,
        dtype=DOUBLE,
        **options,
    )
    names = {
        "q_a_layernorm": "q_a_norm",
        "kv_a_proj_with_mqa": "kv_a_proj",
        "kv_a_layernorm": "kv_a_norm",
        "o_proj": "out_proj",
    }
    weights = {}
    for name, weight in module.state_dict().items():
        first, _, rest = name.partition(".")
        weights[f"{names.get(first, first)}.{rest}"] = weight
    layer.load_state_dict(weights)
    return layer


def cos_sin(module: DeepseekV3Attention, x: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
    # In float32 inside, as theirs is; an embedding of their own class, built for the rotary channels alone.
    embedding = DeepseekV3RotaryEmbedding(module.config)
    cos, sin = embedding(x, torch.arange(start, start + x.shape[1])[None])
    return cos, sin


def run(
    module: DeepseekV3Attention, x: Tensor, start: int = 0, past: DynamicCache | None = None
) -> tuple[Tensor, Tensor]:
    keys = start + x.shape[1]
    visible = torch.arange(start, keys)[:, None] >= torch.arange(keys)
    mask = torch.where(visible, 0.0, -torch.inf).to(DOUBLE)[None, None]
    with torch.no_grad():
        output, weights = module(x, cos_sin(module, x, start), mask, past_key_values=past)
    return output, weights


def close(actual: Tensor, expected: Tensor) -> None:
    # Their angles and cosines are float32.
    torch.testing.assert_close(actual, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("form", ["auto", "expanded", "absorbed"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_output_and_weights_are_theirs(variant: str, form: str) -> None:
    module = theirs(**VARIANTS[variant])
    layer, x = ours(module, form=form), torch.randn(BATCH, LENGTH, EMBED, dtype=DOUBLE)
    output, weights = run(module, x)
    result = layer(x, weights=True)
    close(result.output, output)
    close(result.weights, weights)


@pytest.mark.parametrize("variant", VARIANTS)
def test_generation_is_theirs_with_a_cache_as_large(variant: str) -> None:
    module = theirs(**VARIANTS[variant])
    layer, x = ours(module), torch.randn(BATCH, LENGTH, EMBED, dtype=DOUBLE)
    past, cache, start = (
        DynamicCache(config=module.config),
        LatentCache.for_layout(layer.layout.absorbed, batch_size=BATCH, dtype=DOUBLE),
        0,
    )
    for block in x.split([6, 1, 1, 5], 1):
        expected, _ = run(module, block, start, past)
        with torch.no_grad():
            close(layer(block, cache=cache).output, expected)
        start += block.shape[1]
    held = past.layers[0]
    close(cache.view().key, torch.cat((held.keys, _as_ours(held.values, module)), -1))


def _as_ours(rotated: Tensor, module: DeepseekV3Attention) -> Tensor:
    """Their interleaved rotation puts the first of each pair before the second ones; ours leaves pairs together."""
    if not module.config.rope_interleave:
        return rotated
    return torch.stack(rotated.chunk(2, -1), -1).flatten(-2)
