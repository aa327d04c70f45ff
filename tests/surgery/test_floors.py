"""The folders of surgery stand on floors: each imports those below it, and siblings never each other."""

from __future__ import annotations

import pytest

from tests.test_house import SOURCE, all_imports, plant, read_tree

# From the ground up, as docs/architecture.md tells it.
FLOORS = (("anatomy",), ("stock", "calibration"), ("edits",), ("repair",), ("choosing", "sharing", "storage"))


def folder_of(module: str) -> str | None:
    """The folder of surgery that a module lies in; None for the package itself and for all other rooms."""
    parts = module.split(".")
    return parts[2] if parts[:2] == ["polyhead", "surgery"] and len(parts) > 2 else None


def floor_of(folder: str) -> int:
    return next(height for height, folders in enumerate(FLOORS) if folder in folders)


def violations(trees) -> list[str]:
    found = []
    for edge in all_imports(trees):
        ours, theirs = folder_of(edge.importer), folder_of(edge.target)
        inside = edge.target.split(".")[:2] == ["polyhead", "surgery"]
        if ours is None or not inside or ours == theirs:
            continue
        if theirs is None:
            found.append(f"{edge}: a folder imports modules, and not the package that gathers them")
        elif floor_of(theirs) >= floor_of(ours):
            found.append(f"{edge}: {ours} stands below or beside {theirs}")
    return found


def test_every_folder_of_surgery_has_a_floor():
    folders = {path.name for path in (SOURCE / "polyhead" / "surgery").iterdir() if (path / "__init__.py").is_file()}
    assert folders == {folder for floor in FLOORS for folder in floor}


def test_imports_of_surgery_go_down_its_floors_only():
    assert violations(read_tree(SOURCE)) == []


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("anatomy/layers.py", "from polyhead.surgery.edits.records import x", "anatomy stands below or beside edits"),
        ("choosing/orders.py", "def f():\n    from polyhead.surgery.sharing import align", "choosing stands below or"),
        ("edits/preview.py", "from polyhead.surgery import apply", "not the package that gathers them"),
    ],
)  # fmt: skip
def test_an_import_against_the_floors_is_found(tmp_path, file, text, words):
    (found,) = violations(plant(tmp_path, {"surgery/__init__.py": "", f"surgery/{file}": text}))
    assert words in found
