"""`polyhead report` and `polyhead inspect --html`: written pages, printed output, and refused input."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from polyhead.analysis.syntax_table import SyntaxTable
from polyhead.cli import app
from polyhead.errors import OptionError
from polyhead.report.page import Assets
from tests.inspection.small_models import model_folder, text_folder
from tests.report.test_payload import row_of

pytest.importorskip("pyarrow")


def invoke(*arguments: object, code: int = 0):
    result = CliRunner().invoke(app, [str(x) for x in arguments], env={"COLUMNS": "150", "NO_COLOR": "1"})
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(autouse=True)
def assets(monkeypatch) -> Assets:
    """Stand in for the page's assets, which are tested in a browser."""
    found = Assets("let drawn = 1;", "body{margin:0}")
    monkeypatch.setattr(Assets, "load", classmethod(lambda cls, folder=None: found))
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    model_folder(folder / "bert", "bert")
    text_folder(folder / "text", documents=3, words=40)
    return folder


@pytest.fixture(scope="module")
def run(place) -> Path:
    options = ["--context", 48, "--importance", "none", "--no-chance", "--device", "cpu"]
    invoke("inspect", place / "bert", "--text", place / "text", *options, "--save", place / "run")
    return place / "run"


class Data(HTMLParser):
    """The value in a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found = ""
        self.inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.inside = ("id", "polyhead-data") in attrs

    def handle_endtag(self, tag: str) -> None:
        self.inside = False

    def handle_data(self, data: str) -> None:
        self.found += data if self.inside else ""


def data_of(path: Path) -> dict:
    return json.loads(Data(path.read_text(encoding="utf-8")).found)


def test_an_inspection_ends_with_the_path_of_its_page(place, tmp_path, assets):
    options = ["--context", 48, "--importance", "none", "--no-chance", "--device", "cpu", "--lang", "zh"]
    page = tmp_path / "heads.html"
    shown = invoke("inspect", place / "bert", "--text", place / "text", *options, "--html", page).stdout
    assert shown.splitlines()[-1] == str(page)
    assert data_of(page)["lang"] == "zh"
    assert len(data_of(page)["heads"]) == 8
    assert assets.script in page.read_text(encoding="utf-8")


def test_a_run_that_was_kept_becomes_a_page(run, tmp_path, monkeypatch):
    assert invoke("report", run).stdout == f"{run / 'polyhead-report.html'}\n"
    assert data_of(run / "polyhead-report.html")["lang"] == "en"
    opened = []
    monkeypatch.setattr("typer.launch", opened.append)
    named = tmp_path / "named.html"
    assert invoke("report", run, "--output", named, "--lang", "zh", "--open").stdout == f"{named}\n"
    assert opened == [named.as_uri()]
    assert data_of(named)["syntax"] is None
    resumed = tmp_path / "resumed.html"
    assert invoke("inspect", "--resume", run, "--html", resumed).stdout.splitlines()[-1] == str(resumed)


def test_a_table_of_syntax_stands_in_the_page(run, tmp_path):
    site = json.loads((run / "inspection.json").read_text(encoding="utf-8"))["sites"][0]["name"]
    table = tmp_path / "syntax.json"
    SyntaxTable((row_of(site, 2),), (), 8, (10, 11), 30, 0).save(table, treebank="a.conllu")
    page = tmp_path / "page.html"
    invoke("report", run, "--output", page, "--syntax", table)
    assert data_of(page)["syntax"]["treebank"] == "a.conllu"
    assert data_of(page)["syntax"]["rows"][0]["head"] == [0, 2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("report", "nowhere"), "a folder that `polyhead inspect --save` wrote"),
        (("report", "RUN", "--lang", "fr"), "must be one of en, zh; got 'fr'"),
        (("report", "RUN", "--output", "."), "--output must be a file, got the folder"),
        (("report", "RUN", "--output", "no/such/folder/page.html"), "there is no folder no/such/folder"),
        (("report", "RUN", "--syntax", "none.json"), "file none.json not found"),
        (("inspect", "--html", "no/such/folder/page.html"), "there is no folder no/such/folder"),
        (("inspect", "--html", "page.html", "--lang", "fr"), "must be one of en, zh; got 'fr'"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(run, monkeypatch, tmp_path, arguments, words):
    monkeypatch.chdir(tmp_path)
    result = invoke(*(run if x == "RUN" else x for x in arguments), code=2)
    assert words in result.stderr
    assert "Traceback" not in result.output


def test_missing_assets_are_told_before_anything_is_read(monkeypatch, tmp_path):
    def missing(cls, folder=None):
        raise OptionError("a page needs built assets; `make frontend` builds them")

    monkeypatch.setattr(Assets, "load", classmethod(missing))
    result = invoke("inspect", "no/such/model", "--html", tmp_path / "page.html", code=2)
    assert "make frontend" in result.stderr
    assert "no/such/model" not in result.output


def test_the_help_tells_what_is_needed():
    shown = invoke("report", "--help").stdout
    for word in ("RUN", "--output", "--lang", "--syntax", "--open", "self-contained"):
        assert word in shown
