"""Heat maps of a column, the scatter plot of two, and the names of columns beside their labels."""

from __future__ import annotations

import csv
import itertools
import math
import re

import pytest
from playwright.sync_api import expect

from polyhead.inspection.vocabulary import ROLES as KNOWN_ROLES
from tests.browser.conftest import written
from tests.browser.payloads import COLUMNS, COMPANIONS, HEADS, INFINITE, LAYERS, ROLES, synthetic
from tests.browser.saving import SVG, saved, saved_svg

PAGE = synthetic()
HEADS_BY_KEY = {f"{head['site']}.{head['head']}": head for head in PAGE["heads"]}
COLOURS = "cells => cells.map(cell => [cell.dataset.key, getComputedStyle(cell).backgroundColor, cell.ariaLabel])"


def luminance(colour: str) -> float:
    red, green, blue = (float(x) for x in re.findall(r"[\d.]+", colour)[:3])
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_missing_and_infinite_values_of_a_heat_map(open_page):
    tab = open_page(view="charts?column=output_norm&numbers=1").tab
    shown = {key: (colour, name) for key, colour, name in tab.eval_on_selector_all("a.cell", COLOURS)}
    values = {key: head["values"]["output_norm"] for key, head in HEADS_BY_KEY.items()}
    assert shown.keys() == values.keys()
    missing = tab.eval_on_selector_all("a.cell.missing", "cells => cells.map(cell => cell.dataset.key)")
    assert missing == [key for key, value in values.items() if value is None]
    assert all("not computed" in shown[key][1] for key in missing)
    expect(tab.locator("a.cell.missing").first).to_have_text("")
    expect(tab.locator(".ramp-missing")).to_have_text("not computed")
    known = sorted((key for key in values if key not in missing), key=lambda key: values[key])
    lightness = [luminance(shown[key][0]) for key in known]
    assert lightness == sorted(lightness, reverse=True)
    infinite = "{}.{}".format(*INFINITE)
    assert known[-1] == infinite
    expect(tab.locator(f"a.cell[data-key='{infinite}']")).to_have_text("∞")
    assert max(map(len, tab.locator("a.cell").all_inner_texts())) <= 5
    assert float(tab.locator(f"a.cell[data-key='{known[0]}']").inner_text()) == float(f"{values[known[0]]:.2g}")
    # The file has the same cells: struck through where there is no value.
    root = saved_svg(tab, tab.locator(".stacks figure").nth(1))
    assert len(list(root.iter(f"{SVG}line"))) == len(missing) + 1  # and one in the legend
    assert {"head", "layer", "output norm", "not computed"} <= {x.text for x in root.iter(f"{SVG}text")}


def test_column_with_both_signs_is_symmetric_around_zero(open_page):
    tab = open_page(view="charts?column=copying").tab
    low, middle, high = tab.locator(".explained .ramp-ends span").all_inner_texts()
    assert (middle, low) == ("0", f"-{high}")
    assert float(high) == pytest.approx(max(abs(head["values"]["copying"]) for head in PAGE["heads"]), rel=5e-3)


def test_infinite_and_missing_values_in_csv(open_page):
    tab = open_page(view="charts?x=output_norm&y=ablation").tab
    file, name = saved(tab, tab.locator(".scatter-figure").get_by_role("button", name="as CSV"))
    assert name == "scatter-output_norm-ablation.csv"
    rows = list(csv.DictReader(file.read_text(encoding="utf-8").splitlines()))
    assert len(rows) == len(PAGE["heads"])
    for row, head in zip(rows, PAGE["heads"], strict=True):
        site = PAGE["sites"][head["site"]]
        assert (row["site"], row["layer"], row["head"]) == (site["name"], str(site["layer"]), str(head["head"]))
        value = head["values"]["output_norm"]
        assert row["output_norm"] == ("" if value is None else "inf" if math.isinf(value) else repr(value))
        assert float(row["ablation"]) == head["values"]["ablation"]


