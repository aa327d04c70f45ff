"""Rules between modules that neither import-linter nor ruff can express; theirs are in pyproject.toml."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"
# Imported inside functions only, so that their dependencies may come from an extra.
LAZY = re.compile(r"polyhead\.(ops\.\w+\.kernels|report\.viewer)\b")


class Import(NamedTuple):
    importer: str
    module: str
    name: str  # "" for `import module`
    line: int
    in_function: bool

    def __str__(self) -> str:
        imported = f"{self.module}.{self.name}" if self.name else self.module
        return f"{self.importer} (line {self.line}) imports {imported}"


def modules(source: Path = SOURCE) -> dict[str, Path]:
    """Paths of all modules by dotted name."""
    found = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports(source: Path) -> tuple[Import, ...]:
    """Every import statement of the package; relative imports are banned by ruff."""
    return tuple(
        found
        for importer, path in modules(source).items()
        for found in _imports_below(importer, ast.parse(path.read_text(encoding="utf-8")), deferred=False)
    )


def _imports_below(importer: str, parent: ast.AST, deferred: bool) -> Iterator[Import]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else None
            for alias in node.names:
                imported = (alias.name, "") if module is None else (module, alias.name)
                yield Import(importer, *imported, node.lineno, deferred)
        elif isinstance(node, ast.stmt | ast.excepthandler | ast.match_case):
            function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            checking = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            yield from _imports_below(importer, node, deferred or function or checking)


def private_imports(source: Path = SOURCE) -> list[str]:
    """Imports of another module's private names."""
    return [
        str(found)
        for found in imports(source)
        if found.module.startswith("polyhead") and found.name.startswith("_") and not found.name.startswith("__")
    ]


def root_imports(source: Path = SOURCE) -> list[str]:
    """Imports of the root package from below `cli`: it imports all others, so these are cycles."""
    known = modules(source)
    return [
        str(found)
        for found in imports(source)
        if found.module == "polyhead"
        and f"polyhead.{found.name}" not in known
        and not re.match(r"polyhead\.(cli|__main__)\b", found.importer)
    ]


def run_python(program: str, *arguments: str) -> str:
    """Run a program in a fresh interpreter that finds this source tree."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True, text=True, env=environment, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


# Each line of stdin is a program, which runs in a fork: PyTorch is imported once for all of them.
FORKS = """
import json, os, sys, tempfile, traceback
empty = set(sys.modules)
import polyhead
for name in ("__wrapped__", "__path__"):
    getattr(polyhead, name, None)
imported = set(sys.modules) - empty
import torch
before = set(sys.modules)
for line in sys.stdin:
    with tempfile.TemporaryFile("w+") as written:
        child = os.fork()
        if not child:
            os.dup2(written.fileno(), 1)
            code = 1
            try:
                exec(json.loads(line))
                code = 0
            except BaseException:
                print(traceback.format_exc())
            sys.stdout.flush()
            os._exit(code)
        status = os.waitpid(child, 0)[1]
        written.seek(0)
        print(json.dumps([status, written.read()]), flush=True)
"""


@pytest.fixture(scope="module")
def run_fork() -> Iterator[Callable[[str], str]]:
    """Run a program in a fork of a fresh interpreter that has imported polyhead, then torch, and used neither."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-c", FORKS]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as interpreter:

        def run(program: str) -> str:
            print(json.dumps(program), file=interpreter.stdin, flush=True)
            status, written = json.loads(interpreter.stdout.readline())
            assert status == 0, written
            return written

        yield run


def test_no_module_imports_the_root_package():
    assert root_imports() == []


def test_no_module_imports_a_private_name_of_another():
    assert private_imports() == []


def test_such_imports_are_found(tmp_path):
    (tmp_path / "polyhead" / "ops").mkdir(parents=True)
    (tmp_path / "polyhead" / "__init__.py").write_text("")
    (tmp_path / "polyhead" / "masks.py").write_text("_x = 1")
    text = "import polyhead\ndef f():\n    from polyhead.masks import _x, x\n    from polyhead import masks"
    (tmp_path / "polyhead" / "ops" / "one.py").write_text(text)
    assert root_imports(tmp_path) == ["polyhead.ops.one (line 1) imports polyhead"]
    assert private_imports(tmp_path) == ["polyhead.ops.one (line 3) imports polyhead.masks._x"]


