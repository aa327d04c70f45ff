"""What a user installs: the wheel is whole and typed, versions agree, and every dependency has its pin."""

from __future__ import annotations

import email
import importlib.metadata
import os
import re
import subprocess
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import polyhead

BUILD_ONLY = {"editables"}  # hatchling asks for it when it builds an editable install
CUDA = ("nvidia-", "cuda-")  # a CUDA build of torch brings and pins these itself


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


@pytest.fixture(scope="module")
def project(project_root: Path) -> dict:
    return tomllib.loads((project_root / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def pins(project_root: Path) -> dict[str, str]:
    lines = (project_root / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


@pytest.fixture(scope="module")
def wheel(project_root: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    hatchling = pytest.importorskip("hatchling.builders.wheel", reason="hatchling is in the dev extra")
    folder = tmp_path_factory.mktemp("wheel")
    built = next(hatchling.WheelBuilder(str(project_root)).build(directory=str(folder), versions=["standard"]))
    return zipfile.ZipFile(built)


def test_the_wheel_holds_every_module_and_the_mark_of_types(wheel, project_root):
    source = project_root / "src"
    expected = {path.relative_to(source).as_posix() for path in source.rglob("*.py")} | {"polyhead/py.typed"}
    inside = set(wheel.namelist())
    assert expected - inside == set()
    assert {name.split("/")[0] for name in inside} == {"polyhead", f"polyhead-{polyhead.__version__}.dist-info"}


def test_the_wheel_holds_the_packaged_model_and_training_run(wheel, project_root):
    source = project_root / "src"
    folders = [source / "polyhead" / "sources" / name for name in ("tiny", "tiny-run")]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert {path.relative_to(source).as_posix() for path in files} - set(wheel.namelist()) == set()
    run = [path.stat().st_size for path in files if folders[1] in path.parents]
    assert len(run) > 1
    assert sum(run) < 300_000


def test_every_folder_of_modules_is_a_package(project_root):
    source = project_root / "src" / "polyhead"
    folders = {path.parent for path in source.rglob("*.py")}
    assert [folder.name for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_the_wheel_says_what_it_needs(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(wheel.read(name))
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata.get_all("Provides-Extra")) == {
        "hf",
        "demo",
        "coverage",
        "notebooks",
        "report",
        "train",
        "docs",
        "dev",
        "all",
        "ray",
        "cluster",
    }
    base = {Requirement(line).name for line in metadata.get_all("Requires-Dist") if "extra ==" not in line}
    assert base == {"torch", "numpy", "safetensors", "typer", "rich"}
    assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())


def test_the_version_is_one(project, wheel, project_root):
    assert polyhead.__version__ == project["version"]
    assert f"polyhead-{project['version']}-" in Path(wheel.filename).name
    assert f"## [{project['version']}]" in (project_root / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_citation_has_the_fields_of_the_format_and_the_facts_of_the_project(project, project_root):
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with the extra `hf`")
    cited = yaml.safe_load((project_root / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()  # those that the schema of 1.2.0 requires
    assert (cited["cff-version"], cited["type"]) == ("1.2.0", "software")
    assert (cited["version"], cited["license"], cited["authors"], cited["keywords"]) == (
        project["version"], project["license"], project["authors"], project["keywords"],
    )  # fmt: skip
    for name in ("README.md", "README.zh-CN.md"):
        entry = dict(
            re.findall(r"^  (\w+) += \{(.*)\},$", (project_root / name).read_text(encoding="utf-8"), re.MULTILINE)
        )
        assert entry == {
            "author": f"{{{cited['authors'][0]['name']}}}",
            **{field: cited[field] for field in ("title", "version", "license")},
        }


def test_issue_forms_have_what_github_requires(project_root):
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with the extra `hf`")
    folder = project_root / ".github" / "ISSUE_TEMPLATE"
    if not folder.is_dir():
        pytest.skip("issue forms are in a checkout only")
    forms = {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in folder.glob("*.yml")}
    assert set(forms) == {"config", "bug_report", "wrong_number", "feature_request"}
    del forms["config"]
    for form in forms.values():
        assert {"name", "description", "body"} <= form.keys()
        asked = [part for part in form["body"] if part["type"] != "markdown"]
        assert {part["type"] for part in asked} <= {"input", "textarea"}
        assert len({part["id"] for part in asked}) == len({part["attributes"]["label"] for part in asked}) == len(asked)


def test_the_installed_version_is_the_source_tree_s():
    if _installed("polyhead") is None:
        pytest.skip("polyhead runs from its source tree here, not from an install")
    assert _installed("polyhead") == polyhead.__version__


def test_the_command_is_the_command_line_s_main(project):
    assert project["scripts"] == {"polyhead": "polyhead.cli:main"}
    (entry,) = importlib.metadata.EntryPoints(
        [importlib.metadata.EntryPoint("polyhead", project["scripts"]["polyhead"], "console_scripts")]
    )
    assert callable(entry.load())


def test_constraints_are_exact_and_portable(project_root, pins):
    lines = (project_root / "constraints.txt").read_text(encoding="utf-8").splitlines()
    entries = [line for line in lines if line and not line.startswith("#")]
    assert entries == sorted(entries, key=lambda line: line.split("==")[0])
    # No local version (torch's +cpu), no address, no option: where packages come from is the machine's affair.
    assert [line for line in entries if not re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", line)] == []
    assert pins["torch"] == "2.13.0"
    assert pins["triton"] == "3.9.0"


def test_every_dependency_of_a_dependency_has_a_pin(project, pins):
    named = [*project["dependencies"], *(line for lines in project["optional-dependencies"].values() for line in lines)]
    waiting = [("", requirement) for requirement in map(Requirement, named) if requirement.name != "polyhead"]
    visited: set[tuple[str, str]] = set()  # names with an extra, or without one
    while waiting:
        extra, requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        waiting += [(other, requirement) for other in requirement.extras if (name, other) not in visited and not extra]
        if (name, extra) in visited or name.startswith(CUDA):
            continue
        visited.add((name, extra))
        # What a package needs is known only where it is installed; its own pin is asked for all the same.
        below = importlib.metadata.requires(name) or [] if _installed(name) else []
        needed = [need for need in map(Requirement, below) if not need.marker or need.marker.evaluate({"extra": extra})]
        waiting += [("", need) for need in needed]
    seen = {name for name, _ in visited}
    if other := [name for name, version in pins.items() if _installed(name) not in (None, version)]:
        pytest.skip(f"this environment was not made from the constraints: {', '.join(other)}")
    assert seen - set(pins) == set()
    unused = set(pins) - seen - BUILD_ONLY
    if any(_installed(name) is None for name in seen):
        unused = {name for name in unused if _installed(name)}  # needed, perhaps, by what is not installed here
    assert unused == set()


def test_pins_satisfy_the_declared_ranges(project, pins):
    named = [*project["dependencies"], *(line for lines in project["optional-dependencies"].values() for line in lines)]
    wrong = [
        f"{requirement} is not met by {pins[canonicalize_name(requirement.name)]}"
        for requirement in map(Requirement, named)
        if requirement.name != "polyhead" and pins[canonicalize_name(requirement.name)] not in requirement.specifier
    ]
    assert wrong == []


@pytest.mark.parametrize("target", ["demo", "test", "test-long", "test-fast", "lint", "docs", "package", "bench"])
def test_a_target_makes_its_environment_before_it_runs(project_root, tmp_path, target):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    try:
        planned = subprocess.run(
            ["make", "--dry-run", "--no-print-directory", f"VENV={tmp_path}/venv", target],
            cwd=project_root, env=environment, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        pytest.skip("make is not installed here")
    assert planned.returncode == 0, planned.stderr
    steps = planned.stdout
    extra = "demo" if target == "demo" else "dev"
    (made,) = (line for line in steps.splitlines() if ".ci/environment" in line)  # tests/test_environment.py runs it
    assert re.fullmatch(rf"\.ci/environment {re.escape(str(tmp_path))}/venv \S+ {extra}", made.strip())
    assert steps.index(made) < steps.rindex(f"{tmp_path}/venv/bin/")
