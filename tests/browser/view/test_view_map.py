"""Zooming from the whole matrix to single tokens: texts and numbers are those of the model."""

from __future__ import annotations

import json
import math
import re

import pytest
from playwright.sync_api import expect

from tests.browser.view.map_page import TOKENS, Map, go


@pytest.fixture(scope="module")
def weights(running):
    """Return those of that head, computed once."""
    found = []

    def compute():
        if not found:
            found.append(running("long").weights()[1, 2].double())
        return found[0]

    return compute


def check_written(text: str, weight: float) -> None:
    """Three digits are shown, two below 1e-4; float32 leaves the fifth digit undetermined."""
    last_digit = 10.0 ** (math.floor(math.log10(weight)) - (1 if weight < 1e-4 else 2))
    assert float(text.replace("E", "e")) == pytest.approx(weight, abs=last_digit / 2 + 1e-4 * weight)


def test_zoom_from_the_whole_matrix_to_single_tokens(opened_long, weights, keep_picture):
    view, tokens, exact = Map(opened_long), opened_long.server.tokens(), weights()
    n = len(tokens)
    assert n == TOKENS + 1
    assert view.level == 3
    assert view.scale * n == pytest.approx(view.plot.bounding_box()["width"], rel=0.01)
    keep_picture(opened_long, "view-map-whole")
    # The whole: cells of 4 x 4 tokens, whose sum is shown as the share of their four queries.
    x, y = view.point(0.31, 0.77)
    expect(opened_long.tab.locator(".map-readout")).to_contain_text("attend to tokens")
    numbers = [int(part.replace(",", "")) for part in re.findall(r"[\d,]+(?=–)|(?<=–)[\d,]+", view.readout())]
    first_row, last_row, first_column, last_column = numbers
    assert (last_row - first_row, last_column - first_column) == (3, 3)
    assert abs(first_row + 2 - 0.77 * n) < 5
    assert abs(first_column + 2 - 0.31 * n) < 5
    block = exact[first_row : last_row + 1, first_column : last_column + 1]
    share = float(re.search(r"([\d.]+)% of their attention", view.readout())[1]) / 100
    assert share == pytest.approx(float(block.sum() / 4), abs=6e-4)
    # Down to tokens, at the pointer.
    view.zoom_in()
    assert view.level == 0
    assert view.scale == pytest.approx(40)
    for step in ((0, 0), (85, 0), (0, -130)):
        x, y = x + step[0], y + step[1]
        opened_long.tab.mouse.move(x, y)
        opened_long.tab.wait_for_timeout(50)
        found = re.fullmatch(r"“(.*)” \(([\d,]+)\) attends to “(.*)” \(([\d,]+)\): (.*)", view.readout())
        query, key = (int(found[i].replace(",", "")) for i in (2, 4))
        assert (found[1], found[3]) == (tokens[query], tokens[key])
        assert view.label_at("rows", y) == (query, tokens[query])
        assert view.label_at("columns", x) == (key, tokens[key])
        check_written(found[5], float(exact[query, key]))
        assert abs(query - 0.77 * n) < 8
        assert abs(key - 0.31 * n) < 8
    keep_picture(opened_long, "view-map-tokens")
    opened_long.tab.get_by_role("button", name="Whole", exact=True).click()
    assert view.level == 3
    view.point(0.31, 0.77)
    opened_long.tab.wait_for_timeout(50)
    assert [int(x.replace(",", "")) for x in re.findall(r"[\d,]+(?=–)", view.readout())] == [first_row, first_column]


def test_drawn_colours_match_the_readout(opened_long, weights):
    """The pixels of single tokens are in the order of their weights."""
    view, exact = Map(opened_long), weights()
    view.point(0.2, 0.6)
    view.zoom_in()
    cells = opened_long.tab.evaluate(
        """() => {
          const [drawn, plot] = [document.querySelector(".map-plot canvas"), document.querySelector(".map-plot")];
          const copy = new OffscreenCanvas(drawn.width, drawn.height).getContext("2d", { willReadFrequently: true });
          copy.drawImage(drawn, 0, 0);
          const box = plot.getBoundingClientRect();
          const middles = (side, start, size) =>
            [...document.querySelectorAll(`.map-${side} .mark`)].map((mark) => {
              const place = mark.getBoundingClientRect();
              return [Number(mark.dataset.token), place[start] + place[size] / 2 - box[start] - 1];
            });
          const found = [];
          for (const [query, y] of middles("rows", "top", "height")) {
            for (const [key, x] of middles("columns", "left", "width")) {
              if (x < 0 || y < 0 || x >= drawn.width || y >= drawn.height) continue;
              const [r, g, b] = copy.getImageData(x, y, 1, 1).data;
              found.push([query, key, r + g + b]);
            }
          }
          return found;
        }"""
    )
    assert len(cells) > 100
    cells.sort(key=lambda cell: float(exact[cell[0], cell[1]]))
    greys = [grey for *_, grey in cells]
    assert greys == sorted(greys, reverse=True)
    assert greys[0] > greys[-1] + 50


