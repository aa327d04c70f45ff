"""The reference in docs/reference has an entry for every public name, and the site a place for every page."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "docs" / "reference"
# Modules without __all__ whose classes are public as well.
WITHOUT_ALL = ("polyhead.errors",)
# Modules that list names for the modules beside them, not for users.
INTERNAL = ("polyhead.analysis.importance", "polyhead.analysis.syntax_tables")
ENTRY = re.compile(r"^\.\. (auto(?:class|function)|py:data):: (\S+)$", flags=re.MULTILINE)
LINK = re.compile(r"^- ``(\S+)`` is :py:(?:class|func):`(\S+)`$", flags=re.MULTILINE)


def public_modules() -> list[str]:
    """Modules whose source lists public names; the list of a package is in its __init__.py or its exports.py."""
    source = ROOT / "src"
    listing = [
        path for path in source.rglob("*.py") if re.search(r"^__all__ = ", path.read_text("utf-8"), re.MULTILINE)
    ]
    folders = [
        path.parent if path.name in ("__init__.py", "exports.py") else path.with_suffix("") for path in sorted(listing)
    ]
    return [name for name in (".".join(x.relative_to(source).parts) for x in folders) if name not in INTERNAL]


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
    at_the_root = [f"../{path.stem}" for path in ROOT.glob("*.md")]
    assert sorted(listed) == sorted(
        [
            *guides,
            *at_the_root,
            "../examples/README",
            "../notebooks/README",
            "../tests/faults/results",
            "reference/index",
        ]
    )

    contents = (REFERENCE / "index.rst").read_text("utf-8")
    assert sorted(re.findall(r"^   (polyhead\S*)$", contents, flags=re.MULTILINE)) == sorted(
        path.stem for path in REFERENCE.glob("polyhead*.rst")
    )
