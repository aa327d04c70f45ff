"""The map of a long text, in tokens and pixels."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

from playwright.sync_api import expect

from tests.inspection.small_models import WORDS

CLOSEST = 40  # pixels per token
TOKENS = 2_999  # without the special token; the whole matrix has at most 1,024 cells, of 4 tokens each


def open_long(open_view: Callable[..., Any], view: str, **options: Any) -> Any:
    """Open a view of the long text, and wait until its maps are exact."""
    opened = open_view("long", view, **options)
    if opened.server.viewer.traces["A"] is None:
        opened.go("")
        draw = random.Random(7)
        opened.run_text(" ".join(draw.choice(WORDS) for _ in range(TOKENS)))
        opened.go(view)
    wait_for_maps(opened, view)
    return opened


def go(opened: Any, view: str) -> None:
    """Open a view of one or two maps, and wait until they are exact and visible."""
    opened.go(view)
    wait_for_maps(opened, view)


def go_anew(opened: Any, view: str) -> None:
    """Open a view of maps from another view, so that new maps are created."""
    opened.go("")
    opened.tab.locator(".pictures-note[data-done=true]").wait_for()
    go(opened, view)


def wait_for_maps(opened: Any, view: str) -> None:
    for number in range(2 if "with=" in view else 1):
        opened.tab.locator(".head-panel").nth(number).locator(".map-state[data-state=exact]").wait_for()
    opened.tab.locator(".map-plot").first.evaluate("(plot) => plot.scrollIntoView({ block: 'end' })")


class Map:
    """One of the maps in the page."""

    def __init__(self, opened: Any, number: int = 0) -> None:
        self.opened, self.tab, self.panel = opened, opened.tab, opened.tab.locator(".head-panel").nth(number)
        self.plot = self.panel.locator(".map-plot")

    @property
    def scale(self) -> float:
        """Pixels per token."""
        return float(self.plot.get_attribute("data-scale"))

    @property
    def level(self) -> int:
        return int(self.plot.get_attribute("data-level"))

    def pixel(self, across: float, down: float) -> tuple[float, float]:
        """Return the screen position of a point of the window, given from 0 to 1."""
        box = self.plot.bounding_box()
        return box["x"] + across * box["width"], box["y"] + down * box["height"]

    def point(self, across: float, down: float) -> tuple[float, float]:
        """Move the pointer to a point of the window, again if the page has scrolled."""
        for _ in range(100):
            x, y = self.pixel(across, down)
            self.tab.mouse.move(x, y)
            self.tab.wait_for_timeout(20)
            if self.plot.evaluate("(plot) => plot.matches(':hover')") and self.pixel(across, down) == (x, y):
                return x, y
            self.plot.evaluate("(plot) => plot.scrollIntoView({ block: 'end' })")
        raise AssertionError("the map keeps moving")

    def click(self, across: float, down: float) -> None:
        self.tab.mouse.click(*self.point(across, down))

    def readout(self) -> str:
        return self.panel.locator(".map-readout").inner_text()

    def settle(self) -> None:
        """Wait for all tiles of the window."""
        self.panel.locator(".map-state[data-state=exact][data-tiles='0']").wait_for()

    def zoom_in(self, times: int = 40) -> None:
        """Zoom by wheel at the pointer, doubling the scale each time, up to its maximum.

        The events follow at once, so that they are one entry of the history. Beyond the maximum the page would scroll.
        """
        before = self.scale
        times = min(times, math.ceil(math.log2(CLOSEST / before)))
        for _ in range(times):
            self.tab.mouse.wheel(0, -500)
        self.opened.wait(lambda: self.scale >= 0.99 * min(before * 2**times, CLOSEST))
        self.settle()

    def read_at(self, across: float, down: float) -> str:
        """Return the readout at a point of the window."""
        readout = self.panel.locator(".map-readout")
        self.tab.mouse.move(0, 0)
        expect(readout).to_be_empty()
        self.point(across, down)
        expect(readout).not_to_be_empty()
        return self.readout()

    def label_at(self, side: str, pixel: float) -> tuple[int, str]:
        """Return the token on an axis beside a point of the window."""
        start, extent = ("top", "height") if side == "rows" else ("left", "width")
        found = self.panel.locator(f".map-{side} .mark").evaluate_all(
            f"(marks) => marks.map((x) => [Number(x.dataset.token), x.textContent, x.getBoundingClientRect().{start},"
            f" x.getBoundingClientRect().{extent}])",
        )
        return next((token, text) for token, text, first, size in found if first <= pixel < first + size)
