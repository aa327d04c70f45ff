"""Attention on the words of a sentence, by pointer and by keyboard alone."""

from __future__ import annotations

from playwright.sync_api import expect

from tests.browser.payloads import ANSWER, SENTENCE, synthetic, weights

PAGE = synthetic()


def strongest(tab, index: int) -> list[tuple[str, str]]:
    """Return the words and shares of one of the lists of top words."""
    rows = tab.locator(".strongest > div").nth(index).locator("li").all_inner_texts()
    return [tuple(row.rsplit(" ", 1)) for row in rows]


def expected(shares, words) -> list[tuple[str, str]]:
    order = sorted(range(len(words)), key=lambda i: -float(shares[i]))[:5]
    digits = [0 if shares[i] >= 0.1 else 1 for i in order]
    return [
        (words[i], f"{float(shares[i]):.{some}%}".replace(".0%", "%")) for i, some in zip(order, digits, strict=True)
    ]


def same(shown, wanted) -> None:
    """Words of equal weight may have any order."""
    assert [share for _, share in shown] == [share for _, share in wanted]
    assert [word for word, share in shown if share != wanted[-1][1]] == [
        word for word, share in wanted if share != wanted[-1][1]
    ]


def test_chosen_word_shows_what_it_attends_to_and_what_attends_to_it(open_page):
    tab = open_page(view="head/1/2", color_scheme="light").tab
    here = weights(PAGE, 0, 1)[2]
    expect(tab.locator(".strongest h4")).to_have_text(["Most attended, on average"])
    same(strongest(tab, 0), expected(here.mean(0), SENTENCE))
    words = tab.locator(".word-line button")
    words.nth(5).click()
    expect(tab.locator(".strongest h4")).to_have_text(["“own” attends to", "“own” is attended to by"])
    same(strongest(tab, 0), expected(here[5], SENTENCE))
    same(strongest(tab, 1), expected(here[:, 5], SENTENCE))
    shades = tab.eval_on_selector_all(".word-line button", "all => all.map(x => x.style.background)")
    assert shades[3] != shades[0] != shades[1]
    bars = tab.eval_on_selector_all(".word-line button", "all => all.map(x => x.style.boxShadow)")
    heights = [float(bar.split("px")[0].split(" ")[-1]) if bar != "none" else 0.0 for bar in bars]
    assert heights.index(max(heights)) == 7
    words.nth(5).click()
    expect(tab.locator(".strongest h4")).to_have_text(["Most attended, on average"])


def test_cross_attention_has_two_lines_of_words(open_page):
    tab = open_page(view="head/3/1").tab
    here = weights(PAGE, 1, 3)[1]
    lines = tab.locator(".word-line")
    expect(lines.nth(0).locator("button")).to_have_text(list(ANSWER))
    expect(lines.nth(1).locator("button")).to_have_text(list(SENTENCE))
    lines.nth(0).locator("button").nth(2).click()
    expect(tab.locator(".strongest h4")).to_have_text(["“voit” attends to"])
    same(strongest(tab, 0), expected(here[2], SENTENCE))
    lines.nth(1).locator("button").nth(2).click()
    expect(tab.locator(".strongest h4")).to_have_text(["“cat” is attended to by"])
    same(strongest(tab, 0), expected(here[:, 2], ANSWER))
    assert "word=k2" in tab.url


def test_lines_join_the_words(open_page):
    tab = open_page(view="head/1/2?draw=lines&word=5").tab
    svg = tab.locator(".lines svg")
    assert svg.locator("text").all_text_contents()[2:] == [*SENTENCE, *SENTENCE]
    drawn = int((weights(PAGE, 0, 1)[2] >= 0.02).sum())
    expect(svg.locator("path")).to_have_count(drawn)


def test_head_and_words_are_reachable_by_keyboard(open_page):
    tab = open_page(fresh=True).tab
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.textContent") == "Skip to the content"
    tab.keyboard.press("Enter")
    assert tab.evaluate("document.activeElement.id") == "main"
    for _ in range(40):
        tab.keyboard.press("Tab")
        if tab.evaluate("document.activeElement.classList.contains('cell')"):
            break

    def at() -> str:
        return tab.evaluate("document.activeElement.dataset.key")

    assert at() == "0.0"
    for key, place in (
        ("ArrowRight", "0.1"),
        ("ArrowDown", "1.1"),
        ("End", "1.4"),
        ("Home", "1.0"),
        ("ArrowLeft", "1.0"),
    ):
        tab.keyboard.press(key)
        assert at() == place
    tab.keyboard.press("Control+End")
    assert at() == "2.4"
    tab.keyboard.press("ArrowDown")  # the last layer: no further row
    assert at() == "2.4"
    # The grid is one stop: one Tab leads to the next stack.
    tab.keyboard.press("Tab")
    while not tab.evaluate("document.activeElement.classList.contains('cell')"):
        tab.keyboard.press("Tab")
    assert at() == "3.0"
    tab.keyboard.press("Shift+Tab")
    while at() is None:
        tab.keyboard.press("Shift+Tab")
    assert at() == "2.4"
    tab.keyboard.press("Enter")
    tab.locator("h2#head-name").wait_for()
    expect(tab.locator("#head-name")).to_be_focused()
    for _ in range(20):
        tab.keyboard.press("Tab")
        if tab.evaluate("document.activeElement.classList.contains('word')"):
            break
    expect(tab.locator(".strongest h4").first).to_have_text("“[CLS]” attends to")
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("ArrowRight")
    expect(tab.locator(".strongest h4").first).to_have_text("“cat” attends to")
    same(strongest(tab, 0), expected(weights(PAGE, 0, 2)[4][2], SENTENCE))
    tab.keyboard.press("Escape")
    expect(tab.locator(".strongest h4")).to_have_text(["Most attended, on average"])


def test_link_to_a_missing_word_chooses_none(open_page):
    opened = open_page()
    for word in ("99", "k99", "-1", "x"):
        opened.go(f"head/1/2?word={word}&example=77")
        expect(opened.tab.locator(".strongest h4")).to_have_text(["Most attended, on average"])
        opened.go("overview")
        expect(opened.tab.locator(".strongest")).to_have_count(0)
