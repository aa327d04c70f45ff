"""The page of a plan in a real browser: a view per question, no requests, legible on any screen in light and dark."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from playwright.sync_api import expect

from polyhead.costs import planning, read_layout
from polyhead.costs.comparison import compare
from polyhead.costs.planning import Plan
from polyhead.costs.quantities import decimal_size, seconds, size
from polyhead.costs.timing.machine import Machine
from polyhead.report.plan_page import write_plan_page
from tests.browser.accessibility import bad_contrasts, bad_words, serious_violations

VIEWS = ("fit", "speed", "layout", "numbers")


@pytest.fixture(scope="module")
def plan() -> Plan:
    machine = Machine.load("cpu-2-cores")
    # Attention alone, so that machines with little memory are in the range of the chart.
    layout = dataclasses.replace(read_layout("gemma2-9b"), other_parameters=None)
    return planning.plan(layout, context=4096, dtype=torch.float32, machine=machine)


@pytest.fixture(scope="module")
def page(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("plan") / "plan.html"
    return write_plan_page(file, plan, compare(plan, Machine.load("cpu-2-cores")))


def at(open_page: Any, page: Path, view: str) -> Any:
    """Open a view by its link; it is one of several sections, of which the others are hidden."""
    tab = open_page(page, None).tab
    tab.goto(f"{page.as_uri()}#/{view}")
    expect(tab.locator(f'section[data-view="{view}"]:visible')).to_have_count(1)
    return tab


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_every_view_fits_its_screen_and_opens_without_errors(open_page, page, keep_picture, scheme, width):
    opened = open_page(page, None, viewport=(width, 800), color_scheme=scheme)
    tab = opened.tab
    figures = 0
    for view in VIEWS:
        tab.goto(f"{page.as_uri()}#/{view}")
        expect(tab.locator(f'section[data-view="{view}"]:visible')).to_have_count(1)
        expect(tab.locator("section:visible")).to_have_count(1)
        expect(tab.locator(".views a[aria-current]:visible")).to_have_attribute("href", f"#/{view}")
        figures += tab.locator("figure:visible").count()
        tab.evaluate("document.querySelectorAll('details').forEach((x) => (x.open = true))")
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert tab.evaluate(_TOO_WIDE) == []
        assert tab.evaluate(_OVERLAPS) == []  # no labels overlap or exceed the chart
        tab.evaluate("document.querySelectorAll('details').forEach((x) => (x.open = false))")
        if view in ("fit", "numbers"):
            assert (serious_violations if scheme == "light" else bad_contrasts)(tab) == []
        if width == 1280:
            assert tab.evaluate("document.documentElement.scrollHeight") < 2 * 800
        keep_picture(opened, f"plan-{view}-{scheme}-{width}")
    assert figures == 3
    # Every line and point has a colour of the style sheet, not the black of an undefined variable.
    fills = tab.evaluate(
        "[...new Set([...document.querySelectorAll('svg circle')].map((x) => getComputedStyle(x).fill))]"
    )
    assert len(fills) == 8
    assert "rgb(0, 0, 0)" not in fills


def test_values_are_formatted_as_in_the_tables(open_page, page, plan):
    tab = at(open_page, page, "fit")
    for phase, name in zip(plan.phases, ("training step", "prefill", "decode step"), strict=True):
        title = f"4K tokens of context: {name} {decimal_size(phase.needed)}"
        assert title in tab.locator("svg:visible title").all_text_contents()
    labels = set(tab.locator("svg:visible text").all_text_contents())
    assert {"16 GB", "32 GB", "24, 25.2 GB", "128", "8K", "tokens of context", "peak memory", "decode step"} <= labels
    tab.goto(f"{page.as_uri()}#/speed")
    for phase, name, tokens in zip(
        plan.phases, ("training step", "prefill", "decode step"), (4096, 4096, 1), strict=True
    ):
        tab.get_by_role("group", name="Phase").get_by_role("button", name=name).click()
        title = f"4K tokens of context: cpu-2-cores (measured) {seconds(phase.timing.device_seconds / tokens)}"
        assert title in tab.locator("svg:visible title").all_text_contents()
    assert {"20 ms", "100 ms", "200 ms"} <= set(tab.locator("svg:visible text").all_text_contents())


def test_views_are_reached_by_keyboard_and_by_links(open_page, page):
    tab = open_page(page, None).tab
    expect(tab.locator("section:visible h2")).to_have_text("Will it fit?")
    tab.get_by_role("link", name="Which layout?").focus()
    tab.keyboard.press("Enter")
    expect(tab.locator("section:visible h2")).to_have_text("Which layout?")
    assert tab.url.endswith("#/layout")
    expect(tab.locator("section:visible h2")).to_be_focused()
    tab.locator("summary:visible").first.focus()
    tab.keyboard.press("Enter")
    expect(tab.locator("details:visible table").first).to_be_visible()
    tab.go_back()
    expect(tab.locator("section:visible h2")).to_have_text("Will it fit?")


def test_the_language_is_part_of_the_link(open_page, page):
    tab = at(open_page, page, "speed")
    tab.get_by_label("Language").select_option("zh")
    expect(tab.locator("section:visible h2")).to_have_text("有多快？")
    assert tab.url.endswith("#/speed?lang=zh")
    expect(tab.locator("figure:visible h3")).to_have_text("训练一步：前向与反向：每词元设备时间")
    tab.get_by_role("link", name="全部数字").click()
    expect(tab.locator("section:visible h2")).to_have_text("全部数字")
    assert tab.evaluate("document.documentElement.lang") == "zh-Hans"
    assert bad_words(tab) == []
    tab.get_by_label("语言").select_option("en")
    expect(tab.locator("section:visible h2")).to_have_text("All numbers")


def test_a_chart_is_saved_with_its_title_and_the_names_of_its_series(open_page, page):
    tab = at(open_page, page, "layout")
    with tab.expect_download() as waiting:
        tab.get_by_role("button", name="Save “Cost relative to MHA, by number of KV heads” as SVG").click()
    texts = {x.text for x in ElementTree.parse(waiting.value.path()).iter() if x.tag.endswith("text")}
    assert {"cache per token", "device time, decode step", "relative to MHA", "1x", "1/4", "GQA-8"} <= texts
    assert "Cost relative to MHA, by number of KV heads" in texts


def test_everything_but_the_charts_is_readable_without_javascript(open_page, page, plan):
    tab = open_page(page, None, java_script_enabled=False).tab
    expect(tab.locator("section:visible")).to_have_count(4)
    expect(tab.locator(".answer:visible")).to_have_count(3)
    expect(tab.locator(".cards:visible li")).to_have_count(4)
    expect(tab.locator("tr.total:visible td").last).to_have_text(seconds(plan.phases[-1].timing.seconds))
    expect(tab.locator("noscript p").first).to_be_visible()
    tab.locator("summary:visible", has_text="by context length").first.click()
    row = tab.locator("details[open] tr:visible", has_text="4K").last
    expect(row.locator("td").last).to_have_text(size(plan.phases[0].materialised.total))
    tab.get_by_role("link", name="How fast?").click()
    assert tab.url.endswith("#/speed")


_TOO_WIDE = """
[...document.querySelectorAll('.table-scroll')].filter((x) => x.offsetParent && x.scrollWidth > x.clientWidth + 1)
  .map((x) => x.getAttribute('aria-label'))
"""
_OVERLAPS = """
[...document.querySelectorAll('svg')].filter((svg) => svg.checkVisibility()).flatMap((svg) => {
  const edge = svg.getBoundingClientRect();
  const words = [...svg.querySelectorAll('text')].map((x) => [x.textContent, x.getBoundingClientRect()]);
  const beyond = words.filter(([, at]) => at.left < edge.left - 1 || at.right > edge.right + 1).map(([word]) => word);
  const crossed = words.flatMap(([word, a], i) => words.slice(i + 1)
    .filter(([, b]) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1)
    .map(([other]) => `${word} / ${other}`));
  return [...beyond, ...crossed];
})
"""
