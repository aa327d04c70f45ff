"""Calls in a group of one rank have the results of those without a group, and are timed against them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from benchmarks import one_rank
from benchmarks.measuring.runner import rows_of


@pytest.fixture(autouse=True)
def _few_timings(monkeypatch):
    monkeypatch.setattr(one_rank, "QUICK", {"alternations": 2, "seconds": 0.1, "fewest": 2})


def check(part: str, gpu: torch.device | None = None) -> None:
    (step,) = one_rank.plan([part], quick=True, gpu=gpu)
    found = list(rows_of(step.cases(), step.run))
    ways = [one_rank.TENSOR, one_rank.WHOLE] if part == "tensor" else list(one_rank.METHODS)
    for row in found:
        assert row.failed == ""
        assert set(row.timings.samples_ms) == {one_rank.ALONE, *ways}
        assert [(x.subject, x.against) for x in row.comparisons] == [(way, one_rank.ALONE) for way in ways]
    assert len(found) == (1 if part == "tensor" else 2)
    assert not dist.is_initialized()


@pytest.mark.parametrize("part", one_rank.PARTS)
def test_every_way_is_timed_against_the_call_without_a_group(part):
    check(part)


@pytest.mark.gpu
@pytest.mark.parametrize("part", one_rank.PARTS)
def test_every_way_is_timed_on_a_gpu(part):
    check(part, torch.device("cuda"))


@pytest.mark.parametrize("name", [one_rank.TENSOR, one_rank.WHOLE, *one_rank.METHODS])
def test_another_result_is_not_timed(name, monkeypatch):
    part = "context" if name in one_rank.METHODS else "tensor"
    real = one_rank._check_tensors

    def check_tensors(contender, expected, found):
        real(contender, [expected[0] + 0.1, *expected[1:]] if contender == name else expected, found)

    monkeypatch.setattr(one_rank, "_check_tensors", check_tensors)
    (step,) = one_rank.plan([part], quick=True)
    case = next(iter(step.cases()))
    assert name not in case.calls
    assert f"{name} differs by" in case.failed
