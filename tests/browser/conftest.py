"""A real browser, one per process, and pages whose errors are recorded."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from polyhead.report.page import Assets, html_of
from tests.browser.payloads import synthetic
from tests.browser.tabs import PATIENCE, SharedPage, Tab, Tabs

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SCREENSHOTS = "POLYHEAD_SCREENSHOTS"
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-software-rasterizer")  # no graphics card

HAS_FAILED = pytest.StashKey[bool]()
# Navigation creates the content of a page again; language and colours are reset here.
RESET = """async ([elsewhere, view]) => {
  for (const [known, first] of [["auto", "auto"], ["zh", "en"]]) {
    const choice = document.querySelector(`.switches select:has(option[value=${known}])`);
    if (choice.value === first) continue;
    choice.value = first;
    choice.dispatchEvent(new Event("change", { bubbles: true }));
  }
  localStorage.clear();
  document.activeElement.blur();
  for (const hash of [elsewhere, view]) {
    const changed = new Promise((resolve) => addEventListener("hashchange", resolve, { once: true }));
    location.hash = `#/${hash}`;
    await changed;
    await new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));
  }
  document.activeElement.blur();
  scrollTo(0, 0);
}"""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Record whether a test failed, for the pages shared with the next."""
    report = yield
    item.stash[HAS_FAILED] = item.stash.get(HAS_FAILED, False) or report.failed
    return report


def _missing(what: str, how: str) -> None:
    """Fail in CI, where a browser is required; skip elsewhere."""
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
    """A page in the browser, with its errors."""

    of: Tab
    file: Path

    @property
    def tab(self) -> Any:
        return self.of.page

    def go(self, view: str) -> None:
        """Open a view by its link."""
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


@contextmanager
def pages(tabs: Tabs) -> Iterator[Callable[..., Opened]]:
    """Open pages in empty tabs, and check afterwards that there were no errors and no other requests."""
    all_opened: list[Opened] = []

    def opening(file: Path, view: str | None, **options: Any) -> Opened:
        opened = Opened(tabs.take(lambda address: address.split("#")[0] == file.as_uri(), **options), file)
        all_opened.append(opened)
        if view is None:
            opened.tab.goto(file.as_uri())
        else:
            opened.go(view)
        return opened

    try:
        yield opening
        for opened in all_opened:
            opened.check()
    finally:
        tabs.give_back([opened.of for opened in all_opened])


@pytest.fixture(scope="session")
def shared_page(tabs: Tabs, small_page: Path) -> Iterator[SharedPage]:
    """The small page, shared by tests that start from one of its views."""

    @contextmanager
    def opening() -> Iterator[Opened]:
        with pages(tabs) as open_one:
            yield open_one(small_page, "overview")

    shared = SharedPage(opening)
    yield shared
    shared.close()


@pytest.fixture
def open_page(
    request: pytest.FixtureRequest, tabs: Tabs, small_page: Path, shared_page: SharedPage
) -> Iterator[Callable[..., Opened]]:
    """Open a page: the shared small one, reset, or another one in a new tab.

    `fresh` reloads the small one as well, for tests of links and of the initial focus.
    """
    used = False

    def take_shared(view: str, viewport: tuple[int, int] = (1280, 800), color_scheme: str = "light") -> Opened:
        nonlocal used
        used, opened = True, shared_page.take()
        opened.of.change_size(viewport)
        opened.of.change_scheme(color_scheme)
        opened.tab.mouse.move(0, 0)
        opened.tab.evaluate(RESET, ["overview?reset" if view.startswith("findings") else "findings?reset", view])
        return opened

    try:
        with pages(tabs) as open_one:

            def opening(
                file: Path = small_page, view: str | None = "overview", *, fresh: bool = False, **options: Any
            ) -> Opened:
                if fresh or used or file != small_page or view is None or options.keys() - {"viewport", "color_scheme"}:
                    return open_one(file, view, **options)
                return take_shared(view, **options)

            yield opening
    finally:
        if used:
            shared_page.leave(request.node.stash.get(HAS_FAILED, False))


@pytest.fixture
def keep_picture() -> Callable[[Opened, str], None]:
    """Save a screenshot in the folder of POLYHEAD_SCREENSHOTS, if it is set."""

    def keeping(opened: Opened, name: str) -> None:
        folder = os.environ.get(SCREENSHOTS)
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            opened.tab.screenshot(path=str(Path(folder) / f"{name}.png"), full_page=True, scale="css")

    return keeping
