"""The reference in docs/reference has an entry for every public name, and the site a place for every page."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import polyhead

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "docs" / "reference"
# Modules without __all__ whose classes are public as well.
WITHOUT_ALL = ("polyhead.errors",)
ENTRY = re.compile(r"^\.\. (auto(?:class|function)|py:data):: (\S+)$", flags=re.MULTILINE)
LINK = re.compile(r"^- ``(\S+)`` is :py:(?:class|func):`(\S+)`$", flags=re.MULTILINE)


def public_modules() -> list[str]:
    """Modules that list public names, in `__all__` or as the imports of their exports.py."""
    source = ROOT / "src"
    listing = [
        path
        for path in source.rglob("*.py")
        if path.name == "exports.py" or re.search(r"^__all__ = ", path.read_text("utf-8"), re.MULTILINE)
    ]
    folders = [
        path.parent if path.name in ("__init__.py", "exports.py") else path.with_suffix("") for path in sorted(listing)
    ]
    return [".".join(x.relative_to(source).parts) for x in folders]


def public_names(module: ModuleType) -> list[str]:
    if module.__name__ in WITHOUT_ALL:
        return [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    return list(module.__all__)


def value_of(path: str) -> object:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return {path.stem: path.read_text("utf-8") for path in REFERENCE.glob("polyhead*.rst")}


@pytest.fixture(scope="module")
def entries(pages: dict[str, str]) -> dict[str, str]:
    """The directive of each name that has an entry."""
    found = [(name, directive) for page in pages.values() for directive, name in ENTRY.findall(page)]
    assert len(dict(found)) == len(found)
    return dict(found)


def test_the_packages_of_the_public_api_are_found():
    assert {"polyhead", "polyhead.layers", "polyhead.layers.positions", "polyhead.surgery"} <= set(public_modules())


@pytest.mark.parametrize("name", [*public_modules(), *WITHOUT_ALL])
def test_every_public_name_is_on_a_page(name, pages, entries):
    module = importlib.import_module(name)
    names = [f"{name}.{public}" for public in public_names(module)]
    if name in pages:
        page = pages[name]
        listed = [path for _, path in ENTRY.findall(page)] + [path for path, _ in LINK.findall(page)]
        assert [path for path in names if path not in listed] == []
    else:  # a package whose names another one exports
        documented = [value_of(path) for path in entries]
        assert [path for path in names if not any(value_of(path) is value for value in documented)] == []


def test_entries_exist_and_have_the_directive_of_their_kind(entries):
    for path, directive in entries.items():
        value = value_of(path)
        if directive == "autoclass":
            assert inspect.isclass(value), path
            assert value.__doc__, path
        elif directive == "autofunction":
            assert callable(value), path
            assert value.__doc__, path
        else:
            assert not inspect.isclass(value), path
            assert not inspect.isfunction(value), path


def test_a_link_leads_to_the_entry_of_the_same_object(pages, entries):
    links = [link for page in pages.values() for link in LINK.findall(page)]
    assert ("polyhead.layers.MultiHeadAttention", "polyhead.MultiHeadAttention") in links
    for path, target in links:
        assert target in entries, path
        assert value_of(path) is value_of(target)


def test_every_page_is_in_a_table_of_contents():
    index = (ROOT / "docs" / "index.md").read_text("utf-8")
    tables = re.findall(r"```\{toctree\}\n(?::[^\n]*\n)*\n(.*?)```", index, flags=re.DOTALL)
    listed = [re.sub(r".*<(.*)>", r"\1", line) for table in tables for line in table.splitlines()]
    guides = [path.stem for path in (ROOT / "docs").glob("*.md") if path.stem != "index"]
    guides += [f"zh/{path.stem}" for path in (ROOT / "docs" / "zh").glob("*.md")]
    at_the_root = [f"../{path.stem}" for path in ROOT.glob("*.md")]
    assert sorted(listed) == sorted(
        [
            *guides,
            *at_the_root,
            "../benchmarks/RESULTS",
            "../examples/README",
            "../notebooks/README",
            "../src/polyhead/sources/tiny/README",
            "../tests/faults/results",
            "reference/index",
        ]
    )

    contents = (REFERENCE / "index.rst").read_text("utf-8")
    assert sorted(re.findall(r"^   (polyhead\S*)$", contents, flags=re.MULTILINE)) == sorted(
        path.stem for path in REFERENCE.glob("polyhead*.rst")
    )


# ---- docstrings

# Methods that PyTorch calls and documents.
PYTORCH = ("extra_repr", "get_extra_state", "set_extra_state")


def public_functions() -> dict[str, tuple[Callable[..., Any], str]]:
    """Functions and methods of the public API that are written in polyhead, with their documentation.

    The documentation of a method is its docstring and those of the methods that it overrides; that of a constructor is
    in the docstrings of its class and of the base classes.
    """
    found: dict[str, tuple[Callable[..., Any], str]] = {}
    for module in map(importlib.import_module, [*public_modules(), *WITHOUT_ALL]):
        for value in (getattr(module, name) for name in public_names(module)):
            if inspect.isfunction(value):
                found[f"{value.__module__}.{value.__qualname__}"] = value, inspect.getdoc(value) or ""
            elif inspect.isclass(value):
                found.update(methods_of(value))
    return found


def methods_of(owner: type) -> dict[str, tuple[Callable[..., Any], str]]:
    ours = [base for base in owner.__mro__ if base.__module__.startswith("polyhead.")]
    found = {}
    for name in {name for base in ours for name in vars(base) if not name.startswith("_") or name == "__init__"}:
        definitions = [vars(base)[name] for base in ours if name in vars(base)]
        functions = [getattr(definition, "__func__", definition) for definition in definitions]
        if not inspect.isfunction(functions[0]) or not functions[0].__module__.startswith("polyhead."):
            continue  # a property, or a constructor of the standard library
        if name in PYTORCH or (name == "__init__" and "__dataclass_fields__" in vars(ours[0])):
            continue  # the fields of a dataclass are documented as attributes
        documented = [*ours, *functions] if name == "__init__" else functions
        text = "\n\n".join(inspect.cleandoc(part.__doc__) for part in documented if part.__doc__)
        found[f"{functions[0].__module__}.{functions[0].__qualname__}"] = functions[0], text
    return found


def described_parameters(text: str) -> set[str]:
    """Names in the sections Args: one per line, or several separated by commas."""
    sections = re.findall(r"^Args:\n((?:[ ]+.*\n|\n)*)", text + "\n", flags=re.MULTILINE)
    labels = [label for section in sections for label in re.findall(r"^ {4}([^\s:][^:\n]*):", section, re.MULTILINE)]
    return {name.strip("* ") for label in labels for name in label.split(",")}


def parameters_of(function: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]


PUBLIC_FUNCTIONS = public_functions()


def test_every_parameter_of_a_public_function_is_described():
    assert {"polyhead.observation.session.observe", "polyhead.masks.Mask.window"} <= set(PUBLIC_FUNCTIONS)
    missing = {
        path: [name for name in parameters_of(function) if name not in described_parameters(text)]
        for path, (function, text) in PUBLIC_FUNCTIONS.items()
    }
    assert {path: names for path, names in missing.items() if names} == {}


def test_every_described_parameter_exists():
    for path, (function, text) in PUBLIC_FUNCTIONS.items():
        if not path.endswith(".__init__") and text == inspect.getdoc(function):
            assert described_parameters(text) <= set(parameters_of(function)), path


def test_every_result_of_a_public_function_is_described():
    silent = [
        path
        for path, (function, text) in PUBLIC_FUNCTIONS.items()
        if function.__annotations__.get("return") not in (None, "None", "NoReturn")
        and not re.search(r"^(Returns|Yields):|\A(Return|Yield)\b", text, flags=re.MULTILINE)
    ]
    assert silent == []


def test_the_names_that_most_users_need_have_an_example():
    # `pytest src` runs them. Left out: the result type of `attention`; a command whose input is a treebank.
    names = [f"polyhead.{name}" for name in polyhead.__all__ if name not in ("AttentionOutput", "syntax")]
    names += ["polyhead.inspection.load_inspection", "polyhead.report.write_page"]
    names += [f"polyhead.surgery.{name}" for name in ("PruneHeads", "apply", "find_layers", "preview", "save", "undo")]
    assert len(names) >= 25
    assert [path for path in names if not examples_of(value_of(path))] == []


def examples_of(value: Any) -> int:
    documented = [value, *vars(value).values()] if inspect.isclass(value) else [value]
    return sum((getattr(part, "__doc__", None) or "").count(">>> ") for part in documented)


# Values that users write themselves, as arguments of other functions; the fields of other dataclasses are results.
WRITTEN_BY_USERS = (
    *(f"polyhead.surgery.{name}" for name in ("PruneHeads", "MergeHeads", "ReorderHeads", "AddHeads", "GroupQueries")),
    *(f"polyhead.surgery.{name}" for name in ("AlignHeads", "FuseHeads", "ShareKeys")),
    *(f"polyhead.layers.{name}" for name in ("MultiHeadConfig", "LatentConfig")),
    *(f"polyhead.layers.variants.{name}Config" for name in ("Routed", "GroupedHeads", "HeadMix", "TalkingHeads")),
    *(f"polyhead.layers.variants.{name}Config" for name in ("Differential", "Collaborative")),
    *(f"polyhead.layers.positions.{name}Scaling" for name in ("Linear", "NTK", "DynamicNTK", "Yarn", "Llama3")),
    "polyhead.costs.Workload",
    "polyhead.inspection.Settings",
)


@pytest.mark.parametrize("path", WRITTEN_BY_USERS)
def test_every_field_of_a_value_that_users_write_is_described(path):
    value: Any = value_of(path)
    described = {name for base in value.__mro__ for name in described_parameters(inspect.cleandoc(base.__doc__ or ""))}
    assert [field.name for field in dataclasses.fields(value) if field.name not in described] == []


def test_a_function_that_most_users_call_names_the_errors_that_it_raises():
    functions = [getattr(polyhead, name) for name in polyhead.__all__ if inspect.isfunction(getattr(polyhead, name))]
    raising = [function for function in functions if function.__name__ not in ("build_attention", "syntax")]
    assert [f.__name__ for f in raising if not re.search(r"^ *Raises:$", f.__doc__ or "", flags=re.MULTILINE)] == []


def messages() -> Iterator[str]:
    """The strings of the package that are no docstrings."""
    for path in sorted((ROOT / "src" / "polyhead").rglob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        docstrings = {id(x.value) for x in ast.walk(tree) if isinstance(x, ast.Expr)}
        constants = (x for x in ast.walk(tree) if isinstance(x, ast.Constant) and id(x) not in docstrings)
        yield from (x.value for x in constants if isinstance(x.value, str))


def test_a_function_that_a_message_names_exists():
    named = {name for text in messages() for name in re.findall(r"\bpolyhead(?:\.[a-z]\w*)+\.\w+", text)}
    assert "polyhead.surgery.apply" in named
    for name in sorted(named):
        assert pkgutil.resolve_name(name) is not None
