"""The page of a plan in a real browser: no requests, legible in light and dark, large and small."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from playwright.sync_api import expect

from polyhead.costs import planning, read_layout
from polyhead.costs.curves import over_context, over_heads
from polyhead.costs.planning import Plan
from polyhead.costs.quantities import seconds, size
from polyhead.costs.timing.machine import Machine
from polyhead.report.plan_page import write_plan_page
from tests.browser.accessibility import serious_violations


@pytest.fixture(scope="module")
def plan() -> Plan:
    machine = Machine.load("cpu-2-cores")
    return planning.plan(read_layout("gemma2-9b"), context=4096, dtype=torch.float32, machine=machine)


@pytest.fixture(scope="module")
def page(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    machine = Machine.load("cpu-2-cores")
    file = tmp_path_factory.mktemp("plan") / "plan.html"
    return write_plan_page(file, plan, over_context(plan, machine), over_heads(plan, machine))


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_page_of_a_plan_opens_without_errors(open_page, page, keep_picture, scheme, width):
    opened = open_page(page, None, viewport=(width, 800), color_scheme=scheme)
    expect(opened.tab.locator("figure")).to_have_count(3 * 3 + 1)
    assert opened.tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    # Every bar and point has a colour of the style sheet, not the black of an undefined variable.
    fills = opened.tab.evaluate(
        "[...new Set([...document.querySelectorAll('rect, circle')].map((x) => getComputedStyle(x).fill))]"
    )
    assert len(fills) >= 4
    assert "rgb(0, 0, 0)" not in fills
    # No labels overlap or exceed the chart.
    assert opened.tab.evaluate(_OVERLAPS) == []
    assert serious_violations(opened.tab) == []
    keep_picture(opened, f"plan-{scheme}-{width}")


def test_values_are_formatted_as_in_the_tables(open_page, page, plan):
    tab = open_page(page, None).tab
    titles = set(tab.locator("svg title").all_text_contents())
    for phase, tokens in zip(plan.phases, (4096, 4096, 1), strict=True):
        assert f"4K tokens of context: attention {seconds(phase.timing.stages['attention'] / tokens)}" in titles
        assert f"4K tokens of context: activations {size(phase.fused.activations)}" in titles
        assert f"4K tokens of context: materialised weights {size(phase.materialised.total)}" in titles
    assert f"4K tokens of context: cache {size(plan.cache_bytes)}" in titles  # 2.625 GiB: halves are rounded alike
    # Bars are stacked in the order of the legend, with heights that match the tick labels.
    first = tab.locator("figure").first
    assert (
        first.locator("svg")
        .get_attribute("aria-label")
        .endswith(": time per token: projection; positions, norms; attention; output; launch overhead")
    )
    labels = first.locator("svg text").all_text_contents()
    assert {"0 s", "600 ms", "128", "8K", "tokens of context", "time per token", "launch overhead"} <= set(labels)


def test_a_chart_is_saved_with_its_title_and_the_names_of_its_series(open_page, page):
    tab = open_page(page, None).tab
    with tab.expect_download() as waiting:
        tab.get_by_role("button", name="Save “Training step, forward and backward, relative to").first.click()
    texts = {x.text for x in ElementTree.parse(waiting.value.path()).iter() if x.tag.endswith("text")}
    assert {"exponentials", "memory, fused attention", "predicted time", "relative cost", "128x", "1x"} <= texts
    assert any((text or "").startswith("Training step, forward and backward") for text in texts)


def test_tables_and_cards_are_readable_without_javascript(open_page, page, plan):
    tab = open_page(page, None, java_script_enabled=False).tab
    expect(tab.locator("table")).to_have_count(3)
    expect(tab.locator(".cards li")).to_have_count(4)
    expect(tab.locator("tr.total td").last).to_have_text(seconds(plan.phases[-1].timing.seconds))
    expect(tab.locator("noscript p").first).to_be_visible()


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
