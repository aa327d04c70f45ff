"""Compare the heads of two checkpoints of one training run.

Trains a small byte-level Llama on the reference texts that come with Python, inspects it early and at the end, and
prints the loss of both checkpoints, how many statistics of heads changed by more than sampling error, and the changes
with the largest z-scores.
"""

from __future__ import annotations

from pydoc_data.topics import topics

import torch
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

import polyhead
from polyhead.inspection import Comparison

CONTEXT = 64


def main(early: int = 20, steps: int = 240, tokens: int = 8192) -> tuple[Comparison, list[float]]:
    """Return the comparison, and the training loss at both checkpoints."""
    torch.manual_seed(0)
    tokenizer = ByT5Tokenizer(extra_ids=0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=CONTEXT, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    *training, held_out = ("\n\n".join(list(topics.values())[start::5]) for start in range(5))
    ids = torch.tensor(tokenizer("".join(training)).input_ids)
    losses, inspections = [], []
    for step in range(1, steps + 1):
        batch = ids[torch.randint(len(ids) - CONTEXT, (16, 1)) + torch.arange(CONTEXT)]
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in (early, steps):
            found = polyhead.inspect(
                model.eval(), [held_out], tokenizer=tokenizer, context=CONTEXT, tokens=tokens, importance="gradient",
                chance=False,
            )  # fmt: skip
            model.train()
            losses.append(loss.item())
            inspections.append(found)
            print(f"step {step}: loss {losses[-1]:.2f} nats per byte")

    comparison = polyhead.compare(*inspections)
    changed = [change for change in comparison.significant() if change.error > 0]  # not those of the weights
    print(f"{len(changed)} of {len(comparison.tested())} statistics of {len(inspections[0].table)} heads changed:")
    for change in changed[:6]:
        site, head = change.head
        values = f"{change.before:.3f} -> {change.after:.3f}, standard error {change.error:.3f}"
        print(f"  {polyhead.HeadId(site.layer, head)} {change.name}: {values}")
    roles = [f"{role} ({polyhead.HeadId(site.layer, head)})" for (site, head), role in comparison.gained]
    print("roles gained:", ", ".join(roles) or "none")
    print(
        f"Both checkpoints read the same held-out text, which is compared context by context ({comparison.samples[0]})."
    )
    print("At most about 5% of the changes are expected to be chance; without training in between there would be none.")
    return comparison, losses


if __name__ == "__main__":
    main()
