"""Which tests are collected and in which group they are, and what is said of those that did not run."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from _pytest.doctest import DoctestModule

from tests.ops.interpreter.interpreted import in_the_interpreter

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def rules() -> ModuleType:
    """The root conftest, apart from the one that collects this run."""
    spec = importlib.util.spec_from_file_location("rules_of_collection", ROOT / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_something() -> None: ...


def compiled(function: Any) -> Any:
    return torch.compile(function, backend="eager")


def interprets() -> None:
    in_the_interpreter(check_something)


def compiles_in_a_helper() -> None:
    def inner() -> Any:
        return compiled(check_something)

    inner()


def only_matches() -> None:
    re.compile("torch")


def test_a_group_is_found_in_the_code_of_a_test_and_of_what_it_calls(rules: ModuleType) -> None:
    groups = {
        function.__name__: [group for group, names in rules.GROUPS.items() if rules._reaches(function, names)]
        for function in (interprets, compiles_in_a_helper, only_matches, check_something)
    }
    assert groups == {
        "interprets": ["interpreter"],
        "compiles_in_a_helper": ["compile"],
        "only_matches": [],
        "check_something": [],
    }


def resumed(hook: Any, result: Any) -> Any:
    """What a hook that wraps others returns, given what they return."""
    next(hook)
    with pytest.raises(StopIteration) as ended:
        hook.send(result)
    return ended.value.value


def test_a_module_without_an_example_is_no_doctest(rules: ModuleType, tmp_path: Path) -> None:
    doctest, module = object.__new__(DoctestModule), object()
    for text, expected in (("x = 1\n", [module]), ('"""\n>>> 1\n1\n"""\n', [doctest, module])):
        file = tmp_path / "module.py"
        file.write_text(text)
        assert resumed(rules.pytest_collect_file(file), [doctest, module]) == expected


@pytest.mark.parametrize("has_gpu", [False, True])
def test_tests_of_a_gpu_are_counted_where_there_is_none(
    rules: ModuleType, monkeypatch: pytest.MonkeyPatch, has_gpu: bool
) -> None:
    def test_of_a_gpu() -> None: ...

    def test_of_a_cpu() -> None: ...

    test_of_a_gpu.pytestmark = [pytest.mark.gpu.mark]  # type: ignore[attr-defined]
    monkeypatch.setattr(rules, "_has_gpu", lambda: has_gpu)
    file = SimpleNamespace(nodeid="tests/test_x.py", iter_markers=list)
    of_a_gpu = SimpleNamespace(nodeid="tests/test_y.py", iter_markers=lambda: [pytest.mark.gpu.mark])
    found = [
        rules.pytest_pycollect_makeitem(collector, function.__name__, function)
        for collector, function in ((file, test_of_a_gpu), (file, test_of_a_cpu), (of_a_gpu, test_of_a_cpu))
    ]
    assert found == ([None] * 3 if has_gpu else [[], None, []])  # None: pytest makes the item
    assert rules._left_out == ({} if has_gpu else {"tests/test_x.py": 1, "tests/test_y.py": 1})


def test_a_reason_has_one_line_and_workers_are_not_counted_twice(rules: ModuleType) -> None:
    for _ in range(2):
        rules.pytest_testnodedown(SimpleNamespace(workeroutput={"left_out": {"tests/test_x.py": 3}}))
    reports = [SimpleNamespace(longrepr=("file", line, "Skipped: needs a book")) for line in range(4)]
    reports.append(SimpleNamespace(longrepr=("file", 9, "Skipped: needs a film")))
    lines: list[str] = []
    rules.pytest_terminal_summary(SimpleNamespace(stats={"skipped": reports}, write_line=lines.append))
    assert lines == [
        "SKIPPED [4] needs a book",
        "SKIPPED [1] needs a film",
        f"NOT COLLECTED [3 GPU tests] {rules.NO_GPU}",
    ]
    assert "`make " in rules.NO_GPU


def test_few_cases_of_each_test_are_spread_over_all_of_them(rules: ModuleType) -> None:
    names = ["a", *"bbbbb", *"cc"]
    for most, expected in ((1, "abc"), (2, "abbcc"), (3, "abbbcc"), (9, "abbbbbcc")):
        kept = rules._spread(names, most)
        assert "".join(name for name, is_kept in zip(names, kept, strict=True) if is_kept) == expected
    assert rules._spread(names, 2) == [True, True, False, False, False, True, True, True]


def test_slow_and_long_tests_are_listed_by_the_names_they_have(rules: ModuleType) -> None:
    listed = [name for file in (rules.SLOW, rules.LONG) for name in file.read_text("utf-8").splitlines()]
    assert [name for name, count in Counter(listed).items() if count > 1] == []
    for name in listed:
        file, _, test = name.partition("[")[0].partition("::")
        is_page = file.endswith(".md")  # whose examples are one test, of the name of the page
        assert test == Path(file).name if is_page else f"def {test}(" in (ROOT / file).read_text("utf-8"), name


def test_long_tests_are_marked_and_counted_where_they_alone_are_left_out(rules: ModuleType, tmp_path: Path) -> None:
    rules.SLOW, rules.LONG = tmp_path / "slow.txt", tmp_path / "long.txt"
    rules.SLOW.write_text("tests/test_x.py::test_a\n")
    rules.LONG.write_text("tests/test_x.py::test_b[long case]\ntests/test_x.py::test_c\n")
    marks: dict[str, list[str]] = {}

    def item(name: str) -> Any:
        added = marks.setdefault(name, [])
        known = {"nodeid": f"tests/test_x.py::{name}", "add_marker": added.append}
        return SimpleNamespace(get_closest_marker=lambda mark: mark in added or None, **known)

    items = [item(name) for name in ("test_a[1]", "test_b[long case]", "test_b[short]", "test_c[1]", "test_d")]
    rules.pytest_collection_modifyitems(SimpleNamespace(getoption=lambda name: None), items)
    assert marks == {
        "test_a[1]": ["slow"],
        "test_b[long case]": ["long"],
        "test_b[short]": [],
        "test_c[1]": ["long"],
        "test_d": [],
    }
    rules.pytest_deselected([items[1], items[3]])  # as -m 'not long' does
    rules.pytest_deselected([items[1], items[4]])  # as -k does
    rules.pytest_testnodedown(SimpleNamespace(workeroutput={"long": 1}))
    lines: list[str] = []
    rules.pytest_terminal_summary(SimpleNamespace(stats={}, write_line=lines.append))
    assert lines == ["LEFT OUT [2 long tests] `make test-long` runs them"]
