"""Any chart as a file: an SVG that stands by itself, and a PNG of it."""

from __future__ import annotations

import struct
from pathlib import Path
from xml.etree import ElementTree

import pytest

SVG = "{http://www.w3.org/2000/svg}"
PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
FIGURES = {
    "overview": 2,  # a grid for each stack
    "overview?color=reach": 2,
    "head/1/2": 5,  # words, map, offsets, roles, numbers
    "alike": 6,  # the histogram, and a matrix for each layer
    "matters": 3,
    "syntax": 1,
}


def saved(tab, button) -> tuple[Path, str]:
    with tab.expect_download() as waiting:
        button.click()
    return Path(waiting.value.path()), waiting.value.suggested_filename


def number(text: str) -> float:
    return float(text.removesuffix("px"))


@pytest.mark.parametrize("view", FIGURES)
def test_every_figure_of_a_view_is_saved(open_page, view):
    tab = open_page(view=view, accept_downloads=True).tab
    figures = tab.locator("figure")
    assert figures.count() == FIGURES[view]
    for i in range(figures.count()):
        file, name = saved(tab, figures.nth(i).get_by_role("button", name="as SVG"))
        assert name.endswith(".svg")
        root = ElementTree.parse(file).getroot()
        assert root.tag == f"{SVG}svg"
        text = file.read_text(encoding="utf-8")
        # It stands by itself: no style of the page, nothing that runs, nothing from elsewhere.
        assert "var(" not in text
        assert "currentColor" not in text
        assert {element.tag.removeprefix(SVG) for element in root.iter()}.isdisjoint(
            {"style", "script", "foreignObject"}
        )
        links = [value for element in root.iter() for key, value in element.items() if key.endswith("href")]
        assert all(link.startswith("data:image/png;base64,") for link in links)
        assert len(list(root.iter())) > 5
        said = "".join(element.text or "" for element in root.findall(f"{SVG}text"))  # the title, in lines
        title = figures.nth(i).locator("h3").inner_text()
        assert title.replace(" ", "") in said.replace(" ", "")
        width, height = number(root.get("width")), number(root.get("height"))
        assert width >= 200
        assert height >= 60

        file, name = saved(tab, figures.nth(i).get_by_role("button", name="as PNG"))
        assert name.endswith(".png")
        data = file.read_bytes()
        assert data.startswith(PNG_MAGIC)
        assert struct.unpack(">II", data[16:24]) == (round(2 * width), round(2 * height))
        assert len(data) > 1000  # a blank picture packs smaller


def test_a_saved_chart_has_the_colours_it_is_seen_in(open_page):
    tab = open_page(view="matters", color_scheme="dark", accept_downloads=True).tab
    file, _ = saved(tab, tab.get_by_role("button", name="as SVG").first)
    root = ElementTree.parse(file).getroot()
    background = root.find(f"{SVG}rect")
    assert background.get("fill") == "rgb(20, 22, 29)"
    bars = [x for x in root.iter(f"{SVG}rect") if x is not background]
    assert {bar.get("fill") for bar in bars} == {"rgb(88, 180, 209)"}
    assert len(bars) == 23
    drawn = [number(bar.get("width")) for bar in bars]
    assert drawn == sorted(drawn, reverse=True)
