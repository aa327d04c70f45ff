"""Forward + backward of attention over cuDNN's: every kernel enters, and one that cannot run is recorded."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend
from typer.testing import CliRunner

from benchmarks import recorded
from benchmarks.app import app
from benchmarks.measuring.cases import Run
from benchmarks.measuring.runner import rows_of

RUN = Run(torch.device("cpu"), torch.float32, 3, 0, 0.1, 3, repetitions=0)


@pytest.mark.parametrize(("causal", "text"), [(True, "2, 4, 2, 19, 8/16, causal"), (False, "2, 4, 2, 19, 8/16")])
def test_every_kernel_is_compared_with_cudnn(monkeypatch, causal, text):
    monkeypatch.setitem(recorded.KERNELS, recorded.CUDNN, SDPBackend.MATH)
    (row,) = rows_of(recorded.recorded(RUN, (2, 4, 2, 19, 8, 16), causal), RUN)
    assert (row.bench, row.shape) == ("forward + backward", text)
    others = {c.subject: c.against for c in row.comparisons}
    assert {recorded.AUTO, recorded.STATISTICS} <= set(others)
    assert set(others.values()) == {recorded.CUDNN}
    assert recorded.EFFICIENT in row.timings.absent  # a kernel of CUDA alone
    assert recorded.FUSED in row.failed
    assert row.notes["auto"]


def test_all_shapes_are_planned_with_a_mask_and_without():
    assert len(recorded.plan(quick=False, seed=0, gpu=torch.device("cuda"))) == 22
    assert len(recorded.plan(quick=True, seed=0, gpu=torch.device("cuda"))) == 6


def test_the_command_says_what_it_needs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(app, ["recorded"])
    assert done.exit_code == 0
    assert "no CUDA GPU was found" in done.output
