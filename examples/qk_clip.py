"""Train with a learning rate that is too high, with and without QK-clip, and watch the heads.

Trains the same small Llama on the reference texts that come with Python, from the same weights and batches: without a
bound on the attention logits, and with `polyhead.training.QKClip`, which scales W_Q and W_K of a head down as soon as
its largest logit exceeds the threshold. `HeadMonitor` records every head in every step. Prints loss, largest logit and
entropy of both.
"""

from __future__ import annotations

from contextlib import nullcontext
from pydoc_data.topics import topics

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from polyhead.training import HeadHistory, HeadMonitor, QKClip

CONTEXT = 64


def train(threshold: float | None, steps: int, seed: int = 0, learning_rate: float = 0.02) -> HeadHistory:
    """Return the loss and the statistics of every head in every step."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=CONTEXT, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    ids = torch.tensor(list("\n\n".join(topics.values()).encode()))
    clip = nullcontext() if threshold is None else QKClip(model, optimizer, threshold)
    with clip, HeadMonitor(model) as monitor:
        for _ in range(steps):
            batch = ids[torch.randint(len(ids) - CONTEXT, (16, 1)) + torch.arange(CONTEXT)]
            loss = model(input_ids=batch, labels=batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss)
    return monitor.history


def main(steps: int = 150, threshold: float = 20.0, seeds: int = 2) -> dict[float | None, tuple[float, float, float]]:
    """Return loss, largest logit and mean normalised entropy over the last tenth of the steps, by threshold."""
    results: dict[float | None, tuple[float, float, float]] = {}
    for each in (None, threshold):
        last = slice(-max(1, steps // 10), None)
        runs = [train(each, steps, seed) for seed in range(seeds)]
        loss = torch.tensor([run.losses[last] for run in runs]).mean()
        logit = torch.stack([run["max_logit"][last].amax() for run in runs]).max()
        entropy = torch.stack([run["normalized_entropy"][last].mean() for run in runs]).mean()
        results[each] = (float(loss), float(logit), float(entropy))
        name = "no bound" if each is None else f"QK-clip at {each:g}"
        print(f"{name:>13}: loss {loss:.3f} nats per byte, largest logit {logit:.0f}, normalised entropy {entropy:.3f}")
    print("Heads with logits of hundreds attend to one key and cannot find a better one: their entropy is almost 0.")
    return results


if __name__ == "__main__":
    main()
