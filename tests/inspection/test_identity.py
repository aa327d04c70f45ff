"""Runs of edited models: heads are compared with themselves, named by what they were, and never with a neighbour."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from polyhead.analysis.syntax_table import SyntaxRow, SyntaxTable
from polyhead.errors import OptionError
from polyhead.geometry import HeadOrigins
from polyhead.inspection import Inspection, Settings, compare, load_inspection, save_inspection
from polyhead.inspection.comparison import Change, Comparison
from polyhead.inspection.identity import edits_of
from polyhead.inspection.matching import match_heads
from polyhead.inspection.probing import Probes
from polyhead.inspection.run_files import INSPECTION, OBSERVATIONS
from polyhead.inspection.wording import place_of
from polyhead.observation import AttentionSite
from polyhead.report import page_of
from polyhead.report.syntax_results import Syntax
from polyhead.report.viewer.model import ViewedModel
from polyhead.report.viewer.state import state_of
from polyhead.report.viewer.viewing import Viewer
from polyhead.surgery import (
    AddHeads,
    MergeHeads,
    PruneHeads,
    ReorderHeads,
    SideFiles,
    apply,
    load_record,
    save,
    undo,
)
from polyhead.workflows.inspecting import inspect_model
from polyhead.workflows.model_loading import load_model
from tests.inspection.small_models import model_folder, text_folder

pytest.importorskip("pyarrow")

EDITS = {
    "pruned": [PruneHeads(0, (1,)), PruneHeads(1, (0,))],
    "merged": [MergeHeads(0, (1, 3))],
    "reordered": [ReorderHeads(0, (3, 0, 2, 1))],
    "grown": [PruneHeads(0, (0,)), AddHeads(0, 1)],
}


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return text_folder(tmp_path_factory.mktemp("text"), documents=4, words=60)


@pytest.fixture(scope="module", autouse=True)
def _without_distances_and_examples() -> Iterator[None]:
    """Skip two probes that take a third of the time and are not compared."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Probes, "distances", lambda _: {})
        patch.setattr(Probes, "examples", lambda _: ())
        yield


def inspected(model: Path, text: Path, **options) -> Inspection:
    settings = Settings(str(model), str(text), context=64, batch_tokens=400, importance="none", chance=False)
    return inspect_model(settings, **options)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return model_folder(tmp_path_factory.mktemp("bert"), "bert")


@pytest.fixture(scope="module")
def edited(tmp_path_factory, whole):
    """The folder of a model with some edits, in some form."""
    place = tmp_path_factory.mktemp("edited")

    def make(name: str, form: str = "uneven") -> Path:
        folder = place / f"{name}-{form}"
        if not folder.exists():
            model = load_model(whole).model
            record = apply(model, EDITS[name])
            save(model, folder, form=form, record=record, tokenizer=SideFiles(whole))
        return folder

    return make


@pytest.fixture(scope="module")
def run(whole, edited, text):
    """The inspection of a model, made once."""
    found: dict[tuple[str, ...], Inspection] = {}

    def get(*name: str) -> Inspection:
        if name not in found:
            found[name] = inspected(edited(*name) if name else whole, text)
        return found[name]

    return get


@pytest.mark.parametrize("form", ["uneven", "padded"])
def test_every_head_is_compared_with_itself(run, form):
    before, after = run(), run("pruned", form)
    found = compare(before, after)
    assert {(x.head[0].layer, x.head[1]): x.head_after[1] for x in found.changes if x.head[0].layer == 0} == {
        (0, 0): 0, (0, 2): 1, (0, 3): 2,
    }  # fmt: skip
    # The input of the first layer is the same, so its heads are; those behind it read what two heads less wrote.
    exact = [x for x in found.changes if x.head[0].layer == 0 and x.name in ("entropy", "mean_distance", "confidence")]
    assert len(exact) == 9
    for change in exact:
        assert change.after == pytest.approx(change.before, rel=1e-5)
    assert [x for x in found.significant() if x.head[0].layer == 0 and "output_norm" not in x.name] == []
    assert [x for x in (*found.gained, *found.lost) if x[0][0].layer == 0] == []
    assert [str(x) for x in found.only_before] == ["L0H1 removed", "L1H0 removed"]
    assert found.only_after == ()
    # The other way round they are the same heads.
    back = compare(after, before)
    assert [str(x) for x in back.only_after] == ["L0H1 removed", "L1H0 removed"]
    assert len(back.changes) == len(found.changes)


