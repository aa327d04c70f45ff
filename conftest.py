"""Collection of all tests: examples where there are any, GPU tests where there is a GPU, and groups by what they run.

`make test` leaves out the group `long`, which `make test-long` runs; `make test-fast` also leaves out `compile`,
`interpreter`, `browser` and `slow`. `compile` and `interpreter` are found by what the code of a test reaches, so that
no test has to be marked by hand.
"""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import sys
import tempfile
import types
from collections import Counter
from collections.abc import Generator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from _pytest.doctest import DoctestModule

NO_GPU = "needs a CUDA device; `make test-gpu` on a machine with one runs them"
# A test that names one of these, or calls a function of the tests that does, belongs to the group.
GROUPS = {
    "interpreter": frozenset({"in_the_interpreter"}),
    "compile": frozenset({"compile", "export", "aot_function", "aot_module", "make_fx", "onnx", "dynamo_export"}),
}
NO_LONG = "`make test-long` runs them"
# One test a line, as they were measured; with its case in brackets where only that one takes long.
SLOW = Path(__file__).parent / "tests" / "slow.txt"  # of no other group, more than 0.2 s
LONG = Path(__file__).parent / "tests" / "long.txt"  # left out of `make test`
# Modules and tests that are collected stay, so that searching them again and again for garbage finds none.
gc.set_threshold(100_000, 50, 100)
_thaw = gc.unfreeze
_frozen_modules = 0
_left_out: Counter[str] = Counter()  # GPU tests that were not collected, by file
_long = 0  # long tests that were left out


@cache
def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cases", type=int, metavar="N", help="run at most N cases of each parametrised test, spread evenly"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Let all workers of this run share what Inductor builds, and no other run: a killed one leaves half a library."""
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        folder = tempfile.mkdtemp(prefix="polyhead-inductor.")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


# ---- collection


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path) -> Generator[None, list[Any], list[Any]]:
    """A module without an example is not imported only to find that out."""
    collectors = yield
    return [x for x in collectors if not isinstance(x, DoctestModule) or ">>> " in file_path.read_text("utf-8")]


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: Any, name: str, obj: object) -> list[Any] | None:
    """Without a GPU its tests are counted and not collected: their parameters would be thousands of skipped items."""
    if isinstance(obj, types.FunctionType) and name.startswith("test") and not _has_gpu():
        marks = [*getattr(obj, "pytestmark", []), *collector.iter_markers()]
        if any(mark.name == "gpu" for mark in marks):
            _left_out[collector.nodeid] += 1
            return []
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    most = config.getoption("--cases")
    if most is not None:
        chosen = _spread([item.nodeid.partition("[")[0] for item in items], most)
        config.hook.pytest_deselected(items=[item for item, kept in zip(items, chosen, strict=True) if not kept])
        items[:] = [item for item, kept in zip(items, chosen, strict=True) if kept]
    listed = {mark: frozenset(file.read_text("utf-8").splitlines()) for mark, file in (("slow", SLOW), ("long", LONG))}
    for item in items:
        for mark, names in listed.items():
            if not names.isdisjoint((item.nodeid, item.nodeid.partition("[")[0])):
                item.add_marker(mark)
        function = getattr(item, "function", None)
        for group, names in GROUPS.items():
            if isinstance(function, types.FunctionType) and _reaches(function, names):
                item.add_marker(group)
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker("browser")


def pytest_deselected(items: list[pytest.Item]) -> None:
    global _long
    if all(item.get_closest_marker("long") for item in items):
        _long += len(items)


def _spread(names: list[str], most: int) -> list[bool]:
    """Select the cases to keep: at most so many of each name, the first and the last among them."""
    totals, seen = Counter(names), Counter[str]()
    kept = []
    for name in names:
        place, last = seen[name], totals[name] - 1
        seen[name] += 1
        steps = {round(step * last / max(most - 1, 1)) for step in range(most)}
        kept.append(place in steps)
    return kept


def pytest_collection_finish() -> None:
    gc.unfreeze = _thaw_and_freeze  # a benchmark freezes what there is for itself, and thaws all of it
    gc.set_threshold(20_000, 10, 20)  # compilers allocate so much that a tenth of their time would go to collections
    _freeze_what_stays()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is not None and nextitem.path != item.path:
        _freeze_what_stays()


def _freeze_what_stays(modules: int = 50, objects: int = 50_000) -> None:
    """Hide imported modules and compiled programs from the garbage collector, which would look through millions.

    Again whenever tests have imported so many more, or left so much. (`gc.get_freeze_count()` would count all of it.)
    """
    global _frozen_modules
    if len(sys.modules) >= _frozen_modules + modules or len(gc.get_objects()) >= objects:
        gc.collect()
        gc.freeze()
        _frozen_modules = len(sys.modules)


def _thaw_and_freeze() -> None:
    _thaw()
    gc.freeze()


@cache
def _reaches(function: types.FunctionType, names: frozenset[str]) -> bool:
    """Whether the code of a function, or of a function of the tests that it mentions, names one of these."""
    waiting, seen = [function], {function}
    while waiting:
        current = waiting.pop()
        mentioned = _names(current.__code__)
        if mentioned & names and mentioned & {"torch", *names} - {"compile", "export"}:  # re.compile is another
            return True
        for name in mentioned:
            found = current.__globals__.get(name)
            found = getattr(found, "__wrapped__", found)
            if isinstance(found, types.FunctionType) and found.__module__.startswith("tests") and found not in seen:
                seen.add(found)
                waiting.append(found)
    return False


@cache
def _names(code: types.CodeType) -> frozenset[str]:
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(code.co_names).union(*inner)


# ---- what was not run


def pytest_sessionfinish(session: pytest.Session) -> None:
    gc.unfreeze = _thaw
    # After pytest's last collections. What is frozen when Python ends is taken for a leak by nanobind, which says so.
    atexit.register(gc.unfreeze)
    workeroutput = getattr(session.config, "workeroutput", None)
    if workeroutput is not None:
        workeroutput["left_out"], workeroutput["long"] = dict(_left_out), _long


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    global _long
    output = getattr(node, "workeroutput", {})
    for name, count in output.get("left_out", {}).items():
        _left_out[name] = max(_left_out[name], count)  # every worker has collected all
    _long = max(_long, output.get("long", 0))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """One line for each reason, with the command that makes the tests run where there is one."""
    reasons: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons[reason.removeprefix("Skipped: ")] += 1
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"SKIPPED [{count}] {reason}")
    if _left_out:
        terminalreporter.write_line(f"NOT COLLECTED [{sum(_left_out.values())} GPU tests] {NO_GPU}")
    if _long:
        terminalreporter.write_line(f"LEFT OUT [{_long} long tests] {NO_LONG}")