def test_every_package_that_the_source_imports_is_a_declared_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = [re.split(r"[^\w-]", line)[0] for line in project["dependencies"]]
    optional = [re.split(r"[^\w-]", line)[0] for lines in project["optional-dependencies"].values() for line in lines]
    undeclared = []
    for found in imports(SOURCE):
        package = found.module.split(".")[0]
        allowed = [*names, *optional] if found.in_function or LAZY.match(found.importer) else names
        known = {name.replace("-", "_") for name in allowed} | {"polyhead"}
        if package not in sys.stdlib_module_names and package not in known:
            undeclared.append(str(found))
    assert undeclared == []


def test_importing_polyhead_loads_torch_and_nothing_heavier(run_fork):
    program = """
polyhead.attention
for names in (imported, set(sys.modules) - before):
    print(json.dumps(sorted({name.partition(".")[0] for name in names})))
"""
    imported, used = (set(json.loads(line)) for line in run_fork(program).splitlines())
    assert "polyhead" in imported
    assert imported - set(sys.stdlib_module_names) == {"polyhead"}
    assert used - set(sys.stdlib_module_names) - {"polyhead", "numpy", "torch"} == set()


def test_public_names_are_imported_on_first_use(run_fork):
    program = """
assert "polyhead.exports" not in sys.modules
try:
    polyhead.atention
except AttributeError as error:
    print(error)
from polyhead import *
assert attention is polyhead.attention and polyhead.layers.KVCache is KVCache
assert set(polyhead.__all__) <= set(dir(polyhead)), set(polyhead.__all__) - set(dir(polyhead))
"""
    assert run_fork(program) == "module 'polyhead' has no attribute 'atention'\n"


def test_a_replaced_name_stays_replaced(run_fork):
    program = """
polyhead.attention = "mine"
before = polyhead.attention, hasattr(polyhead, "no_such_name"), polyhead.Mask, len(dir(polyhead))
print(polyhead.attention, polyhead.explain.__name__)
"""
    assert run_fork(program) == "mine explain\n"


def test_a_compiled_function_may_be_the_first_to_use_a_name(run_fork):
    program = """
assert "polyhead.exports" not in sys.modules
compiled = torch.compile(lambda x: polyhead.attention(x, x, x).output, backend="eager", fullgraph=True)
x = torch.randn(1, 2, 4, 8)
print(torch.equal(compiled(x), polyhead.attention(x, x, x).output))
"""
    assert run_fork(program) == "True\n"


def test_help_is_shown_without_importing_torch():
    program = """
import sys
from click.testing import CliRunner
from typer.main import get_command
from polyhead.cli import app
group = get_command(app)
commands = [[], *([name] for name in group.commands)]
for command in commands:
    for argument, code in (("--help", 0), ("--no-such-option", 2)):
        found = CliRunner().invoke(group, [*command, argument])
        assert found.exit_code == code, (command, argument, found.output)
heavy = {"torch", "numpy", "transformers", "pyarrow"} & sys.modules.keys()
print(len(commands), sorted(heavy))
"""
    count, heavy = run_python(program).split(maxsplit=1)
    assert int(count) > 10
    assert heavy == "[]\n"