def test_click_chooses_the_query_in_any_part_of_the_text(opened_long, weights):
    view, exact, tokens, tab = Map(opened_long), weights(), opened_long.server.tokens(), opened_long.tab
    view.point(0.31, 0.77)
    view.zoom_in()
    query = int(re.search(r"” \(([\d,]+)\) attends to", view.readout())[1].replace(",", ""))
    view.click(0.31, 0.77)
    first = query // 300 * 300
    tab.get_by_text(f"Tokens {first:,} to {first + 299:,} of 3,000").wait_for()
    assert tab.locator(".word[aria-pressed=true]").inner_text() == tokens[query]
    expect(tab.locator(".strongest li")).to_have_count(16)
    for number, row in enumerate((exact[query], exact[:, query])):
        strongest = row.topk(8).values.tolist()
        items = tab.locator(".strongest > div").nth(number).locator("li").all()
        for item, expected in zip(items, strongest, strict=True):
            assert float(item.get_attribute("data-weight")) == pytest.approx(expected, rel=1e-3)
            assert float(row[int(item.get_attribute("data-token"))]) == pytest.approx(expected, rel=1e-3)


def test_words_of_a_long_text_are_shaded_by_single_weights(opened_long, weights):
    """A long row has maxima of blocks; the shown words have single weights."""
    tab, query = opened_long.tab, 23
    tab.locator(".word").nth(query).click()
    shaded = "all => all.map((word) => word.style.background !== 'transparent')"
    wanted = [weight >= 0.005 for weight in weights()[query, :300].tolist()]
    assert 10 < sum(wanted) <= query + 1
    opened_long.wait(lambda: tab.eval_on_selector_all(".word", shaded) == wanted)


def test_maximum_weight_of_a_cell(opened_long, weights):
    view, exact = Map(opened_long), weights()
    opened_long.tab.get_by_role("button", name="max attention weight").click()
    view.settle()
    view.point(0.1, 0.4)
    expect(opened_long.tab.locator(".map-readout")).to_contain_text("at most")
    row, last_row, column, last_column = (
        int(part.replace(",", "")) for part in re.findall(r"[\d,]+(?=–)|(?<=–)[\d,]+", view.readout())
    )
    share = float(re.search(r"at most ([\d.]+)%", view.readout())[1]) / 100
    assert share == pytest.approx(float(exact[row : last_row + 1, column : last_column + 1].max()), abs=6e-4)


def test_keyboard_alone_reaches_a_token(opened_long, weights):
    view, exact, tokens = Map(opened_long), weights(), opened_long.server.tokens()
    tab = opened_long.tab
    tab.locator(".map-zoom button").last.focus()
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.className") == "map-plot"
    for _ in range(12):
        tab.keyboard.press("ArrowDown")
    for _ in range(9):
        tab.keyboard.press("+")
    view.settle()
    assert view.level == 0
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("ArrowDown")
    tab.wait_for_timeout(50)
    found = re.fullmatch(r"“(.*)” \(([\d,]+)\) attends to “(.*)” \((\d+)\): (.*)", view.readout())
    query, key = int(found[2].replace(",", "")), int(found[4])
    assert key == 2
    assert query > 200
    assert (found[1], found[3]) == (tokens[query], tokens[key])
    check_written(found[5], float(exact[query, key]))
    tab.keyboard.press("0")
    assert view.level == 3
    tab.keyboard.press("-")
    assert view.level == 3


