"""Properties of Hugging Face model families that are in their code, not in their configs: biases, norms, masks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True)
class Family:
    """Properties of a `model_type`; biases and `causal` are constants, or names of the config field to read."""

    causal: bool | str = True
    bias: bool | str = False
    output_bias: bool | str = False
    qk_norm: Literal["rms"] | None = None
    rotary: bool = True
    is_rotary_partial: bool = False  # a field of the config sets the rotated channels
    sinks: bool = False
    latent: bool = False
    mixed: bool = False  # only some layers have a window; layer_types lists which


_ENCODER = Family(causal="is_decoder", bias=True, output_bias=True, rotary=False)
_LLAMA = Family(bias="attention_bias", output_bias="attention_bias")
_QWEN3 = Family(bias="attention_bias", output_bias="attention_bias", qk_norm="rms")
_DEEPSEEK = Family(bias="attention_bias", output_bias="attention_bias", latent=True)
_GEMMA2 = Family(bias="attention_bias", output_bias="attention_bias", mixed=True)
_GPT = Family(bias=True, output_bias=True, rotary=False)

# Tests compare each entry with the modules that transformers builds, parameter by parameter.
FAMILIES: dict[str, Family] = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "electra"), _ENCODER),
    "distilbert": replace(_ENCODER, causal=False),  # its code has no decoder
    **dict.fromkeys(("gpt2", "gpt_bigcode", "bloom"), _GPT),
    **dict.fromkeys(("llama", "gemma", "granite", "smollm3", "olmo"), _LLAMA),
    **dict.fromkeys(("mistral", "mixtral", "phi3"), Family()),
    **dict.fromkeys(("qwen3", "qwen3_moe"), _QWEN3),
    "gemma2": _GEMMA2,
    "gemma3_text": replace(_GEMMA2, qk_norm="rms"),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), _DEEPSEEK),
    "opt": Family(bias="enable_bias", output_bias="enable_bias", rotary=False),
    "gpt_neox": Family(bias="attention_bias", output_bias="attention_bias", is_rotary_partial=True),
    "gptj": Family(is_rotary_partial=True),
    "falcon": Family(bias="bias", output_bias="bias"),
    "qwen2": Family(bias=True),
    "qwen2_moe": Family(bias="qkv_bias"),
    "starcoder2": Family(bias="use_bias", output_bias="use_bias"),
    "phi": Family(bias=True, output_bias=True, is_rotary_partial=True),
    "cohere": Family(bias="attention_bias", output_bias="attention_bias"),
    "glm": Family(bias="attention_bias", is_rotary_partial=True),
    "gpt_oss": replace(_GEMMA2, sinks=True),
}

# Known families whose code in transformers reads `sliding_window`.
WINDOWED = frozenset(
    ("gemma2", "gemma3_text", "gpt_oss", "mistral", "mixtral", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
) | {"smollm3", "starcoder2"}
# Families whose layers of full attention have no RoPE beside layers with a window.
WINDOWED_ROPE = frozenset(("afmoe", "cohere2", "cohere2_moe", "exaone4", "exaone_moe", "flint", "kolibri1"))
# Fields that list the layers with RoPE, by one value for each layer: 1 in SmolLM3 and Llama 4, the base of RoPE in
# Granite; 0 for layers without.
ROPE_LISTS = ("no_rope_layers", "layer_rope_theta")
