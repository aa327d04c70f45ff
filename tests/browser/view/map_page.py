"""The map of a long text as the page shows it, in tokens and pixels."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

from playwright.sync_api import expect

from tests.inspection.small_models import WORDS

CLOSEST = 40  # pixels a token
TOKENS = 2_999  # with one before them; 1,024 cells of 4 tokens are the most that the whole is shown in


def open_long(open_view: Callable[..., Any], view: str, **options: Any) -> Any:
    """A view over the long text, the whole matrix of each of its maps computed."""
    opened = open_view("long", view, **options)
    if opened.server.viewer.readings["A"] is None:
        opened.go("")
        draw = random.Random(7)
        opened.read(" ".join(draw.choice(WORDS) for _ in range(TOKENS)))
        opened.go(view)
    wait_for_maps(opened, view)
    return opened


def go(opened: Any, view: str) -> None:
    """Open a view of one or two maps, and wait until they are computed and on the screen."""
    opened.go(view)
    wait_for_maps(opened, view)


def go_anew(opened: Any, view: str) -> None:
    """Open a view of maps as a link does: from elsewhere in the page, so that nothing is left of the maps before."""
    opened.go("")
    opened.tab.locator(".pictures-note[data-done=true]").wait_for()
    go(opened, view)


def wait_for_maps(opened: Any, view: str) -> None:
    for number in range(2 if "with=" in view else 1):
        opened.tab.locator(".head-panel").nth(number).locator(".map-state[data-how=exact]").wait_for()
    opened.tab.locator(".map-plot").first.evaluate("(plot) => plot.scrollIntoView({ block: 'end' })")


class Map:
    """One of the maps in the page."""

    def __init__(self, opened: Any, number: int = 0) -> None:
        self.opened, self.tab, self.panel = opened, opened.tab, opened.tab.locator(".head-panel").nth(number)
        self.plot = self.panel.locator(".map-plot")

    @property
    def scale(self) -> float:
        """Pixels a token."""
        return float(self.plot.get_attribute("data-scale"))

    @property
    def level(self) -> int:
        return int(self.plot.get_attribute("data-level"))

    def pixel(self, across: float, down: float) -> tuple[float, float]:
        """A place of the window, each from 0 to 1, on the screen."""
        box = self.plot.bounding_box()
        return box["x"] + across * box["width"], box["y"] + down * box["height"]

    def point(self, across: float, down: float) -> tuple[float, float]:
        """Move the pointer to a place of the window, once more where the page has moved meanwhile."""
        for _ in range(100):
            x, y = self.pixel(across, down)
            self.tab.mouse.move(x, y)
            self.tab.wait_for_timeout(20)
            if self.plot.evaluate("(plot) => plot.matches(':hover')") and self.pixel(across, down) == (x, y):
                return x, y
            self.plot.evaluate("(plot) => plot.scrollIntoView({ block: 'end' })")
        raise AssertionError("the map does not stay where it is")

    def click(self, across: float, down: float) -> None:
        self.tab.mouse.click(*self.point(across, down))

    def readout(self) -> str:
        return self.panel.locator(".map-readout").inner_text()

    def settle(self) -> None:
        """Every tile of the window has arrived."""
        self.panel.locator(".map-state[data-how=exact][data-tiles='0']").wait_for()

    def zoom_in(self, times: int = 40) -> None:
        """By wheel, at the pointer, each time twice as close; no further than it goes, where a wheel scrolls the page.

        The turns follow one another at once, so that they are one step of the history.
        """
        before = self.scale
        times = min(times, math.ceil(math.log2(CLOSEST / before)))
        for _ in range(times):
            self.tab.mouse.wheel(0, -500)
        self.opened.wait(lambda: self.scale >= 0.99 * min(before * 2**times, CLOSEST))
        self.settle()

    def read_at(self, across: float, down: float) -> str:
        """What is told of a place of the window."""
        told = self.panel.locator(".map-readout")
        self.tab.mouse.move(0, 0)
        expect(told).to_be_empty()
        self.point(across, down)
        expect(told).not_to_be_empty()
        return self.readout()

    def label_at(self, side: str, pixel: float) -> tuple[int, str]:
        """The name beside a place of the window."""
        start, extent = ("top", "height") if side == "rows" else ("left", "width")
        found = self.panel.locator(f".map-{side} .mark").evaluate_all(
            f"(marks) => marks.map((x) => [Number(x.dataset.token), x.textContent, x.getBoundingClientRect().{start},"
            f" x.getBoundingClientRect().{extent}])",
        )
        return next((token, text) for token, text, first, size in found if first <= pixel < first + size)
