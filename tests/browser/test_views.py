"""Every view of the page, opened by its link, shows its data."""

from __future__ import annotations

import shlex

import pytest
import torch
from playwright.sync_api import expect

from polyhead.report.packing import packed_weights
from tests.browser.conftest import written
from tests.browser.payloads import (
    CROSS_HEADS,
    CROSS_LAYERS,
    HEADS,
    LAYERS,
    ROLES,
    SENTENCE,
    bare,
    synthetic,
)
from tests.report.test_packing import unpacked

PAGE = synthetic()
ALL = LAYERS * HEADS + CROSS_LAYERS * CROSS_HEADS
VIEWS = {
    "overview": "Summary",
    "head/2/1": "L2H1 (Encoder)",
    "similar": "Similar heads",
    "importance": "Head importance",
    "syntax": "Syntax",
    "findings": "Findings",
}


def holders(role: str) -> list[tuple[int, int]]:
    return [
        (head["site"], head["head"])
        for head in PAGE["heads"]
        if any(score["role"] == role and score["holds"] for score in head["roles"])
    ]


def head_at(site: int, head: int) -> dict:
    (found,) = (one for one in PAGE["heads"] if (one["site"], one["head"]) == (site, head))
    return found


def luminance(colour: str) -> float:
    red, green, blue = (float(x) for x in colour.removeprefix("rgb(").removesuffix(")").split(","))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def cells(tab, script: str) -> list:
    return tab.eval_on_selector_all(".head-grid a.cell", f"cells => cells.map(cell => {script})")


def test_overview_shows_every_head_and_the_findings(open_page):
    tab = open_page(fresh=True).tab
    expect(tab.locator(".head-grid")).to_have_count(2)
    expect(tab.locator("a.cell")).to_have_count(ALL)
    expect(tab.locator("h1")).to_have_text("small: a model of known numbers")
    assert "12,345 tokens of 17 documents" in tab.locator(".facts").inner_text()
    found = tab.locator(".headline .findings a bdi").all_inner_texts()
    assert found == ["L2H1 repeats", "Two say the same", "One matters most", "Some rest"]


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844), (3840, 2160)])
def test_summary_is_visible_without_scrolling(open_page, keep_picture, width, height):
    opened = open_page(viewport=(width, height))
    tab = opened.tab
    answers = dict(zip(tab.locator(".answers dt").all_inner_texts(), tab.locator(".answers dd").all(), strict=True))

    def named(question: str) -> list[str]:
        links = answers[question].locator(".answer a")
        return links.evaluate_all("all => all.map(link => link.getAttribute('href'))")

    def link(site: int, head: int) -> str:
        return f"#/head/{site}/{head}"

    assert named("Which are previous-token heads?") == [link(*place) for place in holders("previous")]
    assert named("Which are redundant?") == [link(1, 0)]
    needed = sorted(PAGE["heads"], key=lambda head: -head["values"]["ablation"])[:3]
    assert named("Which are most important?") == [link(head["site"], head["head"]) for head in needed]
    words = "the other heads of its layer predict 86% of the output of the first"
    assert words in answers["Which are redundant?"].inner_text()
    assert "the first previous in 75% of positions (chance 12%)" in tab.locator(".answers").inner_text()
    bottom = tab.locator(".answers").bounding_box()
    assert bottom["y"] + bottom["height"] <= height
    assert tab.evaluate("scrollY") == 0
    keep_picture(opened, f"glance-{width}")


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_opens_by_its_link(open_page, view):
    tab = open_page(view=view, fresh=True).tab
    expect(tab.locator("main h2").first).to_have_text(VIEWS[view])


def test_statistic_colours_the_grid_from_light_to_dark(open_page):
    opened = open_page(view="overview?color=sink_mass", color_scheme="light")
    tab = opened.tab
    assert tab.get_by_label("Colour by").input_value() == "sink_mass"
    assert tab.locator(".explained .ramp-ends").inner_text().split() == ["0%", "50%", "100%"]
    keys = cells(tab, "cell.dataset.key")
    colours = dict(zip(keys, cells(tab, "getComputedStyle(cell).backgroundColor"), strict=True))
    values = {f"{head['site']}.{head['head']}": head["values"]["sink_mass"] for head in PAGE["heads"]}
    ordered = [luminance(colours[key]) for key in sorted(values, key=values.__getitem__)]
    assert ordered == sorted(ordered, reverse=True)
    assert ordered[0] - ordered[-1] > 100
    head = PAGE["heads"][1]
    (name,) = (x for x in cells(tab, "cell.ariaLabel") if x.startswith("L0H1 (Encoder)"))
    assert f"sink mass {head['values']['sink_mass']:.0%}" in name
    assert "previous role" in name


