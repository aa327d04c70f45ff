"""Train a sharded model on four processes, watch its heads, and compare with one process that has all of the data.

A small Llama is sharded with FSDP2, and every process reads its own batches. `HeadMonitor` has the values of all of
them, `QKClip` scales the sharded weights. Run it with

    torchrun --nproc-per-node 4 examples/sharded_training.py

or as a plain script, which starts four processes itself. It uses gloo and no GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from polyhead.training import HeadHistory, HeadMonitor, QKClip

THRESHOLD = 0.03  # of logits: low, since those of a new model are small


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)  # the same weights on every rank
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8
    )
    return LlamaForCausalLM(config).train()


def train(model: LlamaForCausalLM, ranks: list[int], steps: int, *, group: dist.ProcessGroup) -> HeadHistory:
    """Train on the batches of some ranks; the loss of a step is the mean of theirs."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with (
        HeadMonitor(model, process_group=group) as monitor,
        QKClip(model, optimizer, THRESHOLD, process_group=group) as clip,
    ):
        for step in range(steps):
            for rank in ranks:
                generator = torch.Generator().manual_seed(1000 * step + rank)
                tokens = torch.randint(64, (4, 32), generator=generator)
                loss = model(input_ids=tokens, labels=tokens).loss / len(ranks)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step()
    if dist.get_rank() == 0 and group is dist.group.WORLD:
        print(f"QK-clip scaled {len(clip.latest.heads())} of 16 heads in the last step.")
    return monitor.history


def main(steps: int = 10) -> dict[str, float]:
    """Return the largest relative difference between sharded training and one process, by column."""
    everyone, rank = list(range(dist.get_world_size())), dist.get_rank()
    model = llama()
    for layer in model.model.layers:
        fully_shard(layer)
    found = train(fully_shard(model), [rank], steps, group=dist.group.WORLD)
    own, _ = dist.new_subgroups(1)  # of this process alone
    exact = train(llama(), everyone, steps, group=own)
    results = {}
    for name in ("max_logit", "entropy", "output_norm", "gradient_norm"):
        results[name] = float(((found[name] - exact[name]).abs().amax(0) / exact[name].abs().amax(0)).max())
        if rank == 0:
            print(f"{name:>13}: relative difference to one process {results[name]:.1e}")
    return results


if __name__ == "__main__":
    if "RANK" not in os.environ:
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", __file__]
        sys.exit(subprocess.run(launch, env={"OMP_NUM_THREADS": "1", **os.environ}).returncode)
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
