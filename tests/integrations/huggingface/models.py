"""Small random models of many families, built from their config classes, and their inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

TOKENS = 23  # primes: a swapped axis cannot pass
BATCH = 3
VOCABULARY = 61

_DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
_LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 5,
    "num_key_value_heads": 4, "n_routed_experts": 4, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 2, "first_k_dense_replace": 1, "head_dim": 4,
}  # fmt: skip
_ENCODER = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
_BART = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip
_T5 = {
    "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 2, "bos_token_id": 1,
}  # fmt: skip
_VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 20,
    "patch_size": 4, "num_channels": 3,
}  # fmt: skip
_AUDIO = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "conv_dim": (16, 16), "conv_kernel": (4, 3), "conv_stride": (3, 2), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 5, "num_conv_pos_embedding_groups": 4, "vocab_size": VOCABULARY,
    "feat_extract_norm": "layer", "apply_spec_augment": False,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A family, its kind ("decoder", "encoder", "seq2seq", "vision", "audio", ...), and how its config is told."""

    name: str
    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


def _decoder(name: str, **options: Any) -> Family:
    return Family(name, "decoder", {**_DECODER, **options})


def _encoder(name: str, **options: Any) -> Family:
    return Family(name, "encoder", {**_ENCODER, **options})


GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
OPT = {"vocab_size": VOCABULARY, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
       "word_embed_proj_dim": 32, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
       "eos_token_id": 2}  # fmt: skip
ALTERNATING = ["sliding_attention", "full_attention"]

DECODERS = (
    Family("gpt2", "decoder", GPT2),
    Family("opt", "decoder", OPT),
    _decoder("llama"),
    _decoder("mistral", sliding_window=7),
    _decoder("qwen2", use_sliding_window=True, sliding_window=7, layer_types=ALTERNATING),
    _decoder("qwen3"),
    _decoder("gemma2", sliding_window=7, attn_logit_softcapping=3.0, query_pre_attn_scalar=5, layer_types=ALTERNATING),
    _decoder("gemma3_text", sliding_window=7, layer_types=ALTERNATING, query_pre_attn_scalar=5),
    _decoder("gpt_oss", sliding_window=7, layer_types=ALTERNATING, **_EXPERTS),
    _decoder("phi3", sliding_window=7, original_max_position_embeddings=64),
    _decoder("cohere"),
    _decoder("cohere2", sliding_window=7, layer_types=ALTERNATING),
    _decoder("olmo2"),
    _decoder("mixtral", sliding_window=7, **_EXPERTS),
    _decoder("starcoder2", sliding_window=7),
    _decoder("deepseek_v3", **_LATENT),
    _decoder("gpt_neox"),
    _decoder("stablelm"),
    _decoder("granite", attention_multiplier=0.3),
    _decoder("llama4_text", attention_chunk_size=7, layer_types=["chunked_attention", "full_attention"],
             no_rope_layers=[1, 0], intermediate_size_mlp=48, interleave_moe_layer_step=1, **_EXPERTS),
)  # fmt: skip
ENCODERS = (
    _encoder("bert"),
    _encoder("roberta"),
    Family("distilbert", "encoder", {"vocab_size": VOCABULARY, "dim": 32, "hidden_dim": 48, "n_layers": 2,
                                     "n_heads": 4, "max_position_embeddings": 64}),
    _encoder("electra", embedding_size=32),
    _encoder("modernbert", local_attention=6, global_attn_every_n_layers=2, cls_token_id=1, sep_token_id=2,
             bos_token_id=1, eos_token_id=2),
)  # fmt: skip
SEQ2SEQ = (
    Family("bart", "seq2seq", _BART),
    Family("marian", "seq2seq", _BART),
    Family("t5", "seq2seq", _T5),
)
OTHERS = (
    Family("whisper", "spectrogram", {**_BART, "num_mel_bins": 10, "max_source_positions": 13,
                                      "max_target_positions": 32, "suppress_tokens": None,
                                      "begin_suppress_tokens": None}),
    Family("vit", "vision", _VISION),
    Family("dinov2", "vision", {**_VISION, "mlp_ratio": 2}),
    Family("siglip_vision_model", "vision", _VISION),
    Family("wav2vec2", "audio", _AUDIO),
    Family("hubert", "audio", _AUDIO),
    Family("clip", "clip", {
        "text_config": {**_ENCODER, "projection_dim": 16, "eos_token_id": 2, "bos_token_id": 1},
        "vision_config": {**_VISION, "projection_dim": 16}, "projection_dim": 16}),
)  # fmt: skip
# Newer than the oldest transformers that is supported.
GRANITE_SWA = _decoder("granite_swa", sliding_window=7, layer_types=ALTERNATING, attention_multiplier=0.3)
FAMILIES = (*DECODERS, *ENCODERS, *SEQ2SEQ, *OTHERS)


_built: dict[tuple[str, int, torch.dtype], tuple[nn.Module, Tensor]] = {}


def build(family: Family, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A model in eval mode with weights large enough that attention is far from uniform.

    A copy of the first one that was built so, with the random state that building leaves: copying takes less time.
    """
    key = repr(family), seed, dtype
    if key not in _built:
        model = _build(family, seed, dtype)
        _built[key] = model, torch.get_rng_state()
    model, state = _built[key]
    torch.set_rng_state(state)
    return copy.deepcopy(model)


def _build(family: Family, seed: int, dtype: torch.dtype) -> nn.Module:
    import transformers

    config = transformers.AutoConfig.for_model(family.name, **family.options)
    maker = {
        "decoder": transformers.AutoModelForCausalLM,
        "seq2seq": transformers.AutoModelForSeq2SeqLM,
        "spectrogram": transformers.AutoModelForSpeechSeq2Seq,
    }.get(family.kind, transformers.AutoModel)
    torch.manual_seed(seed)
    model = maker.from_config(config, attn_implementation="eager", experts_implementation="eager").to(dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 or "sinks" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=dtype) * 0.25)
    return model


def tokens(batch: int = BATCH, length: int = TOKENS, *, seed: int = 1) -> Tensor:
    """Ids without those of padding, start and end."""
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def inputs(family: Family, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Return the inputs of the model, without a mask."""
    generator = torch.Generator().manual_seed(1)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype)

    makers: dict[str, Callable[[], dict[str, Tensor]]] = {
        "seq2seq": lambda: {"input_ids": tokens(), "decoder_input_ids": tokens(length=11, seed=2)},
        "spectrogram": lambda: {"input_features": noise(BATCH, 10, 26), "decoder_input_ids": tokens(length=11)},
        "vision": lambda: {"pixel_values": noise(BATCH, 3, 20, 20)},
        "audio": lambda: {"input_values": noise(BATCH, 139)},
        "clip": lambda: {"input_ids": tokens(), "pixel_values": noise(BATCH, 3, 20, 20)},
    }
    return makers.get(family.kind, lambda: {"input_ids": tokens()})()
