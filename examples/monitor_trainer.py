"""Watch every head in a `transformers.Trainer`, which saves the state of the monitor in its checkpoints.

Trains a small Llama on the reference texts that come with Python, in two parts: the second one resumes from a
checkpoint of the first, and the history of the heads continues with it. Prints loss, largest logit and entropy over the
steps.
"""

from __future__ import annotations

import tempfile
from pydoc_data.topics import topics

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments
from transformers.utils.logging import disable_progress_bar

from polyhead.training import HeadHistory, HeadMonitor

CONTEXT = 64


def train(folder: str, steps: int, stop: int, resume: bool) -> HeadHistory:
    """Train from the last checkpoint or from the start, and save one at the end."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=CONTEXT,
    )  # fmt: skip
    ids = torch.tensor(list("\n\n".join(topics.values()).encode()))
    data = [{"input_ids": x, "labels": x} for x in ids[: len(ids) // CONTEXT * CONTEXT].reshape(-1, CONTEXT)]
    arguments = TrainingArguments(
        folder, max_steps=stop, per_device_train_batch_size=8, gradient_accumulation_steps=2, learning_rate=5e-3,
        lr_scheduler_type="constant", save_steps=steps // 2, report_to=[], disable_tqdm=True, use_cpu=True,
        logging_strategy="no", dataloader_pin_memory=False,
    )  # fmt: skip
    monitor = HeadMonitor(LlamaForCausalLM(config))
    trainer = Trainer(monitor.model, arguments, train_dataset=data)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(monitor.trainer_callback())
    with monitor:
        trainer.train(resume_from_checkpoint=resume)
    return monitor.history


def main(steps: int = 80) -> HeadHistory:
    """Return the history of a run in two parts."""
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        train(folder, steps, steps // 2, resume=False)
        history = train(folder, steps, steps, resume=True)
    for index in (0, steps // 2 - 1, steps // 2, steps - 1):
        logit, entropy = history["max_logit"][index].max(), history["normalized_entropy"][index].min()
        step = f"step {history.steps[index]:3}: loss {history.losses[index]:.2f} nats per byte"
        print(f"{step}, largest logit {logit:.1f}, lowest normalised entropy {entropy:.2f}")
    print(f"The second part resumed after step {steps // 2 - 1}; the history has all {len(history)} steps.")
    return history


if __name__ == "__main__":
    main()
