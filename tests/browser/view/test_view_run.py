"""A training run in the live viewer: a grid of layers and heads with a slider over the steps, beside the lines."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from playwright.sync_api import expect

from polyhead.sources.packaged import run_folder
from polyhead.training import load_run
from tests.browser.view.conftest import Running

pytest.importorskip("pyarrow")


def test_a_slider_over_the_steps_of_the_packaged_run(tabs, keep_picture):
    folder = run_folder("tiny-run")
    steps, scores = load_run(folder).steps, load_run(folder)["induction_score"]
    with Running(None, folder) as server:
        of = tabs.take(lambda address: address == server.address)
        tab = of.page
        try:
            tab.goto(f"{server.address}#/induction_score")
            section = tab.locator("section:visible")
            expect(section.locator("svg.plot path:has(title)")).to_have_count(40)
            expect(section.locator("output")).to_have_text(f"step {steps[-1]}")
            layer, head = divmod(int(scores[-1].argmax()), 8)
            box = section.locator("canvas").bounding_box()
            place = {"x": (head + 0.5) * box["width"] / 8, "y": (layer + 0.5) * box["height"] / 5}
            for at in (0, len(steps) - 1):
                section.locator("input[type=range]").fill(str(at))
                section.locator("canvas").hover(position=place)
                value = f"{scores[at, 8 * layer + head]:#.3g}"
                expect(section.locator("output")).to_have_text(f"step {steps[at]}, L{layer}H{head}: {value}")
            keep_picture(SimpleNamespace(tab=tab), "view-run")
            assert [*of.problems, *tab.evaluate("window.violations")] == []
        finally:
            tabs.give_back([of])