def test_role_filter_keeps_the_heads_with_that_role(open_page):
    tab = open_page().tab
    tab.get_by_label("Only heads with the role").select_option("previous")
    expected = holders("previous")
    assert tab.locator(".controls [role=status]").inner_text() == f"{len(expected)} of {ALL} heads"
    lit = tab.eval_on_selector_all("a.cell:not(.faded)", "cells => cells.map(cell => cell.dataset.key)")
    assert lit == [f"{site}.{head}" for site, head in expected]
    expect(tab.locator("table.sortable tbody tr")).to_have_count(len(expected))
    assert "role=previous" in tab.url
    # The legend's button does the same, and a second click undoes it.
    tab.locator("button.category", has_text="previous role").click()
    expect(tab.locator("a.cell.faded")).to_have_count(0)


def test_the_table_sorts_by_any_column_and_the_link_keeps_it(open_page):
    opened = open_page()
    tab = opened.tab
    tab.get_by_role("button", name="mean distance mean_distance", exact=True).click()
    mean_distance = sorted((head["values"]["mean_distance"] for head in PAGE["heads"]), reverse=True)
    values = [round(x, 1) if x >= 10 else float(f"{x:.3g}") for x in mean_distance]  # as numbers of tokens are written
    header = tab.locator("table.sortable thead th", has_text="mean distance")

    def shown() -> list[float]:
        index = tab.eval_on_selector_all("table.sortable thead th", "all => all.map(x => x.innerText.trim())").index(
            "mean distance\nmean_distance"
        )
        return [float(x) for x in tab.locator(f"table.sortable tbody tr > :nth-child({index + 1})").all_inner_texts()]

    assert header.get_attribute("aria-sort") == "descending"
    assert shown() == values
    tab.get_by_role("button", name="mean distance mean_distance", exact=True).click()
    assert header.get_attribute("aria-sort") == "ascending"
    assert shown() == values[::-1]
    tab.reload()
    assert tab.locator("table.sortable thead th[aria-sort=ascending]").inner_text().split("\n")[0] == "mean distance"


def test_card_of_a_head(open_page):
    tab = open_page().tab
    tab.locator("a.cell[data-key='2.1']").click()
    expect(tab.locator("main h2")).to_have_text(VIEWS["head/2/1"])
    expect(tab.locator(".card-head .chip")).to_have_text(["induction role", "previous role"])
    evidence = tab.locator(".summary li").all_inner_texts()
    assert evidence == [f"{role} in 75% of positions (chance 12%)" for role in ROLES[:2]]
    expect(tab.locator(".bars .token")).to_have_text(["the", "."])
    tab.get_by_text("As a table").click()
    row = tab.locator("details tr", has_text="induction role").locator("td").all_inner_texts()
    assert row[:3] == ["0.75", "0.688 – 0.813", "0.125"]
    missing = tab.locator("details tr", has_text=ROLES[-1]).locator("td").all_inner_texts()
    assert missing[:3] == ["not computed", "–", "–"]
    ablation = tab.locator("table.numbers tr", has_text="ablation").locator("td")
    (head,) = (x for x in PAGE["heads"] if (x["site"], x["head"]) == (2, 1))
    expect(ablation.first).to_have_text(f"{head['values']['ablation']:.3g} ± 0.03")
    rank = 1 + sum(x["values"]["ablation"] > head["values"]["ablation"] for x in PAGE["heads"])
    expect(ablation.nth(1)).to_have_text("")  # chance levels exist for shares of the text only
    expect(ablation.nth(2)).to_have_text(f"{rank} of {ALL}")
    sink = tab.locator("table.numbers tr", has_text="sink mass")
    expect(sink.locator("td").nth(1)).to_have_text("6.3%")
    assert sink.locator("td svg [stroke='var(--second)']").count() == 1
    tab.locator(".side").get_by_role("link", name="L0H2 (Encoder)").click()
    expect(tab.locator("main h2")).to_have_text("L0H2 (Encoder)")
    tab.locator("a[rel=next]").click()
    expect(tab.locator("main h2")).to_have_text("L0H3 (Encoder)")
    tab.go_back()
    tab.go_back()
    expect(tab.locator("main h2")).to_have_text(VIEWS["head/2/1"])


def test_attention_map_is_darkest_at_the_largest_weights(open_page):
    """Head 2 of the payload attends two blocks back, or to the first block."""
    tab = open_page(view="head/1/2", color_scheme="light").tab
    canvas = tab.locator(".map canvas")
    size, darkest = canvas.evaluate("""canvas => {
        const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        const dark = [];
        for (let i = 0; i < canvas.width * canvas.height; i++) if (data[4 * i] < 100) dark.push(i);
        return [[canvas.width, canvas.height], dark];
    }""")
    assert size == [7, 7]
    assert darkest == [7 * row + max(0, row - 2) for row in range(7)]
    assert "7 by 7 cells. 14% of the attention is on the diagonal" in canvas.get_attribute("aria-label")
    canvas.hover(position={"x": 5, "y": 5})
    expect(tab.locator(".map-figure .readout")).to_have_text("From tokens 0–15 to tokens 0–15: 50%")