def test_a_change_of_the_weights_is_beyond_sampling_error(run, whole, text, tmp_path):
    changed = shutil.copytree(whole, tmp_path / "changed")
    weights = load_file(changed / "model.safetensors")
    (name,) = (name for name in weights if name.endswith("layer.1.attention.output.dense.weight"))
    noise = torch.randn(weights[name].shape, generator=torch.Generator().manual_seed(1))
    weights[name] += 0.1 * weights[name].std() * noise
    save_file(weights, changed / "model.safetensors", metadata={"format": "pt"})
    significant = compare(run(), inspected(changed, text)).significant()
    exact = [change for change in significant if change.name == "ov_top_share"]
    assert {change.head[0].layer for change in exact} == {1}
    assert list(significant[: len(exact)]) == exact  # without a sampling error, they come first


def test_the_largest_changes_without_an_error_estimate_come_first(run, whole, text, tmp_path):
    changed = shutil.copytree(whole, tmp_path / "changed")
    weights = load_file(changed / "model.safetensors")
    (name,) = (name for name in weights if name.endswith("layer.1.attention.output.dense.weight"))
    weights[name][:, 12:18] *= 0.2  # W_O of L1H2
    save_file(weights, changed / "model.safetensors", metadata={"format": "pt"})
    found = compare(run(), inspected(changed, text))
    largest = next(change for change in found.untested() if change.name == "output_norm")
    assert (largest.head[0].layer, largest.head[1]) == (1, 2)
    assert largest.after == pytest.approx(0.2 * largest.before, rel=1e-6)
    assert largest.relative == pytest.approx(0.8, rel=1e-6)
    sizes = [change.relative for change in found.untested()]
    assert sizes == sorted(sizes, reverse=True)
    assert found.untested("entropy") == ()
    assert [change.name for change in found.untested("output_norm")] == 8 * ["output_norm"]


def test_values_without_a_test_are_not_counted_as_tested(run):
    site = run().table.sites[0]
    values = {"entropy": (1.0, 0.5, 0.1), "next_mass": (0.0, 0.0, 0.0), "sink_mass": (0.0, 0.0, 0.1),
              "output_norm": (2.0, 1.0, math.nan)}  # fmt: skip
    changes = [Change((site, 0), (site, 0), name, *numbers) for name, numbers in values.items()]
    changes.append(Change((site, 1), (site, 1), "sink_mass", 0.0, 0.3, 0.1))  # of another head, it is not 0
    found = Comparison(tuple(dataclasses.replace(change, q=change.p) for change in changes), (), (), (), ())
    assert [change.name for change in found.tested()] == ["entropy", "sink_mass", "sink_mass"]
    assert found.tested("next_mass") == found.tested("output_norm") == ()
    assert [change.name for change in found.significant()] == ["entropy", "sink_mass"]
    assert [change.name for change in found.untested()] == ["output_norm"]


def test_values_without_sampling_error_are_listed_after_tested_ones(run):
    site = run().table.sites[0]
    rows = [("ov_top_share", 0.5, 0.51, 0.0), ("ov_top_share", 0.5, 0.9, 0.0), ("entropy", 1.0, 0.7, 0.1),
            ("entropy", 1.0, 0.5, 0.1)]  # fmt: skip
    found = Comparison(tuple(Change((site, 0), (site, 0), *row, q=0.01) for row in rows), (), (), (), ())
    assert [change.after for change in found.significant()] == [0.5, 0.7, 0.9, 0.51]


def test_heads_that_share_a_number_alone_are_not_compared(run):
    """What this test would have seen before: head 1 of the edited layer beside head 1 of the whole one."""
    before, after = run(), run("pruned")
    assert float(before.table["entropy"][1]) != pytest.approx(float(after.table["entropy"][1]), rel=1e-3)
    assert float(before.table["entropy"][2]) == pytest.approx(float(after.table["entropy"][1]), rel=1e-5)


