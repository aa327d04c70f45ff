"""Plant the faults of faults.toml one by one and report which test notices each: `python -m tests.faults`.

The tree is copied, so that neither the checkout nor another run is touched. PyTorch and transformers are imported once;
each fault is tested in a fork, which imports the faulty polyhead afresh.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import sys
import tempfile
import time
import tomllib
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("faults.toml")
LEFT_BEHIND = (".git", ".venv", "build", "node_modules", ".mypy_cache", ".ruff_cache", ".hypothesis")


@dataclass(frozen=True)
class Fault:
    name: str
    file: str
    old: str
    new: str
    tests: list[str]

    @property
    def folder(self) -> str:
        """Every test of the package, for a fault that the listed files do not notice."""
        folder = f"tests/{self.file.split('/')[0]}"
        return folder if "/" in self.file else "tests/ops"

    def plant(self, tree: Path) -> None:
        path = tree / "src/polyhead" / self.file
        text = path.read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(f"the text of a fault must stand once in {self.file}, got {text.count(self.old)} times")
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")

    def remove(self, tree: Path, root: Path) -> None:
        shutil.copy2(root / "src/polyhead" / self.file, tree / "src/polyhead" / self.file)


class FirstFailure:
    """Record the first test that fails."""

    def __init__(self) -> None:
        self.name: str | None = None

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and self.name is None:
            self.name = report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and self.name is None:
            self.name = f"collection of {report.nodeid}"


def first_failure(tree: Path, tests: list[str], options: list[str], log: Path) -> str | None:
    """The first failure of these tests in a fork of this process; None where all pass."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reading)
            with log.open("ab", buffering=0) as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            os.chdir(tree)
            os.environ["PYTHONPATH"] = f"{tree / 'src'}:{tree}"
            sys.path[:] = [str(tree / "src"), str(tree), *(x for x in sys.path if x not in ("", str(ROOT)))]
            for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "polyhead")]:
                del sys.modules[name]
            noticed = FirstFailure()
            # What transformers imports, pytest cannot rewrite any more.
            quietly = ["-x", "-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
            here = ["--rootdir", str(tree), "-c", str(tree / "pyproject.toml")]
            status = pytest.main([*quietly, *here, *options, *tests], plugins=[noticed])
            if status not in (0, 1, 5) and noticed.name is None:
                noticed.name = f"pytest ended with {status!r}"
            os.write(writing, json.dumps(noticed.name).encode())
            code = 0
        except BaseException:  # noqa: BLE001 - the parent reports it
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        answer = file.read()
    os.waitpid(child, 0)
    if not answer:
        raise RuntimeError(f"the process that ran {tests} died: {log.read_text(errors='replace')[-2000:]}")
    found: str | None = json.loads(answer)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="faults to plant; all by default")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout whose source and tests are copied")
    parser.add_argument("--output", type=Path, help="a JSON file of results; those already in it are kept")
    parser.add_argument("--known", type=Path, help="an earlier output: the test that noticed a fault is run first")
    parser.add_argument("--deselect", action="append", default=[], help="a test that fails without a fault")
    parser.add_argument("--listed", action="store_true", help="run the listed files only")
    requested = parser.parse_args()
    for name in ("torch", "transformers.modeling_utils"):  # once, for all forks
        importlib.import_module(name)

    faults = [Fault(name, **fault) for name, fault in tomllib.loads(LIST.read_text(encoding="utf-8")).items()]
    unknown = sorted(set(requested.names) - {fault.name for fault in faults})
    if unknown:
        parser.error(f"faults.toml has no fault {', '.join(unknown)}")
    results: dict[str, str | None] = {}
    if requested.output is not None and requested.output.exists():
        results = json.loads(requested.output.read_text())
    known: dict[str, str | None] = json.loads(requested.known.read_text()) if requested.known is not None else {}
    options = ["-m", "not long", *(f"--deselect={name}" for name in requested.deselect)]  # by `make test`
    with tempfile.TemporaryDirectory(prefix="faults.") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(requested.root, tree, ignore=shutil.ignore_patterns(*LEFT_BEHIND), symlinks=True)
        for fault in faults:
            if (requested.names and fault.name not in requested.names) or fault.name in results:
                continue
            start = time.monotonic()
            fault.plant(tree)
            stages = [[known[fault.name]]] if known.get(fault.name) else []
            stages += [[name for name in fault.tests if (tree / name.partition("::")[0]).exists()]]
            stages += [] if requested.listed else [[fault.folder]]
            noticed = None
            for stage in stages:
                noticed = noticed or first_failure(tree, [x for x in stage if x], options, Path(folder) / "log")
            fault.remove(tree, requested.root)
            results[fault.name] = noticed
            print(f"{fault.name}: {noticed or 'MISSED'} ({time.monotonic() - start:.0f} s)", flush=True)
            if requested.output is not None:
                requested.output.write_text(json.dumps(results, indent=1) + "\n")
    chosen = {name: noticed for name, noticed in results.items() if not requested.names or name in requested.names}
    missed = [name for name, noticed in chosen.items() if noticed is None]
    print(f"{len(chosen) - len(missed)} of {len(chosen)} faults noticed; missed: {', '.join(missed) or 'none'}")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