REFUSED = [
    (["inspect", "no model"], "a model must be tiny, minilm"),
    (["inspect", "--importance", "most"], "importance must be one of"),
    (["inspect", "--tokens", "0"], "tokens must be at least 1"),
    (["inspect", "--resume", "nowhere"], "--resume must be the folder of a saved run"),
    (["report", "nowhere"], "an inspection is a folder"),
    (["compare", "nowhere", "nowhere"], "an inspection is a folder"),
    (["merge-runs", "nowhere", "-o", "new"], "a shard is a folder that"),
    (["inspect", "--shard", "5/3"], "a part must be I/N"),
    (["view", "no model"], "a model must be tiny, minilm"),
    (["view", "--text", "nowhere.txt"], "--text must be a UTF-8 text file"),
    (["prune", "a/b", "--heads", "5", "-o", "new"], "a head is written"),
    (["prune", "a/b", "--share", "30%", "--criterion", "best", "-o", "new"], "criterion must be one of"),
    (["prune", "a/b", "--share", "30%", "--text", "nowhere.txt", "-o", "new"], "text must be a file"),
    (["merge", "a/b", "--heads", "L0H1+L1H2", "-o", "new"], "two or more heads of one layer"),
    (["convert", "a/b", "--kv-heads", "0", "-o", "new"], "kv_heads must be greater than 0"),
    (["shrink", "a/b", "--target", "5%", "-o", "new"], "a target must be"),
    (["shrink", "a/b", "--target", "5%-heads", "-o", "new"], "text is required"),
    (["undo", "nowhere", "-o", "new"], "undo needs the folder of an edited model"),
    (["syntax", "--treebank", "nowhere.conllu"], "a treebank must be a CoNLL-U file"),
    (["plan"], "specify one of MODEL, --config, and --d-model with --heads; got none"),
    (["plan", "gpt2", "--config", "a.json"], "got MODEL and --config"),
    (["plan", "--config", "nowhere.json"], "--config must be an existing file"),
    (["plan", "gpt2", "--dtype", "float12"], "got 'float12'"),
    (["plan", "gpt2", "--context", "0"], "context must be a positive integer, got 0"),
    (["plan", "gpt2", "--phase", "rest"], "phase must be one of"),
    (["plan", "gpt2", "--machine", "abacus"], "nvidia-l4 (datasheet)"),
    (["plan", "gpt2", "--machine", "nowhere.json"], "a machine file must exist"),
    (["plan", "gpt2", "--lang", "fr"], "--lang must be one of en, zh"),
    (["plan", "calibrate", "--output", "nowhere/a.json"], "there is no folder nowhere"),
    (["choose", "--parameters", "9M", "--machine", "abacus"], "machine must be one of"),
    (["choose", "--d-model", "512"], "a budget must limit parameters"),
    (["choose", "--cache", "3x"], "--cache must be a number such as"),
    (["choose", "--parameters", "9M", "--dtype", "float12"], "got 'float12'"),
    (["choose", "--parameters", "9M", "--layers", "0"], "layers must be a positive integer, got 0"),
]


@pytest.fixture(scope="module")
def refusals(tmp_path_factory) -> list[list]:
    """Exit code, whether torch is imported by then, and output of each refused call, all in one interpreter."""
    program = """
import json, os, sys
from click.testing import CliRunner
from typer.main import get_command
from polyhead.cli import app
os.chdir(sys.argv[1])
command, found = get_command(app), []
for arguments in json.loads(sys.argv[2]):
    result = CliRunner().invoke(command, arguments)
    found.append((result.exit_code, "torch" in sys.modules, result.output))
print(json.dumps(found))
"""
    calls = [arguments for arguments, _ in REFUSED]
    return json.loads(run_python(program, str(tmp_path_factory.mktemp("refused")), json.dumps(calls)))


@pytest.mark.parametrize("case", range(len(REFUSED)), ids=["-".join(arguments[:2]) for arguments, _ in REFUSED])
def test_bad_arguments_are_refused_without_importing_torch(case, refusals):
    arguments, message = REFUSED[case]
    if arguments[0] in ("inspect", "view", "syntax"):
        pytest.importorskip("transformers")
    code, has_torch, text = refusals[case]
    assert message in text
    assert len(text.strip().splitlines()) == 1
    assert (code, has_torch) == (2, False)


@pytest.mark.parametrize("exports", sorted(SOURCE.rglob("exports.py")), ids=lambda path: path.parent.name)
def test_no_public_name_of_a_package_is_that_of_a_submodule(exports):
    """Otherwise the order of imports would decide whether the name is the object or the submodule."""
    imports = [node for node in ast.parse(exports.read_text("utf-8")).body if isinstance(node, ast.ImportFrom)]
    names = [alias.name for node in imports for alias in node.names]
    submodules = {path.stem for path in exports.parent.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert names
    assert submodules & set(names) == set()


# Neighbours in the alphabet end up far apart in the last order, the same way on every machine.
@pytest.mark.parametrize(
    "order",
    [lambda names: sorted(names, reverse=True),
     lambda names: sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())],
    ids=["backwards", "shuffled"],
)  # fmt: skip
def test_no_submodule_takes_the_place_of_a_public_name(order, run_fork):
    program = f"""
import importlib, types
public = {{name: getattr(polyhead, name) for name in polyhead.__all__}}
for name in {order(modules().keys() - {"polyhead", "polyhead.__main__"})}:
    importlib.import_module(name)
for name, value in public.items():
    assert getattr(polyhead, name) is value, f"importing submodules replaced polyhead.{{name}}"
    assert not isinstance(value, types.ModuleType), f"polyhead.{{name}} is a module"
    assert callable(value) or name.startswith("__"), f"polyhead.{{name}} is neither a function nor a class: {{value!r}}"
print(len(public))
"""
    assert int(run_fork(program)) > 0


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
