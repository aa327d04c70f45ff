"""Public functions take a path as a string or as a path-like object."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import polyhead
from polyhead.costs.calibration import calibrate
from polyhead.costs.options import Budget
from polyhead.costs.timing.machine import Machine
from polyhead.inspection import load_inspection, save_inspection

SAVED = Path(__file__).parent / "formats" / "saved"
PACKAGES = ("", ".inspection", ".observation", ".surgery", ".report", ".costs", ".sources")
MORE = (Machine, calibrate)  # documented, in modules of their own
RESULTS = ("SavedModel", "Texts")  # constructed by the library only


class Folder(os.PathLike[str]):
    """A path that is neither a string nor a `Path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return str(self.path)


def functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    modules = [importlib.import_module(f"polyhead{package}") for package in PACKAGES]
    for value in (*(getattr(module, name) for module in modules for name in module.__all__), *MORE):
        if inspect.isfunction(value):
            yield value.__qualname__, value
        elif inspect.isclass(value):
            for name, method in inspect.getmembers(value, inspect.isroutine):
                if inspect.isfunction(getattr(method, "__func__", method)) and (name == "__init__" or name[0] != "_"):
                    yield f"{value.__qualname__}.{name}", method


def test_no_public_function_requires_a_path_object():
    found = dict(functions())
    assert {
        "load_inspection",
        "Machine.load",
        "Machine.save",
        "write_page",
        "load_record",
        "read_facts",
    } <= found.keys()
    wrong = [
        f"{name}({parameter.name}: {parameter.annotation})"
        for name, function in found.items()
        if not name.startswith(RESULTS)
        for parameter in inspect.signature(function).parameters.values()
        if re.search(r"\bPath\b", str(parameter.annotation)) and "PathLike" not in str(parameter.annotation)
    ]
    assert wrong == []


@pytest.mark.parametrize("form", [str, Folder])
def test_an_inspection_is_saved_and_loaded_by_any_path(tmp_path, monkeypatch, form):
    pytest.importorskip("pyarrow")
    run = next(path.parent for path in sorted(SAVED.rglob("inspection.json")))
    shutil.copytree(run, tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    found = load_inspection(form(Path("run")))
    Path("again").mkdir()
    save_inspection(form(Path("again")), found)
    assert load_inspection(Path("again")).table.names == found.table.names


@pytest.mark.parametrize("form", [str, Folder])
def test_a_machine_is_saved_and_loaded_by_any_path(tmp_path, form):
    file = form(tmp_path / "machine.json")
    machine = Machine.load("cpu-2-cores")
    assert machine.save(file) == tmp_path / "machine.json"
    assert Machine.load(file).to_dict() == machine.to_dict()
    assert polyhead.plan("gpt2", machine=file)["prefill"].timing is not None
    assert polyhead.choose(Budget(cache_bytes_per_token=4096), d_model=512, machine=file).found[0].seconds is not None
