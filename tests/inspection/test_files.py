"""An inspection in a folder: pictures, examples and findings come back as they were, and other formats are told."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from polyhead.analysis.roles import RoleScore
from polyhead.errors import OptionError
from polyhead.inspection import Inspection, Settings, load_inspection, save_inspection
from polyhead.inspection.inspection_files import FORMAT
from polyhead.inspection.run_files import PICTURES
from polyhead.inspection.vocabulary import Text
from polyhead.inspection.wording import Basis, Finding
from polyhead.report.payload import page_of
from polyhead.workflows.inspecting import inspect_model
from tests.inspection.small_models import model_folder, text_folder

pytest.importorskip("pyarrow")


@pytest.fixture(scope="module")
def inspection(tmp_path_factory) -> Inspection:
    folder = tmp_path_factory.mktemp("run")
    text = str(text_folder(folder / "text", documents=4, words=40))
    return inspect_model(Settings(str(model_folder(folder / "t5", "t5")), text, context=48))


def test_pictures_examples_and_findings_come_back_bit_by_bit(inspection, tmp_path):
    save_inspection(tmp_path, inspection)
    again = load_inspection(tmp_path)
    assert again.findings == inspection.findings
    assert [str(finding) for finding in again.findings] == [str(finding) for finding in inspection.findings]
    assert list(again.head_maps) == list(inspection.head_maps)
    assert len(inspection.head_maps) == 6
    for site, maps in inspection.head_maps.items():
        assert again.head_maps[site].block == maps.block
        assert torch.equal(again.head_maps[site].map, maps.map)
        assert torch.equal(again.head_maps[site].offsets, maps.offsets)
    assert len(again.examples) == len(inspection.examples) == 3
    for one, other in zip(again.examples, inspection.examples, strict=True):
        assert (one.title, one.queries, one.keys) == (other.title, other.queries, other.keys)
        assert set(one.weights) == set(other.weights)
        for site, weights in other.weights.items():
            assert torch.equal(one.weights[site], weights)


def test_findings_stand_in_the_file_in_words_as_well(inspection, tmp_path):
    save_inspection(tmp_path, inspection)
    rest = json.loads((tmp_path / "inspection.json").read_text(encoding="utf-8"))
    assert [finding["text"] for finding in rest["findings"]] == [str(finding) for finding in inspection.findings]


def test_a_folder_of_the_first_format_is_refused_with_what_to_do(inspection, tmp_path):
    save_inspection(tmp_path, inspection)
    file = tmp_path / "inspection.json"
    rest = json.loads(file.read_text(encoding="utf-8"))
    assert rest["format"] == FORMAT == 8
    file.write_text(json.dumps({**rest, "format": 1}), encoding="utf-8")
    (tmp_path / PICTURES).unlink()
    with pytest.raises(
        OptionError,
        match=r"reads inspections of format 2 to 8, got 1 in .*inspection.json; run `polyhead",
    ):
        load_inspection(tmp_path)


def as_format_7(rest: dict) -> dict:
    """Pairs by the former name of a field."""
    for pair in rest["pairs"]:
        pair["guess"] = pair.pop("estimate")
    return {**rest, "format": 7}


def test_all_of_format_7_is_read(inspection, tmp_path):
    pairs = tuple(dataclasses.replace(pair, estimate=pair.cosine / 2) for pair in inspection.pairs)
    assert pairs
    save_inspection(tmp_path, dataclasses.replace(inspection, pairs=pairs))
    file = tmp_path / "inspection.json"
    file.write_text(json.dumps(as_format_7(json.loads(file.read_text(encoding="utf-8")))), encoding="utf-8")
    again = load_inspection(tmp_path)
    assert again.pairs == pairs
    assert again.table.names == inspection.table.names
    assert again.findings == inspection.findings


def as_format_6(rest: dict) -> dict:
    """With groups of similar heads by a threshold on cosines, and a finding about one."""
    rest = as_format_7(rest)
    rest["redundancy"] = {"threshold": 0.55, "null": 0.1}
    rest["groups"] = [{"heads": [[0, 0], [0, 1]], "least": 0.9}]
    values = {"cosine": 0.9, "across": False, "null": 0.1}
    similar = {"kind": "similar", "heads": [[0, 0], [0, 1]], "column": None, "values": values, "stacked": False}
    rest["findings"] = [x for x in rest["findings"] if x["kind"] != "redundant"] + [similar]
    return {**rest, "format": 6}


def test_what_format_6_measured_otherwise_is_no_result_of_today(inspection, tmp_path):
    """Copying by the weights is no role, and a pronoun score of all kinds of sentences keeps its sentence."""
    head = inspection.roles[0]
    scores = [RoleScore(role, 0.9, 0.8, 1.0, 0.3, 0.5, True) for role in ("copy", "anti-copy")]
    scores.append(RoleScore("pronoun", 0.9, 0.8, 1.0, 0.5, 0.75, True, weight=0.2))
    roles = (dataclasses.replace(head, scores=tuple(scores)),)
    values, found = {"score": 0.9, "null": 0.3, "weight": 0.2}, ("copy", "pronoun", "induction")
    findings = [Finding("role", ((head.site, head.head),), None, {"role": x, **values}) for x in found]
    columns = {**inspection.table.columns, "copy_score": inspection.table["entropy"]}
    columns |= {"anti_copy_score": -columns["copy_score"]}
    columns |= {
        f"{x}_share{end}": columns["entropy"] for x in ("word", "sentence") for end in ("", "_error", "_chance")
    }
    for name in [name for name in columns if name.startswith("copying_circuit_score")]:
        del columns[name]
    names = tuple(dict.fromkeys([*inspection.table.names, "word_share", "sentence_share"]))
    names = tuple(name for name in names if name != "copying_circuit_score")
    table = dataclasses.replace(inspection.table, names=names, columns=columns)
    earlier = dataclasses.replace(inspection, roles=roles, table=table, findings=tuple(findings), halves={})
    save_inspection(tmp_path, earlier)
    file = tmp_path / "inspection.json"
    rest = {**as_format_7(json.loads(file.read_text(encoding="utf-8"))), "format": 6}
    rest["roles"][0]["scores"][2]["evidence"] = "resolves pronouns"
    file.write_text(json.dumps(rest), encoding="utf-8")
    again = load_inspection(tmp_path)
    assert again.roles[0].roles == {"pronoun"}
    assert again.roles[0]["pronoun"].evidence == "resolves pronouns"
    assert [finding.values["role"] for finding in again.findings] == ["pronoun", "induction"]
    assert "resolves pronouns" in str(again.findings[0])
    assert again.table["copying_circuit_score"].tolist() == inspection.table["entropy"].tolist()
    assert str(again.findings[1]).endswith(": an induction head")  # not known to hold in two halves
    shown = [finding["text"]["en"] for finding in page_of(again)["findings"]]
    assert shown == list(map(str, again.findings))
    dropped = ("copy_score", "anti_copy_score", "word_share", "sentence_share")  # the last two counted the token itself
    assert not [name for name in (*again.table.names, *again.table.columns) if name.startswith(dropped)]


def as_format_5(rest: dict) -> dict:
    """Kinds of findings by the names that they had."""
    rest = as_format_6(rest)
    former = {"similar": "alike", "importance": "matters", "sink": "resting", "uniform": "wide"}
    for finding in rest["findings"]:
        finding["kind"] = former.get(finding["kind"], finding["kind"])
        if "by_representation" in finding["values"]:
            finding["values"]["turned"] = finding["values"].pop("by_representation")
    return {**rest, "format": 5}


def as_format_4(rest: dict) -> dict:
    """Two fields by the names that they had."""
    rest = as_format_5(rest)
    rest["likeness"], rest["looks"] = rest.pop("redundancy"), rest.pop("head_maps")
    return {**rest, "format": 4}


def as_format_3(rest: dict) -> dict:
    """Texts instead of fields, as the former version wrote them."""
    rest = as_format_4(rest)
    facts, (finding, *_) = rest["facts"], rest["findings"]
    facts |= {"pairs_by": facts["pairs_by"]["text"], "left_out": [reason["text"] for reason in facts["left_out"]]}
    for score in (score for head in rest["roles"] for score in head["scores"]):
        score.pop("offset", None)
    assert finding["kind"] == "role"
    text = next(
        x["evidence"] for head in rest["roles"] for x in head["scores"] if x["score"] == finding["values"]["score"]
    )
    finding["values"]["evidence"] = text
    return {**rest, "format": 3}


def test_groups_by_cosine_of_format_6_are_dropped_and_the_rest_is_read(inspection, tmp_path):
    new = ("predictable_share", "word_share", "sentence_share")  # format 6 has the last two in another sense
    columns = {name: x for name, x in inspection.table.columns.items() if not name.startswith(new)}
    names = tuple(name for name in inspection.table.names if name in columns)
    table = dataclasses.replace(inspection.table, names=names, columns=columns)
    before = dataclasses.replace(inspection, table=table)
    save_inspection(tmp_path, before)
    file = tmp_path / "inspection.json"
    file.write_text(json.dumps(as_format_6(json.loads(file.read_text(encoding="utf-8")))), encoding="utf-8")
    again = load_inspection(tmp_path)
    assert again.findings == tuple(x for x in inspection.findings if x.kind != "redundant")
    assert again.redundant == ()
    assert again.table.names == names
    assert page_of(again)["redundancy"] is None


def test_findings_of_format_5_are_of_the_kinds_of_today(inspection, tmp_path):
    site = inspection.table.sites[0]
    heads = (site, 0), (site, 1)
    findings = (
        Finding("importance", heads[:1], "ablation", {"value": 0.2, "by_representation": True}),
        Finding("sink", heads, "sink_mass", {"count": 2, "of": 7}),
        Finding("uniform", heads, "normalized_entropy", {"count": 2, "of": 7}),
    )
    save_inspection(tmp_path, dataclasses.replace(inspection, findings=findings))
    file = tmp_path / "inspection.json"
    file.write_text(json.dumps(as_format_5(json.loads(file.read_text(encoding="utf-8")))), encoding="utf-8")
    assert '"kind": "matters"' in file.read_text(encoding="utf-8")
    # They were of the whole text, not of both halves.
    facts = inspection.facts
    basis = Basis(inspection.settings.text, facts["tokens"], facts["context"], halves=False)
    first, *others = findings
    assert load_inspection(tmp_path).findings == (first, *(dataclasses.replace(x, basis=basis) for x in others))


def test_fields_of_format_4_are_found_by_their_names_of_today(inspection, tmp_path):
    save_inspection(tmp_path, inspection)
    file = tmp_path / "inspection.json"
    file.write_text(json.dumps(as_format_4(json.loads(file.read_text(encoding="utf-8")))), encoding="utf-8")
    again = load_inspection(tmp_path)
    assert list(again.head_maps) == list(inspection.head_maps)


def test_texts_of_the_former_format_are_shown_in_both_languages(inspection, tmp_path):
    save_inspection(tmp_path, inspection)
    file = tmp_path / "inspection.json"
    rest = as_format_3(json.loads(file.read_text(encoding="utf-8")))
    assert "evidence" in rest["findings"][0]["values"]
    file.write_text(json.dumps(rest), encoding="utf-8")
    again = load_inspection(tmp_path)
    assert [str(finding) for finding in again.findings] == [str(finding) for finding in inspection.findings]
    assert [str(reason) for reason in again.facts["left_out"]] == [str(x) for x in inspection.facts["left_out"]]
    assert again.facts["pairs_by"].text.zh == str(inspection.facts["pairs_by"])
    for one, other in zip(again.roles, inspection.roles, strict=True):
        for score, expected in zip(one.scores, other.scores, strict=True):
            assert score.text == Text(expected.evidence, expected.evidence)
    save_inspection(tmp_path, again)  # in the current format
    assert load_inspection(tmp_path).roles == again.roles
    assert load_inspection(tmp_path).facts == again.facts


def test_names_that_are_no_utf8_are_kept(inspection, tmp_path):
    facts = {**inspection.facts, "model": "folder \udcff: 好"}
    example = dataclasses.replace(inspection.examples[0], queries=("half \ud83d", *inspection.examples[0].queries[1:]))
    save_inspection(tmp_path, dataclasses.replace(inspection, facts=facts, examples=(example,)))
    again = load_inspection(tmp_path)
    assert again.facts["model"] == facts["model"]
    assert again.examples[0].queries == example.queries
