"""The design's rules about the tree itself: what may import what, what an import costs, and who may print."""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"

# The rooms of the house from the ground up. A room may import every room of the rows before its own; rooms of one row
# are siblings and meet only through the values below them.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("errors", "version"),
    ("files",),
    ("geometry",),
    ("masks",),
    ("kernels",),
    ("functional",),
    ("layers",),
    ("huggingface", "observatory", "sources"),
    ("analysis",),
    ("plan", "training", "distributed", "inspection"),
    ("surgery",),  # what an edit would save is counted by the plan
    ("report",),  # a page is drawn of an inspection
    ("lab",),  # an experiment trains, operates and reports, so it stands on all of them
    ("cli",),
    ("__main__",),
)
# What a room may not reach although it stands higher.
CLOSED: Mapping[str, frozenset[str]] = {
    # Kernels are private to functional: everybody else asks for attention and is told which kernel ran.
    "kernels": frozenset({"functional"}),
    # The ground floor describes attention; a raw kernel is handed pointers and sizes, never a description.
    "masks": frozenset(room for floor in FLOORS for room in floor) - {"kernels"},
}
BACKENDS = ("reference", "blockwise", "sdpa", "fused")
# Who may import a heavy package while being imported. Anybody may inside a function.
HEAVY: Mapping[str, tuple[str, ...]] = {
    "triton": ("kernels",),
    "typer": ("cli",),
    "rich": ("cli",),
    "starlette": ("report",),
    "uvicorn": ("report",),
    **dict.fromkeys(
        (
            "transformers",
            "matplotlib",
            "plotly",
            "pandas",
            "pyarrow",
            "gguf",
            "accelerate",
            "onnx",
            "onnxruntime",
        ),
        (),
    ),
}
# Packages that nothing imports while being imported itself, so that they may need what an extra installs.
LAZY = ("polyhead.kernels", "polyhead.report.viewer")
PRINTERS = ("cli", "__main__")


@dataclass(frozen=True)
class Import:
    """One import statement's target, and whether it happens when the module itself is imported."""

    importer: str
    target: str
    line: int
    at_import: bool

    def __str__(self) -> str:
        return f"{self.importer} (line {self.line}) imports {self.target}"


@functools.cache
def read_tree(source: Path) -> dict[str, ast.Module]:
    """Parse every module under source, by dotted name; a package goes by the name of its folder."""
    trees = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        trees[name] = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    return trees


def packages_of(modules: Iterable[str]) -> frozenset[str]:
    """The names that have modules below them."""
    return frozenset(name.rsplit(".", 1)[0] for name in modules if "." in name)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _statements(node: ast.AST, at_import: bool = True) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            continue
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, at_import
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _statements(child, False)
        elif _is_type_checking(child):
            assert isinstance(child, ast.If)
            for statement in child.body:
                yield from _statements(ast.Module([statement], []), False)
            for statement in child.orelse:
                yield from _statements(ast.Module([statement], []), at_import)
        else:
            yield from _statements(child, at_import)