def test_far_offsets_are_binned(open_page):
    tab = open_page(view="head/1/3").tab
    described = tab.locator(".offset-figure svg").get_attribute("aria-label")
    assert described == "Bar chart of attention by distance. The largest: −3: 75% and +9…+16: 15%."
    ticks = tab.locator(".offset-figure svg text").all_text_contents()
    assert [x for x in ticks if x[0] in "−+" or x == "0"] == [
        "−16…−9", "−8…−5", "−4", "−3", "−2", "−1", "0", "+1", "+2", "+3", "+4", "+5…+8", "+9…+16",
    ]  # fmt: skip
    bars = tab.locator(".offset-figure svg rect:has(title)")
    heights = {bar.text_content(): float(bar.get_attribute("height")) for bar in bars.all()}
    one, eight = heights["−3: 75% of the attention in all"], heights["+9…+16: 15% of the attention in all"]
    assert one / eight == pytest.approx(0.75 / (0.15 / 8), rel=0.02)  # a bin is divided by its width


def test_findings_lead_to_their_evidence(open_page):
    opened = open_page()
    tab = opened.tab
    tab.get_by_role("link", name="Two say the same").click()
    expect(tab.locator("main h2").first).to_have_text("Similar heads")
    expect(tab.locator(".groups li.marked a")).to_have_text(["Encoder L1H0", "Encoder L1H3"])
    assert "86% · 77% by Encoder L1H3 alone, cosine -0.61" in tab.locator(".groups li.marked").inner_text()
    opened.go("overview")
    tab.get_by_role("link", name="Some rest").click()
    assert tab.get_by_label("Colour by").input_value() == "sink_mass"
    marked = tab.eval_on_selector_all("a.cell.marked", "cells => cells.map(cell => cell.dataset.key)")
    assert marked == ["0.2"]
    tab.get_by_role("link", name="One matters most").click()
    expect(tab.locator("tr.marked th a")).to_have_text(["Encoder L0H4"])


def test_similar_heads_are_ranked_by_the_chosen_relation(open_page):
    tab = open_page(view="similar").tab
    first = tab.locator("table.sortable").first.locator("tbody tr").first
    expect(first.locator("th, td")).to_have_text(["Encoder L1H0", "Encoder L1H3", "0.81"])
    assert "L1H0 (Encoder) and L1H3 (Encoder)" in tab.locator(".lead strong").inner_text()
    tab.get_by_label("Measure").select_option("attention_distance")
    expect(first.locator("th, td")).to_have_text(["Encoder L1H0", "Encoder L1H3", "0.19"])
    expect(tab.locator(".matrix canvas")).to_have_count(LAYERS + CROSS_LAYERS)


def test_command_for_a_redundant_head_can_be_copied(open_page, keep_picture):
    opened = open_page(view="similar", permissions=("clipboard-read", "clipboard-write"))
    tab = opened.tab
    command = tab.locator(".groups .command")
    words = "polyhead prune small --heads L1H0 --stack 'encoder.*' --text text.txt --form uneven --output pruned"
    assert command.locator("code").inner_text() == words
    command.get_by_role("button").click()
    expect(command.get_by_role("button")).to_have_text("Copied")
    assert tab.evaluate("navigator.clipboard.readText()") == words
    # A share would be of one stack, and this model has two.
    expect(tab.locator(".command")).to_have_count(1)
    keep_picture(opened, "edits")


def test_command_for_a_share_of_the_heads_of_a_single_stack(tmp_path, open_page):
    page = synthetic()
    page |= {"redundant": [], "stacks": page["stacks"][:1]}
    page["facts"]["name"] = "my models/it's small"
    tab = open_page(written(page, tmp_path / "page.html"), view="similar").tab
    (command,) = tab.locator(".command code").all_inner_texts()
    options = "--share 20% --text text.txt --form uneven --output pruned"
    assert command == f"polyhead prune 'my models/it'\\''s small' {options}"
    assert shlex.split(command)[2] == "my models/it's small"
    page["facts"]["name"] = None
    assert not open_page(written(page, tmp_path / "page.html"), view="similar").tab.locator(".command").count()


