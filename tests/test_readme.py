"""The README in two languages says the same: commands, examples, links, and every link leads somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from polyhead.cli import app
from polyhead.inspection.vocabulary import ROLES

LANGUAGES = ("README.md", "README.zh-CN.md")


@pytest.fixture(scope="module")
def pages(project_root: Path) -> dict[str, str]:
    return {name: (project_root / name).read_text(encoding="utf-8") for name in LANGUAGES}


def blocks(page: str, kind: str) -> list[str]:
    """The code of a page, without comments, which are in the page's language."""
    found = re.findall(rf"```{kind}\n(.*?)```", page, flags=re.DOTALL)
    return [re.sub(r" +# .*", "", block) for block in found]


def sections(page: str) -> list[str]:
    return re.split(r"^## .*$", page, flags=re.MULTILINE)


def test_both_languages_name_the_same_commands(pages):
    english, chinese = (blocks(pages[name], "console") for name in LANGUAGES)
    commands = [line for block in english for line in block.splitlines()]
    assert english == chinese
    assert "$ make demo" in commands
    assert "$ make test" in commands
    assert any(line.startswith("$ polyhead inspect") for line in commands)


def test_both_languages_have_the_same_five_examples(pages):
    # The English ones are run; the Chinese ones are the same to the letter.
    assert blocks(pages["README.md"], "python") == blocks(pages["README.zh-CN.md"], "python")
    for name in LANGUAGES:
        (examples,) = (part for part in sections(pages[name]) if "polyhead.observe(" in part)
        assert len(re.findall(r"^\*\*", examples, flags=re.MULTILINE)) == 5, name
        assert len(re.findall(r"^```(?:python|console)$", examples, flags=re.MULTILINE)) == 5, name


def test_every_command_of_the_examples_exists(pages):
    known = {command.name for command in app.registered_commands} | {group.name for group in app.registered_groups}
    named = {verb for page in pages.values() for verb in re.findall(r"\$ polyhead (\w+)", page)}
    assert named
    assert named - known == set()


def test_every_command_of_the_chinese_guides_exists_with_its_options(project_root):
    program = typer.main.get_command(app)
    guides = [path.read_text(encoding="utf-8") for path in (project_root / "docs" / "zh").glob("*.md")]
    lines = [line for guide in guides for line in re.findall(r"(?:^\$ |`)(polyhead \w+ [^`\n]*)", guide, re.MULTILINE)]
    assert len(lines) >= 15
    for line in lines:
        _, name, *words = shlex.split(line)
        parameters = program.commands[name].params
        known = {option for parameter in parameters for option in (*parameter.opts, *parameter.secondary_opts)}
        assert [word for word in words if word.startswith("--") and word not in known] == [], line


def test_the_chinese_guide_names_the_roles_as_the_command_does(project_root):
    guide = (project_root / "docs" / "zh" / "inspecting.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([a-z、]+) \| (.*?) \|", guide, flags=re.MULTILINE)
    named = {letters: label for row in rows for letters, label in zip(*(x.split("、") for x in row), strict=True)}
    assert named == {role.letters: role.label.zh for role in ROLES.values()}


def test_both_languages_have_the_same_links_and_each_leads_somewhere(pages, project_root):
    english, chinese = (set(re.findall(r"\]\(([^)]+)\)", pages[name])) for name in LANGUAGES)
    guides = {f"docs/zh/{path.name}" for path in (project_root / "docs" / "zh").iterdir()}
    assert english - chinese == {"README.zh-CN.md"}
    assert chinese - english == {"README.md"} | guides
    assert [link for link in english | chinese if not (project_root / link).is_file()] == []
