"""Saved figures of the viewer: grids of heads, the grids of a word, and the map at any zoom."""

from __future__ import annotations

import base64
import struct

from tests.browser.saving import SVG, check_png, number, saved_svg, title_of
from tests.browser.view.map_page import Map, go_anew


def texts(root) -> list[str]:
    return [element.text for element in root.iter(f"{SVG}text") if element.text]


def test_every_figure_of_the_viewer_is_saved(open_view):
    opened = open_view()
    opened.run_text()
    tab = opened.tab
    (figure,) = tab.locator("figure").all()
    root = saved_svg(tab, figure)
    assert title_of(root).replace(" ", "") == "Layersandheads:Attentionmap(llama,textA)"
    assert len(list(root.iter(f"{SVG}image"))) == 8
    assert "A cell is one attention weight." in texts(root)
    check_png(tab, figure, root)
    # A word in every head.
    tab.locator(".word").nth(3).click()
    tab.locator(".of-word").wait_for()
    root = saved_svg(tab, figure)
    assert title_of(root).replace(" ", "") == "“w3”attendsto(llama,textA)"
    weights, tokens = opened.server.weights(), opened.server.tokens()
    for layer in range(2):
        for head in range(4):
            assert tokens[int(weights[layer, head, 3].argmax())] in texts(root)
    # Ablated heads are crossed out.
    opened.go("head/1/2")
    tab.locator(".ablate").click()
    tab.locator(".map-state[data-state=exact]").wait_for()
    tab.locator(".word").nth(3).click()
    tab.locator(".word-in-heads figure").nth(1).wait_for()
    figures = tab.locator("figure")
    assert figures.locator("h3").all_inner_texts() == [
        "Attention matrix",
        "All heads",
        "attends to",
        "attended to by",
    ]
    for figure in figures.all():
        root = saved_svg(tab, figure)
        check_png(tab, figure, root)
    strip = saved_svg(tab, figures.nth(1))
    assert len(list(strip.iter(f"{SVG}line"))) == 2


def test_saved_map_equals_the_visible_one(opened_long):
    """The texts and the PNG in light mode, the colours in dark mode."""
    opened = opened_long
    go_anew(opened, "head/1/2?map=1200.5_300.25_16")
    view, tab, tokens = Map(opened), opened.tab, opened.server.tokens()
    view.settle()
    figure = tab.locator("figure.map")
    root = saved_svg(tab, figure)
    check_png(tab, figure, root)
    assert "L1H2,textA" in title_of(root).replace(" ", "")
    # The tokens along both sides, in their order.
    labels = texts(root)
    for first in (1201, 301):
        wanted = [token.strip() or "[␣]" for token in tokens[first : first + 15]]
        assert any(labels[i : i + 15] == wanted for i in range(len(labels)))
    ends = tab.locator("figure.map .ramp-ends span").all_inner_texts()
    assert tab.locator("figure.map .map-corner").inner_text().split("\n") == ["key tokens →", "query tokens ↓"]
    assert {"key tokens →", "← query tokens", ends[0], ends[-1]} <= set(labels)
    light = check_colours(tab, root)
    opened.of.change_scheme("dark")
    tab.locator("html[data-theme=dark]").wait_for()
    assert check_colours(tab, saved_svg(tab, figure)) != light


def check_colours(tab, root) -> list[int]:
    """The picture of a saved map has the colours of the canvas; return one of them."""
    (image,) = root.iter(f"{SVG}image")
    data = base64.b64decode(next(value for key, value in image.items() if key.endswith("href")).partition(",")[2])
    size = struct.unpack(">II", data[16:24])
    assert size == tuple(round(2 * number(image.get(side))) for side in ("width", "height"))
    same = tab.evaluate(
        """async ([data, across, down]) => {
          const image = new Image();
          image.src = `data:image/png;base64,${data}`;
          await image.decode();
          const at = (drawn, width, height) => {
            const copy = new OffscreenCanvas(width, height).getContext("2d");
            copy.drawImage(drawn, 0, 0);
            const [x, y] = [Math.floor(across * width), Math.floor(down * height)];
            return [...copy.getImageData(x, y, 1, 1).data];
          };
          const seen = document.querySelector(".map-plot canvas");
          return [at(image, image.width, image.height), at(seen, seen.width, seen.height)];
        }""",
        [base64.b64encode(data).decode(), 0.47, 0.61],
    )
    assert same[0] == same[1]
    return same[0]


def test_hostile_word_in_a_saved_map_is_text(open_view):
    opened = open_view()
    opened.run_text("<script>window.hacked=1</script> a\u202eb w1")
    opened.go("head/1/2")
    opened.tab.locator(".map-state[data-state=exact]").wait_for()
    root = saved_svg(opened.tab, opened.tab.locator("figure.map"))
    labels = texts(root)
    assert {"<", "script", ">"} <= set(labels)
    assert not any("\u202e" in text for text in labels)
