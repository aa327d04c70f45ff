"""Appearance of the page: dark and light, English and Chinese, screen sizes, accessibility."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.browser.accessibility import bad_contrasts, bad_words, serious_violations, violations_after_switch
from tests.browser.conftest import written
from tests.browser.payloads import few_heads

VIEWS = (
    "overview",
    "overview?color=copying&role=sink",
    "charts?column=output_norm&numbers=1&by=role",
    "head/2/1?word=3&draw=lines",
    "head/3/1",
    "similar",
    "importance",
    "syntax",
    "findings",
)
BACKGROUND = "getComputedStyle(document.body).backgroundColor"


@pytest.mark.parametrize(("scheme", "colour"), [("light", "rgb(255, 255, 255)"), ("dark", "rgb(20, 22, 29)")])
def test_theme_follows_the_system(open_page, scheme, colour):
    opened = open_page(color_scheme=scheme)
    assert opened.tab.evaluate(BACKGROUND) == colour
    opened.of.change_scheme("light" if scheme == "dark" else "dark")
    other = {"light": "rgb(20, 22, 29)", "dark": "rgb(255, 255, 255)"}[scheme]
    expect(opened.tab.locator("body")).to_have_css("background-color", other)


def test_chosen_theme_is_remembered(open_page):
    tab = open_page(color_scheme="light").tab
    # Far from the diagonal, where head 0 of the payload does not look.
    corner = """(() => {
        const copy = new OffscreenCanvas(7, 7).getContext("2d");
        copy.drawImage(document.querySelector("a.cell canvas"), 0, 0);
        return copy.getImageData(6, 0, 1, 1).data[0];
    })()"""
    assert tab.evaluate(corner) > 200
    tab.get_by_label("Colours").select_option("dark")
    assert tab.evaluate(BACKGROUND) == "rgb(20, 22, 29)"
    assert tab.evaluate(corner) < 60  # a canvas has no style sheet and is painted again
    tab.reload()
    tab.locator("main h2").first.wait_for()
    assert tab.evaluate(BACKGROUND) == "rgb(20, 22, 29)"
    tab.get_by_label("Colours").select_option("auto")
    assert tab.evaluate(BACKGROUND) == "rgb(255, 255, 255)"


def test_language_is_switched_and_kept_in_the_link(open_page):
    opened = open_page()
    tab = opened.tab
    tab.get_by_label("Language").select_option("zh")
    assert tab.evaluate("document.documentElement.lang") == "zh-Hans"
    expect(tab.locator("nav.views a")).to_have_text(["总览", "图表", "相似的头", "头的重要性", "句法", "发现"])
    expect(tab.locator(".findings a bdi").first).to_have_text("中文：L2H1 repeats")
    assert tab.locator("a.cell").first.get_attribute("aria-label").startswith("L0H0")
    opened.go("importance?lang=zh")
    tab.reload()
    expect(tab.locator("main h2").first).to_have_text("头的重要性")
    expect(tab.locator(".lead strong")).to_have_text(re.compile(r"^L\dH\d（[^（）]+）在此文本上排名第一。$"))


def test_no_string_of_the_interface_is_left_in_english(open_page):
    """In Chinese, the interface has no English words but names."""
    opened = open_page(view="overview?lang=zh")
    tab = opened.tab
    names = {"SVG", "PNG", "CSV", "English", "Transformer", "polyhead"}
    for view in ("overview", "charts", "similar", "importance", "syntax", "findings"):
        opened.go(f"{view}?lang=zh")
        texts = tab.locator("nav.views, .switches, main h2, main h3, .lead, figcaption, footer")
        for text in texts.all_inner_texts():
            words = {word for word in text.split() if word.isascii() and word.isalpha()}
            assert words <= names | {"Encoder", "Decoder", "to", "encoder", "How", "much", "worse"}, (view, text)


def test_chinese_glyphs_are_drawn(open_page, keep_picture):
    """A browser without a font for a character draws the same box for each."""
    opened = open_page(view="overview?lang=zh")
    drawn = opened.tab.evaluate(
        """(words) => [...words].map((word) => {
          const canvas = new OffscreenCanvas(40, 40);
          const context = canvas.getContext("2d");
          context.font = `32px ${getComputedStyle(document.body).fontFamily}`;
          context.fillText(word, 4, 32);
          return context.getImageData(0, 0, 40, 40).data.join();
        })""",
        "层头词元看",
    )
    assert len(set(drawn)) == 5, "there is no font for Chinese; `make system` installs one"
    keep_picture(opened, "chinese-overview")
    opened.go("findings?lang=zh")
    keep_picture(opened, "chinese-findings")


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_page_never_scrolls_sideways(open_page, keep_picture, language):
    widths = (360, 1280)
    opened = open_page(view=f"overview?lang={language}", viewport=(widths[0], 740))
    for view in VIEWS:
        opened.go(view)
        assert opened.tab.evaluate("document.documentElement.lang").startswith(language)
        for width in widths:
            opened.of.change_size((width, 740))
            assert opened.tab.evaluate("document.documentElement.scrollWidth") <= width, view
            if width == 360:
                keep_picture(opened, f"phone-{language}-{view.split('?')[0].replace('/', '-')}")
        widths = widths[::-1]  # the next view opens at the current width


# Pairs of labels of a chart that overlap by more than two pixels.
OVERLAPS = """() => [...document.querySelectorAll(".chart svg")].flatMap((svg) => {
  const labels = [...svg.querySelectorAll("text")].filter((x) => x.textContent && x.checkVisibility());
  const boxes = labels.map((x) => x.getBoundingClientRect());
  const shared = (a, b) => Math.min(a.right - b.left, b.right - a.left, a.bottom - b.top, b.bottom - a.top);
  return labels.flatMap((x, i) => labels.slice(i + 1).flatMap((y, j) =>
    shared(boxes[i], boxes[i + 1 + j]) > 2 ? [`${x.textContent} | ${y.textContent}`] : []));
})"""


@pytest.mark.parametrize("view", ["charts", "similar", "importance", "head/1/2"])
def test_labels_of_charts_do_not_overlap_on_a_phone(open_page, view):
    tab = open_page(view=view, viewport=(390, 844)).tab
    tab.locator(".chart svg").first.wait_for()
    assert tab.evaluate(OVERLAPS) == []


def test_large_screen_is_filled(open_page, keep_picture):
    opened = open_page(viewport=(3840, 2160))
    width = opened.tab.evaluate("document.querySelector('#polyhead-page').clientWidth")
    assert width > 3000
    assert float(opened.tab.evaluate("getComputedStyle(document.body).fontSize").removesuffix("px")) > 20
    keep_picture(opened, "4k-overview")


def test_axe_finds_nothing_serious_in_any_view(open_page, keep_picture, tmp_path):
    """All rules in light and English or in dark and Chinese; contrast and texts in both."""
    opened = open_page(written(few_heads(), tmp_path / "page.html"))
    tab = opened.tab

    def keep() -> None:
        state = f"{opened.of.color_scheme}-{tab.evaluate('document.documentElement.lang')[:2]}"
        keep_picture(opened, f"desk-{state}-{view.split('?')[0].replace('/', '-')}")

    for view in VIEWS:
        opened.go(view)
        for closed in tab.locator("main details:not([open]) > summary").all()[:3]:
            closed.click()
        assert serious_violations(tab) == [], view
        keep()
        assert violations_after_switch(opened) == [], view
        keep()


def test_axe_detects_bad_contrast_and_missing_names(open_page):
    tab = open_page(view="importance", fresh=True).tab
    assert (bad_contrasts(tab), bad_words(tab)) == ([], [])
    tab.locator("p.facts").evaluate("(line) => { line.style.color = 'rgb(200, 200, 200)'; }")
    (contrast,) = bad_contrasts(tab)
    assert contrast.startswith('color-contrast: <p class="facts"')
    tab.locator("main button").last.evaluate("(button) => { button.replaceChildren(); button.ariaLabel = '' }")
    tab.evaluate("document.documentElement.lang = 'xx-nonsense'")
    assert {words.partition(":")[0] for words in bad_words(tab)} == {"button-name", "html-lang-valid"}