def test_merged_and_grown_heads_are_listed_as_such(run):
    merged = compare(run(), run("merged"))
    assert [str(x) for x in merged.only_before] == ["L0H1 merged into L0H1", "L0H3 merged into L0H1"]
    assert [str(x) for x in merged.only_after] == ["L0H1+L0H3 merged"]
    assert {x.head[1] for x in merged.changes if x.head[0].layer == 0} == {0, 2}
    grown = compare(run(), run("grown"))
    assert [str(x) for x in grown.only_before] == ["L0H0 removed"]
    assert [str(x) for x in grown.only_after] == ["L0H3 new"]
    # Two edits of one model are compared as well, by what both were made of.
    both = match_heads(run("pruned"), run("merged"))
    assert [(one[1], other[1]) for one, other in both.pairs if one[0].layer == 0] == [(0, 0), (1, 2)]
    assert [(x.head[1], x.reason) for x in both.only_before if x.head[0].layer == 0] == [(2, "merged")]


def test_an_order_is_followed_although_no_head_is_gone(run):
    pairs = match_heads(run(), run("reordered")).pairs
    assert [(one[1], other[1]) for one, other in pairs if one[0].layer == 0] == [(0, 1), (1, 3), (2, 2), (3, 0)]
    changes = [x for x in compare(run(), run("reordered")).changes if x.name == "entropy" and x.head[0].layer == 0]
    assert all(x.after == pytest.approx(x.before, rel=1e-5) for x in changes)


def test_after_undoing_heads_are_where_they_were(edited, whole, text, run):
    loaded = load_model(edited("reordered"))
    undo(loaded.model, load_record(edited("reordered")))
    again = inspected(edited("reordered"), text, loaded=loaded)
    assert again.table.sites == run().table.sites
    assert again.facts["edited"] is False
    assert compare(run(), again).significant() == ()


@pytest.mark.parametrize("name", sorted(EDITS))
def test_a_saved_run_has_it(run, name, tmp_path):
    found = run(name)
    save_inspection(tmp_path, found)
    again = load_inspection(tmp_path)
    assert again.table.sites == found.table.sites
    assert again.table.sites[0].origins is not None
    assert [row["original_head"] for row in again.table.rows()] == [row["original_head"] for row in found.table.rows()]
    assert len(compare(run(), again).changes) == len(compare(run(), found).changes)


def test_heads_are_named_by_what_they_were(run):
    site = run("pruned").table.sites[0]
    assert [place_of((site, head)) for head in range(3)] == [
        "L0H0", "L0H1 (originally L0H2)", "L0H2 (originally L0H3)",
    ]  # fmt: skip
    summary = edits_of(run("pruned").table.sites)
    assert summary.en == "removed L0H1, L1H0; 5 heads have a different number than in the original"
    assert edits_of(run("merged").table.sites).en == "merged L0H1+L0H3"  # head 2 is where it was
    assert edits_of(run("grown").table.sites).en == (
        "removed L0H0; new L0H3; 3 heads have a different number than in the original"
    )
    assert edits_of(run().table.sites) is None
    assert "L0H1 (originally L0H2)" in str(run("pruned").table)
    assert "originally" not in str(run().table)
    assert "edited: removed L0H1, L1H0" in run("pruned")._repr_html_()
    assert "L0H1 (originally L0H2)" in run("pruned")._repr_html_()


def test_the_page_names_them(run):
    page = page_of(run("pruned"))
    assert page["facts"]["edits"]["en"].startswith("removed L0H1, L1H0")
    assert page["facts"]["edits"]["zh"].startswith("去除 L0H1, L1H0")
    assert page["sites"][0]["originals"] == ["0", "2", "3"]
    heads = {(x["site"], x["head"]): x["origin"] for x in page["heads"]}
    assert heads[0, 0] is None
    assert heads[0, 1] == {"en": "originally L0H2", "zh": "原为 L0H2"}
    assert page_of(run("merged"))["heads"][1]["origin"]["en"] == "merged from L0H1+L0H3"
    assert page_of(run("grown"))["heads"][3]["origin"] == {"en": "new", "zh": "新头"}
    plain = page_of(run())
    assert plain["facts"]["edits"] is None
    assert {x["origin"] for x in plain["heads"]} == {None}


