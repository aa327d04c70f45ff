"""Lines between words in the viewer, and texts that are too long for the window."""

from __future__ import annotations

from playwright.sync_api import expect

from tests.browser.saving import SVG, saved_svg
from tests.browser.view.map_page import go, go_anew

SCROLLS = "(x) => ({ top: x.scrollTop, shown: x.clientHeight, all: x.scrollHeight })"
# Whether a chosen word is visible inside the box that scrolls.
IS_VISIBLE = """(word) => {
  const [inner, outer] = [word, word.closest(".text-words, .lines")].map((x) => x.getBoundingClientRect());
  return inner.top >= outer.top && inner.bottom <= outer.bottom;
}"""


def test_lines_join_the_words_of_a_text(read_sentence, keep_picture):
    opened = read_sentence()
    opened.go("head/1/2")
    tab, tokens = opened.tab, list(opened.server.tokens())
    expect(tab.locator(".lines")).to_have_count(0)
    tab.get_by_role("button", name="Words and lines").click()
    drawn = int((opened.server.weights()[1, 2] >= 0.02).sum())
    expect(tab.locator(".lines path")).to_have_count(drawn)
    assert tab.locator(".lines text").all_text_contents() == ["Queries", "Keys", *tokens, *tokens]
    assert tab.url.endswith("?draw=lines")
    tab.locator(".word").nth(6).click()
    expect(tab.locator(".lines text[font-weight='700']")).to_have_text([tokens[6], tokens[6]])
    root = saved_svg(tab, tab.locator(".head-lines"))
    assert len(list(root.iter(f"{SVG}path"))) == drawn
    keep_picture(opened, "view-lines")


def test_long_text_scrolls_to_the_chosen_word(opened_long, keep_picture):
    opened, tab = opened_long, opened_long.tab
    go(opened, "head/1/2?word=1900&draw=lines")
    tab.get_by_text("Tokens 1,792 to 2,047 of 3,000").wait_for()
    token = opened.server.tokens()[1900]
    for box, chosen in ((".text-words", ".word[aria-pressed=true]"), (".lines", ".lines text[font-weight='700']")):
        expect(tab.locator(chosen).first).to_have_text(token)
        scroll = tab.locator(box).evaluate(SCROLLS)
        assert scroll["top"] > scroll["shown"]
        assert scroll["all"] > 3 * scroll["shown"]
        assert tab.locator(chosen).first.evaluate(IS_VISIBLE)
    scroll = tab.locator("#text-A").evaluate(SCROLLS)
    assert scroll["all"] > 3 * scroll["shown"]
    for width in (390, 1280):
        opened.of.change_size((width, 800))
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
    keep_picture(opened, "view-long-lines")


def test_words_of_a_long_text_are_added_while_they_scroll(opened_long):
    """The word at the top of the box stays there when words are added before it."""
    opened, tab, tokens = opened_long, opened_long.tab, opened_long.server.tokens()
    box, words = tab.locator(".text-words"), tab.locator(".word")
    expect(words).to_have_count(300)
    for _ in range(10):
        box.evaluate("(box) => { box.scrollTop = box.scrollHeight }")
        tab.wait_for_timeout(50)
    expect(words).to_have_count(len(tokens))
    assert words.all_text_contents() == list(tokens)
    assert words.last.evaluate(IS_VISIBLE)
    go_anew(opened, "head/1/2?word=1204")  # the fifth word of a part
    tab.get_by_text("Tokens 1,200 to 1,499 of 3,000").wait_for()
    word = tab.locator(".word[aria-pressed=true]")
    before = word.bounding_box()["y"]
    box.evaluate("(box) => box.dispatchEvent(new Event('scroll'))")
    tab.get_by_text("Tokens 900 to 1,499 of 3,000").wait_for()
    assert abs(word.bounding_box()["y"] - before) < 40  # lines may break elsewhere
