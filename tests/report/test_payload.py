"""The payload of a page: all data of an inspection, in both languages."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any, get_args

import numpy as np
import pytest
import torch

from polyhead.analysis.dependency_accuracy import DOWNWARD, UPWARD
from polyhead.analysis.importance.losses import NAMES as LOSSES
from polyhead.analysis.syntax_table import SyntaxRow, SyntaxTable
from polyhead.errors import OptionError
from polyhead.inspection import cross_layer_similarity, load_inspection, save_inspection
from polyhead.inspection.example_weights import Example
from polyhead.inspection.head_maps import HeadMaps, bin_edges
from polyhead.inspection.vocabulary import Text
from polyhead.inspection.wording import Reason, kind_of_model, loss_in_words
from polyhead.observation.token_sample import TokenSample
from polyhead.report import page_of
from polyhead.report.packing import MAX_TEXT_LENGTH
from polyhead.report.pictures import MAX_MAP_CELLS, pooled
from polyhead.report.syntax_results import Syntax
from polyhead.sources.models import Kind
from polyhead.sources.probes import repeated_batches
from polyhead.sources.token_class import token_classes
from polyhead.workflows.inspecting import inspect_model
from polyhead.workflows.model_loading import load_model
from tests.report.test_packing import HOSTILE, unpacked

NAMES = ("bert", "llama", "t5")


def texts_in(value: Any, path: str = "") -> list[tuple[str, dict]]:
    """Yield every bilingual text with its path."""
    if isinstance(value, dict):
        if set(value) == {"en", "zh"}:
            return [(path, value)]
        return [found for name, x in value.items() for found in texts_in(x, f"{path}.{name}")]
    if isinstance(value, list):
        return [found for index, x in enumerate(value) for found in texts_in(x, f"{path}.{index}")]
    return []


@pytest.fixture(scope="module")
def pages(inspections) -> dict[str, dict[str, Any]]:
    return {name: page_of(inspection) for name, inspection in inspections.items()}


@pytest.mark.parametrize("name", NAMES)
def test_payload_is_plain_json_with_texts_in_both_languages(pages, name):
    page = pages[name]
    assert json.loads(json.dumps(page, allow_nan=False)) == page
    texts = texts_in(page)
    assert len(texts) > 40
    for path, text in texts:
        assert text["en"], path
        assert text["zh"], path
        assert any("\u4e00" <= character <= "\u9fff" for character in text["zh"]), (path, text)


def english_words(text: str) -> set[str]:
    return set(re.findall(r"[A-Za-z]{2,}", text))


def numbers_in(text: str) -> list[str]:
    return sorted(re.findall(r"[\d,]*\d", text))


@pytest.mark.parametrize("name", NAMES)
def test_facts_of_a_run_are_translated(pages, inspections, name):
    facts = pages[name]["facts"]
    assert inspections[name].facts["left_out"]
    assert len(facts["left_out"]) == len(inspections[name].facts["left_out"])
    texts = [facts["kind"], facts["pairs_by"], *facts["left_out"], *([] if facts["loss"] is None else [facts["loss"]])]
    for text in texts:
        assert english_words(text["en"])
        assert english_words(text["zh"]) <= {"MiB"}, text
        assert numbers_in(text["en"]) == numbers_in(text["zh"])


def test_every_reason_of_a_run_is_translated(inspections):
    head_projections = {(f"layer.{number}", "self"): torch.eye(5).expand(3, -1, -1) for number in range(2)}
    reasons = [
        *(
            cross_layer_similarity.method(TokenSample(head_projections, 1024, name=name))
            for name in ("said", "sketches")
        ),
        *inspections["bert"].facts["left_out"],
    ]
    settings = dataclasses.replace(inspections["bert"].settings, importance="none", chance=False)
    short = inspect_model(dataclasses.replace(settings, context=24)).facts["left_out"]
    assert [reason.kind for reason in short] == ["repeated_words", "pronoun_sentences"]
    tokenizer = load_model(settings.model).tokenizer
    with pytest.raises(OptionError) as refused:
        list(repeated_batches(tokenizer, token_classes(tokenizer), seed=0, context=24))
    assert str(short[0]) == f"induction and duplicate-token: {refused.value}"
    earlier = Reason("returned_weights")  # of runs that earlier versions saved
    for text in (reason.text for reason in (*reasons, *short, earlier)):
        assert english_words(text.zh) <= {"MiB"}, text
        assert numbers_in(text.en) == numbers_in(text.zh)
    assert Reason("pronoun_error", {"error": "no offsets"}).text == Text("pronoun: no offsets", "代词指代：no offsets")
    assert {kind_of_model(kind).zh for kind in get_args(Kind)}.isdisjoint(get_args(Kind))
    assert {loss_in_words(loss).zh for loss in LOSSES}.isdisjoint(LOSSES)


@pytest.mark.parametrize("name", NAMES)
def test_heads_have_the_numbers_of_the_table(pages, inspections, name):
    page, table = pages[name], inspections[name].table
    assert [(page["sites"][x["site"]]["name"], x["head"]) for x in page["heads"]] == [
        (site.name, head) for site, head in zip(table.sites, table.heads, strict=True)
    ]
    names = [column["name"] for column in page["columns"]]
    assert names[: 1 + len(table.names)] == ["tokens", *table.names]
    assert sorted(names) == sorted(table.columns) == sorted(page["table"])
    for column in names:
        np.testing.assert_array_equal(unpacked(page["table"][column]), table[column].numpy(), strict=True)
    groups = {column["name"]: column["group"] for column in page["columns"]}
    scores = {name for name in table.columns if name.endswith("_score")}
    assert {name for name, group in groups.items() if group == "companion"} == set(table.columns) - {
        "tokens",
        *table.names,
        *scores,
    }
    assert scores


def test_an_encoder_decoder_has_three_grids_and_names_them(pages):
    stacks = pages["t5"]["stacks"]
    assert [(stack["label"]["en"], stack["kind"], len(stack["sites"])) for stack in stacks] == [
        ("Encoder self-attention", "self", 2),
        ("Decoder self-attention", "self", 2),
        ("Decoder cross-attention", "cross", 2),
    ]
    cross = {str(number) for number in stacks[2]["sites"]}
    assert cross <= set(pages["t5"]["maps"])
    assert not cross & set(pages["t5"]["offsets"]["sites"])
    assert cross <= set(pages["t5"]["examples"][0]["sites"])
    assert [stack["label"]["en"] for stack in pages["bert"]["stacks"]] == ["Self-attention"]


@pytest.mark.parametrize("name", NAMES)
def test_roles_are_ordered_with_null_interval_and_evidence(pages, inspections, name):
    page = pages[name]
    order = [role["name"] for role in page["roles"]]
    assert len({role["letters"] for role in page["roles"]}) == len(order)
    roles = {(x.site.name, x.site.kind, x.head): x for x in inspections[name].roles}
    for head in page["heads"]:
        site = page["sites"][head["site"]]
        found = roles.get((site["name"], site["kind"], head["head"]))
        assert len(head["roles"]) == (0 if found is None else len(found.scores))
        assert [x["role"] for x in head["roles"]] == sorted((x["role"] for x in head["roles"]), key=order.index)
        for role in head["roles"]:
            score = found[role["role"]]
            assert role["evidence"]["en"] == score.evidence
            assert role["holds"] == score.holds
            assert role["null"] == pytest.approx(score.null, rel=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_maps_and_offsets_are_shares(pages, name):
    page = pages[name]
    edges = page["offsets"]["edges"]
    assert edges == sorted(edges)
    assert edges[0] <= -60
    assert edges[-1] >= (1 if name == "llama" else 60)
    for number, packed in page["maps"].items():
        grid = unpacked(packed)
        assert grid.shape[0] == page["sites"][int(number)]["heads"]
        assert grid.shape[1] == grid.shape[2] == 64 // page["map_block"]
        assert abs(grid.sum(-1) - 1).max() < grid.shape[2] * grid.max() / 255
    for packed in page["offsets"]["sites"].values():
        assert packed["shape"][1] == len(edges) - 1
        assert abs(unpacked(packed).sum(-1) - 1).max() < 1e-4


def test_relations_alike_and_importance(pages, inspections):
    page, inspection = pages["llama"], inspections["llama"]
    assert page["importance"]["column"] == "gradient"
    assert pages["bert"]["importance"]["column"] == "ablation"
    assert pages["t5"]["importance"] is None
    names = [x["name"] for x in page["relation_names"]]
    assert {"cosine", "gradient_overlap"} <= set(names)
    for number, found in page["relations"].items():
        site = next(x for x in inspection.relations if x.name == page["sites"][int(number)]["name"])
        for name, packed in found.items():
            torch.testing.assert_close(
                torch.tensor(unpacked(packed)), inspection.relations[site][name].float(), rtol=0, atol=0, equal_nan=True
            )
    for head in page["heads"]:
        cosines = [x["cosine"] for x in head["similar"]]
        assert cosines == sorted(cosines, key=abs, reverse=True)
        assert 1 <= len(cosines) <= 5
        for other in head["similar"]:
            assert other["head"] != [head["site"], head["head"]]
            assert other["across"] == (other["head"][0] != head["site"])


@pytest.mark.parametrize("name", NAMES)
def test_findings_refer_to_existing_heads_and_views(pages, name):
    page = pages[name]
    assert page["findings"]
    for finding in page["findings"]:
        assert finding["view"] in ("head", "similar", "importance", "overview", "roles")
        assert finding["heads"]
        for site, head in finding["heads"]:
            assert head < page["sites"][site]["heads"]
        assert finding["column"] is None or finding["column"] in [x["name"] for x in page["columns"]]


def test_heads_have_top_keys_and_chance_levels(pages, inspections):
    page, inspection = pages["llama"], inspections["llama"]
    assert "punctuation_mass_chance" in page["table"]
    for head in page["heads"]:
        site = next(x for x in inspection.top_keys if x.name == page["sites"][head["site"]]["name"])
        expected = inspection.top_keys[site][head["head"]]
        assert [key["text"] for key in head["top_keys"]] == [key.text for key in expected]
        assert [key["share"] for key in head["top_keys"]] == pytest.approx([key.share for key in expected], rel=1e-5)
        assert head["top_keys"]


def test_interrupted_run_has_a_page(inspections):
    less = {
        "roles": (),
        "pairs": (),
        "relations": {},
        "head_maps": {},
        "examples": (),
    }
    facts = {**inspections["bert"].facts, "interrupted": True, "read": False}
    page = page_of(dataclasses.replace(inspections["bert"], facts=facts, top_keys={}, **less))
    assert page["facts"]["interrupted"]
    after = dataclasses.replace(inspections["bert"], facts={**facts, "read": True})
    assert not page_of(after)["facts"]["interrupted"], "the results are of the whole text"
    assert len(page["heads"]) == 8
    assert page["maps"] == page["relations"] == {}
    assert page["roles"] == page["examples"] == page["redundant"] == []


def test_saved_run_has_the_same_page(inspections, pages, tmp_path):
    save_inspection(tmp_path, inspections["t5"])
    assert page_of(load_inspection(tmp_path)) == pages["t5"]


def test_hostile_and_long_tokens_are_text(inspections):
    inspection = inspections["bert"]
    tokens = (*HOSTILE, "x" * 100_000, "half \ud800 pair")
    shape = (inspection.table.sites[0].num_heads, len(tokens), len(tokens))
    example = Example("<b>\u202etitle", tokens, tokens, {inspection.table.sites[0]: torch.full(shape, 1 / len(tokens))})
    facts = {**inspection.facts, "model": "</title><script>1</script>\udcff" + "y" * 5000}
    page = page_of(dataclasses.replace(inspection, examples=(example,), facts=facts))
    (found,) = page["examples"]
    assert found["queries"][: len(HOSTILE)] == list(HOSTILE)
    assert found["keys"][-2:] == ["x" * MAX_TEXT_LENGTH + "…", "half \ufffd pair"]
    assert found["title"] == "<b>\u202etitle"
    assert len(page["title"]) == MAX_TEXT_LENGTH + 1
    assert page["facts"]["model"].startswith("</title><script>1</script>\ufffdyyy")
    json.dumps(page, ensure_ascii=False).encode("utf-8")


def test_heads_without_numbers_are_not_zeros_and_hide_no_others(inspections):
    inspection = inspections["llama"]
    heads = dict(inspection.head_maps)
    for site, x in heads.items():
        rows = torch.arange(site.num_heads) != 2
        heads[site] = HeadMaps(x.block, x.map.clone(), x.offsets.clone())
        heads[site].map[~rows] = heads[site].offsets[~rows] = torch.nan
        assert rows.sum() == site.num_heads - 1 > 0
    (site, weights), *_ = inspection.examples[0].weights.items()
    example = dataclasses.replace(inspection.examples[0], weights={site: weights.clone()})
    example.weights[site][2] = torch.nan
    page = page_of(dataclasses.replace(inspection, head_maps=heads, examples=(example,)))
    assert page["offsets"]["edges"] == page_of(inspection)["offsets"]["edges"]
    arrays = [*page["maps"].values(), *page["offsets"]["sites"].values(), *page["examples"][0]["sites"].values()]
    assert len(arrays) == 2 * len(heads) + 1
    for packed in arrays:
        found = unpacked(packed)
        assert np.isnan(found[2]).all()
        assert np.isfinite(np.delete(found, 2, 0)).all()
    nothing = {site: HeadMaps(x.block, x.map, torch.full_like(x.offsets, torch.nan)) for site, x in heads.items()}
    page = page_of(dataclasses.replace(inspection, head_maps=nothing))
    assert page["offsets"]["edges"] == bin_edges()


def test_maps_of_many_heads_are_pooled_to_the_limit(inspections):
    inspection = inspections["bert"]
    site = dataclasses.replace(inspection.table.sites[0], num_heads=600)
    looks = HeadMaps(8, torch.rand(600, 61, 61).softmax(-1), torch.zeros(600, len(bin_edges()) - 1))
    page = page_of(dataclasses.replace(inspection, head_maps={site: looks}, relations={}, examples=()))
    (packed,) = page["maps"].values()
    assert packed["shape"] == [600, 31, 31]
    assert 600 * 31 * 31 <= MAX_MAP_CELLS < 600 * 61 * 61
    assert page["map_block"] == 16
    assert page["offsets"] == {"edges": [], "sites": {}}
    small = pooled(looks.map, 2)
    torch.testing.assert_close(small.sum(-1), torch.ones(600, 31))
    torch.testing.assert_close(small[0, 3, 5], looks.map[0, 6:8, 10:12].sum() / 2)
    torch.testing.assert_close(small[0, 30, 30], looks.map[0, 60, 60])


# ---- syntax


def row_of(site: str, head: int, **other: Any) -> SyntaxRow:
    numbers = dict.fromkeys(("low", "high", "baseline_low", "baseline_high", "chosen_accuracy", "chosen_baseline"), 0.5)
    counts = dict.fromkeys(("head_only", "baseline_only", "chosen_count"), 7)
    return SyntaxRow(
        **{
            "relation": "det", "direction": UPWARD, "count": 41, "site": site, "layer": 0, "head": head,
            "accuracy": 0.8, "offset": 1, "baseline": 0.6, **numbers, **counts, **other,
        }
    )  # fmt: skip


@pytest.mark.parametrize("suffix", [".json", ".parquet"])
def test_syntax_table_is_part_of_the_page(inspections, tmp_path, suffix):
    inspection = inspections["bert"]
    site = inspection.table.sites[-1]
    rows = (row_of(site.name, 3), row_of(site.name, 1, relation="obj", direction=DOWNWARD, offset=-2))
    file = tmp_path / f"table{suffix}"
    SyntaxTable(rows, (), 8, (10, 11), 30, 0).save(file, model="bert", treebank="en_ewt.conllu")
    page = page_of(inspection, syntax=Syntax.load(file))["syntax"]
    assert page["treebank"] == ("en_ewt.conllu" if suffix == ".json" else file.name)
    first, second = page["rows"]
    assert (first["relation"], first["direction"], first["head"], first["words"]) == ("det", "head", [1, 3], 41)
    assert (second["relation"], second["direction"], second["head"]) == ("obj", "dependent", [1, 1])
    assert (second["offset"], second["accuracy"], second["baseline"]) == (-2, 0.8, 0.6)


def test_a_syntax_table_of_another_model_or_none_is_refused(inspections, tmp_path):
    file = tmp_path / "table.json"
    SyntaxTable((row_of("another.module", 3),), (), 8, (10, 11), 30, 0).save(file)
    with pytest.raises(OptionError, match=r"of the same model, got head 3 of 'another.module'"):
        page_of(inspections["bert"], syntax=Syntax.load(file))
    file.write_text("{}")
    with pytest.raises(OptionError, match="as `polyhead syntax --output` wrote it"):
        Syntax.load(file)
    with pytest.raises(OptionError, match=r"none\.json not found"):
        Syntax.load(tmp_path / "none.json")
    with pytest.raises(OptionError, match=r"got 'table.txt'"):
        Syntax.load(tmp_path / "table.txt")
