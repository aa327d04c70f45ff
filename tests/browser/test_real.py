"""A page of a real inspection, as `polyhead inspect --html` writes it: an encoder-decoder, with all kinds of heads."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.csv
import pyarrow.parquet
import pytest
from playwright.sync_api import expect

from polyhead.inspection import Settings, save_inspection
from polyhead.report.page import write_page
from polyhead.workflows.inspecting import inspect_model
from tests.browser.saving import saved
from tests.inspection.small_models import model_folder, text_folder


@pytest.fixture(scope="module")
def real_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run, which is saved beside it."""
    folder = tmp_path_factory.mktemp("real")
    text = str(text_folder(folder / "text", documents=3, words=40))
    model = str(model_folder(folder / "model", "t5"))
    inspection = inspect_model(Settings(model, text, context=48, batch_tokens=400))
    save_inspection(folder / "run", inspection)
    return write_page(folder / "page.html", inspection)


@pytest.fixture(scope="module")
def parquet(real_page: Path) -> pyarrow.Table:
    return pyarrow.parquet.read_table(real_page.parent / "run" / "heads.parquet")


def read_csv(file: Path, schema: pyarrow.Schema) -> list[dict[str, Any]]:
    """Return the rows of a CSV file with the types of a schema; a missing number is NaN, as in Parquet."""
    table = pyarrow.csv.read_csv(file, convert_options=pyarrow.csv.ConvertOptions(column_types=schema))
    return [{name: math.nan if x is None else x for name, x in row.items()} for row in table.to_pylist()]


def same(rows: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    """Compare rows exactly; NaN equals NaN."""
    assert [list(row) for row in rows] == [list(row) for row in wanted]
    assert repr(rows) == repr(wanted)  # the shortest text of a float names it exactly


def test_saved_csv_has_the_rows_of_the_parquet_file(open_page, real_page, parquet):
    tab = open_page(real_page, "charts?column=mean_distance&x=entropy&y=mean_distance_max").tab
    place = ["site", "kind", "stack", "layer", "head", "original_head"]
    figures = tab.locator(".stacks figure")
    expect(figures).to_have_count(3)
    rows = parquet.to_pylist()
    stacks = list(dict.fromkeys((row["stack"], row["kind"]) for row in rows))
    for figure, stack in zip(figures.all(), stacks, strict=True):
        file, name = saved(tab, figure.get_by_role("button", name="as CSV"))
        assert name.endswith("mean_distance.csv")
        wanted = parquet.select([*place, "mean_distance"]).to_pylist()
        same(read_csv(file, parquet.schema), [row for row in wanted if (row["stack"], row["kind"]) == stack])
    file, _ = saved(tab, tab.locator(".scatter-figure").get_by_role("button", name="as CSV"))
    same(read_csv(file, parquet.schema), parquet.select([*place, "entropy", "mean_distance_max"]).to_pylist())
    tab.locator("nav.views a").first.click()
    file, name = saved(tab, tab.get_by_role("button", name="as CSV"))
    assert name == "heads.csv"
    same(read_csv(file, parquet.schema), rows)


def as_shown(value: float, *, is_share: bool) -> tuple[float, str]:
    """Return a number of tokens, or a share as a percentage, rounded as the page writes it."""
    if is_share:
        return (float(f"{100 * value:.2g}") if value < 0.1 else float(f"{100 * value:.0f}")), "%"
    return (float(f"{value:.3g}") if value < 10 else round(value, 1)), ""


def test_heat_map_has_the_values_of_the_parquet_file(open_page, real_page, parquet):
    opened = open_page(real_page, "charts")
    tab = opened.tab
    options = tab.eval_on_selector_all("select", "all => [...all.at(-3).options].map(x => x.value)")
    numeric = [field.name for field in parquet.schema if pyarrow.types.is_floating(field.type)]
    assert sorted(options) == sorted(numeric)
    for column in ("mean_distance", "confidence_std"):
        tab.get_by_label("Column", exact=True).select_option(column)
        tab.locator(".explained strong", has_text=column).wait_for()
        for cell, value in zip(tab.locator("a.cell").all(), parquet[column].to_pylist(), strict=True):
            name = cell.get_attribute("aria-label")
            if math.isnan(value):
                assert "not computed" in name
                assert "missing" in cell.get_attribute("class")
            else:
                shown = re.search(r"(?:mean attention distance|standard deviation) ([-+.\de]+)(%?)", name)
                assert (float(shown[1]), shown[2]) == as_shown(value, is_share=column == "confidence_std")


# Chooses one column after another; returns the number of values below the colour scale of each. Nothing is laid out.
COLOUR_BY = """async (select, columns) => {
  const found = {};
  document.querySelector("main").hidden = true;
  const shown = () => document.querySelector(".explained strong")?.textContent.split(/\\s/).at(-1);
  const deadline = performance.now() + 60_000;
  for (const column of columns) {
    select.value = column;
    select.dispatchEvent(new Event("change", { bubbles: true }));
    while (shown() !== column && performance.now() < deadline) await new Promise((resolve) => setTimeout(resolve));
    found[shown()] = document.querySelectorAll(".explained .ramp-ends span").length;
  }
  document.querySelector("main").hidden = false;
  return found;
}"""


def test_every_view_of_a_real_inspection_opens(open_page, real_page):
    opened = open_page(real_page)
    tab = opened.tab
    heads = tab.evaluate("JSON.parse(document.getElementById('polyhead-data').textContent).heads.length")
    expect(tab.locator("a.cell")).to_have_count(heads)
    expect(tab.locator(".head-grid")).to_have_count(3)  # encoder, decoder and cross-attention
    columns = tab.eval_on_selector_all("select optgroup option", "all => all.map(x => x.value)")
    assert len(columns) > 50
    assert tab.get_by_label("Colour by").evaluate(COLOUR_BY, columns) == dict.fromkeys(columns, 3)
    hrefs = tab.eval_on_selector_all("a.cell", "cells => cells.map(cell => cell.getAttribute('href'))")
    for href in (*hrefs[:2], hrefs[-1], "#/similar", "#/importance", "#/findings"):
        opened.go(href.removeprefix("#/"))
        assert tab.locator("main h2").first.inner_text() != "This model has no such head"
    # A head of cross-attention has words in two lines.
    opened.go(hrefs[-1].removeprefix("#/"))
    expect(tab.locator(".word-line")).to_have_count(2)