def test_the_viewer_names_them_and_takes_no_run_of_other_heads(run, edited, whole):
    model = ViewedModel(load_model(edited("pruned")))
    state = state_of(Viewer(model, run=page_of(run("pruned"))))
    assert state["layers"][0]["origins"] == [
        None, {"en": "originally L0H2", "zh": "原为 L0H2"}, {"en": "originally L0H3", "zh": "原为 L0H3"},
    ]  # fmt: skip
    assert state["edits"]["en"].startswith("removed L0H1, L1H0")
    assert state["layers"][0]["run_site"] == 0
    for other in (run(), run("merged")):
        with pytest.raises(OptionError, match=r"must have the same heads.*a model whose heads are originally 0, 2, 3"):
            Viewer(model, run=page_of(other))
    reordered = ViewedModel(load_model(edited("reordered")))
    with pytest.raises(OptionError, match="originally 0, 1, 2, 3, and a model whose heads are originally 3, 0, 2, 1"):
        Viewer(reordered, run=page_of(run()))
    assert state_of(Viewer(ViewedModel(load_model(whole))))["edits"] is None


def test_a_syntax_table_of_other_heads_is_refused(run):
    site = run("reordered").table.sites[0]
    numbers = dict.fromkeys(("accuracy", "low", "high", "baseline", "baseline_low", "baseline_high"), 0.5)
    numbers |= dict.fromkeys(("chosen_accuracy", "chosen_baseline"), 0.5)
    counts = dict.fromkeys(("count", "offset", "head_only", "baseline_only", "chosen_count"), 1)

    def page(original: str | None) -> dict:
        row = SyntaxRow("nsubj", "head", site=site.name, layer=0, head=1, original_head=original, **numbers, **counts)
        table = SyntaxTable((row,), (), 8, (1, 1), 1, 0)
        assert table.cells()[1][0][3] == ("L0H1 (originally L0H0)" if original == "0" else "L0H1")
        return page_of(run("reordered"), syntax=Syntax("bank", table))

    assert page("0")["syntax"]["rows"][0]["head"] == [0, 1]
    assert page(None)["syntax"]["rows"][0]["head"] == [0, 1]  # of a file that does not say
    with pytest.raises(OptionError, match="with the same edits, got L0H1, originally L0H1 in the table, L0H0 in the"):
        page("1")


# ---- runs that cannot be matched


def with_facts(inspection: Inspection, **facts) -> Inspection:
    kept = {name: value for name, value in inspection.facts.items() if name not in facts}
    return dataclasses.replace(inspection, facts={**kept, **{k: v for k, v in facts.items() if v is not ...}})


def with_sites(inspection: Inspection, change) -> Inspection:
    table = dataclasses.replace(inspection.table, sites=tuple(change(site) for site in inspection.table.sites))
    return dataclasses.replace(inspection, table=table, roles=())


def without_identity(inspection: Inspection) -> Inspection:
    """As a run of before."""
    sizes = dict.fromkeys(("edited", "model_type", "hidden_size", "num_hidden_layers"), ...)
    return with_facts(with_sites(inspection, lambda site: dataclasses.replace(site, origins=None)), **sizes)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"hidden_size": 48}, "whose hidden size differs: 24 in A .*, 48 in B"),
        ({"model_type": "gpt2"}, "whose model type differs: bert in A .*, gpt2 in B"),
        ({"num_hidden_layers": 12}, "whose number of layers differs: 2 in A .*, 12 in B"),
    ],
)
def test_different_models_are_refused(run, facts, words):
    with pytest.raises(OptionError, match=words):
        compare(run(), with_facts(run(), **facts))


def test_runs_without_a_lineage_are_refused_where_heads_are_gone(run):
    """Two runs of before: nobody knows which head is gone."""
    whole, pruned = without_identity(run()), without_identity(run("pruned"))
    for one, other in ((whole, pruned), (pruned, whole), (run(), pruned)):
        with pytest.raises(OptionError, match=r"heads in A and \d in B; inspect the models again"):
            compare(one, other)
    # The same counts of heads in both: as they were compared before.
    assert compare(whole, without_identity(run())).significant() == ()
    # One that has them says which heads the other's are.
    assert [str(x) for x in compare(whole, run("pruned")).only_before] == ["L0H1 removed", "L1H0 removed"]


def test_a_run_of_before_beside_a_new_order_is_refused(run):
    """It may be of the model before the edit or after it: both have as many heads."""
    with pytest.raises(OptionError, match="A was saved by a version that did not record the identity of heads"):
        compare(without_identity(run()), run("reordered"))
    with pytest.raises(OptionError, match="B was saved by a version"):
        compare(run("reordered"), without_identity(run("reordered")))


