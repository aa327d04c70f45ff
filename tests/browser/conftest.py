"""A real browser, opened once a process: pages are written as a user's are, and whatever goes wrong is written down."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from polyhead.report.page import Assets, html_of
from tests.browser.payloads import synthetic
from tests.browser.tabs import PATIENCE, Tab, Tabs

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SCREENSHOTS = "POLYHEAD_SCREENSHOTS"
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-software-rasterizer")  # nothing here is drawn by a graphics card


def _missing(what: str, how: str) -> None:
    """In CI a browser is a duty; elsewhere its absence is a reason to skip."""
    words = f"pages are tested in a real browser, {what}; {how}"
    if os.environ.get("CI"):
        pytest.fail(words, pytrace=False)
    pytest.skip(words)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium, one for all tests of this process."""
    try:
        from playwright.sync_api import expect, sync_playwright
    except ImportError:
        _missing("got no playwright", "`pip install -e .[dev]` installs it")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        _missing(f"got none of {', '.join(NAMES)}", "`make system` installs chromium")
    expect.set_options(timeout=PATIENCE)
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        yield launched
        launched.close()


@pytest.fixture(scope="session")
def tabs(browser: Any) -> Tabs:
    return Tabs(browser)


@dataclass
class Opened:
    """A page in the browser, with all that went wrong in it."""

    of: Tab
    file: Path

    @property
    def tab(self) -> Any:
        return self.of.page

    def go(self, view: str) -> None:
        """Open a view by its link, as a reader who was sent it."""
        self.tab.goto(f"{self.file.as_uri()}#/{view}")
        self.tab.wait_for_selector("main h2")

    def check(self) -> None:
        violations = self.tab.evaluate("window.violations ?? []")
        assert [*self.of.problems, *violations] == []


def written(payload: dict[str, Any], file: Path) -> Path:
    file.write_text(html_of(payload, Assets.load()), encoding="utf-8")
    return file


@pytest.fixture(scope="session")
def small_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of `payloads.synthetic`."""
    return written(synthetic(), tmp_path_factory.mktemp("page") / "small.html")


@pytest.fixture
def open_page(tabs: Tabs, small_page: Path) -> Iterator[Callable[..., Opened]]:
    """Opens a page in an empty tab; afterwards nothing may have gone wrong, and nothing was requested but the page."""
    all_opened: list[Opened] = []

    def opening(file: Path = small_page, view: str | None = "overview", **options: Any) -> Opened:
        opened = Opened(tabs.take(lambda address: address.split("#")[0] == file.as_uri(), **options), file)
        all_opened.append(opened)
        if view is None:
            opened.tab.goto(file.as_uri())
        else:
            opened.go(view)
        return opened

    yield opening
    try:
        for opened in all_opened:
            opened.check()
    finally:
        tabs.give_back(len(all_opened))


@pytest.fixture
def keep_picture() -> Callable[[Opened, str], None]:
    """Keeps a screenshot in the folder that POLYHEAD_SCREENSHOTS names, if it names one."""

    def keeping(opened: Opened, name: str) -> None:
        folder = os.environ.get(SCREENSHOTS)
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            opened.tab.screenshot(path=str(Path(folder) / f"{name}.png"), full_page=True, scale="css")

    return keeping
