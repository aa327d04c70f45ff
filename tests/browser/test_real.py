"""A page of a real inspection, as `polyhead inspect --html` writes it: an encoder-decoder, with all kinds of heads."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import expect

from polyhead.inspection import Settings
from polyhead.report.page import write_page
from polyhead.workflows.inspecting import inspect_model
from tests.inspection.small_models import model_folder, text_folder


@pytest.fixture(scope="module")
def real_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("real")
    text = str(text_folder(folder / "text", documents=3, words=40))
    model = str(model_folder(folder / "model", "t5"))
    return write_page(folder / "page.html", inspect_model(Settings(model, text, context=48, batch_tokens=400)))


def test_every_view_of_a_real_inspection_opens(open_page, real_page):
    opened = open_page(real_page)
    tab = opened.tab
    heads = tab.evaluate("JSON.parse(document.getElementById('polyhead-data').textContent).heads.length")
    expect(tab.locator("a.cell")).to_have_count(heads)
    expect(tab.locator(".head-grid")).to_have_count(3)  # encoder, decoder and cross-attention
    columns = tab.eval_on_selector_all("select optgroup option", "all => all.map(x => x.value)")
    for column in columns:
        tab.get_by_label("Colour by").select_option(column)
        expect(tab.locator(".explained .ramp-ends span")).to_have_count(3)
    hrefs = tab.eval_on_selector_all("a.cell", "cells => cells.map(cell => cell.getAttribute('href'))")
    for href in (*hrefs[:2], hrefs[-1], "#/similar", "#/importance", "#/findings"):
        opened.go(href.removeprefix("#/"))
        assert tab.locator("main h2").first.inner_text() != "This model has no such head"
    # A head of cross-attention has words in two lines.
    opened.go(hrefs[-1].removeprefix("#/"))
    expect(tab.locator(".word-line")).to_have_count(2)