def imports_of(name: str, tree: ast.Module, modules: Iterable[str]) -> Iterator[Import]:
    """Every import of one module; `from package import submodule` counts as an import of the submodule."""
    modules = frozenset(modules)
    for node, at_import in _statements(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(name, alias.name, node.lineno, at_import)
            continue
        base = node.module or ""
        if node.level:
            package = name if name in packages_of(modules) else name.rpartition(".")[0]
            anchor = package.split(".")[: len(package.split(".")) - (node.level - 1)]
            base = ".".join([*anchor, *([node.module] if node.module else [])])
        for alias in node.names:
            submodule = f"{base}.{alias.name}"
            yield Import(name, submodule if submodule in modules else base, node.lineno, at_import)


def all_imports(trees: Mapping[str, ast.Module]) -> list[Import]:
    """Every import of every module."""
    return [found for name, tree in trees.items() for found in imports_of(name, tree, trees)]


def room_of(module: str) -> str:
    """The room a module of polyhead lies in; the root package has the empty name."""
    return module.split(".")[1] if "." in module else ""


def _floor_of(room: str) -> int | None:
    return next((height for height, rooms in enumerate(FLOORS) if room in rooms), None)


def direction_violations(trees: Mapping[str, ast.Module]) -> list[str]:
    """Imports that climb the house, cross between siblings, enter a closed room or name a room without a floor."""
    found = [
        f"the room {room!r} has no floor: give it a place in FLOORS"
        for room in sorted({room_of(name) for name in trees} - {""})
        if _floor_of(room) is None
    ]
    for edge in all_imports(trees):
        if edge.target.split(".")[0] != "polyhead":
            continue
        importer, target = room_of(edge.importer), room_of(edge.target)
        above, below = _floor_of(importer), _floor_of(target)
        if importer and not target:
            # The root package gathers every public name, so importing it from below would be a circle.
            if importer not in ("lab", "cli", "__main__"):
                found.append(f"{edge}: only lab and cli may import the root package")
        elif not importer:
            if target in ("cli", "__main__", "lab", "kernels"):
                found.append(f"{edge}: the root package does not open {target}")
        elif above is None or below is None or importer == target:
            continue
        elif below >= above:
            found.append(f"{edge}: {importer} stands below or beside {target}")
        elif target in CLOSED and importer not in CLOSED[target]:
            found.append(f"{edge}: {target} is closed to {importer}")
    return found


def _reachable(start: str, edges: Mapping[str, frozenset[str]]) -> frozenset[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        for target in edges.get(waiting.pop(), frozenset()) - seen:
            seen.add(target)
            waiting.append(target)
    return frozenset(seen)


def _edges_at_import(trees: Mapping[str, ast.Module]) -> dict[str, frozenset[str]]:
    found = [edge for edge in all_imports(trees) if edge.at_import and edge.target in trees]
    return {name: frozenset(edge.target for edge in found if edge.importer == name) for name in trees}


def backend_violations(trees: Mapping[str, ast.Module]) -> list[str]:
    """Backends that import one another, in any function, or by way of a module they share."""

    def backend_of(module: str) -> str | None:
        parts = module.split(".")
        return parts[2] if parts[:2] == ["polyhead", "functional"] and len(parts) > 2 and parts[2] in BACKENDS else None

    found = []
    for edge in all_imports(trees):
        ours, theirs = backend_of(edge.importer), backend_of(edge.target)
        if ours and theirs and ours != theirs:
            found.append(f"{edge}: backends never import each other")
    edges = _edges_at_import(trees)
    for name in trees:
        if ours := backend_of(name):
            others = {target for target in _reachable(name, edges) if (backend_of(target) or ours) != ours}
            found += [f"{name} reaches {target} through what it imports" for target in sorted(others)]
    return found


def cycles(trees: Mapping[str, ast.Module]) -> list[str]:
    """Modules that import themselves by way of others while being imported, each cycle once."""
    edges = _edges_at_import(trees)
    reach = {name: _reachable(name, edges) for name in edges}
    knots = {frozenset(other for other in reach[name] if name in reach[other]) for name in reach if name in reach[name]}
    return sorted(" <-> ".join(sorted(knot)) for knot in knots)


def heavy_imports(trees: Mapping[str, ast.Module]) -> list[str]:
    """Imports at module level of a package that only some rooms may load."""
    return [
        f"{edge} at module level"
        for edge in all_imports(trees)
        if edge.at_import
        and room_of(edge.importer) not in HEAVY.get(edge.target.split(".")[0], (room_of(edge.importer),))
    ]


def prints(trees: Mapping[str, ast.Module]) -> list[str]:
    """Calls that write to the terminal from a room that only computes."""
    found = []
    for name, tree in trees.items():
        if room_of(name) in PRINTERS:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                if called in ("print", "pprint", "pprint.pprint", "sys.stdout.write", "sys.stderr.write"):
                    found.append(f"{name} (line {node.lineno}) calls {called}")
    return found


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    """The package as it stands."""
    return read_tree(SOURCE)


def plant(tmp_path: Path, files: Mapping[str, str]) -> dict[str, ast.Module]:
    """Write a small house and parse it."""
    for name, text in files.items():
        path = tmp_path / "polyhead" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return read_tree.__wrapped__(tmp_path)


def run_python(program: str, *arguments: str) -> str:
    """Run a program in a fresh interpreter that finds this source tree and nothing that a test has loaded."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True, text=True, env=environment, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_imports_go_down_the_house_only(trees):
    assert direction_violations(trees) == []


def test_backends_never_import_each_other(trees):
    assert backend_violations(trees) == []


def test_no_modules_import_each_other_in_a_circle(trees):
    assert cycles(trees) == []


def test_heavy_packages_are_imported_only_where_they_are_used(trees):
    assert heavy_imports(trees) == []


def test_nothing_below_the_command_line_prints(trees):
    assert prints(trees) == []


def test_every_package_that_the_source_imports_is_a_declared_dependency(trees):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = [re.split(r"[^\w-]", line)[0] for line in project["dependencies"]]
    optional = [re.split(r"[^\w-]", line)[0] for lines in project["optional-dependencies"].values() for line in lines]
    undeclared = []
    for edge in all_imports(trees):
        package = edge.target.split(".")[0]
        allowed = [*names, *optional] if not edge.at_import or edge.importer.startswith(LAZY) else names
        known = {name.replace("-", "_") for name in allowed} | {"polyhead"}
        if package not in sys.stdlib_module_names and package not in known:
            undeclared.append(str(edge))
    assert undeclared == []


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("masks.py", "from polyhead.functional import api", "masks stands below or beside functional"),
        ("functional/api.py", "def f():\n    from polyhead.layers import heads", "functional stands below or beside"),
        ("functional/api.py", "from ..layers import heads", "functional stands below or beside layers"),
        ("functional/api.py", "import polyhead", "only lab and cli may import the root package"),
        ("functional/api.py", "from .. import attention", "only lab and cli may import the root package"),
        ("observatory/session.py", "import polyhead.huggingface", "observatory stands below or beside huggingface"),
        ("plan/cost.py", "from polyhead.surgery.edits import x", "plan stands below or beside surgery"),
        ("layers/heads.py", "from polyhead.kernels.forward import x", "kernels is closed to layers"),
        ("kernels/forward.py", "from polyhead.masks import Mask", "masks is closed to kernels"),
        ("layers/heads.py", "from polyhead.cli import main", "layers stands below or beside cli"),
        ("__init__.py", "from polyhead.cli import main", "the root package does not open cli"),
        ("attic/things.py", "", "the room 'attic' has no floor"),
    ],
)  # fmt: skip
def test_an_import_against_the_design_is_found(tmp_path, file, text, words):
    house = {"__init__.py": "", "functional/__init__.py": "", "functional/api.py": "", "layers/heads.py": ""}
    found = direction_violations(plant(tmp_path, {**house, file: text}))
    assert len(found) == 1
    assert words in found[0]


def test_imports_along_the_design_are_not_found(tmp_path):
    house = {
        "__init__.py": "from polyhead.functional.api import attention\nfrom polyhead.layers import heads",
        "errors.py": "import torch",
        "masks.py": "from polyhead import errors",
        "kernels/forward.py": "from polyhead.errors import ShapeError",
        "functional/__init__.py": "from .api import attention",
        "functional/api.py": "from polyhead.masks import Mask\nfrom ..kernels import forward",
        "layers/heads.py": "from polyhead.functional import attention",
        "surgery/edits.py": "from polyhead.analysis.roles import x\nfrom polyhead.layers import heads",
        "analysis/roles.py": "from polyhead.observatory.session import x",
        "observatory/session.py": "from polyhead.layers.heads import x",
        "lab/claim.py": "from polyhead.surgery.edits import x\nimport polyhead",
        "cli/__init__.py": "import polyhead\nfrom polyhead.lab.claim import x",
    }
    planted = plant(tmp_path, house)
    assert direction_violations(planted) == []
    assert cycles(planted) == []


def test_a_backend_that_reaches_another_is_found(tmp_path):
    house = {
        "functional/reference.py": "",
        "functional/blockwise.py": "def f():\n    from polyhead.functional.reference import g",
        "functional/sdpa.py": "from polyhead.functional import common",
        "functional/common.py": "from .reference import g",
    }
    found = backend_violations(plant(tmp_path, house))
    assert len(found) == 2
    assert "blockwise (line 2) imports polyhead.functional.reference" in found[0]
    assert "sdpa reaches polyhead.functional.reference" in found[1]


def test_a_circle_is_found_and_a_deferred_import_is_not_one(tmp_path):
    house = {
        "functional/__init__.py": "from polyhead.functional.api import attention",
        "functional/api.py": "from . import request",
        "functional/request.py": "from polyhead.functional import attention",
        "layers/one.py": "from polyhead.layers import two",
        "layers/two.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from polyhead.layers import one",
        "layers/three.py": "def f():\n    from polyhead.layers import three",
    }
    expected = "polyhead.functional <-> polyhead.functional.api <-> polyhead.functional.request"
    assert cycles(plant(tmp_path, house)) == [expected]


def test_a_heavy_import_and_a_print_are_found(tmp_path):
    house = {
        "kernels/forward.py": "import triton.language as tl",
        "cli/demo.py": "import rich\nprint(1)",
        "functional/fused.py": "import triton\ndef f():\n    import transformers\n    print(2)",
        "layers/one.py": "try:\n    from matplotlib import pyplot\nexcept ImportError:\n    pyplot = None",
    }
    planted = plant(tmp_path, house)
    assert heavy_imports(planted) == [
        "polyhead.functional.fused (line 1) imports triton at module level",
        "polyhead.layers.one (line 2) imports matplotlib at module level",
    ]
    assert prints(planted) == ["polyhead.functional.fused (line 4) calls print"]


def test_importing_polyhead_loads_torch_and_nothing_heavier():
    program = """
import json, sys
import torch
before = set(sys.modules)
import polyhead
print(json.dumps(sorted({name.partition(".")[0] for name in set(sys.modules) - before})))
"""
    loaded = set(json.loads(run_python(program)))
    assert "polyhead" in loaded
    assert loaded & set(HEAVY) == set()
    # numpy comes with torch; a package of anybody else's would be a weight that nobody asked for.
    assert loaded - set(sys.stdlib_module_names) - {"polyhead", "numpy", "torch"} == set()


def test_no_submodule_takes_the_place_of_a_public_name(trees):
    names = sorted(name for name in trees if name != "polyhead" and room_of(name) != "__main__")
    # Neighbours in the alphabet end up far apart, the same way on every machine.
    shuffled = sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())
    program = """
import importlib, os, sys, types
import polyhead
before = {name: getattr(polyhead, name) for name in polyhead.__all__}
for names in sys.argv[1:]:
    child = os.fork()  # with polyhead as it was imported, and nothing that an earlier order loaded
    if child:
        assert os.waitpid(child, 0)[1] == 0, "see above"
        continue
    for name in names.split():
        importlib.import_module(name)
    for name, value in before.items():
        assert getattr(polyhead, name) is value, f"importing submodules replaced polyhead.{name}"
        assert not isinstance(value, types.ModuleType), f"polyhead.{name} is a module"
        assert callable(value) or name.startswith("__"), f"polyhead.{name} is neither a function nor a class: {value!r}"
    print(len(before), flush=True)
    os._exit(0)
"""
    found = run_python(program, *(" ".join(order) for order in (names, names[::-1], shuffled)))
    assert all(int(count) > 0 for count in found.split())
    assert len(found.split()) == 3


def test_no_file_names_a_place_on_somebodys_machine():
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listed.returncode != 0:
        pytest.skip("not a git checkout, so nothing says which files are committed")
    place = re.compile(r"(?<![\w.])/(?:home|Users|root|work)/\w+")
    found = []
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if not path.is_file():
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{name}: {match.group()}" for match in place.finditer(text)]
    assert found == []


def test_the_floors_name_each_room_once():
    rooms = [room for floor in FLOORS for room in floor]
    assert len(rooms) == len(set(rooms))
