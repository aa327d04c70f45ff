"""The page of a training run in a real browser: a view per statistic, a line per head."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from playwright.sync_api import expect

from polyhead.report.training_page import write_training_page
from polyhead.training import HeadHistory, HeadLocation
from tests.browser.accessibility import bad_contrasts, serious_violations

LAYERS, HEADS = 7, 11


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    heads = [HeadLocation(f"layers.{i}.attn", "self", i, j, str(j)) for i in range(LAYERS) for j in range(HEADS)]
    history, generator = HeadHistory(tuple(heads), ("entropy", "max_logit")), torch.Generator().manual_seed(0)
    for step in range(50):
        history.append(step, torch.rand(2, len(heads), generator=generator) + step / 10, 3.0 - step / 50)
    return write_training_page(tmp_path_factory.mktemp("run") / "run.html", history, "my run")


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_every_view_draws_its_lines(open_page, page, keep_picture, scheme, width):
    opened = open_page(page, None, viewport=(width, 800), color_scheme=scheme)
    tab = opened.tab
    for view, lines in (("loss", 1), ("entropy", LAYERS * HEADS), ("max_logit", LAYERS * HEADS), ("numbers", 0)):
        tab.goto(f"{page.as_uri()}#/{view}")
        expect(tab.locator("section:visible")).to_have_count(1)
        expect(tab.locator(".views a[aria-current]:visible")).to_have_attribute("href", f"#/{view}")
        expect(tab.locator("section:visible svg.plot path:has(title)")).to_have_count(lines)
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
        keep_picture(opened, f"training-{view}-{scheme}-{width}")
        if view == "entropy":
            slider = tab.locator("section:visible input[type=range]")
            expect(tab.locator("section:visible output")).to_have_text("step 49")
            pixels = "(x) => x.toDataURL()"
            last = tab.locator("section:visible canvas").evaluate(pixels)
            slider.fill("3")
            expect(tab.locator("section:visible output")).to_have_text("step 3")
            assert tab.locator("section:visible canvas").evaluate(pixels) != last
            ramp = tab.locator("section:visible .ramp-bar").evaluate("(x) => getComputedStyle(x).backgroundImage")
            assert ("rgb(247, 250, 247)" if scheme == "light" else "rgb(25, 27, 37)") in ramp
            size = tab.locator("section:visible canvas").evaluate("(x) => [x.width, x.height]")
            assert size == [HEADS, LAYERS]
            tab.locator("section:visible canvas").hover(position={"x": 1, "y": 1})
            expect(tab.locator("section:visible output")).to_contain_text("step 3, L0H0: ")
        if view == "max_logit":
            titles = tab.locator("section:visible svg.plot path title").all_text_contents()
            assert titles.count("L6H10") == 1
            labels = tab.locator("section:visible svg.plot text").all_text_contents()
            assert {f"Layer {layer}" for layer in range(LAYERS)} <= set(labels)
            assert (serious_violations if scheme == "light" else bad_contrasts)(tab) == []
