"""Split one sequence over four processes, and compare loss, gradients and statistics with a single process.

A small decoder reads packed documents; each process holds a quarter of the tokens. Run it with

    torchrun --nproc-per-node 4 examples/context_parallel.py

or as a plain script, which starts four processes itself. It uses gloo and no GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F

import polyhead
from polyhead.layers.positions import Rotary
from polyhead.layers.transformer import LanguageModel
from polyhead.parallel import context_bytes, context_parallel, shard_positions, shard_sequence


def main(tokens: int = 1024, method: str = "ring") -> dict[str, float]:
    """Return the differences to a single process, relative to the largest number, and the bytes sent in a layer."""
    ranks = dist.get_world_size()
    torch.manual_seed(0)  # the same model and the same text on every rank
    model = LanguageModel(vocab_size=50, embed_dim=64, num_heads=4, num_layers=2, num_kv_heads=2, positions=Rotary(16))
    text = torch.randint(50, (1, tokens + 1))
    documents = torch.arange(tokens) // 300
    mask = polyhead.Mask.documents(documents)
    layer = model.blocks[0].attention
    options = {"mask": mask, "statistics": ("entropy", "mean_distance")}

    loss = F.cross_entropy(model(text[:, :-1], mask)[0], text[0, 1:], reduction="sum")
    loss.backward()
    whole = {"loss": loss.detach(), "gradient": layer.q_proj.weight.grad.clone()}
    whole |= dict(layer(model.embedding(text[:, :-1]), **options).statistics.items())
    model.zero_grad()

    with context_parallel(model, method=method):
        shard, labels = (shard_sequence(x, dim=1) for x in (text[:, :-1], text[:, 1:]))
        positions = shard_positions(shard.shape[1])
        loss = F.cross_entropy(model(shard, mask, token_positions=positions)[0], labels[0], reduction="sum")
        loss.backward()
        rows = layer(model.embedding(shard), token_positions=positions, **options).statistics
    parts = {"loss": loss.detach(), "gradient": layer.q_proj.weight.grad}
    for x in parts.values():
        dist.all_reduce(x)  # as in data parallel training: the sum over the ranks
    parts |= dict(rows.items())

    results = {}
    for name, x in parts.items():
        exact = whole[name] if name in ("loss", "gradient") else shard_sequence(whole[name], dim=2)
        difference = ((x - exact).abs().max() / exact.abs().max()).detach()
        dist.all_reduce(difference, dist.ReduceOp.MAX)
        results[name] = float(difference)
    sizes = {"batch": 1, "kv_heads": 2, "tokens": tokens, "head_dim": 16, "dtype": torch.float32}
    sent = context_bytes(**sizes, ranks=ranks, method=method)
    results["bytes"] = sent.forward + sent.backward
    if dist.get_rank() == 0:
        for name in ("loss", "gradient", "entropy", "mean_distance"):
            print(f"{name:>13}: relative difference to one process {results[name]:.1e}")
        print(f"Each rank holds {tokens // ranks} of {tokens} tokens, and sends {sent.forward:,} bytes in the forward")
        print(
            f"of a layer and {sent.backward:,} in its backward. Sequences that fit on no single device are trained and"
        )
        print("measured exactly, up to rounding.")
    return results


if __name__ == "__main__":
    if "RANK" not in os.environ:
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", __file__]
        sys.exit(subprocess.run(launch, env={"OMP_NUM_THREADS": "1", **os.environ}).returncode)
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
