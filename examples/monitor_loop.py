"""Watch every head in a training loop of your own, and resume it after an interruption.

Trains a small Llama on the reference texts that come with Python. `HeadMonitor` records every head, `RunDirectory`
writes each step to a folder. The run is interrupted after a checkpoint and continues from it. Prints the heads that
changed most between an early and the last step, beyond the noise of single batches.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import polyhead
from polyhead.inspection import Comparison
from polyhead.training import HeadHistory, HeadMonitor, RunDirectory, inspect_step, load_run

CONTEXT = 64


def train(folder: Path, steps: int, *, save_at: int | None = None) -> None:
    """Train to a number of steps, from the checkpoint in the folder if there is one."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=CONTEXT, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    monitor = HeadMonitor(model, callbacks=[RunDirectory(folder / "run")])
    parts, checkpoint = {"model": model, "optimizer": optimizer, "monitor": monitor}, folder / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    ids = torch.tensor(list("\n\n".join(topics.values()).encode()))
    with monitor:
        while monitor.steps < steps:
            start = torch.randint(len(ids) - CONTEXT, (16, 1), generator=torch.Generator().manual_seed(monitor.steps))
            batch = ids[start + torch.arange(CONTEXT)]
            loss = model(input_ids=batch, labels=batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss)
            if monitor.steps == save_at:
                torch.save({name: part.state_dict() for name, part in parts.items()}, checkpoint)


def main(steps: int = 120) -> tuple[HeadHistory, Comparison]:
    """Return the steps of an interrupted run, and the differences between an early and the last one."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train(folder, steps * 3 // 4, save_at=steps // 2)  # the last quarter of the work is lost
        train(folder, steps)
        history = load_run(folder / "run")
    found = polyhead.compare(inspect_step(history, steps // 6), inspect_step(history, steps - 1))
    print(f"{history}; loss {history.losses[0]:.2f} to {history.losses[-1]:.2f} nats per byte")
    changes = sorted(found.significant(), key=lambda change: -change.relative)
    for change in changes[:3]:
        site, head = change.head
        print(f"L{site.layer}H{head} {change.name}: {change.before:.3g} to {change.after:.3g}")
    print(f"{len(changes)} of {len(found.tested())} values changed by more than batches differ from each other.")
    return history, found


if __name__ == "__main__":
    main()
