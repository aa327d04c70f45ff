"""Hostile text of a corpus: it does not run, does not break the page, and is visible."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import written
from tests.browser.payloads import synthetic, with_tokens

TOKENS = [
    "<script>window.hacked=1</script>",
    "</script><script>window.hacked=2</script>",
    "<img src=x onerror=window.hacked=3>",
    "<svg/onload=window.hacked=4>",
    "<!--<script>",
    "javascript:window.hacked=5",
    "{{constructor.constructor('window.hacked=6')()}}",
    "'\"`${window.hacked=7}&lt;&#x3C;",
    "a\u202eb\u202c",
    "\u2067c\u2069",
    "zero\u200bwidth\ufeff",
    "bell\x07null\x00escape\x1b[31m",
    "line\u2028paragraph\u2029",
    "\U0001f600 Z\u0351\u036b\u0343\u036a\u0302",
    "",
    " ",
    "\n",
    "x" * 100_000,
]
VIEWS = ("overview", "head/0/1?draw=lines&word=8", "head/1/1?word=17", "similar", "importance", "syntax", "findings")


@pytest.mark.parametrize("language", ["en", "zh"])
def test_hostile_text_neither_runs_nor_breaks_the_page(open_page, keep_picture, tmp_path, language):
    page = with_tokens({**synthetic(), "lang": language}, TOKENS)
    opened = open_page(written(page, tmp_path / "hostile.html"), viewport=(360, 740))
    tab = opened.tab
    for view in VIEWS:
        opened.go(view)
        assert tab.evaluate("window.hacked") is None
        expect(tab.locator("main img, main script, main iframe, main object")).to_have_count(0)
        assert tab.evaluate("document.documentElement.scrollWidth") <= 360, view
        keep_picture(opened, f"hostile-{language}-{view.split('?')[0].replace('/', '-')}")
    # The data are complete: every head and every word.
    opened.go("overview")
    expect(tab.locator("a.cell")).to_have_count(23)
    opened.go("head/0/1")
    expect(tab.locator(".word-line button")).to_have_count(len(TOKENS))


def test_invisible_characters_are_shown_by_name(open_page, tmp_path):
    tab = open_page(written(with_tokens(synthetic(), TOKENS), tmp_path / "hostile.html"), "head/0/1").tab
    words = tab.locator(".word-line button")
    shown = [words.nth(i).text_content() for i in range(len(TOKENS))]
    assert shown[0] == TOKENS[0]
    assert shown[8:13] == [
        "aRLObPDF",
        "RLIcPDI",
        "zeroZWSPwidthBOM",
        "bellU+0007nullU+0000escapeU+001B[31m",
        "lineU+2028paragraphU+2029",
    ]
    assert shown[14:17] == ["∅", "␣", "LF"]
    assert words.nth(8).locator(".invisible").all_text_contents() == ["RLO", "PDF"]
    # A bidirectional override does not affect other tokens.
    assert words.nth(8).locator("bdi").evaluate("x => getComputedStyle(x).unicodeBidi") == "isolate"
    assert shown[17] == f"{'x' * 40}… 100000"
    assert words.nth(17).bounding_box()["height"] < 200


def test_a_hostile_word_is_saved_as_text(open_page, tmp_path):
    opened = open_page(written(with_tokens(synthetic(), TOKENS), tmp_path / "hostile.html"), "head/0/1")
    tab = opened.tab
    with tab.expect_download() as waiting:
        tab.get_by_role("button", name="Save “Attention on example texts” as SVG").click()
    root = ElementTree.parse(waiting.value.path()).getroot()
    tags = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert tags == {"svg", "rect", "text", "path"}
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert "<script>window.hacke…" in texts
    assert not any("\u202e" in (text or "") for text in texts)
