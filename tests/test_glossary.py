"""docs/glossary.md defines every statistic, column, relation and role that users meet in tables and files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from polyhead.analysis.roles_rules import RULES
from polyhead.inspection.vocabulary import COLUMNS, RELATIONS, ROLES
from polyhead.ops.common.statistics import NAMES


@pytest.fixture(scope="module")
def defined(project_root: Path) -> list[str]:
    """The identifiers in the first column of the glossary's tables."""
    page = (project_root / "docs" / "glossary.md").read_text(encoding="utf-8")
    first_cells = re.findall(r"^\| (`[^|]*`) \|", page, flags=re.MULTILINE)
    return [name for cell in first_cells for name in re.findall(r"`([^`]+)`", cell)]


@pytest.mark.parametrize("names", [NAMES, COLUMNS, RELATIONS, ROLES, RULES])
def test_every_name_is_defined(defined, names):
    assert [name for name in names if name not in defined] == []


def test_no_name_is_defined_twice(defined):
    assert sorted(set(defined)) == sorted(defined)


def test_thresholds_of_roles_are_those_of_the_rules(project_root):
    page = (project_root / "docs" / "glossary.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z-]+)` \|[^|]*\| (?:[^|\\]|\\\|)*\| ([0-9.]+) \|", page, flags=re.MULTILINE)
    expected = {name: rule.threshold for name, rule in RULES.items()}
    assert {name: float(threshold) for name, threshold in rows} == expected
