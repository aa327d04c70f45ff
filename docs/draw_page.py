"""Draw docs/images/page-*.png, screenshots of the page, in the chromium of the system.

polyhead inspect --html page.html
python docs/draw_page.py page.html
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-headless-shell")
# View, window size and colour scheme; only the part that is visible without scrolling is captured.
VIEWS = {
    "overview": ("#/overview", (1280, 1250), "light"),
    "head": ("#/head/1/3?word=26", (1280, 1000), "light"),
    "charts": ("#/charts?column=confidence&x=confidence&y=ablation", (1280, 1790), "light"),
    "importance": ("#/importance", (1280, 800), "light"),
    "phone": ("#/overview", (390, 844), "dark"),
}


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(f"python docs/draw_page.py PAGE, got {len(sys.argv) - 1} arguments")
    address, images = Path(sys.argv[1]).absolute().as_uri(), Path(__file__).parent / "images"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for name, (view, (width, height), scheme) in VIEWS.items():
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            page.goto(address + view)
            page.locator("h2").first.wait_for()
            page.screenshot(path=images / f"page-{name}.png", animations="disabled")
            page.close()
        browser.close()


if __name__ == "__main__":
    main()
