"""Saved charts: self-contained SVG and PNG."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from playwright.sync_api import expect

from tests.browser.saving import SVG, check_png, number, saved, saved_svg, title_of

FIGURES = {
    "overview": 2,  # a grid for each stack
    "overview?color=mean_distance": 2,
    "charts?column=output_norm&numbers=1&by=role": 3,  # a heat map for each stack, and the scatter plot
    "head/1/2": 5,  # words, map, offsets, roles, numbers
    "similar": 6,  # the histogram, and a matrix for each layer
    "importance": 3,
    "syntax": 1,
}


@pytest.mark.parametrize("view", FIGURES)
def test_every_figure_of_a_view_is_saved(open_page, view):
    tab = open_page(view=view).tab
    figures = tab.locator("figure")
    expect(figures).to_have_count(FIGURES[view])
    for figure in figures.all():
        root = saved_svg(tab, figure)
        assert figure.locator("h3").inner_text().replace(" ", "") in title_of(root).replace(" ", "")
        check_png(tab, figure, root)


@pytest.mark.parametrize(
    ("view", "figure"),
    [("overview?color=mean_distance", "figure"), ("head/1/2", ".map-figure"), ("similar", ".matrix")],
)
def test_saved_maps_have_their_colour_scale(open_page, view, figure):
    tab = open_page(view=view).tab
    root = saved_svg(tab, tab.locator(figure).first)
    ramp = [x for x in root.iter(f"{SVG}rect") if x.get("width") == "4.5"]
    assert len(ramp) == 48
    assert len({x.get("fill") for x in ramp}) > 40
    below = [x.text for x in root.iter(f"{SVG}text") if float(x.get("y")) > float(ramp[0].get("y"))]
    assert len(below) == 3  # at both ends and in the middle


def test_saved_chart_has_the_colours_of_the_page(open_page):
    tab = open_page(view="importance", color_scheme="dark").tab
    file, _ = saved(tab, tab.get_by_role("button", name="as SVG").first)
    root = ElementTree.parse(file).getroot()
    background = root.find(f"{SVG}rect")
    assert background.get("fill") == "rgb(20, 22, 29)"
    bars = [x for x in root.iter(f"{SVG}rect") if x is not background]
    assert {bar.get("fill") for bar in bars} == {"rgb(88, 180, 209)"}
    assert len(bars) == 23
    drawn = [number(bar.get("width")) for bar in bars]
    assert drawn == sorted(drawn, reverse=True)
