"""Head layouts of well-known models, from their published configs, for comparison."""

from __future__ import annotations

from functools import cache
from typing import Any

from polyhead.costs.layouts.hf_config import read_hf_config
from polyhead.costs.layouts.model_layout import ModelLayout


def _llama(width: int, heads: int, kv_heads: int, layers: int, context: int, **other: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": layers,
        "max_position_embeddings": context,
        "attention_bias": False,
        **other,
    }


def _encoder(width: int, heads: int, layers: int) -> dict[str, Any]:
    return {**_llama(width, heads, heads, layers, 512), "model_type": "bert"}


def _gpt(width: int, heads: int, layers: int, context: int) -> dict[str, Any]:
    return {"model_type": "gpt2", "n_embd": width, "n_head": heads, "n_layer": layers, "n_positions": context}


def _deepseek(kind: str, width: int, heads: int, layers: int, q_rank: int | None, context: int) -> dict[str, Any]:
    latent = {"kv_lora_rank": 512, "q_lora_rank": q_rank, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    return {**_llama(width, heads, heads, layers, context), "model_type": kind, **latent, "v_head_dim": 128}


def _alternating(
    kind: str, width: int, heads: int, layers: int, context: int, head_dim: int, window: int, **other: Any
) -> dict[str, Any]:
    """Return the config of a model with 8 KV heads in which every second layer, from the first on, has a window."""
    types = [("sliding_attention", "full_attention")[index % 2] for index in range(layers)]
    options = {"model_type": kind, "head_dim": head_dim, "sliding_window": window, "layer_types": types}
    return _llama(width, heads, 8, layers, context, **options, **other)


# Configs, and parameters of the whole model, tied embeddings counted once, as transformers builds it from them.
_MODELS: dict[str, tuple[dict[str, Any], int | None]] = {
    "transformer-base": ({**_encoder(512, 8, 6), "max_position_embeddings": None}, None),  # the encoder
    "bert-base": (_encoder(768, 12, 12), 109_482_240),
    "bert-large": (_encoder(1024, 16, 24), 335_141_888),
    "gpt2": (_gpt(768, 12, 12, 1024), 124_439_808),
    "gpt3-175b": (_gpt(12288, 96, 96, 2048), 174_604_259_328),
    "llama2-7b": (_llama(4096, 32, 32, 32, 4096), 6_738_415_616),
    "llama2-70b": (_llama(8192, 64, 8, 80, 4096), 68_976_648_192),
    "llama3.1-8b": (_llama(4096, 32, 8, 32, 131072), 8_030_261_248),
    "llama3.1-70b": (_llama(8192, 64, 8, 80, 131072), 70_553_706_496),
    "llama3.1-405b": (_llama(16384, 128, 8, 126, 131072), 405_853_388_800),
    "mistral-7b": (_llama(4096, 32, 8, 32, 32768, model_type="mistral", sliding_window=4096), 7_241_732_096),
    "qwen2.5-7b": (_llama(3584, 28, 4, 28, 131072, model_type="qwen2"), 7_615_616_512),
    "qwen3-0.6b": (_llama(1024, 16, 8, 28, 40960, model_type="qwen3", head_dim=128), 596_049_920),
    "qwen3-8b": (_llama(4096, 32, 8, 36, 40960, model_type="qwen3", head_dim=128), 8_190_735_360),
    "qwen3-32b": (_llama(5120, 64, 8, 64, 40960, model_type="qwen3", head_dim=128), 32_762_123_264),
    "gemma2-9b": (_alternating("gemma2", 3584, 16, 42, 8192, 256, 4096), 9_241_705_984),
    "gpt-oss-20b": (_alternating("gpt_oss", 2880, 64, 24, 131072, 64, 128, attention_bias=True), 20_914_757_184),
    "deepseek-v2-lite": (_deepseek("deepseek_v2", 2048, 16, 27, None, 163840), 15_706_484_224),
    "deepseek-v2": (_deepseek("deepseek_v2", 5120, 128, 60, 1536, 163840), 235_741_434_880),
    "deepseek-v3": (_deepseek("deepseek_v3", 7168, 128, 61, 1536, 163840), 671_026_404_352),
}
KNOWN = tuple(_MODELS)


@cache
def known_model(name: str) -> ModelLayout:
    """Return the layout of a model in `KNOWN`.

    >>> known_model("deepseek-v3").config.layout.cache_width
    576
    """
    config, parameters = _MODELS[name]
    return read_hf_config(config, name=name, complete=True).with_parameters(parameters)
