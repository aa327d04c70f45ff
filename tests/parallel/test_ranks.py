"""The processes that serve the tests of several ranks."""

import os
import signal

import pytest
import torch
import torch.distributed as dist

from tests.ranks import Failure, Ranks, RanksError


def summed(value: float) -> tuple[int, float]:
    total = torch.tensor([value * (dist.get_rank() + 1)])
    dist.all_reduce(total)
    return dist.get_world_size(), float(total)


def fails_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("this rank fails")


def dies_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_function_runs_on_every_rank(ranks: Ranks, world: int) -> None:
    assert ranks.run(summed, 2.0, world=world) == [(world, world * (world + 1.0))] * world


def test_a_failure_names_its_rank_and_the_next_function_runs(ranks: Ranks) -> None:
    with pytest.raises(RanksError, match="rank 1: ValueError: this rank fails"):
        ranks.run(fails_on, 1, world=2)
    assert ranks.run(summed, 1.0, world=2) == [(2, 3.0)] * 2


def test_a_killed_rank_is_a_failure_of_its_own(ranks: Ranks) -> None:
    first, second = ranks.outcomes(dies_on, 1, world=2, collective_seconds=5)
    assert isinstance(first, Failure)
    assert first.error != "TimeoutError"
    assert second == Failure("ProcessEnded", f"exit status {-signal.SIGKILL}")
    assert ranks.run(summed, 1.0, world=2) == [(2, 3.0)] * 2
