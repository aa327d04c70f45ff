"""Comparison of two runs: a planted change is found on one text, and two halves of a text do not differ."""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from polyhead.analysis.intervals import influence_error
from polyhead.analysis.roles import RoleScore
from polyhead.cli import app
from polyhead.inspection import Inspection, compare, load_inspection, save_inspection
from polyhead.inspection.comparison import EXACT, Change
from polyhead.observation import AttentionSite
from polyhead.workflows.inspecting import inspect
from polyhead.workflows.model_loading import load_model
from tests.inspection.small_models import WORDS, model_folder

pytest.importorskip("pyarrow")

SITE = AttentionSite("layers.0.attention", "self", "layers.*.attention", 0, 4)


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


@pytest.fixture(scope="module")
def other(loaded) -> Inspection:
    """Another text."""
    return inspected(loaded, documents(16, seed=5), importance="gradient")


def without_documents(inspection: Inspection) -> Inspection:
    """As a version saved it that kept no effects of documents."""
    facts = {name: x for name, x in inspection.facts.items() if name not in ("text", "mean_loss", "document_losses")}
    return dataclasses.replace(inspection, facts=facts, influence={})


def test_a_planted_change_is_found_in_its_head_alone(run, changed):
    found = compare(run, changed)
    assert (found.paired, found.samples, found.over) == (True, (16, 16), ("documents", "documents"))
    statistics = [x for x in found.significant() if x.name not in ("gradient", "taylor")]
    assert {(x.head[0].layer, x.head[1]) for x in statistics} == {(1, 2)}
    assert {"entropy", "max_logit", "confidence"} <= {x.name for x in statistics}
    assert all(x.degrees == 15 for x in found.changes if x.name == "entropy")
    # The same documents explain most of what differs between documents: as independent samples, much less is found.
    independent = compare(run, dataclasses.replace(changed, facts={**changed.facts, "text": "another"}))
    assert not independent.paired
    assert len([x for x in independent.significant() if x.name not in ("gradient", "taylor")]) < len(statistics)
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


@pytest.mark.usefixtures("only_roles_and_pairs")
def test_a_model_does_not_differ_from_itself(loaded, run, tmp_path):
    save_inspection(tmp_path, run)
    for again in (inspected(loaded, documents(16, seed=0), importance="gradient"), load_inspection(tmp_path)):
        found = compare(run, again)
        assert found.paired
        assert found.significant() == ()
        assert found.loss is not None
        assert found.loss.difference == found.loss.error == 0


@pytest.mark.usefixtures("without_probes")
def test_two_halves_of_a_text_do_not_differ(loaded):
    """About half of the p-values of two draws of two texts are below one half, and nothing is reported."""
    p: list[float] = []
    for seed in (1, 2):
        both = documents(24, seed)
        found = compare(inspected(loaded, both[::2]), inspected(loaded, both[1::2]))
        assert (found.paired, found.samples) == (False, (12, 12))
        assert found.significant() == ()
        values = found.tested()
        assert all(11 <= x.degrees <= 22 for x in values if x.error > 0)
        p += [x.p for x in values]
    assert sum(x < 0.05 for x in p) < 0.1 * len(p)
    assert 0.25 * len(p) < sum(x < 0.5 for x in p) < 0.75 * len(p)


@pytest.mark.usefixtures("without_probes")
def test_few_documents_are_compared_by_context(loaded):
    text = [" ".join(documents(8, seed=4))]
    one_layer = inspected(loaded, text, layers=(0,))
    found, contexts = compare(inspected(loaded, text), one_layer), one_layer.facts["contexts"]
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
    assert compare(old, old).significant() == ()
    assert compare(old, old).over == ("tokens", "tokens")


@pytest.mark.usefixtures("without_probes")
def test_the_loss_of_the_text_is_compared(run, changed, other, loaded):
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
    independent = compare(run, other).loss
    assert not independent.paired
    assert independent.error > loss.error
    assert compare(run, inspected(loaded, documents(16, seed=0))).loss is None


@pytest.mark.usefixtures("without_probes")
def test_importance_is_paired_only_over_the_same_tokens(run, loaded):
    """The same number of documents with other tokens of them: the first 32 of each context instead of the first 64."""
    shorter = inspected(loaded, documents(16, seed=0), importance="gradient", importance_tokens=256)
    assert shorter.facts["text"] == run.facts["text"]
    assert shorter.facts["importance_tokens"] != run.facts["importance_tokens"]
    found = compare(run, shorter)
    errors = {x.name: x for x in found.changes if x.head[0].layer == 1 and x.head[1] == 2}
    (site, head) = errors["gradient"].head
    own = [
        run.influence[site]["gradient"][:, head],
        shorter.influence[errors["gradient"].head_after[0]]["gradient"][:, head],
    ]
    independent = math.hypot(*(influence_error(x) for x in own))
    assert errors["gradient"].error == pytest.approx(independent, rel=1e-9)
    assert errors["entropy"].error == 0  # the same text, paired
    assert found.loss is not None
    assert not found.loss.paired


