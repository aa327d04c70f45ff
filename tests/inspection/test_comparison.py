"""What differs beyond sampling error: a planted change is found in one text, and two halves of a text agree."""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from polyhead.cli import app
from polyhead.inspection import Inspection, compare, load_inspection, save_inspection
from polyhead.inspection.comparison import EXACT
from polyhead.workflows.inspecting import inspect
from polyhead.workflows.model_loading import load_model
from tests.inspection.small_models import WORDS, model_folder

pytest.importorskip("pyarrow")


def documents(number: int, seed: int) -> list[str]:
    """Documents with vocabularies and lengths of their own, so that tokens of one document are alike."""
    draw = random.Random(seed)
    texts = []
    for _ in range(number):
        vocabulary = draw.sample(WORDS, 25)
        words = [draw.choice(vocabulary) + (" ." if draw.random() < 0.1 else "") for _ in range(draw.randint(40, 90))]
        texts.append(" ".join(words))
    return texts


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load_model(model_folder(tmp_path_factory.mktemp("llama"), "llama"))


def inspected(loaded, text: list[str], **options) -> Inspection:
    return inspect(loaded, text, **{"context": 96, "chance": False, "importance": "none", **options})


@pytest.fixture(scope="module")
def run(loaded) -> Inspection:
    return inspected(loaded, documents(16, seed=0), importance="gradient")


@pytest.fixture(scope="module")
def changed(loaded) -> Inspection:
    """The same text, with queries of L1H2 that are half as large again."""
    weight = loaded.model.model.layers[1].self_attn.q_proj.weight
    before = weight.detach().clone()
    try:
        with torch.no_grad():
            weight[12:18] *= 1.5
        return inspected(loaded, documents(16, seed=0), importance="gradient")
    finally:
        weight.data.copy_(before)


def without_documents(inspection: Inspection) -> Inspection:
    """As a version saved it that kept no effects of documents."""
    facts = {name: x for name, x in inspection.facts.items() if name not in ("text", "mean_loss", "document_losses")}
    return dataclasses.replace(inspection, facts=facts, influence={})


def test_a_planted_change_is_found_in_its_head_alone(run, changed):
    found = compare(run, changed)
    assert (found.paired, found.samples, found.over) == (True, (16, 16), ("documents", "documents"))
    statistics = [x for x in found.beyond() if x.name not in ("gradient", "taylor")]
    assert {(x.head[0].layer, x.head[1]) for x in statistics} == {(1, 2)}
    assert {"entropy", "max_logit", "confidence"} <= {x.name for x in statistics}
    assert all(x.degrees == 15 for x in found.changes if x.name == "entropy")
    # The same documents explain most of what differs between documents: as independent samples, much less is found.
    independent = compare(run, dataclasses.replace(changed, facts={**changed.facts, "text": "another"}))
    assert not independent.paired
    assert len([x for x in independent.beyond() if x.name not in ("gradient", "taylor")]) < len(statistics)
    errors = [
        (x.error, y.error)
        for x, y in zip(found.changes, independent.changes, strict=True)
        if x.head[0].layer == 1 and x.head[1] == 2 and x.name in ("entropy", "mean_distance")
    ]
    assert all(paired < 0.7 * apart for paired, apart in errors)


def test_a_paired_error_is_that_of_the_differences_of_documents(run, changed):
    change = next(x for x in compare(run, changed).changes if x.name == "entropy" and x.head[0].layer == 1)
    (site, head), (other, _) = change.head, change.head_after
    differences = (changed.influence[other]["entropy"] - run.influence[site]["entropy"])[:, head].double()
    assert change.error == pytest.approx(math.sqrt(16 / 15 * float(differences.square().sum())), rel=1e-9)


def test_a_model_does_not_differ_from_itself(loaded, run, tmp_path):
    save_inspection(tmp_path, run)
    for again in (inspected(loaded, documents(16, seed=0), importance="gradient"), load_inspection(tmp_path)):
        found = compare(run, again)
        assert found.paired
        assert found.beyond() == ()
        assert found.loss is not None
        assert found.loss.difference == found.loss.error == 0


