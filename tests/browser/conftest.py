"""A real browser, opened once: pages are written as a user's are, and whatever goes wrong in one is written down."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from polyhead.report.page import Assets, html_of
from tests.browser.payloads import synthetic

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SCREENSHOTS = "POLYHEAD_SCREENSHOTS"
PATIENCE = 60_000  # milliseconds; a machine that does other work besides is slow and not wrong
WATCH = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) => {
  window.violations.push(`${event.violatedDirective}: ${event.blockedURI} ${event.sample}`);
});
"""


def _missing(what: str, how: str) -> None:
    """In CI a browser is a duty; elsewhere its absence is a reason to skip."""
    words = f"pages are tested in a real browser, {what}; {how}"
    if os.environ.get("CI"):
        pytest.fail(words, pytrace=False)
    pytest.skip(words)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, one for all tests."""
    try:
        from playwright.sync_api import expect, sync_playwright
    except ImportError:
        _missing("got no playwright", "`pip install -e .[dev]` installs it")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        _missing(f"got none of {', '.join(NAMES)}", "`make system` installs chromium")
    expect.set_options(timeout=PATIENCE)
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield launched
        launched.close()


@dataclass
class Opened:
    """A page in the browser, with all that went wrong in it."""

    tab: Any
    file: Path
    problems: list[str] = field(default_factory=list)

    def go(self, view: str) -> None:
        """Open a view by its link, as a reader who was sent it."""
        self.tab.goto(f"{self.file.as_uri()}#/{view}")
        self.tab.wait_for_selector("main h2")

    def check(self) -> None:
        violations = self.tab.evaluate("window.violations ?? []")
        assert [*self.problems, *violations] == []


def watched(tab: Any, file: Path) -> Opened:
    """Errors, warnings and requests are problems; the page itself and pictures it made are not."""
    opened = Opened(tab, file)

    def requested(request: Any) -> None:
        if request.url.split("#")[0] != file.as_uri() and not request.url.startswith(("data:", "blob:")):
            opened.problems.append(f"asked for {request.url}")

    def said(message: Any) -> None:
        if message.type in ("error", "warning"):
            opened.problems.append(f"console: {message.text}")

    tab.add_init_script(WATCH)
    tab.on("console", said)
    tab.on("pageerror", lambda error: opened.problems.append(f"error: {error}"))
    tab.on("request", requested)
    return opened


def written(payload: dict[str, Any], file: Path) -> Path:
    file.write_text(html_of(payload, Assets.load()), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def small_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of `payloads.synthetic`."""
    return written(synthetic(), tmp_path_factory.mktemp("page") / "small.html")


@pytest.fixture
def open_page(browser: Any, small_page: Path) -> Iterator[Callable[..., Opened]]:
    """Opens a page in a fresh context of the browser; afterwards nothing may have gone wrong."""
    all_opened: list[tuple[Any, Opened]] = []

    def opening(file: Path = small_page, view: str = "overview", **options: Any) -> Opened:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        context.set_default_timeout(PATIENCE)
        opened = watched(context.new_page(), file)
        all_opened.append((context, opened))
        opened.go(view)
        return opened

    yield opening
    for context, opened in all_opened:
        try:
            opened.check()
        finally:
            context.close()


@pytest.fixture
def keep_picture() -> Callable[[Opened, str], None]:
    """Keeps a screenshot in the folder that POLYHEAD_SCREENSHOTS names, if it names one."""

    def keeping(opened: Opened, name: str) -> None:
        folder = os.environ.get(SCREENSHOTS)
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            opened.tab.screenshot(path=str(Path(folder) / f"{name}.png"), full_page=True)

    return keeping