def test_layers_of_other_names_are_refused(run):
    renamed = with_sites(run(), lambda site: dataclasses.replace(site, name=f"other.{site.name}"))
    with pytest.raises(
        OptionError, match=r"heads in common to be compared, got none: A has the layers encoder\.layer\.0"
    ):
        compare(run(), renamed)


def test_layers_that_were_not_read_are_listed(run, whole, text):
    settings = dataclasses.replace(run().settings, layers=(0,))
    found = compare(run(), inspect_model(settings))
    assert [str(x) for x in found.only_before] == [f"L1H{head} not read" for head in range(4)]


def test_importance_by_other_measures_is_not_compared(run):
    def measured(loss: str) -> Inspection:
        table = run().table
        columns = {**table.columns, "ablation": torch.rand(len(table), dtype=torch.float64)}
        table = dataclasses.replace(table, names=(*table.names, "ablation"), columns=columns)
        return with_facts(dataclasses.replace(run(), table=table), loss=loss)

    same = compare(measured("language"), measured("language"))
    assert "ablation" in {x.name for x in same.changes}
    other = compare(measured("language"), measured("representation"))
    assert "ablation" not in {x.name for x in other.changes}
    assert other.losses == ("language", "representation")


def test_a_run_does_not_go_on_with_other_heads(edited, text, tmp_path):
    """What was gathered before heads had an identity is not added to what is gathered now."""
    done = inspected(edited("reordered"), text, folder=tmp_path)
    save_inspection(tmp_path, done)
    written = json.loads((tmp_path / INSPECTION).read_text())
    assert written["sites"][0]["origins"]["heads"] == [[3], [0], [2], [1]]
    path = tmp_path / OBSERVATIONS
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["polyhead.observations"])
    assert header["sites"][0]["origins"] == {"heads": [[3], [0], [2], [1]], "total": 4}
    for site in header["sites"]:
        site.pop("origins", None)
    header["facts"]["batches"], header["facts"]["digest"] = 0, None
    save_file(load_file(path), path, {"polyhead.observations": json.dumps(header)})
    with pytest.raises(OptionError, match="must not change during a session"):
        inspected(edited("reordered"), text, folder=tmp_path, resume=True)


def test_origins_of_a_site_are_of_its_heads():
    site = {"name": "a.0", "kind": "self", "stack": "a.*", "layer": 0, "num_heads": 2}
    assert AttentionSite.from_dict(site).origins is None
    summary = {"origins": HeadOrigins(((1,), (0,)), 2).to_dict()}
    assert AttentionSite.from_dict({**site, **summary}).to_dict() == {**site, **summary}
    with pytest.raises(OptionError, match="each of the 3 heads"):
        AttentionSite.from_dict({**site, "num_heads": 3, **summary})


def plainly_inspected(folder, text):
    return inspect_model(Settings(str(folder), str(text), context=64, batch_tokens=400, chance=False))


@pytest.fixture(scope="module")
def whole_llama(text, tmp_path_factory):
    folder = model_folder(tmp_path_factory.mktemp("llama"), "llama")
    return folder, plainly_inspected(folder, text)


@pytest.mark.parametrize("form", ["uneven", "padded"])
def test_a_head_of_a_group_that_lost_another_is_itself_in_every_column(form, whole_llama, text, tmp_path):
    """Query heads of one KV head, of which one is gone: keys and values are still those that each head read."""
    whole, one = whole_llama
    model = load_model(whole).model
    apply(model, [PruneHeads(0, (0,)), PruneHeads(1, (2, 3))])
    save(model, tmp_path / "pruned", form=form, tokenizer=SideFiles(whole))
    found = compare(one, plainly_inspected(tmp_path / "pruned", text))
    assert [str(x) for x in found.only_before] == ["L0H0 removed", "L1H2 removed", "L1H3 removed"]
    # Its share of what the layer writes, and what the loss makes of it, depend on the others.
    of_others = {"output_norm_share", "total_correlation", "predictable_share", "gradient", "taylor"}
    alone = [x for x in found.changes if x.head[0].layer == 0 and x.name not in of_others]
    assert {x.name for x in alone} >= {"entropy", "qk_top_share", "ov_top_share", "output_norm", "effective_rank"}
    assert {x.head[1] for x in alone} == {1, 2, 3}
    for change in alone:
        assert change.after == pytest.approx(change.before, rel=2e-4, abs=1e-6), change