@pytest.mark.usefixtures("without_probes")
def test_masked_models_are_paired_only_with_the_same_masked_tokens(tmp_path_factory):
    loaded = load_model(model_folder(tmp_path_factory.mktemp("masked"), "masked"))
    runs = [inspected(loaded, documents(6, seed=0), importance="gradient", seed=seed) for seed in (0, 1, 0)]
    assert not compare(runs[0], runs[1]).loss.paired
    assert compare(runs[0], runs[2]).loss.paired


def test_the_relative_size_of_an_infinite_difference_is_one():
    def relative(before: float, after: float) -> float:
        return Change((SITE, 0), (SITE, 0), "max_logit", before, after, 0.0).relative

    assert relative(math.inf, 2.0) == relative(1.0, -math.inf) == relative(math.inf, -math.inf) == 1.0
    assert relative(math.inf, math.inf) == 0.0
    assert relative(2.0, 1.0) == 0.5


@pytest.mark.usefixtures("without_probes")
def test_heads_of_an_encoder_decoder_are_named_with_their_stack(tmp_path_factory, tmp_path):
    loaded = load_model(model_folder(tmp_path_factory.mktemp("t5"), "t5"))
    whole, first = (inspected(loaded, documents(6, seed=0), layers=layers) for layers in (None, (0,)))
    names = [str(x) for x in compare(whole, first).only_before]
    assert len(set(names)) == len(names)
    assert {"encoder self-attention, L1H0 not read", "decoder cross-attention, L1H0 not read"} <= set(names)
    shown = printed(whole, first, place=tmp_path)
    assert "decoder cross-attention, L1H0 not read" in shown


