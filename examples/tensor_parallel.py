"""Distribute the heads of a small language model over four processes, and compare with the model in one.

Six heads do not divide four ranks, and two KV heads are fewer: zero heads fill the last rank, and every rank holds the
KV heads. Prints what each rank stores, the differences of logits, statistics and a step of training, and the tensors of
a checkpoint. `torchrun --nproc-per-node 4 examples/tensor_parallel.py`; without torchrun it starts it.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import polyhead
from polyhead.layers.positions import Rotary
from polyhead.layers.transformer import LanguageModel
from polyhead.parallel import head_parallel_plan


def main(context: int = 64) -> dict[str, float]:
    """Return the largest differences to the model in one process."""
    torch.manual_seed(0)
    whole = LanguageModel(256, 96, 6, 2, num_kv_heads=2, positions=lambda: Rotary(16)).double()
    model = copy.deepcopy(whole)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, head_parallel_plan(model))
    attention: Any = model.blocks[0].attention
    stored = f"heads {list(attention.parallelism.heads)}, KV heads in a cache: {attention.cache_layout.num_kv_heads}"
    by_rank: list[str] = [""] * mesh.size()
    dist.all_gather_object(by_rank, stored)

    tokens = torch.randint(256, (2, context))
    entropies, logits, norms = [], [], []
    for each in (whole, model):
        with polyhead.observe(each, statistics="entropy") as session:
            logits.append(each(tokens))
        entropies.append(session.profile["entropy"])
        loss = torch.nn.functional.cross_entropy(logits[-1][:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.optim.SGD(each.parameters(), lr=0.1).step()
        norms.append(each(tokens).detach())
    saved = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    expected = whole.state_dict()
    assert saved.keys() == expected.keys()
    differences = {
        "logits": float((logits[0] - logits[1]).detach().abs().max()),
        "entropy of every head": float((entropies[0] - entropies[1]).abs().max()),
        "logits after a step": float((norms[0] - norms[1]).abs().max()),
        "checkpoint": max(float((saved[name] - expected[name]).abs().max()) for name in expected),
    }
    if dist.get_rank() == 0:
        print("\n".join(f"rank {rank}: {text}" for rank, text in enumerate(by_rank)))
        print("\n".join(f"{name:>21}: differs by {value:.1e}" for name, value in differences.items()))
        print("Over four ranks the model is that in one process up to the rounding of sums, and its checkpoint has the")
        print("same tensors: zero heads are not saved, and KV heads are saved once.")
    return differences


if __name__ == "__main__":
    if "RANK" not in os.environ:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", __file__]
        sys.exit(subprocess.run([sys.executable, *launch]).returncode)
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
