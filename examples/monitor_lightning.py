"""Watch every head in a Lightning `Trainer`, which saves the state of the monitor in its checkpoints.

Trains a small Llama on the reference texts that come with Python, with two micro-batches per step, and logs to
TensorBoard. Prints the head with the largest logit over the steps, and what the checkpoint contains of the monitor.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from pathlib import Path
from pydoc_data.topics import topics

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from polyhead.training import HeadHistory, HeadMonitor, TensorBoardLogger

CONTEXT = 64


class LanguageModel(LightningModule):
    """A small Llama with its loss and its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=CONTEXT, tie_word_embeddings=True,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=5e-3)


def main(steps: int = 80) -> tuple[HeadHistory, int]:
    """Return the history, and the number of steps of the monitor in the checkpoint."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    torch.manual_seed(0)
    ids = torch.tensor(list("\n\n".join(topics.values()).encode()))
    data = DataLoader(ids[: len(ids) // CONTEXT * CONTEXT].reshape(-1, CONTEXT), batch_size=8, shuffle=True)
    module = LanguageModel().train()
    with tempfile.TemporaryDirectory() as folder:
        monitor = HeadMonitor(module.model, callbacks=[TensorBoardLogger(Path(folder) / "events", every=10)])
        trainer = Trainer(
            max_steps=steps, accumulate_grad_batches=2, accelerator="cpu", callbacks=[monitor.lightning_callback()],
            default_root_dir=folder, logger=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        with monitor:
            trainer.fit(module, data)
        trainer.save_checkpoint(Path(folder) / "last.ckpt")
        saved = torch.load(Path(folder) / "last.ckpt", weights_only=False)["callbacks"]["HeadMonitor"]["steps"]
    history = monitor.history
    for index in range(0, steps, max(1, steps // 4)):
        logit, head = history["max_logit"][index].max(0)
        loss = history.losses[index]
        print(f"step {index:3}: loss {loss:.2f} nats per byte, largest logit {logit:.1f} in {history.heads[head]}")
    print(f"The checkpoint has the state of the monitor after {saved} steps, from which a resumed fit continues.")
    return history, saved


if __name__ == "__main__":
    main()
