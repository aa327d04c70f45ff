"""Heads in a notebook: HTML fragments without scripts, with escaped texts."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser

import pytest
import torch

import polyhead
from polyhead.errors import OptionError
from polyhead.observation import AttentionSite, HeadProfile
from polyhead.observation.cards import Cell, Number, card, grids

EMPTY_ELEMENTS = ("br",)


class Checked(HTMLParser):
    """Parser that checks that elements are nested and closed, and that none runs or loads anything."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "style", "img", "iframe", "link")
        for name, value in attrs:
            assert not name.startswith("on")
            assert name not in ("src", "href")
            assert "url(" not in (value or "")
        self.seen.append(tag)
        if tag not in EMPTY_ELEMENTS:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def words_of(text: str) -> str:
    return re.sub(r"<[^>]*>", " ", text)


@pytest.mark.parametrize("name", ["bert", "llama", "t5"])
def test_inspection_shows_findings_roles_and_a_card_per_head(inspections, name):
    inspection = inspections[name]
    shown = inspection._repr_html_()
    Checked(shown)
    text = words_of(shown)
    for finding in inspection.findings:
        assert str(finding).replace("'", "&#x27;") in text
    for site in dict.fromkeys(inspection.table.sites):
        assert f"cards of {site.name}, {site.kind}-attention" in text
    assert shown.count("display: inline-block") == len(inspection.table)
    held = [score for head in inspection.roles for score in head.scores if score.holds]
    assert held or name != "t5"
    for score in held:
        assert f"{score.role}: {score.evidence}" in text


def test_a_profile_of_a_session_shows_a_shaded_grid_and_cards():
    layer = polyhead.MultiHeadAttention(16, 2, causal=True)
    with polyhead.observe(layer, statistics=("entropy", "mean_distance")) as session:
        layer(torch.randn(3, 5, 16))
    shown = session.profile._repr_html_()
    Checked(shown)
    assert repr(session.profile) in words_of(shown)
    assert "shaded by entropy" in shown
    assert shown.count("display: inline-block") == 2
    shades = re.findall(r'text-align: center; background: rgba\(64, 120, 200, ([\d.]+)\)" title="L0H', shown)
    assert sorted(shades) == ["0.00", "0.75"]
    assert Checked(polyhead.observe(layer).profile._repr_html_()).seen == ["p", "strong"]


def test_many_heads_have_a_grid_and_a_table_and_no_cards(inspections, monkeypatch):
    monkeypatch.setattr("polyhead.observation.head_profile.MAX_CARDS", 7)
    shown = inspections["bert"]._repr_html_()
    Checked(shown)
    assert "8 heads are too many for cards in a notebook" in shown
    assert "display: inline-block" not in shown
    assert shown.count("<td>encoder.layer.1.attention.self</td>") == 4


def test_markup_in_names_is_escaped(inspections):
    inspection = inspections["bert"]
    evil = "<script>alert(1)</script>\"' onload=x"
    renamed = {site: dataclasses.replace(site, name=evil, stack=evil) for site in inspection.table.sites}
    table = inspection.table
    columns = {**table.columns, evil: table["entropy"]}
    table = HeadProfile(tuple(renamed[x] for x in table.sites), table.heads, (*table.names, evil), columns)
    facts = {**inspection.facts, "model": evil}
    Checked(dataclasses.replace(inspection, table=table, facts=facts)._repr_html_())
    Checked(table._repr_html_())
    Checked(card(evil, [evil], [Number(evil, evil, 0.5), Number(evil, evil, None)]))
    Checked(grids(table.sites[:1], lambda site, head: Cell(evil, 9.0, evil)))


# ---- other tools


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_tables_convert_to_arrow_pandas_and_polars(inspections, name):
    table = inspections[name].table
    for tool, rows in (
        ("pyarrow", lambda: table.to_arrow().to_pylist()),
        ("pandas", lambda: table.to_pandas().to_dict("records")),
        ("polars", lambda: table.to_polars().to_dicts()),
    ):
        pytest.importorskip(tool)
        found = rows()
        assert [list(row) for row in found] == [list(row) for row in table.rows()], tool
        for row, expected in zip(found, table.rows(), strict=True):
            assert repr(row) == repr(expected), tool  # NaN is not equal to itself


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_dataset_has_each_head_at_its_stack_layer_and_index(inspections, name):
    xarray = pytest.importorskip("xarray")
    table = inspections[name].table
    dataset = table.to_xarray()
    stacks = list(zip(dataset["stack"].values.tolist(), dataset["kind"].values.tolist(), strict=True))
    assert len(stacks) == {"bert": 1, "t5": 3}[name]
    seen = 0
    for row in table.rows():
        place = {"stack": stacks.index((row["stack"], row["kind"]))}
        cell = dataset.isel(place).sel(layer=row["layer"], head=row["head"])
        assert isinstance(cell, xarray.Dataset)
        for column in (*table.columns, "site", "original_head"):
            assert repr(cell[column].item()) == repr(row[column])
        seen += 1
    assert seen == int(dataset["tokens"].notnull().sum())


def test_dataset_is_nan_where_a_layer_has_no_such_head():
    pytest.importorskip("xarray")
    wide, narrow = (AttentionSite(f"h.{n}", "self", "h.*", n, heads) for n, heads in ((0, 3), (2, 2)))
    cross = AttentionSite("h.2", "cross", "h.*", 2, 2)  # the same module as self- and as cross-attention
    sites, heads = (wide, wide, wide, narrow, narrow, cross), (0, 1, 2, 0, 1, 1)
    values = torch.tensor([2.0, 3, 5, 7, 11, 13], dtype=torch.float64)
    dataset = HeadProfile(sites, heads, ("entropy",), {"tokens": values + 17, "entropy": values}).to_xarray()
    nan = float("nan")
    expected = [[[2.0, 3.0, 5.0], [7.0, 11.0, nan]], [[nan] * 3, [nan, 13.0, nan]]]
    assert repr(dataset["entropy"].values.tolist()) == repr(expected)
    assert dataset["layer"].values.tolist() == [0, 2]
    assert dataset["kind"].values.tolist() == ["self", "cross"]
    assert dataset["site"].values.tolist() == [["h.0", "h.2"], ["", "h.2"]]
    assert dataset["original_head"].values[1].tolist() == [["", "", ""], ["", "1", ""]]
    empty = HeadProfile((), (), (), {"tokens": values[:0]}).to_xarray()
    assert dict(empty.sizes) == {"stack": 0, "layer": 0, "head": 0}


def test_missing_package_is_named_with_its_install_command(inspections, monkeypatch):
    for package in ("polars", "xarray"):
        monkeypatch.setitem(__import__("sys").modules, package, None)
        install = f"needs the package {package}; install it with: pip install '{package}'"
        with pytest.raises(OptionError, match=install):
            getattr(inspections["bert"].table, f"to_{package}")()