def printed(*runs: Inspection, place: Path) -> str:
    for name, run in zip("AB", runs, strict=True):
        save_inspection(place / name, run)
    result = CliRunner().invoke(app, ["compare", str(place / "A"), str(place / "B")], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.output


def test_the_terminal_shows_the_loss_and_how_differences_were_tested(run, changed, other, tmp_path):
    loss = compare(run, changed).loss
    shown = printed(run, changed, place=tmp_path)
    assert "\npaired tests over the 16 documents of the same text\n" in shown
    assert (
        f"\nnext-token loss {loss.before:.4g} in A, {loss.after:.4g} in B, difference {loss.difference:+.3g} nats, "
        f"standard error {loss.error:.2g} (paired over {loss.samples[0]} documents)\n" in shown
    )
    shown = printed(without_documents(run), other, place=tmp_path)
    tokens = f"{run.facts['tokens']:,} tokens in A, 16 documents in B, one in eight tokens counts as independent"
    assert f"\ntests of independent samples: {tokens}; assumes that the texts share no documents\n" in shown
    assert "loss" not in shown
    assert "nats, standard error" in (shown := printed(run, other, place=tmp_path))
    assert "(independent samples)\n" in shown


def test_the_terminal_counts_tested_values_exact_values_and_heads(run, changed, tmp_path):
    found = compare(run, changed)
    tested, exact = found.tested(), found.exact()
    assert {x.name for x in exact} == set(EXACT)
    assert not {x.name for x in tested} & set(EXACT)
    # Eight planted differences are significant and tiny, three are of the weights.
    tiny = {id(x) for x in tested if x.name == "window_mass"} | {id(x) for x in exact[:3]}
    assert len(tiny) == 11
    found = dataclasses.replace(
        found,
        changes=tuple(
            dataclasses.replace(x, before=1.0, after=1.001, q=0.001) if id(x) in tiny else x for x in found.changes
        ),
    )
    significant = [x for x in found.tested() if x.significant]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("polyhead.inspection.compare", lambda one, two: found)
        shown = printed(run, changed, place=tmp_path)
    rejected = sum(x.q <= 0.05 for x in found.tested())
    assert rejected >= len(significant) + 8
    rate = f"{rejected} of {len(tested)} tested values differ at a false discovery rate of 5%"
    assert f"\n{rate}, {len(significant)} of them by more than 1%:\n" in shown
    counts = dict(entry.split(" ") for entry in shown.splitlines()[3].split(", "))
    assert {name: int(number) for name, number in counts.items()} == {
        name: sum(x.name == name for x in significant) for name in {x.name for x in tested}
    }
    assert "\n3 of 16 values computed from the weights alone (ov_top_share, qk_top_share) differ\n" in shown
    assert f"\n{len({x.head for x in found.significant()})} of 8 common heads changed\n" in shown


def test_a_value_of_a_layer_is_listed_once(run, changed, tmp_path):
    found = compare(run, changed)
    layers = [x.head[0].layer for x in found.untested("total_correlation")]
    assert sorted(layers) == [0, 1]
    assert len(found.untested("output_norm")) == 8
    for name in "AB":
        save_inspection(tmp_path / name, run)
    options = ["compare", str(tmp_path / "A"), str(tmp_path / "B"), "--statistic", "total_correlation"]
    shown = CliRunner().invoke(app, options, env={"COLUMNS": "200"}).output
    assert [line.split("  ")[0] for line in shown.splitlines() if line.startswith("layer ")] == ["layer 0", "layer 1"]


def test_roles_with_other_thresholds_are_not_compared(run, tmp_path):
    """Without a model with random weights as chance level, thresholds of roles are lower."""

    def with_role(chance: bool, holds: bool) -> Inspection:
        first, *rest = run.roles
        scores = [dataclasses.replace(x, holds=holds) if x.role == "previous" else x for x in first.scores]
        roles = (dataclasses.replace(first, scores=tuple(scores)), *rest)
        return dataclasses.replace(run, roles=roles, facts={**run.facts, "chance": chance})

    assert run.facts["chance"] is False
    has, has_not = with_role(False, True), with_role(False, False)
    assert [role for _, role in compare(has_not, has).gained] == ["previous"]
    assert "lost the role previous" in printed(has, has_not, place=tmp_path)
    other = with_role(True, False)
    assert compare(has, other).lost == compare(other, has).gained == ()
    shown = printed(has, other, place=tmp_path)
    assert "the role" not in shown
    assert "roles are not compared: their thresholds allow for a model with random weights in B, not in A" in shown
    old = dataclasses.replace(other, facts={name: x for name, x in other.facts.items() if name != "chance"})
    assert [role for _, role in compare(has, old).lost] == ["previous"]  # a run that did not record it


def test_roles_that_one_run_did_not_measure_are_not_compared(run):
    """Such as copying in a run of an earlier version, whose pronoun heads are those of all kinds of sentences."""
    head, role = run.roles[0], RoleScore("previous", 0.9, 0.8, 1.0, 0.3, 0.5, True)
    copying, pronoun = (dataclasses.replace(role, role=name) for name in ("copy", "pronoun"))
    measured = dataclasses.replace(pronoun, holds=False, meaning=0.5)
    before, after = (
        dataclasses.replace(run, roles=(dataclasses.replace(head, scores=scores),))
        for scores in ((pronoun, dataclasses.replace(role, holds=False)), (measured, copying, role))
    )
    place = head.site, head.head
    assert (compare(before, after).gained, compare(before, after).lost) == (((place, "previous"),), ())
    assert (compare(after, before).gained, compare(after, before).lost) == ((), ((place, "previous"),))


def test_pooled_documents_are_called_groups(run):
    many = dataclasses.replace(run, facts={**run.facts, "documents": 1000})
    assert compare(many, many).over == ("groups of documents", "groups of documents")


def test_a_value_that_is_nan_in_one_run_alone_is_reported(run, tmp_path):
    columns = {name: x.clone() for name, x in run.table.columns.items()}
    columns["entropy"][6] = columns["confidence"][6] = columns["entropy"][1] = math.nan
    broken = dataclasses.replace(run, table=dataclasses.replace(run.table, columns=columns))
    found = compare(run, broken)
    places = [(x.name, x.head[0].layer, x.head[1]) for x in found.undefined]
    assert places == [("entropy", 0, 1), ("entropy", 1, 2), ("confidence", 1, 2)]
    assert not {("entropy", 6), ("confidence", 6)} & {(x.name, 4 * x.head[0].layer + x.head[1]) for x in found.changes}
    assert compare(run, run).undefined == compare(broken, broken).undefined == ()
    for name, runs in (("B", (run, broken)), ("A", (broken, run))):
        text = printed(*runs, place=tmp_path / name)
        assert f"3 values not compared, since they are NaN in {name} only: confidence, entropy of L0H1, L1H2" in text
    assert "alone" not in printed(run, run, place=tmp_path / "same")
    columns["mean_distance"][:] = math.nan  # the whole column
    printed(run, broken, place=tmp_path / "column")
    options = [
        "compare",
        str(tmp_path / "column" / "A"),
        str(tmp_path / "column" / "B"),
        "--statistic",
        "mean_distance",
    ]
    text = CliRunner().invoke(app, options).output
    assert "8 values not compared, since they are NaN in B only: mean_distance of L0H0, L0H1" in text
