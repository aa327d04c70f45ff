"""The faults that `python -m tests.faults` plants fit the source as it is."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

FAULTS = tomllib.loads((Path(__file__).parent / "faults" / "faults.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_can_be_planted(name: str, project_root: Path) -> None:
    fault = FAULTS[name]
    source = (project_root / "src" / "polyhead" / fault["file"]).read_text(encoding="utf-8")
    assert source.count(fault["old"]) == 1
    assert any((project_root / test.partition("::")[0]).exists() for test in fault["tests"])