def test_two_halves_of_a_text_do_not_differ(loaded):
    """About half of the p-values of three draws of two texts are below one half, and nothing is reported."""
    p: list[float] = []
    for seed in (1, 2, 3):
        both = documents(24, seed)
        found = compare(inspected(loaded, both[::2]), inspected(loaded, both[1::2]))
        assert (found.paired, found.samples) == (False, (12, 12))
        assert found.beyond() == ()
        values = [x for x in found.tested() if x.name not in EXACT]
        assert all(11 <= x.degrees <= 22 for x in values if x.error > 0)
        p += [x.p for x in values]
    assert sum(x < 0.05 for x in p) < 0.1 * len(p)
    assert 0.25 * len(p) < sum(x < 0.5 for x in p) < 0.75 * len(p)


def test_few_documents_are_compared_by_context(loaded):
    text = [" ".join(documents(8, seed=4))]
    found = compare(inspected(loaded, text), inspected(loaded, text, layers=(0,)))
    contexts = inspected(loaded, text, layers=(0,)).facts["contexts"]
    assert (found.paired, found.samples, found.over) == (True, (contexts, contexts), ("contexts", "contexts"))


def test_a_saved_run_without_documents_is_compared_by_its_tokens(run, changed):
    old = without_documents(run)
    found = compare(old, changed)
    assert (found.paired, found.over, found.loss) == (False, ("tokens", "documents"), None)
    assert found.samples == (run.facts["tokens"], 16)
    change = next(x for x in found.changes if x.name == "entropy")
    row = next(run.table.rows())
    tokens = row["entropy_std"] / math.sqrt(row["tokens"] / 8)
    effects = changed.influence[change.head[0]]["entropy"][:, 0].double()
    by_document = math.sqrt(16 / 15 * float(effects.square().sum()))
    assert change.error == pytest.approx(math.hypot(tokens, by_document), rel=1e-9)
    assert math.isfinite(change.degrees)
    assert compare(old, old).beyond() == ()
    assert compare(old, old).over == ("tokens", "tokens")


def test_the_loss_of_the_text_is_compared(run, changed, loaded):
    loss = compare(run, changed).loss
    assert (loss.before, loss.after) == pytest.approx((run.facts["mean_loss"], changed.facts["mean_loss"]), rel=1e-12)
    assert loss.paired
    sums = [torch.tensor(x.facts["document_losses"], dtype=torch.float64) for x in (run, changed)]
    assert loss.samples == (len(sums[0]), len(sums[1]))
    total = sums[0][:, 1].sum()
    effects = [(x[:, 0] - x[:, 0].sum() / total * x[:, 1]) / total for x in sums]
    samples = len(effects[0])
    error = math.sqrt(samples / (samples - 1) * float((effects[1] - effects[0]).square().sum()))
    assert loss.error == pytest.approx(error, rel=1e-9)
    other = compare(run, inspected(loaded, documents(16, seed=5), importance="gradient")).loss
    assert not other.paired
    assert other.error > loss.error
    assert compare(run, inspected(loaded, documents(16, seed=0))).loss is None


def printed(*runs: Inspection, place: Path) -> str:
    for name, run in zip("AB", runs, strict=True):
        save_inspection(place / name, run)
    result = CliRunner().invoke(app, ["compare", str(place / "A"), str(place / "B")], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.output


def test_the_terminal_shows_the_loss_and_how_differences_were_tested(run, changed, loaded, tmp_path):
    loss = compare(run, changed).loss
    shown = printed(run, changed, place=tmp_path)
    assert "\npaired tests over the 16 documents of the same text; false discovery rate 5%\n" in shown
    assert (
        f"\nnext-token loss {loss.before:.4g} in A, {loss.after:.4g} in B, difference {loss.difference:+.3g} nats, "
        f"standard error {loss.error:.2g} (paired over {loss.samples[0]} documents)\n" in shown
    )
    other = inspected(loaded, documents(16, seed=5), importance="gradient")
    shown = printed(without_documents(run), other, place=tmp_path)
    tokens = f"{run.facts['tokens']:,} tokens in A, 16 documents in B, one in eight tokens counts as independent"
    assert f"\ntests of independent samples: {tokens}; false discovery rate 5%\n" in shown
    assert "loss" not in shown
    assert "nats, standard error" in (shown := printed(run, other, place=tmp_path))
    assert "(independent samples)\n" in shown


def test_pooled_documents_are_called_groups(run):
    many = dataclasses.replace(run, facts={**run.facts, "documents": 1000})
    assert compare(many, many).over == ("groups of documents", "groups of documents")
