"""Every sentence of a report is recognised and recomputed, and one with a wrong number is found."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import polyhead
from benchmarks.statements.checks import same, verdict_of
from benchmarks.statements.command import elsewhere, table, verdicts
from benchmarks.statements.inputs import recomputed_of
from benchmarks.statements.recomputed import Recomputed
from benchmarks.statements.sentences import Statement
from polyhead.inspection import Inspection
from polyhead.workflows.model_loading import load_model
from tests.inspection.small_models import model_folder, text_folder


@pytest.fixture(scope="module", params=["llama", "bert"])
def inspected(request, tmp_path_factory) -> tuple[Inspection, Recomputed]:
    folder = tmp_path_factory.mktemp("statements")
    text = str(text_folder(folder / "text", documents=11, words=30))
    loaded = load_model(str(model_folder(folder / request.param, request.param)))
    found = polyhead.inspect(loaded, text, context=56)
    return found, recomputed_of(loaded, found)


def test_every_sentence_agrees_with_materialised_attention(inspected):
    found, numbers = inspected
    rows = verdicts(found, numbers)
    assert [row for row in rows if row["verdict"] != "passed"] == []
    assert {row["place"] for row in rows} == {"terminal", "findings", "head", "similar", "importance", "columns"}
    assert sum(row["place"] == "columns" for row in rows) == len(found.table.columns)
    on_the_same = elsewhere(found, numbers, "the same text")
    assert {row["verdict"] for row in on_the_same} == {"holds"}
    assert f"findings     {len(on_the_same):9}       0            0" in table(rows)


def test_a_wrong_number_and_a_wrong_head_are_reported(inspected):
    found, numbers = inspected
    columns = {name: x.clone() for name, x in found.table.columns.items()}
    columns["mean_distance"][int(columns["mean_distance"].argmax())] += 1.0
    columns["confidence"] = columns["confidence"].roll(1)
    halves = {site: dict(of_site) for site, of_site in found.halves.items()}
    for site, of_site in halves.items():
        rows = [row for row, x in enumerate(found.table.sites) if x == site]
        of_site["confidence"] = columns["confidence"][rows].float().expand(2, -1)
    wrong = dataclasses.replace(found, table=dataclasses.replace(found.table, columns=columns), halves=halves)
    failed = [row["sentence"] for row in verdicts(wrong, numbers) if row["verdict"] == "failed"]
    wanted = ("mean_distance: ", "confidence: ", "has the largest max attention weight")
    assert all(any(part in sentence for sentence in failed) for part in wanted)
    known = (*wanted, "has the largest mean attention distance")
    assert all(any(part in sentence for part in known) for sentence in failed)


def test_a_role_that_the_weights_do_not_show_is_reported_and_a_new_sentence_is_not_checked(inspected):
    _, numbers = inspected
    sentence = "L1H2 attends most to the previous token in 93% of positions (chance 4%): a previous-token head"
    verdict = verdict_of(numbers, Statement("findings", sentence))
    assert not verdict.agrees
    assert not verdict.holds
    assert verdict_of(numbers, Statement("terminal", "L1H2 is a clever head.")) is None


def test_a_printed_number_is_a_value_to_its_last_digit():
    assert same("63", 0.6338, 100)
    assert not same("63", 0.6362, 100)
    assert same("0.084", torch.tensor(0.08395))
    assert not same("6,888", 6889)
