"""The page of a plan in a real browser: nothing is fetched, and it is readable in light and dark, large and small."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from playwright.sync_api import expect

from polyhead.costs import planning, read_layout
from polyhead.costs.curves import over_context, over_heads
from polyhead.costs.timing.machine import Machine
from polyhead.report.plan_page import write_plan_page
from tests.browser.accessibility import serious_violations


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    machine = Machine.load("cpu-2-cores")
    plan = planning.plan(read_layout("gemma2-9b"), context=4096, dtype=torch.float32, machine=machine)
    file = tmp_path_factory.mktemp("plan") / "plan.html"
    return write_plan_page(file, plan, over_context(plan, machine), over_heads(plan, machine))


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_it_is_read_without_trouble(open_page, page, keep_picture, scheme, width):
    opened = open_page(page, None, viewport=(width, 800), color_scheme=scheme)
    expect(opened.tab.locator("figure")).to_have_count(3 * 3 + 1)
    assert opened.tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    # Every bar and point is drawn in a colour of the style, and none in the black of a class that is missing.
    fills = opened.tab.evaluate(
        "[...new Set([...document.querySelectorAll('rect, circle')].map((x) => getComputedStyle(x).fill))]"
    )
    assert len(fills) >= 4
    assert "rgb(0, 0, 0)" not in fills
    # No word of a chart lies on another, nor beyond its edge.
    assert opened.tab.evaluate(_OVERLAPS) == []
    assert serious_violations(opened.tab) == []
    keep_picture(opened, f"plan-{scheme}-{width}")


_OVERLAPS = """
[...document.querySelectorAll('svg')].flatMap((svg) => {
  const edge = svg.getBoundingClientRect();
  const words = [...svg.querySelectorAll('text')].map((x) => [x.textContent, x.getBoundingClientRect()]);
  const beyond = words.filter(([, at]) => at.left < edge.left - 1 || at.right > edge.right + 1).map(([word]) => word);
  const crossed = words.flatMap(([word, a], i) => words.slice(i + 1)
    .filter(([, b]) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1)
    .map(([other]) => `${word} / ${other}`));
  return [...beyond, ...crossed];
})
"""
