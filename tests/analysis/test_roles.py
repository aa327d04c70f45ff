"""Every planted role is found and no other; heads made by hand for the rest; nulls and intervals mean what they say."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import polyhead
from polyhead.analysis.roles import DRAWS, HeadRoles, RoleScore, _Documents, evidence_of, head_roles
from polyhead.analysis.roles_copying import Words, copying_scores
from polyhead.analysis.roles_rules import RULES
from polyhead.errors import OptionError, ShapeError
from polyhead.layers.head_matrices import HeadMatrices
from polyhead.observation import BatchMetadata
from polyhead.observation.role_evidence import EvidenceCollector, HeadEvidence
from polyhead.observation.role_evidence_rows import COLUMNS
from polyhead.observation.role_evidence_tokens import TokenVectors
from tests.analysis.roles_seeds import wrong_roles
from tests.analysis.test_circuits import copying
from tests.integrations.huggingface import models
from tests.planted import PLANTED_ROLES


# `python -m tests.analysis.roles_seeds --seeds 20` tries as many as are asked for, with and without later tokens.
@pytest.mark.parametrize(("seed", "causal"), [(0, True), (1, False)])
def test_every_planted_role_is_found_and_no_other_and_none_in_a_random_model(seed: int, causal: bool) -> None:
    assert wrong_roles(seed, causal) == []


def test_every_planted_role_has_a_rule() -> None:
    assert {role for roles in PLANTED_ROLES.values() for role in roles} <= set(RULES)


# ---- heads made by hand: a stream whose axes say what each token is

WORDS, GROUPS, SIZE = 36, 12, 41
COMMAS = (6, 7, 8)
RARE = (30, 31, 32)


def hand_made() -> tuple[polyhead.MultiHeadAttention, Tensor]:
    """A layer with a head for commas, one for rare words and one for related words; and its embedding.

    Three words of a group have a cosine of one half or more. The last three axes are 1 for everybody, for commas and
    for rare words.
    """
    generator = torch.Generator().manual_seed(5)
    groups, own = (
        torch.nn.functional.normalize(torch.randn(n, 29, generator=generator), dim=1) for n in (GROUPS, WORDS)
    )
    words = torch.nn.functional.normalize(1.5 * groups.repeat_interleave(3, 0) + own, dim=1)
    embedding = torch.zeros(WORDS, 32)
    embedding[:, :29] = words
    embedding[:, 29] = 1.0
    embedding[list(COMMAS), 30] = 1.0
    embedding[list(RARE), 31] = 1.0

    def head(query: Tensor, key: Tensor) -> HeadMatrices:
        return HeadMatrices(query, key, torch.eye(32), torch.eye(32))

    def looking_at(axis: int) -> HeadMatrices:
        query, key = torch.zeros(32, 32), torch.zeros(32, 32)
        query[29, 0], key[axis, 0] = 60.0, 1.0
        return head(query, key)

    same = torch.diag(torch.tensor([1.0] * 29 + [0.0] * 3))
    heads = [looking_at(30), looking_at(31), head(60.0 * same, same)]
    return polyhead.MultiHeadAttention.from_heads(heads, causal=False).eval(), embedding


@functools.cache
@torch.no_grad()
def hand_made_evidence(documents: int = 12) -> HeadEvidence:
    layer, embedding = hand_made()
    generator = torch.Generator().manual_seed(7)
    frequency = torch.ones(WORDS)
    frequency[list(RARE)] = 0.4
    tokens = torch.multinomial(frequency.expand(documents, -1), SIZE, replacement=True, generator=generator)
    tokens[:, 3], tokens[:, 11] = COMMAS[0], RARE[0]
    classes = torch.where(torch.isin(tokens, torch.tensor(COMMAS)), 5, 2)
    rare = torch.zeros(WORDS, dtype=torch.bool)
    rare[list(RARE)] = True
    collector = EvidenceCollector(rare=rare, meaning=TokenVectors.of(embedding[:, :29], dims=24))
    with polyhead.observe(layer, statistics=False, collect=[collector]) as session:
        session.metadata = BatchMetadata(documents=torch.arange(documents), tokens=tokens, classes=classes)
        layer(embedding[tokens])
    (found,) = evidence_of(session.observations.collected).values()
    return found


def test_heads_for_delimiters_rare_words_and_related_words_are_told_apart() -> None:
    evidence = hand_made_evidence()
    found = head_roles({evidence.site: evidence})
    assert [head.roles for head in found] == [{"delimiter"}, {"rare-token"}, {"same-meaning", "self"}]
    assert "of its attention on special tokens and punctuation (chance" in str(found[0])
    assert str(found[2]).startswith(f"L0H2 of {evidence.site.name}: ")
    assert found[2]["same-meaning"].score > 0.5 > 3 * found[2]["same-meaning"].null
    assert {"duplicate-token", "induction", "copy"}.isdisjoint(score.role for score in found[0].scores)
    with pytest.raises(KeyError):
        found[0]["induction"]


def test_an_interval_holds_the_score_and_shrinks_with_more_documents() -> None:
    few, many = (hand_made_evidence(documents) for documents in (5, 60))
    widths = []
    for evidence in (few, many):
        scores = head_roles({evidence.site: evidence})[2].scores
        for score in scores:
            assert score.low <= score.score <= score.high, score
        widths.append(sum(score.high - score.low for score in scores if score.role in ("local", "broad", "rare-token")))
    assert widths[1] < widths[0] / 2
    # That of a mean over documents of one size is about 4 standard errors wide.
    share = many.column("window_mass")[:, 2] / many.column("rows")[:, 2]
    local = next(score for score in head_roles({many.site: many})[2].scores if score.role == "local")
    assert local.high - local.low == pytest.approx(4.0 * float(share.std()) / math.sqrt(60), rel=0.15)
    assert DRAWS == 1000


def test_a_score_prints_its_numbers_and_its_evidence() -> None:
    score = RoleScore("previous", 0.7734, 0.71, 0.82, 0.0212, 0.51, holds=True)
    evidence = "attends most to the previous token in 77% of positions (chance 2%)"
    assert repr(score) == f"RoleScore(previous 0.773 [0.71, 0.82], chance 0.0212, threshold 0.51: {evidence})"
    assert repr(replace(score, holds=False)).endswith("threshold 0.51: does not hold)")


def test_draws_depend_on_the_seed_alone() -> None:
    evidence = hand_made_evidence()
    one, again, other = (head_roles({evidence.site: evidence}, seed=seed) for seed in (3, 3, 4))
    assert [head.scores for head in one] == [head.scores for head in again]
    assert [head.scores for head in one] != [head.scores for head in other]


def test_one_document_names_no_role() -> None:
    evidence = hand_made_evidence(1)
    found = head_roles({evidence.site: evidence})
    assert all(not len(head.roles) for head in found)
    assert found[0]["delimiter"].score > 0.9
    assert math.isnan(found[0]["delimiter"].low)


def test_a_role_says_better_what_another_says_too() -> None:
    evidence = hand_made_evidence()
    sums = evidence.sums.clone()
    sums[:, 0, COLUMNS.index("sink_mass")] = 0.9 * sums[:, 0, COLUMNS.index("rows")]
    (head, *_) = head_roles({evidence.site: replace(evidence, sums=sums)})
    assert head.roles == {"sink"}
    assert head["delimiter"].score >= head["delimiter"].threshold


def test_the_threshold_rises_with_the_null() -> None:
    evidence = hand_made_evidence()
    (comma, *_) = head_roles({evidence.site: evidence})
    assert comma["delimiter"].threshold == RULES["delimiter"].threshold
    assert comma["broad"].threshold == max(0.95, (1 + comma["broad"].null) / 2)
    raised = replace(comma, scores=tuple(replace(score, score=1.0) for score in comma.scores))
    found = head_roles({evidence.site: evidence}, reference=[raised])
    assert found[0]["delimiter"].null == found[0]["delimiter"].threshold == 1.0
    assert all(not len(head.roles) for head in found)


@torch.no_grad()
def roles_of_random_bert(seed: int, reference: tuple[HeadRoles, ...] = ()) -> tuple[HeadRoles, ...]:
    model = models.build({family.name: family for family in models.ENCODERS}["bert"], seed=seed, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.mul_(0.02 / 0.25)  # as transformers draws them
    collector = EvidenceCollector(meaning=TokenVectors.of(model.get_input_embeddings().weight, dims=16))
    tokens = models.tokens(9, 47)
    with polyhead.observe(model, statistics=False, collect=[collector]) as session:
        session.metadata = BatchMetadata(documents=torch.arange(9), tokens=tokens)
        model(input_ids=tokens)
    return head_roles(evidence_of(session.observations.collected), reference=reference)


def test_a_random_model_that_looks_everywhere_is_broad_and_not_beyond_its_like() -> None:
    assert {role for head in roles_of_random_bert(3) for role in head.roles} == {"broad"}
    reference = (*roles_of_random_bert(4), *roles_of_random_bert(5))
    assert all(not len(head.roles) for head in roles_of_random_bert(3, reference))


# ---- by the weights


@pytest.mark.parametrize("vocabulary", [211, 131], ids=["many words", "few words"])
def test_copying_equals_that_of_the_formula_and_has_an_error_and_a_null(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    value, embedding = drawn(5, 31, 7), drawn(vocabulary, 31)
    output = torch.stack([value[0].T, -value[1].T, *drawn(3, 7, 31)])
    words = Words(embedding, embedding)
    assert (words._products is None) == (vocabulary < 31 * 10 / 2)
    found = copying_scores(value, output, words)
    torch.testing.assert_close(found.score, copying(*(x.double() for x in (value, output, embedding, embedding))))
    shared = copying_scores(value[:1], output, words)  # five heads of one KV head
    alone = copying_scores(value[:1].expand(5, -1, -1), output, words)
    torch.testing.assert_close(shared.score, alone.score)
    torch.testing.assert_close(shared.error, alone.error)
    assert found.score[0] > 0.99
    assert found.score[1] < -0.99
    assert found.score[2:].abs().max() < 3 * found.null < 1.5
    assert 0.2 < found.null < 0.8  # random eigenvalues: about 1.96 / sqrt(2 * 7)
    assert (found.error[2:] > 0).all()
    assert found.error.max() < 0.3


def test_a_circuit_that_nobody_reads_copies_nothing() -> None:
    value, output = torch.randn(2, 12, 3), torch.randn(2, 3, 12)
    embedding, unembedding = torch.zeros(50, 12), torch.zeros(50, 12)
    embedding[:, :6], unembedding[:, 6:] = torch.randn(50, 6), torch.randn(50, 6)
    output[..., 6:] *= 1e-8
    found = copying_scores(value, output, Words(embedding, unembedding))
    assert found.score.tolist() == [0.0, 0.0]
    with pytest.raises(ShapeError, match=r"must be \[vocabulary, embed_dim\]"):
        Words(embedding[:, :5], unembedding)
    with pytest.raises(ShapeError, match=r"must be \[kv_heads, 12, value_dim\]"):
        copying_scores(value[:, :5], output, Words(embedding, unembedding))


@pytest.mark.parametrize("documents", [2, 3, 8])
def test_intervals_of_few_documents_contain_the_true_share_almost_as_often_as_they_say(documents: int) -> None:
    """2,000 draws of documents of different lengths, each as a head; percentiles alone contain it in 46 to 86%."""
    generator = torch.Generator().manual_seed(documents)
    rows = torch.rand(documents, 2000, generator=generator, dtype=torch.float64) + 0.5
    shares = 0.5 + 0.15 * torch.randn(documents, 2000, generator=generator, dtype=torch.float64)
    resampled = _Documents(hand_made_evidence(documents), 0)
    resampled.nan = torch.zeros(2000)
    found = resampled.ratio(rows * shares, rows, torch.zeros(2000))
    assert found is not None
    contained = ((found.low <= 0.5) & (found.high >= 0.5)).double().mean()
    assert 0.92 <= float(contained) <= 0.98
    assert 0 <= float(found.low.min()) <= float(found.high.max()) <= 1


def test_rows_of_a_single_document_have_no_interval() -> None:
    documents = _Documents(hand_made_evidence(4), 0)
    counts = torch.tensor([[10.0, 10.0, 0.0], [0.0, 10.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]).double()
    found = documents.ratio(0.7 * counts, counts, torch.zeros(3))
    assert found is not None
    assert found.score[:2].tolist() == pytest.approx([0.7, 0.7])
    assert found.low.isnan().tolist() == found.high.isnan().tolist() == [True, False, True]


def copy_evidence(wins: list[list[float]], pairs: list[list[float]], rows: list[list[float]]) -> HeadEvidence:
    """Evidence in which only the comparisons of logits, [documents, heads], are of interest."""
    evidence = hand_made_evidence(len(wins))
    sums = evidence.sums.clone()
    for name, numbers in (("copy_wins", wins), ("copy_pairs", pairs), ("copy_rows", rows)):
        sums[:, :-1, COLUMNS.index(name)] = torch.tensor(numbers, dtype=torch.float64)
    return replace(evidence, sums=sums)


def test_copy_needs_three_quarters_of_the_pairs_and_an_interval_beyond_half() -> None:
    pairs, rows = [[100.0] * 3] * 20, [[12.0] * 3] * 20
    evidence = copy_evidence([[76.0 + k % 3, 74.0, 20.0] for k in range(20)], pairs, rows)
    copy, almost, anti = head_roles({evidence.site: evidence})
    assert ("copy" in copy.roles, "copy" in almost.roles, "anti-copy" in anti.roles) == (True, False, True)
    assert copy["copy"].score == pytest.approx(0.7695)
    assert (copy["copy"].null, copy["copy"].threshold) == (0.5, 0.75)
    assert anti["anti-copy"].score == pytest.approx(0.8)
    assert (anti["anti-copy"].low, anti["anti-copy"].high) == pytest.approx(
        (1 - anti["copy"].high, 1 - anti["copy"].low)
    )
    # Documents that disagree, all pairs in one document, and a few rows: no label, though enough pairs are won.
    wins = [[100.0 if k < 15 else 0.0, 0.0, 0.9] for k in range(20)]
    pairs = [[100.0, 0.0, 1.0] for k in range(20)]
    rows = [[12.0, 0.0, 0.25] for k in range(20)]
    wins[0][1], pairs[0][1], rows[0][1] = 900.0, 1000.0, 64.0
    evidence = copy_evidence(wins, pairs, rows)
    disagree, one, few = head_roles({evidence.site: evidence})
    for head, score in ((disagree, 0.75), (one, 0.9), (few, 0.9)):
        assert head["copy"].score == pytest.approx(score)
        assert "copy" not in head.roles
    assert math.isnan(one["copy"].low)


def test_of_many_heads_that_know_nothing_none_copies() -> None:
    """Each of 16 documents has its own share of wins around one half."""
    torch.manual_seed(0)
    excluded = 0
    for _ in range(200):
        wins = (torch.randn(16, 3) * 10 + 50).clamp(0, 100)
        evidence = copy_evidence(wins.tolist(), [[100.0] * 3] * 16, [[30.0] * 3] * 16)
        found = head_roles({evidence.site: evidence})
        excluded += sum(head["copy"].low > 0.5 or head["copy"].high < 0.5 for head in found)
    assert excluded <= 15  # 5% of 200 models of three heads, and their luck


def test_repeated_tokens_must_be_of_the_same_sites() -> None:
    evidence = hand_made_evidence()
    with pytest.raises(OptionError, match="the same sites as text, got none for"):
        head_roles({evidence.site: evidence}, {})