def test_points_are_named_and_open_their_cards(open_page):
    tab = open_page(view="charts?x=output_norm&y=entropy").tab
    figure = tab.locator(".scatter-figure")
    points = figure.locator(".points a")
    drawn = [key for key, head in HEADS_BY_KEY.items() if math.isfinite(head["values"]["output_norm"] or math.nan)]
    expect(points).to_have_count(LAYERS * HEADS - 1)
    expect(figure.locator("figcaption")).to_contain_text(f"Not drawn: {len(PAGE['heads']) - len(drawn)} heads")
    by_x = sorted(drawn, key=lambda key: HEADS_BY_KEY[key]["values"]["output_norm"])
    by_y = sorted(drawn, key=lambda key: HEADS_BY_KEY[key]["values"]["entropy"])

    def centre(key: str) -> tuple[float, float]:
        box = figure.locator(f".points a[data-key='{key}']").bounding_box()
        return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2

    centres = {key: centre(key) for key in drawn}
    assert sorted(drawn, key=lambda key: centres[key][0]) == by_x
    assert sorted(drawn, key=lambda key: -centres[key][1]) == by_y

    def focused() -> str:
        return tab.evaluate("document.activeElement.dataset.key")

    figure.locator(f".points a[data-key='{by_x[0]}']").focus()
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("ArrowRight")
    assert focused() == by_x[2]
    tab.keyboard.press("ArrowUp")
    above = by_y[by_y.index(by_x[2]) + 1]
    assert focused() == above
    site, head = above.split(".")
    expect(figure.locator(".point-name")).to_have_text(f"L{site}H{head} (Encoder)")
    entropy = HEADS_BY_KEY[above]["values"]["entropy"]
    expect(figure.locator(".readout")).to_contain_text(f"entropy {float(f'{entropy:.3g}'):g} nats")
    tab.mouse.move(*centre(by_x[5]))
    expect(figure.locator(".points a.chosen")).to_have_attribute("data-key", by_x[5])
    x, y = centre(by_x[5])
    tab.mouse.click(x + 6, y)  # beside the point, which is the nearest
    tab.locator("h2#head-name").wait_for()
    assert tab.url.endswith("#/head/{}/{}".format(*by_x[5].split(".")))


