"""Count what a head layout costs before anything is trained, and compare the count with a built model.

Plans the attention of one model in three layouts: multi-head, grouped-query and multi-query. Builds each with
transformers, without memory for its weights, and counts the parameters of its attention modules. Prints both counts,
the KV cache of the context, the FLOPs to read it, and the context from which scores cost more than projections.
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import polyhead


def main(layers: int = 32, hidden: int = 4096, heads: int = 32, context: int = 8192) -> dict[int, tuple[int, int, int]]:
    """Return planned parameters, parameters of the built model and cache bytes, by number of KV heads."""
    results = {}
    print(f"{layers} layers, d_model {hidden}, {heads} heads, {context:,} tokens")
    for kv_heads in (heads, heads // 4, 1):
        config = LlamaConfig(
            hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers, num_attention_heads=heads,
            num_key_value_heads=kv_heads, max_position_embeddings=context, dtype="bfloat16",
        )  # fmt: skip
        planned = polyhead.plan(config.to_dict(), context=context, phases=("prefill", "decode"))
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        built = sum(x.numel() for name, x in model.named_parameters() if ".self_attn." in name)
        results[kv_heads] = planned.parameters.total, built, planned.cache_bytes
        print(
            f"KV heads {kv_heads:>2}: {planned.parameters.total:>13,} parameters planned, {built:>13,} built; cache "
            f"{planned.cache_bytes / 2**30:6.3f} GiB; prefill {planned['prefill'].flops.total / 1e12:.1f} TFLOPs; "
            f"crossover {planned.crossover:,} tokens"
        )
    print("The cache shrinks with the number of KV heads; of parameters and FLOPs, only those of K and V do. From")
    print("the crossover on, scores and values cost more than all projections. `polyhead choose` lists layouts for")
    print("a budget.")
    return results


if __name__ == "__main__":
    main()
