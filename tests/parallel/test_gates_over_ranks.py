"""HeadGates on several ranks: replicas keep the same gates, by the mean of the ranks' gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from polyhead.training import HeadGates
from tests.parallel.test_sharded_training import STEPS, batch, llama
from tests.ranks import Ranks


def gradients(gates: HeadGates) -> Tensor:
    parts = [x.grad for x in gates.parameters() if x.grad is not None]
    return torch.cat(parts)


def backward(model: Any, gates: HeadGates, step: int) -> None:
    rank = dist.get_rank()
    torch.manual_seed(1 + 10 * rank + step)
    (model(**batch(rank, step)).loss + 0.05 * gates.penalty()).backward()


def averaged_rank(checkpointed: bool) -> tuple[Tensor, Tensor]:
    """Return the gradients of two micro-batches, averaged by the gates and by hand."""
    alone, model = dist.new_subgroups(1)[0], llama()
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    single = copy.deepcopy(model)
    gates, own = HeadGates(model), HeadGates(single, process_group=alone)
    with gates, own:
        replica = DistributedDataParallel(model)
        for step in range(2):
            backward(replica, gates, step)
            backward(single, own, step)
    expected = gradients(own)
    dist.all_reduce(expected)
    return gradients(gates), expected / dist.get_world_size()


@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients_of_gates_are_the_mean_over_ranks(ranks: Ranks, checkpointed: bool) -> None:
    for found, expected in ranks.run(averaged_rank, checkpointed, world=2):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def trained_rank() -> tuple[Tensor, Tensor]:
    """Return the gates, and a weight of the model, after some steps on data of each rank's own."""
    model = llama()
    gates, replica = HeadGates(model), DistributedDataParallel(model)
    optimizer = torch.optim.Adam([{"params": model.parameters()}, {"params": gates.parameters(), "lr": 0.1}])
    with gates:
        for step in range(STEPS):
            backward(replica, gates, step)
            optimizer.step()
            optimizer.zero_grad()
    return torch.cat([x.detach() for x in gates.parameters()]), model.lm_head.weight.detach()


def test_replicas_keep_the_same_gates(ranks: Ranks) -> None:
    (gates, weight), *others = ranks.run(trained_rank, world=2)
    assert gates.unique().numel() > 2
    for other, other_weight in others:
        assert torch.equal(other, gates)
        assert torch.equal(other_weight, weight)