def test_points_are_coloured_by_layer_or_role(open_page):
    tab = open_page(view="charts?x=sink_mass&y=entropy").tab
    figure = tab.locator(".scatter-figure")
    fills = "links => Object.fromEntries(links.map(x => [x.dataset.key, x.firstElementChild.getAttribute('fill')]))"
    by_layer = figure.locator(".points a").evaluate_all(fills)
    layers = {key: PAGE["sites"][head["site"]]["layer"] for key, head in HEADS_BY_KEY.items()}
    assert len(set(by_layer.values())) == len(set(layers.values())) == LAYERS
    assert len({(by_layer[key], layer) for key, layer in layers.items()}) == LAYERS
    expect(figure.locator(".ramp-ends span")).to_have_text(["Layer 0", "Layer 1", "Layer 2"])
    texts = [x.text for x in saved_svg(tab, figure).iter(f"{SVG}text")]
    assert {"entropy, nats", "sink mass"} <= set(texts)
    assert texts[-7:] == ["Layer 0", "Layer 1", "Layer 2", "●", "Encoder", "■", "Decoder to encoder"]
    tab.get_by_label("Colour by").select_option("role")
    expect(figure.locator(".keys li")).to_contain_text(
        [*(f"{role} role" for role in ROLES), "no role", "Encoder", "Decoder to encoder"]
    )
    roles = {key: next((x["role"] for x in head["roles"] if x["holds"]), None) for key, head in HEADS_BY_KEY.items()}
    by_role = figure.locator(".points a").evaluate_all(fills)
    assert len({(by_role[key], role) for key, role in roles.items()}) == len(set(roles.values())) == len(ROLES) + 1


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colours by WCAG 2."""

    def light(colour: str) -> float:
        channels = [float(x) / 255 for x in re.findall(r"[\d.]+", colour)[:3]]
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in channels]
        return 0.05 + 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    ratio = light(one) / light(other)
    return max(ratio, 1 / ratio)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_role_has_a_colour_of_its_own_and_every_point_is_visible(open_page, tmp_path, scheme):
    page = synthetic()
    roles = [{**PAGE["roles"][0], "name": name, "letters": role.letters} for name, role in KNOWN_ROLES.items()]
    score = PAGE["heads"][0]["roles"][0]
    page["roles"] = roles
    assert len(page["heads"]) > len(roles)
    for head, role in itertools.zip_longest(page["heads"], roles):
        head["roles"] = [{**score, "role": role["name"], "holds": True}] if role else []
    opened = open_page(written(page, tmp_path / "roles.html"), "overview?color=role", color_scheme=scheme)
    swatches = opened.tab.eval_on_selector_all(
        ".category .swatch", "all => all.map(x => getComputedStyle(x).backgroundColor)"
    )
    assert len(set(swatches)) == len(swatches) == len(roles)
    fills = "links => links.map(link => getComputedStyle(link.firstElementChild).fill)"
    for colouring, count in (("layer", LAYERS), ("role", len(roles) + 1)):
        opened.go(f"charts?x=sink_mass&y=entropy&by={colouring}")
        points = opened.tab.locator(".scatter-figure .points a")
        expect(points).to_have_count(len(page["heads"]))
        shown = set(points.evaluate_all(fills))
        paper = opened.tab.evaluate("getComputedStyle(document.body).backgroundColor")
        assert len(shown) == count
        assert min(contrast(colour, paper) for colour in shown) > 1.3


def test_labels_of_axes_fit_on_a_phone(open_page, tmp_path):
    page = synthetic()
    longest = {"en": "attention to previous token, standard deviation", "zh": "对前一词元的注意力，标准差"}
    for column in page["columns"]:
        column["label"] = longest
    opened = open_page(written(page, tmp_path / "long.html"), "charts?x=sink_mass&y=copying", viewport=(390, 844))
    figure = opened.tab.locator(".scatter-figure")
    frame = figure.locator(".chart svg").bounding_box()
    labels = figure.locator("svg text", has_text="attention to previous").all()
    assert len(labels) == 2
    for label in labels:
        box = label.bounding_box()
        assert box["x"] >= frame["x"]
        assert box["x"] + box["width"] <= frame["x"] + frame["width"]
    assert figure.locator("h3").bounding_box()["height"] < 40


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_label_has_the_name_of_its_column(open_page, language):
    opened = open_page(view="overview", viewport=(390, 844))
    tab = opened.tab
    tab.locator(".switches select").first.select_option(language)
    names = [*COLUMNS, *COMPANIONS]
    options = tab.eval_on_selector_all("select optgroup option", "all => all.map(x => [x.value, x.textContent])")
    assert [value for value, _ in options] == names
    assert all(text == value or text.endswith(f" · {value}") for value, text in options)
    headers = []
    for button in tab.locator(".table-head .segments button").all():
        button.click()
        headers += tab.locator("table.sortable thead .numeric button").all_inner_texts()
    assert [header.split("\n")[-1] for header in headers] == sorted(names, key=names.index)
    opened.go("head/1/2")
    rows = tab.locator(".numbers summary").all_inner_texts()
    assert [re.split(r"\s", row.strip())[-1] for row in rows] == list(COLUMNS)
    for name in tab.locator(".numbers .code-name").all():
        expect(name).to_be_visible()
    opened.go("importance")
    headers = tab.locator("table.sortable thead .numeric .code-name").all_inner_texts()
    assert headers == ["ablation", "ablation_error"]
