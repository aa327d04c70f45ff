"""Convert a multi-head model to grouped-query attention, and load the result in plain transformers.

Trains a small Llama with 8 KV heads on the reference texts that come with Python, then merges them into 2 in two ways:
mean pooling, as in GQA uptraining, and `polyhead.convert`, which refits in closed form on a calibration text. Prints
the loss of each without further training, and the measured size of the KV cache.
"""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import torch
from transformers import AutoModelForCausalLM, ByT5Tokenizer, DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

import polyhead
from polyhead.surgery import GroupQueries, apply

CONTEXT = 64


def evaluate(model: LlamaForCausalLM, ids: torch.Tensor) -> tuple[int, float, int]:
    """Return the KV heads of a layer, the loss in nats per byte, and the bytes of the KV cache."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids, past_key_values=cache, use_cache=True).loss
    size = sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))
    return cache.layers[0].keys.shape[1], float(loss), size


def main(steps: int = 240, kv_heads: int = 2, tokens: int = 16_384) -> dict[str, tuple[int, float, int]]:
    """Return KV heads, loss and cache bytes of each model."""
    torch.manual_seed(0)
    tokenizer = ByT5Tokenizer(extra_ids=0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8,
        max_position_embeddings=CONTEXT, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    *training, held_out = ("\n\n".join(list(topics.values())[start::5]) for start in range(5))
    ids = torch.tensor(tokenizer("".join(training)).input_ids)
    for _ in range(steps):
        batch = ids[torch.randint(len(ids) - CONTEXT, (16, 1)) + torch.arange(CONTEXT)]
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
    model.eval()

    test = torch.tensor(tokenizer(held_out).input_ids)[: 128 * CONTEXT].view(128, CONTEXT)
    results = {"multi-head": evaluate(model, test)}
    pooled = copy.deepcopy(model)
    size = 8 // kv_heads
    groups = tuple(tuple(range(start, start + size)) for start in range(0, 8, size))
    apply(pooled, [GroupQueries(layer, groups) for layer in range(2)])
    results["mean-pooled"] = evaluate(pooled, test)

    converted = polyhead.convert(model, kv_heads, text=training, tokenizer=tokenizer, context=CONTEXT, tokens=tokens)
    with tempfile.TemporaryDirectory() as folder:
        converted.save(Path(folder, "grouped"))
        results["converted"] = evaluate(AutoModelForCausalLM.from_pretrained(Path(folder, "grouped")), test)
    for name, (heads, loss, size) in results.items():
        print(f"{name:>12}: {heads} KV heads, loss {loss:.3f} nats per byte, cache {size / 1024:,.0f} KiB")
    print("The converted model is loaded by transformers alone. Its cache shrinks with the number of KV heads; the")
    print("higher loss is the price before any further training.")
    return results


if __name__ == "__main__":
    disable_progress_bar()
    main()
