"""Draw docs/images/view-*.png, screenshots of the live viewer, in the chromium of the system.

python docs/draw_view.py [minilm] [tiny-run]
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

TEXT = (
    "Anna gave the book to her brother because he had asked for it. "
    "The brother read it in one night, and then he gave it back to Anna."
)
IMAGES = Path(__file__).parent / "images"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-headless-shell")


def draw(page: Page, address: str) -> None:
    page.goto(address)
    page.get_by_role("textbox").first.fill(TEXT)
    page.get_by_role("button", name="Run", exact=True).click()
    page.locator(".word", has_text="Anna").first.wait_for()  # the maps of the example are complete before
    page.locator(".pictures-note[data-done=true]").wait_for()
    page.screenshot(path=IMAGES / "view-heads.png", animations="disabled")
    page.goto(f"{address}#/head/1/3")
    page.locator(".map-state[data-state=exact]").wait_for()
    page.screenshot(path=IMAGES / "view-head.png", animations="disabled")
    # A previous-token head and a next-token head, zoomed in on the same words.
    page.goto(f"{address}#/head/0/2?with=A.1.8&map=1_1_15")
    for number in range(2):
        page.locator(".map-state[data-state=exact]").nth(number).wait_for()
    maps = page.locator("figure.map")
    maps.first.scroll_into_view_if_needed()
    left, right = (maps.nth(number).bounding_box() for number in range(2))
    assert left is not None
    assert right is not None
    box = {"x": left["x"], "y": left["y"], "width": right["x"] + right["width"] - left["x"], "height": left["height"]}
    page.screenshot(path=IMAGES / "view-maps.png", animations="disabled", clip=box)


def draw_run(page: Page, address: str) -> None:
    page.goto(f"{address}#/induction_score")
    page.locator("section:visible svg.plot").wait_for()
    page.screenshot(
        path=IMAGES / "view-run.png", animations="disabled", clip={"x": 0, "y": 0, "width": 1280, "height": 800}
    )


def main() -> None:
    for name, draw_it in {"minilm": draw, "tiny-run": draw_run}.items():
        if name in sys.argv[1:] or not sys.argv[1:]:
            show(name, draw_it)


def show(name: str, draw_it: Callable[[Page, str], None]) -> None:
    command = [sys.executable, "-m", "polyhead", "view", name, "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server, sync_playwright() as playwright:
        assert server.stdout is not None
        found = next((x for x in map(re.compile(r"http://\S+").search, server.stdout) if x), None)
        assert found is not None, "the viewer did not start"
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            draw_it(browser.new_page(viewport={"width": 1280, "height": 1130}), found[0])
        finally:
            browser.close()
            server.terminate()


if __name__ == "__main__":
    main()