def test_most_important_head_is_first(open_page):
    tab = open_page(view="importance").tab
    best = max(PAGE["heads"], key=lambda head: head["values"]["ablation"])
    layer = PAGE["sites"][best["site"]]["layer"]
    assert tab.locator(".lead strong").inner_text().startswith(f"L{layer}H{best['head']} (Encoder) ranks first")
    row = tab.locator("table.sortable tbody tr").first.locator("th, td").all_inner_texts()
    assert row[1:3] == [f"{best['values']['ablation']:.3g}", "0.03"]
    assert tab.locator(".ramp-ends span").last.inner_text() == row[1]


def test_syntax_is_compared_with_its_baseline(open_page):
    tab = open_page(view="syntax").tab
    row = tab.locator("table.sortable tbody tr").first.locator("th, td").all_inner_texts()
    assert row[:5] == ["obj", "to the syntactic head", "Encoder L1H2", "70% (60%–80%)", "35%"]
    assert row[5].strip() == "+35%"
    assert row[6] == "better"
    chart = tab.locator("table.sortable tbody tr").first.locator(".gain svg")
    left, width = chart.bounding_box()["x"], chart.bounding_box()["width"]
    dot, interval = (chart.locator(mark).bounding_box() for mark in ("circle", "path"))
    assert (dot["x"] + dot["width"] / 2 - left) / width == pytest.approx(0.7, abs=0.03)
    assert (interval["x"] - left) / width == pytest.approx(0.6, abs=0.03)
    expect(chart.locator("[stroke='var(--second)'] line")).to_have_count(1)


def test_a_link_to_the_view_is_copied(open_page, small_page):
    opened = open_page(view="head/2/1?word=3", permissions=("clipboard-read", "clipboard-write"))
    tab = opened.tab
    tab.get_by_label("Language").select_option("zh")
    tab.get_by_role("button", name="复制链接").click()
    tab.get_by_role("button", name="已复制").wait_for()
    assert tab.evaluate("navigator.clipboard.readText()") == f"{small_page.as_uri()}#/head/2/1?word=3&lang=zh"


def test_minimal_run_and_invalid_links(open_page, tmp_path):
    opened = open_page(written(bare(), tmp_path / "bare.html"), "%")
    views = ["overview", "head/0/0", "head/9/9", "similar", "head/x/y", "importance", "syntax", "findings", "%"]
    expected = {"head/9/9": "This model has no such head", "head/x/y": "This model has no such head"}
    for view in views:
        opened.go(view)
        expect(opened.tab.locator("main h2").first).to_contain_text(expected.get(view, ""))
        expect(opened.tab.locator("nav.views a")).to_have_text(["Overview", "Charts", "Similar heads", "Findings"])


def test_head_of_an_edited_model_shows_its_origin(open_page, tmp_path):
    page = synthetic()
    page["facts"]["edits"] = {"en": "removed L0H3", "zh": "去除 L0H3"}
    first = page["heads"][1]
    first["origin"] = {"en": "originally L0H4", "zh": "原为 L0H4"}
    opened = open_page(written(page, tmp_path / "edited.html"), f"head/{first['site']}/{first['head']}")
    expect(opened.tab.locator("main h2")).to_contain_text("originally L0H4")
    expect(opened.tab.locator("header .facts")).to_contain_text("Edited: removed L0H3")
    opened.go("findings")
    expect(opened.tab.get_by_text("Edits, by original heads")).to_be_visible()


def test_attention_that_is_not_a_number_is_called_so(open_page, tmp_path):
    page = synthetic()
    packs = [page["maps"]["2"], page["offsets"]["sites"]["2"], page["examples"][0]["sites"]["2"]]
    for packed, key in zip(packs, ("maps", "offsets", "examples"), strict=True):
        weights = torch.from_numpy(unpacked(packed)).float()
        weights[1] = torch.nan
        into = page["examples"][0]["sites"] if key == "examples" else page[key].get("sites", page[key])
        into["2"] = packed_weights(weights)
    opened = open_page(written(page, tmp_path / "nan.html"), "overview?color=map")
    tab = opened.tab
    missing = tab.locator("a.cell.missing")
    expect(missing).to_have_attribute("data-key", "2.1")
    assert "not a number (NaN)" in missing.get_attribute("aria-label")
    assert tab.locator("a.cell canvas").count() == ALL - 1
    missing.click()
    expect(tab.locator(".map-figure canvas")).to_have_attribute("aria-label", "not a number (NaN)")
    expect(tab.locator(".map-figure .ramp-missing")).to_have_text("not a number (NaN)")
    expect(tab.locator(".offset-figure figcaption")).to_have_text("not a number (NaN)")
    expect(tab.locator(".strongest")).to_contain_text("not a number (NaN)")
    assert tab.locator(".word.missing").count() == len(SENTENCE)
    tab.get_by_role("button", name="Lines").click()
    expect(tab.locator(".lines svg")).to_contain_text("not a number (NaN)")
    assert not tab.locator(".lines svg path").count()
    opened.check()
