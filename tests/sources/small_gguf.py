"""A small model in llama.cpp's format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from tests.sources.small_tokenizers import byte_level


def write_gguf(path: Path) -> transformers.LlamaForCausalLM:
    """A small Llama in llama.cpp's format, where the rows of each rotary head's queries and keys are interleaved."""
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    tokenizer = byte_level()
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=24, intermediate_size=40, num_hidden_layers=1, num_attention_heads=3,
            num_key_value_heads=1, max_position_embeddings=37,
        )
    )  # fmt: skip
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(37)
    writer.add_embedding_length(24)
    writer.add_block_count(1)
    writer.add_feed_forward_length(40)
    writer.add_head_count(3)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(len(tokenizer))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokenizer.convert_ids_to_tokens(range(len(tokenizer))))
    writer.add_token_types([3] + [1] * (len(tokenizer) - 1))
    writer.add_token_merges(
        [" ".join(pair) for pair in json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]]
    )
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_unk_token_id):
        add(0)
    parts = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    for key, tensor in model.state_dict().items():
        part = key.removesuffix(".weight")
        name = "blk.0." + parts[part.removeprefix("model.layers.0.")] if ".layers." in part else parts[part]
        if part.endswith(("q_proj", "k_proj")):
            tensor = tensor.unflatten(0, (-1, 2, 4)).transpose(1, 2).reshape(tensor.shape)
        writer.add_tensor(f"{name}.weight", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model
