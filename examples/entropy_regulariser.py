"""Train a transformers model with a loss on the entropy of its heads.

Trains the same small Llama twice on the reference texts that come with Python, from the same weights and batches: with
the language modelling loss alone, and with a bonus for attention entropy, which keeps heads from collapsing onto one
key. Prints the loss and the entropy of both.
"""

from __future__ import annotations

from pydoc_data.topics import topics

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import polyhead

CONTEXT = 64


def train(bonus: float, steps: int) -> tuple[float, float]:
    """Return the loss in nats per byte and the mean normalised entropy of all heads, over the last tenth of the run."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=CONTEXT, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ids = torch.tensor(list("\n\n".join(topics.values()).encode()))
    history = []
    with polyhead.observe(model, statistics="normalized_entropy", keep_statistics=True) as session:
        for _ in range(steps):
            batch = ids[torch.randint(len(ids) - CONTEXT, (16, 1)) + torch.arange(CONTEXT)]
            loss = model(input_ids=batch, labels=batch).loss
            entropy = session.statistics.mean("normalized_entropy").mean()  # over heads; differentiable
            optimizer.zero_grad()
            (loss - bonus * entropy).backward()
            optimizer.step()
            history.append((loss.item(), entropy.item()))
    last = torch.tensor(history[-max(1, steps // 10) :]).mean(0)
    return float(last[0]), float(last[1])


def main(steps: int = 120, bonus: float = 0.03) -> dict[float, tuple[float, float]]:
    """Return the final loss and entropy by bonus."""
    results = {}
    for factor in (0.0, bonus):
        results[factor] = train(factor, steps)
        loss, entropy = results[factor]
        print(f"loss - {factor} * entropy: loss {loss:.3f} nats per byte, normalised entropy {entropy:.3f}")
    (plain_loss, plain_entropy), (loss, entropy) = results[0.0], results[bonus]
    print("Normalised entropy is 1 for uniform attention and 0 for a single key.")
    print(f"With the bonus it is {entropy - plain_entropy:+.3f}, and the loss {loss - plain_loss:+.3f} nats per byte.")
    return results


if __name__ == "__main__":
    main()
