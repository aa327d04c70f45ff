"""Appearance of the viewer: hostile text, keyboard, dark mode, Chinese, screen sizes, accessibility."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.browser.accessibility import serious_violations, violations_after_switch

HOSTILE = [
    "<script>window.hacked=1</script>",
    "<img src=x onerror=window.hacked=2>",
    "javascript:window.hacked=3",
    "a\u202eb\u202c",
    "\u2067c\u2069",
    "zero\u200bwidth\ufeff",
    "bell\x07null\x00escape\x1b[31m",
    "Z\u0351\u036b\u0343\u036a\u0302",
    "x" * 20_000,
]
VIEWS = ("", "head/1/2", "head/0/1?with=A.1.1&draw=lines")
BACKGROUND = "getComputedStyle(document.body).backgroundColor"


@pytest.mark.parametrize("language", ["en", "zh"])
def test_hostile_text_is_text(open_view, keep_picture, language):
    opened = open_view(viewport=(360, 740))
    tab = opened.tab
    tab.get_by_label("Language").select_option(language)
    opened.run_text(" ".join(HOSTILE))
    for view in VIEWS:
        opened.go(view)
        tab.locator(".word").nth(5).hover()
        tab.locator(".of-word").first.wait_for()
        assert tab.evaluate("window.hacked") is None
        expect(tab.locator("main img, main script, main iframe, main object")).to_have_count(0)
        assert tab.evaluate("document.documentElement.scrollWidth") <= 360, view
        keep_picture(opened, f"view-hostile-{language}-{view.split('?')[0].replace('/', '-') or 'home'}")
    words = tab.locator(".head-panel").first.locator(".word").all_text_contents()
    assert len(words) == len(opened.server.tokens())
    assert {"<", "script", ">", "window"} <= set(words)
    assert "RLO" in "".join(words)
    assert any(word.startswith("x" * 40 + "… ") for word in words)  # long tokens are truncated
    assert not any(mark in "".join(words) for mark in ("\u202e", "\u2067", "\u200b", "\x07", "\x00"))
    labels = tab.locator(".map-rows .mark").all_text_contents()
    assert not any(mark in "".join(labels) for mark in ("\u202e", "\u2067", "\u200b", "\x07", "\x00"))


def test_viewer_works_with_the_keyboard_alone(open_view):
    opened = open_view()
    tab = opened.tab

    def focused(expression: str):
        return tab.evaluate(f"document.activeElement.{expression}")

    def tab_to(expression: str, wanted) -> None:
        for _ in range(60):
            tab.keyboard.press("Tab")
            if focused(expression) == wanted:
                return
        raise AssertionError(f"Tab never reached {wanted}")

    tab.keyboard.press("Tab")
    assert focused("textContent") == "Skip to the content"
    tab_to("id", "text-A")
    tab.keyboard.press("Control+A")
    tab.keyboard.type("w1 w2 w3 w4")
    tab.keyboard.press("Control+Enter")
    expect(tab.locator(".word")).to_have_text(["[CLS]", "w1", "w2", "w3", "w4"])
    tab_to("className", "word")
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("ArrowRight")
    expect(tab.locator(".word-name")).to_have_text("“w2” in every head")
    tab.keyboard.press("Escape")
    expect(tab.locator(".word-name")).to_be_empty()
    tab_to("classList.contains('cell')", True)
    for key in ("ArrowRight", "ArrowDown", "ArrowRight"):
        tab.keyboard.press(key)
    assert focused("dataset.key") == "1.2"
    tab.keyboard.press("Enter")
    tab.get_by_role("heading", name="L1H2", exact=True).wait_for()
    opened.wait(lambda: focused("textContent") == "L1H2")
    tab_to("textContent", "Ablate this head")
    tab.keyboard.press("Enter")
    tab.locator(".ablated-heads .measure").wait_for()
    tab_to("className", "word")
    tab.keyboard.press("End")
    tab.get_by_role("heading", name="“w4” attends to").wait_for()
    tab_to("className", "map-plot")
    tab.keyboard.press("ArrowDown")
    expect(tab.locator(".map-readout")).to_contain_text("“w1” (1) attends to “[CLS]” (0)")


def test_drawings_follow_the_colour_scheme(open_view, keep_picture):
    opened = open_view(color_scheme="light")
    opened.run_text()
    tab = opened.tab
    corner = """(() => {
        const drawn = document.querySelector("a.cell canvas");
        const copy = new OffscreenCanvas(drawn.width, drawn.height).getContext("2d");
        copy.drawImage(drawn, 0, 0);
        return copy.getImageData(drawn.width - 1, 0, 1, 1).data[0];
    })()"""  # a key that is masked for the first query
    assert tab.evaluate(BACKGROUND) == "rgb(255, 255, 255)"
    assert tab.evaluate(corner) > 200
    tab.get_by_label("Colours").select_option("dark")
    assert tab.evaluate(BACKGROUND) == "rgb(20, 22, 29)"
    assert tab.evaluate(corner) < 60
    keep_picture(opened, "view-dark")
    opened.go("head/1/2")
    tab.locator(".map-state[data-state=exact]").wait_for()
    keep_picture(opened, "view-dark-head")


def test_no_string_is_left_in_english(open_view, keep_picture):
    opened = open_view()
    opened.run_text()
    tab = opened.tab
    tab.get_by_label("Language").select_option("zh")
    assert tab.evaluate("document.documentElement.lang") == "zh-Hans"
    names = {
        "KL",
        "Enter",
        "A",
        "B",
        "Ctrl+Enter",
        "Jensen-Shannon",
        "English",
        "SVG",
        "PNG",
        "polyhead",
        "llama",
        "float32",
        "cpu",
        "view",
    }
    tab.locator("a.cell").first.click()
    tab.locator(".ablate").click()
    tab.locator(".ablated-heads .measure").wait_for()
    for view in ("head", ""):
        if not view:
            tab.locator("nav.views a").first.click()
        texts = tab.locator(".note, h2, h3, h4, button:not(.word):not(.candidate), .facts, footer, nav a, label")
        for text in texts.all_inner_texts():
            words = {word for word in text.replace("，", " ").split() if word.isascii() and word.isalpha()}
            assert words <= names | {"LlamaForCausalLM"}, text
        keep_picture(opened, f"view-zh-{view or 'home'}")


def test_layout_from_phone_to_large_screen(read_sentence, keep_picture):
    widths = (360, 1280, 3840)
    opened = read_sentence((widths[0], 740))
    for view in VIEWS:
        opened.go(view)
        opened.tab.locator(".word").nth(3).click()
        opened.tab.locator(".of-word").first.wait_for()
        for width in widths:
            opened.of.change_size((width, 740))
            assert opened.tab.evaluate("document.documentElement.scrollWidth") <= width, view
            assert opened.tab.evaluate("document.querySelector('#polyhead-view').clientWidth") > 0.8 * width
            if width in (360, 3840):
                keep_picture(opened, f"view-{width}-{view.split('?')[0].replace('/', '-') or 'home'}")
        widths = widths[::-1]  # the next view opens at the current width


def test_axe_finds_nothing_serious(open_view):
    """All rules in light and English or in dark and Chinese; contrast and texts in both."""
    opened = open_view()
    tab = opened.tab
    opened.run_text("w1 w2 w3 w4")
    tab.locator(".candidates button").first.click()
    tab.locator(".newest").wait_for()
    for view in VIEWS:
        opened.go(view)
        tab.locator(".word").nth(3).click()
        tab.locator(".of-word").first.wait_for()
        if view == "head/1/2":
            tab.locator(".ablate").click()
            tab.locator(".ablated-heads .measure").wait_for()
        assert serious_violations(tab) == [], view
        assert violations_after_switch(opened) == [], view
