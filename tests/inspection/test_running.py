"""A whole inspection of small models: what it finds, what it keeps, and how it goes on after it was stopped."""

from __future__ import annotations

import dataclasses
import functools
import gc
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch.multiprocessing.reductions import StorageWeakRef

import polyhead
from polyhead.analysis.importance import gradient_scores
from polyhead.analysis.roles import RoleScore
from polyhead.errors import OptionError
from polyhead.inspection import Inspection, Settings, compare, load_inspection, probing, save_inspection
from polyhead.inspection.cross_layer_similarity import sample_of
from polyhead.inspection.probing import Probes
from polyhead.inspection.run_files import OBSERVATIONS
from polyhead.inspection.text_reader import Reader
from polyhead.observation import read_facts
from polyhead.observation.role_evidence_rows import ROW_STATISTICS
from polyhead.ops.attention import attention
from polyhead.progress import Progress
from polyhead.sources import Context
from polyhead.sources.text_contexts import TextContexts, read_contexts
from polyhead.workflows import model_loading
from polyhead.workflows.inspecting import inspect_model
from tests.forked import stopped_when
from tests.inspection.small_models import MAKERS, NAMES, model_folder, odd_text_folder, text_folder

pytest.importorskip("pyarrow")


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return text_folder(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return {name: model_folder(tmp_path_factory.mktemp(name), name) for name in MAKERS}


def settings_for(model: Path, text: Path, **options) -> Settings:
    return Settings(str(model), str(text), context=96, batch_tokens=400, **options)


@pytest.fixture(scope="module")
def inspected(folders, text, tmp_path_factory) -> Callable[[str], tuple[Inspection, list[Progress], Path]]:
    """A model by name, inspected once; what was reported on the way, and the folder of the run."""

    @functools.cache
    def once(name: str) -> tuple[Inspection, list[Progress], Path]:
        seen: list[Progress] = []
        folder = tmp_path_factory.mktemp("inspected")
        found = inspect_model(settings_for(folders[name], text), folder=folder, progress=seen.append)
        return found, seen, folder

    return once


@pytest.fixture(scope="module")
def plain_bert(folders, text) -> Inspection:
    return inspect_model(settings_for(folders["bert"], text, importance="none", chance=False))


@pytest.mark.usefixtures("without_probes")
def test_documents_that_the_tokens_do_not_reach_are_not_counted(folders, text, plain_bert):
    tokens = plain_bert.facts["tokens"] // 3
    found = inspect_model(settings_for(folders["bert"], text, importance="none", chance=False, tokens=tokens))
    loaded = model_loading.load_model(folders["bert"])
    contexts = read_contexts(loaded, text, context=96, tokens=tokens).contexts
    assert found.facts["documents"] == len({x.document for x in contexts}) < plain_bert.facts["documents"]


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_every_kind_of_model_is_inspected(inspected, name):
    found, seen, _ = inspected(name)
    stacks = 3 if name == "t5" else 1
    assert len(found.table) == stacks * 8
    assert found.facts["documents"] == 6
    assert found.facts["context"] == 96
    left_out, *others = map(str, found.facts["left_out"])
    assert left_out.startswith("agreement and pronoun: of 160 sentences with pronouns the tokenizer can read 0")
    two_stacks = "importance: auto does not measure encoder-decoders; call polyhead.analysis.importance.ablate"
    assert [x[: len(two_stacks)] for x in others] == ([two_stacks] if name == "t5" else [])
    assert len(found.roles) == (16 if name == "t5" else 8)  # a cross-attention has no place among its keys
    assert found.table["predictable_share"].isfinite().all()
    for site, matrices in found.relations.items():
        rows = [index for index, other in enumerate(found.table.sites) if other == site]
        assert (found.table["predictable_share"][rows] <= 1).all()
        assert (matrices["predictable_share"].diagonal() > 0.9).all()
    assert 1 <= len(found.findings) <= 3  # of random weights, few hold in both halves
    text = (
        f"in both halves of {Path(found.settings.text).name} ({found.facts['tokens']} tokens in contexts of up to 96)"
    )
    assert any(str(finding).endswith(text) for finding in found.findings)
    assert found.table["entropy"].isfinite().all()
    assert found.table["output_norm"].isfinite().all()
    if name != "t5":
        torch.testing.assert_close(found.table["output_norm_share"].view(2, 4).sum(1), torch.ones(2).double())
    measure = {"bert": "ablation", "masked": "gradient", "llama": "gradient"}.get(name)
    assert (measure in found.table.columns) if measure else "gradient" not in found.table.columns
    for matrices in found.relations.values():
        for kind in ("cosine", "cka", "subspace_overlap"):
            torch.testing.assert_close(matrices[kind].diagonal(), torch.ones(4).double())
    assert_is_told_of_tokens(found)
    text_steps = [x for x in seen if x.step == "read the text"]
    assert text_steps[-1].done == text_steps[-1].total
    assert len(found.pairs)
    assert all(pair.one[0] != pair.other[0] for pair in found.pairs)


def assert_is_told_of_tokens(found):
    """Which tokens get the attention, and which part of the text it stays in; but not across two texts."""
    kinds = torch.tensor([site.kind == "self" for site in found.table.sites])
    for name in ("special_mass", "punctuation_mass", "sentence_share"):
        for column in (name, f"{name}_chance", f"{name}_error"):
            assert torch.equal(found.table[column].isfinite(), kinds), column
            assert (found.table[column][kinds] > 0).all(), column
        assert (found.table[name][kinds] < 1).all()
    assert "word_share" not in found.table.columns  # every word of this vocabulary is one token
    assert found.table["total_correlation"].isfinite().all()
    assert set(found.top_keys) == {site for site in found.table.sites if site.kind == "self"}
    for site, heads in found.top_keys.items():
        assert len(heads) == site.num_heads == 4
        for keys in heads:
            assert len(keys) == 10
            assert [key.share for key in keys] == sorted((key.share for key in keys), reverse=True)
            assert 0 < sum(key.share for key in keys) < 1
            assert all(key.text == NAMES[key.token] and 0 < key.frequency < 0.2 for key in keys)
    for site, spectra in found.spectra.items():
        assert set(spectra) == {"qk", "ov"}
        assert all(x.shape == (4, 6) and (x.diff(dim=-1) <= 0).all() for x in spectra.values())
        rows = [index for index, other in enumerate(found.table.sites) if other == site]
        top = spectra["ov"][:, 0].square() / spectra["ov"].square().sum(-1)
        torch.testing.assert_close(found.table["ov_top_share"][rows], top)


@pytest.mark.usefixtures("without_probes")
def test_a_head_that_is_the_opposite_of_another_is_redundant(folders, text, tmp_path):
    """The second head of layer 0 is made the first, with the opposite sign."""
    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(folders["bert"])
    dim = 6
    with torch.no_grad():
        attention = model.encoder.layer[0].attention
        for part in (attention.self.query, attention.self.key, attention.self.value):
            part.weight[dim : 2 * dim] = part.weight[:dim]
            part.bias[dim : 2 * dim] = part.bias[:dim]
        attention.output.dense.weight[:, dim : 2 * dim] = -attention.output.dense.weight[:, :dim]
    model.save_pretrained(tmp_path / "twins")
    AutoTokenizer.from_pretrained(folders["bert"]).save_pretrained(tmp_path / "twins")
    found = inspect_model(settings_for(tmp_path / "twins", text, importance="none", chance=False))
    twins = {x.head[1]: x for x in found.redundant if x.head[0].layer == 0 and x.head[1] in (0, 1)}
    assert {head: x.other[1] for head, x in twins.items()} == {0: 1, 1: 0}
    for twin in twins.values():
        assert twin.share_of_other > 0.99
        assert twin.share > 0.9  # more predictors, for few tokens
        assert twin.cosine < -0.9999
    assert any("writes the opposite of L0H" in str(x) for x in found.findings)


@pytest.mark.usefixtures("without_probes")
def test_shares_are_those_of_a_regression_on_the_outputs_that_hooks_see(folders, text):
    """One half of the contexts is fitted, the other predicted; they alternate."""
    from polyhead.sources.text_contexts import read_contexts

    settings = settings_for(folders["bert"], text, importance="none", chance=False)
    found = inspect_model(settings)
    loaded = model_loading.load_model(folders["bert"])
    contexts = read_contexts(loaded, text, context=96, tokens=settings.tokens).contexts
    assert len({x.document for x in contexts}) == 6  # few, so that each context counts as one
    dense, rows = loaded.model.encoder.layer[1].attention.output.dense, []
    with dense.register_forward_pre_hook(lambda _, args: rows.append(args[0][0].double())), torch.no_grad():
        for context in contexts:
            loaded.model(torch.tensor([context.ids]))
    half = [(context.document + context.piece) % 2 for context in contexts]
    one, other = (torch.cat([x for x, h in zip(rows, half, strict=True) if h == number]) for number in (0, 1))
    both = torch.cat([one, other]).unflatten(1, (4, -1))
    unit = (both - both.mean(0)).square().mean((0, 2)).sqrt().repeat_interleave(6)
    weights = dense.weight.detach().double().T
    for head in range(4):
        own, error, total = slice(6 * head, 6 * head + 6), 0.0, 0.0
        rest = [x for x in range(24) if not 6 * head <= x < 6 * head + 6]
        for train, test in ((one, other), (other, one)):
            x, y = train[:, rest] / unit[rest], train[:, own] @ weights[own]
            left = torch.cat([x - x.mean(0), len(rest) ** 0.5 * torch.eye(len(rest)).double()])
            right = torch.cat([y - y.mean(0), torch.zeros(len(rest), y.shape[1]).double()])
            fitted, target = torch.linalg.lstsq(left, right).solution, test[:, own] @ weights[own]
            error += float((target - y.mean(0) - (test[:, rest] / unit[rest] - x.mean(0)) @ fitted).square().sum())
            total += float((target - target.mean(0)).square().sum())
        assert float(found.table["predictable_share"][4 + head]) == pytest.approx(1 - error / total, abs=1e-3)


@pytest.mark.usefixtures("without_probes")
def test_redundancy_is_not_measured_with_fewer_tokens_than_predictors(folders, text):
    found = inspect_model(settings_for(folders["bert"], text, importance="none", chance=False, tokens=96))
    assert "predictable_share" not in found.table.columns
    assert found.redundant == ()
    (words,) = [str(x) for x in found.facts["left_out"] if x.kind == "few_tokens"]
    assert "needs 72 tokens in each half of the documents, got 0; use a longer text" in words


@pytest.mark.usefixtures("only_chance_and_pairs")
def test_pairs_of_layers_are_measured_also_where_they_were_picked_by_a_projection(plain_bert, monkeypatch):
    found = plain_bert
    assert found.facts["pairs_by"].kind == "every_pair"
    assert len(found.pairs) == 16  # all there are
    monkeypatch.setattr(
        "polyhead.inspection.cross_layer_similarity.sample_of", functools.partial(sample_of, max_bytes=0)
    )
    picked = inspect_model(found.settings)
    assert "random projection to 64 dimensions" in str(picked.facts["pairs_by"])
    estimated, measured = (torch.tensor([getattr(x, name) for x in picked.pairs]) for name in ("estimate", "cosine"))
    assert 0 < (estimated - measured).abs().max() < 0.35  # 64 numbers for 24, drawn at random
    exact = {(pair.one, pair.other): pair.cosine for pair in found.pairs}
    for pair in picked.pairs:
        assert pair.cosine == pytest.approx(exact[pair.one, pair.other], abs=1e-6)


@pytest.mark.usefixtures("only_chance_and_pairs")
@pytest.mark.parametrize("name", ["bert", "t5"])
def test_only_batches_with_sampled_tokens_are_read_again(folders, text, monkeypatch, name):
    settings = Settings(
        str(folders[name]), str(text), context=48, batch_tokens=60, tokens=300, importance="none", chance=False
    )
    monkeypatch.setattr("polyhead.inspection.cross_layer_similarity.TOKENS", 4)
    every = inspect_model(settings)
    monkeypatch.setattr(
        "polyhead.inspection.cross_layer_similarity.sample_of", functools.partial(sample_of, max_bytes=0)
    )
    steps: list[Progress] = []
    picked = inspect_model(settings, progress=steps.append)
    read = [now for now in steps if now.step == "compare heads across layers"]
    assert 0 < read[-1].total < picked.facts["tokens"]  # at most four batches
    assert sum(now.done == 0 for now in read) == 1  # and not all of them afterwards
    exact = {(pair.one, pair.other): pair.cosine for pair in every.pairs}
    common = [pair for pair in picked.pairs if (pair.one, pair.other) in exact]
    assert len(common) >= 5
    for pair in common:
        assert pair.cosine == pytest.approx(exact[pair.one, pair.other], abs=1e-6)


@pytest.mark.usefixtures("only_chance_and_pairs")
def test_pairs_are_measured_on_all_batches_if_the_sampled_tokens_are_not_found(plain_bert, monkeypatch):
    monkeypatch.setattr(
        "polyhead.inspection.cross_layer_similarity.sample_of", functools.partial(sample_of, max_bytes=0)
    )
    monkeypatch.setattr("polyhead.inspection.probing.token_hashes", lambda _, counted, __: counted.long())
    picked = inspect_model(plain_bert.settings)
    exact = {(pair.one, pair.other): pair.cosine for pair in plain_bert.pairs}
    assert len(picked.pairs) == 16
    for pair in picked.pairs:
        assert pair.cosine == pytest.approx(exact[pair.one, pair.other], abs=1e-6)


@pytest.mark.usefixtures("only_chance_and_pairs")
def test_pairs_of_layers_are_compared_a_few_tokens_at_a_time(plain_bert, monkeypatch):
    bmm, tokens = torch.bmm, []

    def recorded(outputs, matrices, **options):
        if matrices.shape[1:] == (6, 24):  # to the residual stream
            tokens.append(outputs.shape[1])
        return bmm(outputs, matrices, **options)

    monkeypatch.setattr(torch, "bmm", recorded)
    monkeypatch.setattr("polyhead.inspection.cross_layer_similarity.CHUNK", 7)
    monkeypatch.setattr("polyhead.inspection.cross_layer_similarity.HEADS", 3)
    found = inspect_model(plain_bert.settings)
    assert sum(tokens) >= 2 * 96
    assert max(tokens) == 7
    assert [(x.one, x.other) for x in found.pairs] == [(x.one, x.other) for x in plain_bert.pairs]
    assert [x.cosine for x in found.pairs] == pytest.approx([x.cosine for x in plain_bert.pairs], abs=1e-6)


@pytest.mark.usefixtures("only_roles_and_pairs")
def test_probes_compute_the_statistics_of_roles_with_the_attention_of_the_model(plain_bert, monkeypatch):
    computed = []

    def recorded(*tensors, statistics=None, **options):
        if statistics is not None and set(statistics.names) == set(ROW_STATISTICS):
            computed.append(tensors[2].shape[-1])
        return attention(*tensors, statistics=statistics, **options)

    monkeypatch.setattr("polyhead.observation.role_evidence_rows.attention", recorded)
    found = inspect_model(dataclasses.replace(plain_bert.settings, chance=True))
    assert computed == []
    assert repr(found.roles) != repr(())


def test_it_is_kept_and_read_again(inspected):
    found, _, folder = inspected("llama")
    again = load_inspection(folder)
    assert again.settings == found.settings
    assert repr(again.roles) == repr(found.roles)  # NaN is not equal to itself
    assert again.redundant == found.redundant
    assert again.pairs == found.pairs
    assert again.findings == found.findings
    assert again.top_keys == found.top_keys
    assert again.spectra.keys() == found.spectra.keys()
    for site, spectra in found.spectra.items():
        assert all(torch.equal(again.spectra[site][name], x) for name, x in spectra.items())
    assert again.influence.keys() == found.influence.keys() == set(found.table.sites)
    for site, effects in found.influence.items():
        assert {"entropy", "ablation"} & set(found.table.names) <= set(effects) == set(again.influence[site])
        assert all(torch.equal(again.influence[site][name], x) for name, x in effects.items())
    assert again.table.names == found.table.names
    assert again.table.sites == found.table.sites
    for name in found.table.columns:
        torch.testing.assert_close(again.table[name], found.table[name], rtol=0, atol=0, equal_nan=True)
    for site, matrices in found.relations.items():
        for kind, matrix in matrices.items():
            torch.testing.assert_close(again.relations[site][kind], matrix, rtol=0, atol=0, equal_nan=True)
    same = compare(found, again)
    assert same.significant() == ()
    assert same.gained == same.lost == ()


def test_an_interrupt_leaves_what_was_gathered(folders, plain_bert, text, tmp_path):
    def stop(now: Progress) -> None:
        if now.step == "read the text" and now.done > 0:
            raise KeyboardInterrupt

    found = inspect_model(settings_for(folders["bert"], text, chance=False), folder=tmp_path, progress=stop)
    assert found.facts["interrupted"]
    assert 0 < found.facts["tokens"] < 800
    assert found.roles == ()
    assert found.table["entropy"].isfinite().all()
    settings = dataclasses.replace(found.settings, importance="none")
    resumed = inspect_model(settings, folder=tmp_path, resume=True)
    for name, column in plain_bert.table.columns.items():
        torch.testing.assert_close(resumed.table[name], column, rtol=0, atol=0, equal_nan=True)
    for site, effects in plain_bert.influence.items():
        assert all(torch.equal(resumed.influence[site][name], x) for name, x in effects.items())
    assert resumed.facts["text"] == plain_bert.facts["text"] != found.facts["text"]  # of what was read


def test_a_run_is_not_overwritten(folders, plain_bert, text, tmp_path):
    save_inspection(tmp_path, plain_bert)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    rule = "folder must be a new run, got .* which contains a run already; continue it with resume=True"
    with pytest.raises(OptionError, match=rule):
        inspect_model(plain_bert.settings, folder=tmp_path)
    with pytest.raises(OptionError, match=rule):
        polyhead.inspect(folders["bert"], text, folder=tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    with pytest.raises(OptionError, match="resume=True continues the run in a folder, got none"):
        polyhead.inspect(folders["bert"], text, resume=True)


def test_a_dtype_is_of_a_model_that_is_loaded_by_name(folders):
    loaded = model_loading.load_model(folders["bert"])
    for model, options in ((loaded, {}), (loaded.model, {"tokenizer": loaded.tokenizer})):
        with pytest.raises(OptionError, match="models loaded by name, got 'bfloat16' with a model in memory; convert"):
            polyhead.inspect(model, ["w1 w2"], dtype="bfloat16", **options)


@pytest.mark.usefixtures("only_roles_and_pairs")
def test_an_interrupt_of_the_ablation_leaves_the_roles(folders, plain_bert, text):
    def stop(now: Progress) -> None:
        if now.step == "ablate every head in turn" and now.done > 0:
            raise KeyboardInterrupt

    found = inspect_model(settings_for(folders["bert"], text, chance=False), progress=stop)
    assert found.facts["interrupted"]
    assert "ablation" not in found.table.columns
    assert found.roles_table() == plain_bert.roles_table()
    assert found.facts["read"]  # to its end, so that no message says otherwise
    assert "are made when a saved run is resumed" in str(found.facts["left_out"][-1])


@pytest.mark.usefixtures("only_roles_and_pairs")
def test_importance_that_a_model_has_no_loss_for_is_refused_before_the_text_is_read(folders, text):
    masked, t5 = (model_loading.load_model(folders[name]) for name in ("masked", "t5"))
    masked.tokenizer.mask_token = None

    def inspected(loaded, importance: str) -> Inspection:
        settings = settings_for(Path("any"), text, chance=False, layers=(0,), tokens=400, importance=importance)
        return inspect_model(settings, loaded=loaded)

    with pytest.raises(OptionError, match="needs a tokenizer with a mask token, for its loss, got BertForMaskedLM"):
        inspected(masked, "gradient")
    with pytest.raises(
        OptionError, match="in models of one stack, got T5ForConditionalGeneration; use importance none"
    ):
        inspected(t5, "ablation")
    found = inspected(masked, "auto")
    assert not {"gradient", "ablation"} & set(found.table.columns)
    assert "got a tokenizer without one" in " ".join(map(str, found.facts["left_out"]))
    assert found.roles


def test_only_a_causal_model_has_copying_circuits(folders, text, inspected, request):
    """A masked model's unembedding reads what a head of its own makes of the stream."""
    assert "copying_circuit_score" in inspected("llama")[0].table.columns
    request.getfixturevalue("without_probes")  # not before, as other tests use the inspection of the llama
    found = inspect_model(settings_for(folders["masked"], text, importance="none", chance=False, tokens=400))
    assert "copying_circuit_score" not in found.table.columns


def test_pairs_are_of_different_layers_in_an_encoder_decoder_as_well(inspected):
    """Self-attention and cross-attention of one decoder layer read the same tokens."""
    pairs = inspected("t5")[0].pairs
    assert pairs
    assert all(pair.one[0].layer != pair.other[0].layer for pair in pairs)


@pytest.mark.usefixtures("without_probes")
def test_a_requested_ablation_is_measured_on_more_tokens_and_says_on_how_many(folders, text):
    def tokens(context: int | None, **options) -> int:
        found = inspect_model(settings_for(folders["bert"], text, chance=False, layers=(0,), **options))
        assert found.facts.get("importance_context") == context
        return found.facts["importance_tokens"]

    by_default = tokens(32)  # the beginnings of contexts, an eighth of the tokens each
    assert 256 <= by_default < 256 + 96
    assert tokens(96, importance="ablation") > 2 * by_default  # all of this text, which has fewer than 2,048
    assert 500 <= tokens(62, importance_tokens=500) < 500 + 96
    assert tokens(None, importance="none") is None
    with pytest.raises(OptionError, match="importance_tokens must be at least 1, got 0"):
        Settings(importance_tokens=0)


@pytest.mark.usefixtures("without_probes")
def test_both_measures_of_importance_are_those_of_two_runs_on_the_same_tokens(folders, text):
    def inspected(importance: str) -> Inspection:
        options = {"chance": False, "layers": (0,), "importance": importance, "importance_tokens": 500}
        return inspect_model(settings_for(folders["llama"], text, **options))

    both = inspected("both")
    for importance, columns in (("ablation", ("ablation",)), ("gradient", ("gradient", "taylor"))):
        single = inspected(importance)
        assert single.facts["importance_tokens"] == both.facts["importance_tokens"]
        for column in columns:
            for name in (column, f"{column}_error"):
                torch.testing.assert_close(both.table[name], single.table[name], rtol=0, atol=0, equal_nan=True)


def test_gradients_are_the_same_in_batches_of_few_tokens(folders, text, inspected, monkeypatch, request):
    expected, _, _ = inspected("llama")
    request.getfixturevalue("without_probes")
    measured: list[int] = []

    def scores(model, batches, *rest, **options):
        measured.extend(int(batch.mask.numel()) for batch in batches)
        return gradient_scores(model, batches, *rest, **options)

    monkeypatch.setattr(probing, "GRADIENT_BATCH_TOKENS", 100)
    monkeypatch.setattr(probing, "gradient_scores", scores)
    found = inspect_model(settings_for(folders["llama"], text, chance=False))
    assert max(measured) <= 100 < 400
    assert found.facts["importance_tokens"] == expected.facts["importance_tokens"]
    for column in ("gradient", "gradient_error", "taylor"):
        torch.testing.assert_close(found.table[column], expected.table[column], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("importance", ["gradient", "both"])
def test_gradients_of_an_embedding_model_are_refused_before_the_text_is_read(folders, text, importance):
    seen: list[Progress] = []
    with pytest.raises(OptionError, match="a language modelling head, for its loss, got BertModel; use importance abl"):
        inspect_model(settings_for(folders["bert"], text, importance=importance), progress=seen.append)
    assert [one.step for one in seen] == ["load the model"]


@pytest.mark.usefixtures("without_probes")
def test_importance_of_a_single_document_has_an_error_over_its_contexts(folders, tmp_path):
    single = text_folder(tmp_path / "text", documents=1, words=200)
    found = inspect_model(settings_for(folders["llama"], single, chance=False, importance="gradient"))
    assert found.table["gradient_error"].isfinite().all()
    assert found.table["gradient_error"].gt(0).any()


def test_the_score_of_every_role_is_a_column_and_a_row(inspected):
    found, _, folder = inspected("llama")
    rows = found.roles_table()
    assert len(rows) == sum(len(head.scores) for head in found.roles)
    for number, head in enumerate(found.roles):
        for score in head.scores:
            assert found.table[f"{score.role.replace('-', '_')}_score"][number] == score.score
    first = found.roles[0].scores[0]
    assert rows[0] | {"layer": 0, "head": 0, "role": first.role, "score": first.score, "holds": first.holds} == rows[0]
    assert not any(name.endswith("_score") for name in found.table.names)  # `compare` has no error of them
    save_inspection(folder, found)
    torch.testing.assert_close(load_inspection(folder).table["induction_score"], found.table["induction_score"])


@pytest.mark.usefixtures("only_chance_and_pairs")
def test_the_baseline_reads_contexts_of_full_length(folders, text, monkeypatch):
    # The weight of the first token, or of the previous one, depends on the number of visible tokens.
    read, whole = {}, []
    watched = Probes.watched

    def recorded(probe, model, batches, collector, step, *statistics):
        read[step] = [int(length) for batch in batches for length in batch.mask.sum(-1)]
        whole[:] = [len(context.ids) for context in probe.reader.contexts]
        return watched(probe, model, batches, collector, step, *statistics)

    monkeypatch.setattr(Probes, "watched", recorded)
    monkeypatch.setattr("polyhead.inspection.probing.CHANCE_TOKENS", 300)
    inspect_model(settings_for(folders["llama"], text, importance="none"))
    baseline = read["observe a model with random weights"]
    assert not Counter(baseline) - Counter(whole)
    assert 300 <= sum(baseline) < 300 + 96 < sum(whole)


@pytest.mark.usefixtures("only_chance_and_pairs")
def test_the_random_model_is_freed_before_importance_is_measured(folders, text, monkeypatch):
    weights, alive = [], []

    def twin(model, seed):
        made = random_twin(model, seed)
        weights.extend(StorageWeakRef(x.untyped_storage()) for x in (*made.parameters(), *made.buffers()))
        return made

    def importance(self):
        alive.extend(not x.expired() for x in weights)
        return None, {}

    random_twin = probing.random_twin
    monkeypatch.setattr(probing, "random_twin", twin)
    monkeypatch.setattr(Probes, "importance", importance)
    gc.disable()  # it would free the model at some later time
    try:
        inspect_model(settings_for(folders["llama"], text))
    finally:
        gc.enable()
    assert len(alive) > 20
    assert not any(alive)


def test_a_text_of_one_context_says_that_roles_need_two(folders, tmp_path):
    (tmp_path / "short.txt").write_text(" ".join(NAMES[-40:]))
    found = inspect_model(settings_for(folders["bert"], tmp_path / "short.txt", importance="none", chance=False))
    assert found.facts["contexts"] == 1
    (reason,) = [str(x) for x in found.facts["left_out"] if "two contexts" in str(x)]
    assert reason.startswith("positional, previous, next, self, local, ")
    assert "induction" not in reason
    assert "findings about the text are left out as well" in reason
    assert all(finding.basis is None or not finding.basis.halves for finding in found.findings)


@pytest.mark.usefixtures("one_thread", "only_roles_and_pairs")
def test_a_killed_run_goes_on_bit_by_bit(folders, text, tmp_path):
    options = ["--context", "96", "--batch", "100", "--importance", "none", "--no-chance", "--device", "cpu"]
    saved = ["--tokens", 600, "--save", tmp_path / "killed", "--save-seconds", 0]
    command = ["inspect", folders["llama"], "--text", text, *options, *saved]
    file = tmp_path / "killed" / OBSERVATIONS
    code, _, said = stopped_when(file, signal.SIGKILL, command)
    assert file.exists(), said
    assert code == -signal.SIGKILL
    counts = [x.amax() for name, x in load_file(file).items() if name.endswith("statistics.moments.count")]
    before, tokens = (read_facts(file)[name] for name in ("batches", "tokens"))
    assert [int(x) for x in counts] == [tokens, tokens]  # whole batches, in both layers
    settings = Settings.from_dict(read_facts(file)["settings"])
    for folder in ("killed", "whole"):
        place = tmp_path / folder
        inspect_model(settings, folder=place, resume=folder == "killed")
    total = read_facts(tmp_path / "whole" / OBSERVATIONS)["batches"]
    assert 0 < before < total == read_facts(file)["batches"]
    assert file.read_bytes() == (tmp_path / "whole" / OBSERVATIONS).read_bytes()
    one, other = (load_file(tmp_path / folder / OBSERVATIONS) for folder in ("killed", "whole"))
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name
    tables = [load_inspection(tmp_path / folder).table for folder in ("killed", "whole")]
    for name in tables[0].columns:
        torch.testing.assert_close(tables[0][name], tables[1][name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "deterministic"), [("bert", False), ("llama", True)])
def test_on_a_gpu_a_killed_run_goes_on(folders, tmp_path, name, deterministic):
    """Within 1e-6 of what it would have been, and bit by bit where that was asked for."""
    text = odd_text_folder(tmp_path / "text")
    model, sure = [str(folders[name]), "--text", str(text)], ["--deterministic"] if deterministic else []
    begun = ["--context", "95", "--batch", "100", "--importance", "none", "--no-chance", "--device", "cuda"]
    command, places = [sys.executable, "-m", "polyhead", "inspect"], [tmp_path / "killed", tmp_path / "whole"]
    file = places[0] / OBSERVATIONS
    with subprocess.Popen(
        [*command, *model, *begun, *sure, "--save", str(places[0]), "--save-seconds", "0"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as run:
        until = time.monotonic() + 240
        while not file.exists() and run.poll() is None and time.monotonic() < until:
            time.sleep(0.001)
        run.send_signal(signal.SIGKILL)
    assert 0 < read_facts(file)["batches"] < 10
    if deterministic:  # a process must know of it from its start
        rest = (["--resume", str(places[0])], [*model, *begun, "--save", str(places[1])])
        runs = [
            subprocess.Popen([*command, *sure, *x], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            for x in rest
        ]
        for run in runs:
            said = run.communicate()[1]
            assert run.returncode == 0, said[-4000:]
    else:
        settings = Settings.from_dict(read_facts(file)["settings"])
        for place in places:
            inspect_model(settings, folder=place, resume=place == places[0])
    resumed, whole = (load_inspection(place).table for place in places)
    assert resumed.columns.keys() == whole.columns.keys()
    for column in whole.columns:
        rtol, atol = (0.0, 0.0) if deterministic else (1e-6, 1e-9)
        torch.testing.assert_close(resumed[column], whole[column], rtol=rtol, atol=atol, equal_nan=True, msg=column)


def test_a_run_goes_on_with_its_own_text_alone(folders, text, tmp_path):
    def stop(now: Progress) -> None:
        if now.step == "read the text" and now.done > 0:
            raise KeyboardInterrupt

    moved = text_folder(tmp_path / "text")
    found = inspect_model(settings_for(folders["bert"], moved), folder=tmp_path / "run", progress=stop)
    for file in moved.iterdir():
        file.write_text("w1 w2 w3 " * 50)
    with pytest.raises(OptionError, match="resumed with the text"):
        inspect_model(found.settings, folder=tmp_path / "run", resume=True)


@pytest.mark.usefixtures("only_roles_and_pairs")
def test_two_models_differ_beyond_sampling_error_and_one_does_not_from_itself(plain_bert, tmp_path):
    other, one = model_folder(tmp_path / "other", "bert", seed=1), plain_bert
    two = inspect_model(dataclasses.replace(one.settings, model=str(other)))
    found = compare(one, two)
    assert len(found.significant()) > 10
    assert found.only_before == found.only_after == ()
    clearest = found.significant("max_logit")[0]
    assert abs(clearest.difference) > 1.96 * clearest.error
    assert len(compare(one, one).significant()) == 0

    def with_roles(*held: str):
        """The first head has these roles, and no other head has any."""
        roles = ("sink", "previous", "local")
        scores = tuple(RoleScore(role, 1.0, 1.0, 1.0, 0.0, 0.5, role in held) for role in roles)
        first, *others = (dataclasses.replace(x, scores=()) for x in one.roles)
        return dataclasses.replace(one, roles=(dataclasses.replace(first, scores=scores), *others))

    changed = compare(with_roles("sink", "previous"), with_roles("previous", "local"))
    assert [x[-1] for x in changed.gained] == ["local"]
    assert [x[-1] for x in changed.lost] == ["sink"]


@pytest.mark.usefixtures("without_probes")
def test_two_halves_of_a_text_mostly_agree(folders, tmp_path):
    """Two halves of a text differ by sampling error alone."""
    halves = [text_folder(tmp_path / half, documents=12) for half in ("one", "two")]
    for half, keep in zip(halves, (0, 1), strict=True):
        for file in half.iterdir():
            if int(file.stem) % 2 != keep:
                file.unlink()
    options = {"importance": "none", "chance": False}
    one, two = (inspect_model(settings_for(folders["bert"], half, **options)) for half in halves)
    names = [name for name in one.table.names if f"{name}_std" in one.table.columns]
    found = compare(one, two)
    requested = [change for change in found.changes if change.name in names]
    assert len(requested) > 50
    assert [change for change in requested if change.significant] == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"context": 4000}, "context must be at most 130 tokens, the maximum of .*, got 4000"),
        ({"tokens": 0}, "tokens must be at least 1"),
        ({"importance": "magic"}, "importance must be one of"),
    ],
)
def test_what_cannot_be_is_refused(folders, text, options, words):
    with pytest.raises(OptionError, match=words):
        inspect_model(Settings(**{"model": str(folders["llama"]), "text": str(text), **options}))


def test_a_folder_that_is_no_inspection_is_refused(tmp_path):
    with pytest.raises(OptionError, match="a folder that `polyhead inspect --save` wrote"):
        load_inspection(tmp_path)


@pytest.mark.parametrize("documents", [1, 2, 3, 13])
def test_both_halves_of_a_text_have_parts_of_all_of_it(documents):
    """Even and odd numbers: of contexts, where there are few documents, with contexts of each; else of documents."""
    contexts = tuple(Context(document, piece, [1], [False]) for document in range(documents) for piece in range(4))
    reader = Reader(None, TextContexts(contexts, ("x",) * documents, 1), 1, torch.zeros(2))
    places = torch.tensor([(x.document, x.piece) for x in contexts])
    numbers = reader.documents_of(SimpleNamespace(documents=places[:, 0], pieces=places[:, 1]))
    odd = numbers % 2 == 1
    if documents < 10:
        assert len(set(numbers.tolist())) == len(contexts)
        assert all(int(odd[places[:, 0] == document].sum()) == 2 for document in range(documents))
    else:
        assert numbers.tolist() == places[:, 0].tolist()


def test_documents_that_are_too_short_leave_no_gap_in_the_halves(tmp_path):
    folder = model_folder(tmp_path / "llama", "llama")
    texts = ["a", "the cat sat on the mat and then it went away again"] * 11  # every second one is read
    found = read_contexts(model_loading.load_model(folder), texts, context=32)
    assert [x.document for x in found.contexts] == list(range(11))
    assert found.documents == tuple(f"document {number}" for number in range(1, 22, 2))
