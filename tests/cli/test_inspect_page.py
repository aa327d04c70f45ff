"""docs/inspecting.md explains everything that `polyhead inspect` shows: roles, columns, matrices, options."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from polyhead.analysis.redundancy import THRESHOLD
from polyhead.analysis.roles_rules import RULES
from polyhead.cli import app
from polyhead.inspection import Inspection, Settings, save_inspection
from polyhead.inspection.comparison import FALSE_DISCOVERIES, MIN_CHANGE
from polyhead.inspection.cross_layer_similarity import CANDIDATES, TOKENS, WIDTH
from polyhead.inspection.most_attended import CANDIDATES as TOP_KEYS
from polyhead.inspection.text_reader import FEW_DOCUMENTS
from polyhead.inspection.vocabulary import role_of
from polyhead.observation.statistics import NAMES
from polyhead.workflows.inspecting import inspect_model
from tests.inspection.small_models import model_folder, text_folder

pytest.importorskip("pyarrow")
# What is told of a column's tokens beside their mean, explained once for all of them.
SUFFIXES = ("_std", "_max", "_error", "_chance")


@pytest.fixture(scope="module")
def page(project_root: Path) -> str:
    return (project_root / "docs" / "inspecting.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Inspection]:
    """A model that makes vectors, whose heads are taken out, and one that writes, which has gradients."""
    folder = tmp_path_factory.mktemp("runs")
    text = str(text_folder(folder / "text", documents=3, words=60))
    return [
        inspect_model(
            Settings(model=str(model_folder(folder / name, name)), text=text, context=64, statistics=statistics)
        )
        for name, statistics in (("bert", None), ("llama", tuple(NAMES)))
    ]


def rows_of(page: str, heading: str) -> dict[str, list[str]]:
    """The lines of the tables below a heading, by each name in their first cell; the first line of a name."""
    below = page.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = {}
    for line in below.splitlines():
        if line.startswith("| `"):
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            rows = dict.fromkeys(re.findall(r"`([^`]+)`", cells[0]), cells) | rows
    return rows


def options_of(verb: str) -> list[str]:
    # Whichever click typer brings along: a parameter with secondary names is an option.
    command = typer.main.get_command(app).commands[verb]
    return [name for found in command.params for name in (*found.opts, *found.secondary_opts) if name.startswith("--")]


def test_every_role_stands_there_with_its_letters_and_its_threshold(page):
    rows = rows_of(page, "The picture")
    assert set(rows) == set(RULES)
    for role, rule in RULES.items():
        _, letters, meaning, threshold, chance = rows[role]
        assert letters == role_of(role).letters, role
        assert threshold.replace(",", "").split()[0] == f"{rule.threshold:g}", role
        assert meaning, role
        assert chance, role


def test_every_column_of_the_table_is_explained(page, runs):
    explained = rows_of(page, "The table")
    words = page.split("\n## The table\n", 1)[1].split("\n## ", 1)[0]
    columns = {name for run in runs for row in run.table.rows() for name in row}
    assert {"ablation", "gradient_error", "ov_top_share", "mean_offset", "mean_distance_max", "special_mass"} <= columns
    missing = []
    for column in sorted(columns):
        suffix = next((end for end in SUFFIXES if column.endswith(end) and column not in explained), "")
        if column.removesuffix(suffix) not in explained and f"`{column}`" not in words:
            missing.append(column)
    assert missing == []
    assert all(f"`...{suffix}`" in words for suffix in SUFFIXES)
    assert [name for name in NAMES if name not in explained] == []


def test_every_matrix_of_heads_is_explained(page, runs):
    words = page.split("\n## Redundant heads\n", 1)[1].split("\n## ", 1)[0]
    matrices = {name for run in runs for found in run.relations.values() for name in found}
    assert {"cosine", "gradient_overlap"} <= matrices
    assert [name for name in sorted(matrices) if f"`{name}`" not in words] == []


def test_every_option_is_explained(page):
    explained = rows_of(page, "Options")
    assert "--text" in options_of("inspect")
    assert [name for name in options_of("inspect") if name not in explained] == []
    missing = [name for name in options_of("compare") if f"`{name}" not in page]
    assert missing == []


def test_every_file_of_a_run_is_named_and_the_example_in_python_runs(page, runs, tmp_path, monkeypatch):
    save_inspection(tmp_path / "run", runs[0])
    written = [file.name for file in (tmp_path / "run").iterdir()]
    assert len(written) == 4
    assert [name for name in written if f"`{name}`" not in page] == []
    # Those with a prompt run as doctests.
    (example,) = [x for x in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL) if ">>> " not in x]
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    exec(compile(example, "docs/inspecting.md", "exec"), namespace)
    assert isinstance(namespace["found"], Inspection)


def test_the_numbers_in_the_text_are_those_of_the_code(page):
    said = " ".join(page.split())
    for words in (
        f"rejects at a false discovery rate of {FALSE_DISCOVERIES:.0%}",
        f"more than {MIN_CHANGE:.0%} of the value",
        f"compared at {TOKENS:,} tokens",
        f"**redundant** if this share is at least {THRESHOLD}",
        f"random projection to {WIDTH} dimensions",
        f"the {CANDIDATES} pairs that look most alike",
        f"fewer than {FEW_DOCUMENTS} documents",
        f"The {TOP_KEYS:,} most frequent tokens",
    ):
        assert words in said


def test_every_link_leads_to_a_page_or_a_heading(page, project_root):
    def anchors(text: str) -> set[str]:
        headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
        return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}

    wrong = []
    for link in re.findall(r"\]\(([^)]+)\)", page):
        name, _, anchor = link.partition("#")
        target = project_root / "docs" / name if name else project_root / "docs" / "inspecting.md"
        if not target.is_file() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            wrong.append(link)
    assert wrong == []
