"""Comparison of a run that several processes read with that of one."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from polyhead.inspection import Inspection, Settings
from polyhead.inspection.run_files import OBSERVATIONS
from polyhead.observation import read_facts

# Sums of at most 32 batches in float64, each rounded once per batch, relative to the largest entry of a tensor.
BOUND = 32 * torch.finfo(torch.float64).eps
COUNTS = ("count", "rows", "documents", "available", "hits", "hashes", "largest")


def settings_of(model: Path, text: Path) -> Settings:
    return Settings(
        str(model), str(text), context=48, batch_tokens=100, tokens=700, importance="none", chance=False, device="cpu"
    )


def assert_same_observations(folder: Path, whole: Path) -> None:
    """Counts, maxima and samples are equal; sums differ by their order alone."""
    found, expected = (load_file(x / OBSERVATIONS) for x in (folder, whole))
    assert found.keys() == expected.keys()
    exact = 0
    for name, one in expected.items():
        other = found[name]
        assert (other.shape, other.dtype) == (one.shape, one.dtype), name
        if name.rpartition(".")[2] in COUNTS or not one.is_floating_point() or one.dtype is torch.float32:
            torch.testing.assert_close(other, one, rtol=0, atol=0, equal_nan=True, msg=name)
            exact += 1
        elif bool(one.isfinite().any()):
            largest = float(one[one.isfinite()].abs().max())
            torch.testing.assert_close(other, one, rtol=0, atol=BOUND * largest, equal_nan=True, msg=name)
    assert exact >= 10
    facts = [read_facts(x / OBSERVATIONS) for x in (folder, whole)]
    assert facts[0] == facts[1]


def assert_same_inspection(found: Inspection, whole: Inspection) -> None:
    assert found.settings == whole.settings
    assert {**found.facts, "seconds": 0} == {**whole.facts, "seconds": 0}
    assert [str(x) for x in found.findings] == [str(x) for x in whole.findings]
    assert [head.roles for head in found.roles] == [head.roles for head in whole.roles]
    assert torch.equal(found.table["tokens"], whole.table["tokens"])
    for name, column in whole.table.columns.items():
        # The total correlation is a log-determinant: of the inverse of a covariance, whose condition it multiplies by.
        bound = 1e-6 if name == "total_correlation" else 1e-11
        torch.testing.assert_close(found.table[name], column, rtol=bound, atol=bound, equal_nan=True, msg=name)