def test_estimate_is_labelled_until_exact_values_arrive(opened_long, monkeypatch):
    from polyhead.report.viewer import tiles

    opened = opened_long
    monkeypatch.setitem(tiles.ESTIMATE_PAIRS, "cpu", 1 << 18)
    monkeypatch.setitem(tiles.STRIP_PAIRS, "cpu", 1 << 16)
    opened.server.viewer.cache.clear()  # a cached picture would have no estimate
    opened.tab.evaluate(
        """() => {
          window.seen = [];
          const watch = () => {
            const state = document.querySelector(".map-state");
            if (state && window.seen.at(-1) !== state.dataset.state) window.seen.push(state.dataset.state);
          };
          new MutationObserver(watch).observe(document.body, { subtree: true, childList: true, attributes: true });
        }"""
    )
    opened.tab.locator(".strip a.cell[data-key='0.1']").click()  # the strip of all heads beside the map
    opened.tab.get_by_role("heading", name="L0H1", exact=True).wait_for()
    opened.tab.locator(".map-state[data-state=exact]").wait_for()
    opened.wait(lambda: opened.tab.evaluate("window.seen.slice(-2)") == ["estimate", "exact"])


def test_panning_aborts_requests_for_invisible_tiles(opened_long):
    opened, tab = opened_long, opened_long.tab
    failed = []
    tab.on("requestfailed", lambda request: failed.append((request.url.rpartition("/")[2], request.failure)))
    held = []
    tab.route("**/api/tile", lambda route: held.append(route))
    view = Map(opened)
    view.point(0.5, 0.6)
    for _ in range(3):
        tab.mouse.wheel(0, -500)
        tab.wait_for_timeout(50)
    opened.wait(lambda: len(held) > 0)
    assert tab.locator(".map-state").inner_text().strip().startswith("Exact; ")
    tab.get_by_role("button", name="Whole", exact=True).click()
    opened.wait(lambda: len(failed) >= len(held))
    assert set(failed) == {("tile", "net::ERR_ABORTED")}
    view.settle()


def test_failed_tile_is_reported_and_others_load(opened_long):
    opened, tab, view = opened_long, opened_long.tab, Map(opened_long)
    requested: list[str] = []
    failure = {"error": {"status": 507, "kind": "out-of-memory", "message": "Its own words."}}

    def fail_first(route):
        requested.append(route.request.post_data)
        if len(requested) == 1:
            route.fulfill(status=507, body=json.dumps(failure))
        else:
            route.continue_()

    tab.route("**/api/tile", fail_first)
    go(opened, "head/1/2?map=1000_1000_700")  # from 1,000 to 1,700 in tiles of 512: three per side
    expect(tab.locator("[role=alert]")).to_contain_text("Its own words.")
    view.settle()
    assert len(set(requested)) == len(requested) == 9
    tab.locator(".error").get_by_role("button").click()
    expect(tab.locator("[role=alert]")).to_be_empty()
    opened.problems.clear()  # the browser logs a refused request itself


def test_tile_refused_by_a_busy_server_is_requested_again_while_visible(opened_long):
    opened, tab, view = opened_long, opened_long.tab, Map(opened_long)
    refused: list[str] = []
    busy = {"error": {"status": 429, "kind": "busy", "message": "Too many."}}

    def refuse(route):
        refused.append(route.request.post_data)
        route.fulfill(status=429, headers={"Retry-After": "1"}, body=json.dumps(busy))

    opened.speed_up_timers()
    tab.route("**/api/tile", refuse)
    view.point(0.5, 0.6)
    for _ in range(4):
        tab.mouse.wheel(0, -500)
        tab.wait_for_timeout(50)
    opened.wait(lambda: max(map(refused.count, refused), default=0) > 1)
    expect(tab.locator(".waiting")).to_contain_text("The server is busy.")
    # After panning, nothing is pending.
    view.panel.get_by_role("button", name="Whole", exact=True).click()
    expect(tab.locator(".waiting")).to_be_empty()
    requested = len(refused)
    tab.wait_for_timeout(400)  # twice as long as the longest pause
    assert len(refused) == requested
    # After returning, all tiles load once the server is free.
    tab.go_back()
    opened.wait(lambda: len(refused) > requested)
    assert view.plot.get_attribute("data-level") != "3"
    tab.unroute("**/api/tile")
    view.settle()
    expect(tab.locator(".waiting")).to_be_empty()
    expect(tab.locator("[role=alert]")).to_be_empty()
    opened.problems.clear()  # the browser logs a refused request itself
