"""The position of a map is part of the link, and is shared by maps side by side."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.browser.view.map_page import Map, go, go_anew, open_long

HERE = (0.31, 0.77)
# The address keeps hundredths of a token, and the closest view shows about twelve tokens: 0.005 / 12 and a little.
ROUNDED = 1e-3


def zoom(opened, view: Map, times: int) -> None:
    """Zoom by wheel at one point of the window, and wait for the link to change."""
    before = opened.tab.url
    view.point(*HERE)
    view.zoom_in(times)
    opened.wait(lambda: opened.tab.url != before)
    view.settle()


def test_a_link_opens_the_same_view(opened_long, open_view):
    opened = opened_long
    assert "map=" not in opened.tab.url  # the whole matrix needs no position
    view = Map(opened)
    zoom(opened, view, 5)
    opened.tab.get_by_role("button", name="max attention weight").click()
    view.settle()
    scale, readout = view.scale, view.read_at(*HERE)
    assert "at most" in readout or "attends to" in readout
    link = opened.tab.url.partition("#/")[2]
    assert re.fullmatch(r"head/1/2\?map=[\d.]+_[\d.]+_[\d.]+&pool=max", link)

    again = Map(open_long(open_view, link))
    again.settle()
    assert again.scale == pytest.approx(scale, rel=ROUNDED)
    assert again.read_at(*HERE) == readout
    # Another head is opened at the same position.
    again.tab.locator(".strip a.cell[data-key='0.1']").click()
    again.tab.get_by_role("heading", name="L0H1", exact=True).wait_for()
    again.settle()
    assert again.tab.url.endswith(link.replace("head/1/2", "head/0/1"))
    assert again.scale == pytest.approx(scale, rel=ROUNDED)


def test_back_and_forward_move_the_map(opened_long):
    opened = opened_long
    view, scales = Map(opened), []
    for times in (3, 4):
        scales.append(view.scale)
        zoom(opened, view, times)
    scales.append(view.scale)
    assert scales[0] < scales[1] < scales[2]
    closest = view.read_at(*HERE)
    for scale in (scales[1], scales[0]):
        opened.tab.go_back()
        opened.wait(lambda scale=scale: view.scale == pytest.approx(scale, rel=ROUNDED))
    for scale in scales[1:]:
        opened.tab.go_forward()
        opened.wait(lambda scale=scale: view.scale == pytest.approx(scale, rel=ROUNDED))
    view.settle()
    assert view.read_at(*HERE) == closest
    opened.tab.get_by_role("button", name="max attention weight").click()
    opened.tab.go_back()
    expect(opened.tab.get_by_role("button", name="share of attention")).to_have_attribute("aria-pressed", "true")
    expect(opened.tab.locator("main h2").first).to_have_text("L1H2")


@pytest.mark.parametrize("elsewhere", ["#/", "#/head/1/2?map=100_100_50"])
def test_a_position_written_late_does_not_undo_a_navigation(opened_long, elsewhere):
    """The address is written after a pause, and `hashchange` is dispatched later than the address changes."""
    opened = opened_long
    opened.tab.evaluate(
        """() => {
          const wait = window.setTimeout;
          window.restoreTimers = () => { window.setTimeout = wait; };
          window.late = [];
          window.setTimeout = (call, milliseconds = 0, ...rest) => {
            if (milliseconds !== 300) return wait(call, milliseconds, ...rest);
            return window.late.push(call);
          };
        }"""
    )
    view = Map(opened)
    view.point(*HERE)
    opened.tab.mouse.wheel(0, -500)
    opened.wait(lambda: opened.tab.evaluate("window.late.length > 0"))
    found = opened.tab.evaluate(
        """(elsewhere) => {
          const before = location.hash;
          location.hash = elsewhere;
          window.late.at(-1)();
          return [before, location.hash];
        }""",
        elsewhere,
    )
    assert found == ["#/head/1/2", elsewhere]


def test_invalid_link_shows_the_whole_matrix(opened_long):
    whole = Map(opened_long).scale
    for link in ("nonsense", "1_2_0", "1_2", "-5e9_0_10", "<b>_1_1"):
        go_anew(opened_long, f"head/1/2?map={link}&pool=median")
        assert (Map(opened_long).level, Map(opened_long).scale) == (3, whole), link
    assert "attend to tokens" in Map(opened_long).read_at(*HERE)


def test_link_beyond_the_text_shows_its_end(opened_long):
    go_anew(opened_long, "head/1/2?map=999999_999999_20")
    view = Map(opened_long)
    view.settle()
    assert view.level == 0
    assert "(2,999) attends to" in view.read_at(0.99, 0.99)


def test_compared_maps_zoom_and_pan_together(opened_long, keep_picture):
    opened = opened_long
    opened.of.change_size((1600, 900))
    go(opened, "head/1/2?with=A.0.1")
    one, other = Map(opened), Map(opened, 1)
    zoom(opened, one, 12)
    other.settle()
    assert one.scale == pytest.approx(40)
    assert other.scale == pytest.approx(one.scale, rel=ROUNDED)

    def tokens(view: Map) -> list[str]:
        return re.findall(r"\(([\d,]+)\)", view.read_at(0.5, 0.5))

    before = tokens(one)
    assert len(before) == 2
    assert tokens(other) == before
    keep_picture(opened, "view-two-maps")
    # Dragging the second moves the first: a hundred and twenty pixels are three tokens.
    x, y = other.point(0.5, 0.5)
    opened.tab.mouse.down()
    opened.tab.mouse.move(x + 120, y - 120, steps=4)
    opened.tab.mouse.up()
    one.settle()
    number = [int(token.replace(",", "")) for token in before]
    assert [int(token.replace(",", "")) for token in tokens(one)] == [number[0] + 3, number[1] - 3]
    assert tokens(other) == tokens(one)
    opened.tab.locator(".map-zoom button").last.click()  # the second one's
    opened.wait(lambda: one.level == other.level == 3)
    opened.tab.get_by_role("button", name="max attention weight").first.click()
    pressed = opened.tab.get_by_role("button", name="max attention weight")
    for button in pressed.all():
        expect(button).to_have_attribute("aria-pressed", "true")


def test_short_text_beside_a_long_one_follows_within_its_limits(opened_long):
    opened = opened_long
    opened.tab.get_by_role("button", name="Compare with a second text").click()
    opened.tab.locator("#text-B").fill("w1 w2 w3 w4 w5 w6 w7 w8 w9")
    opened.tab.keyboard.press("Control+Enter")
    opened.wait(lambda: opened.server.viewer.traces["B"] is not None)
    go(opened, "head/1/2?with=B.1.2")
    long, short = Map(opened), Map(opened, 1)
    long.settle()
    fit, whole = short.scale, long.scale
    zoom(opened, long, 6)
    assert short.scale == pytest.approx(fit, rel=ROUNDED)
    assert "“w9” (9) attends to “w9” (9)" in short.read_at(0.99, 0.99)
    zoomed = long.scale
    short.point(0.5, 0.5)
    opened.tab.mouse.wheel(0, 500)  # it already shows the whole matrix
    opened.tab.wait_for_timeout(400)
    assert long.scale == pytest.approx(zoomed, rel=ROUNDED)
    opened.tab.locator(".map-zoom button").last.click()
    opened.wait(lambda: long.scale == pytest.approx(whole, rel=ROUNDED))
    opened.tab.get_by_role("button", name="Remove text B").click()  # later tests on this server expect one text
    opened.wait(lambda: opened.server.viewer.traces["B"] is None)
