"""The best of many heads is no pronoun head by luck, and one that finds antecedents is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from polyhead.analysis.intervals import normal_quantile, student_quantile
from polyhead.analysis.pronouns import NAME, PronounTexts, pronoun_table, pronoun_texts
from polyhead.analysis.roles import head_roles
from polyhead.errors import OptionError
from polyhead.observation import AttentionSite
from polyhead.observation.observations import Observations
from polyhead.observation.role_evidence import EvidenceCollector
from polyhead.observation.statistics import StatisticsRequest
from polyhead.observation.word_attention import ByContext
from polyhead.sources.pronoun_sentences import pronoun_sentences

pytest.importorskip("transformers")
from tests.sources.small_tokenizers import byte_level


@pytest.fixture(scope="module")
def texts() -> PronounTexts:
    return pronoun_texts(pronoun_sentences(), byte_level())


def told(texts: PronounTexts, weights: Tensor, site: AttentionSite | None = None) -> Observations:
    """Heads that give these weights [sentences, heads, 2] to antecedent and distractor."""
    site = site or AttentionSite("layer.0", "self", "layer.*", 0, weights.shape[1])
    expected = torch.full((len(weights), 2), 0.1).double()
    part = {"contexts": torch.arange(len(weights)), "weights": weights, "expected": expected}
    value = ByContext(texts.collector(), weights.shape[1], (part,))
    return Observations(StatisticsRequest(()), (), {site: {NAME: value}})


@pytest.mark.parametrize(
    ("tail", "degrees", "expected"),
    [(0.025, 1, 12.706), (0.025, 2, 4.303), (0.025, 9, 2.262), (0.0005, 9, 4.781), (0.005, 30, 2.750)],
)
def test_quantiles_are_those_of_the_books(tail, degrees, expected):
    assert student_quantile(tail, degrees) == pytest.approx(expected, abs=5e-4)  # they print three decimal places
    normal, many = normal_quantile(tail), 10**4
    nearly = normal + (normal**3 + normal) / (4 * many)  # the first term of Cornish and Fisher; the next is 1e-7 of it
    assert student_quantile(tail, many) == pytest.approx(nearly, rel=1e-6)


def test_a_quantile_of_no_degrees_is_refused():
    with pytest.raises(OptionError, match=r"got 0 and 0\.1"):
        student_quantile(0.1, 0)


def test_of_many_heads_that_know_nothing_none_is_beyond_chance(texts):
    """Each of 20 models of 300 heads would have some whose own interval is: that is what the correction is for."""
    wrong = flattered = 0
    for seed in range(20):
        weights = torch.rand(len(texts.contexts), 300, 2, generator=torch.Generator().manual_seed(seed)).double()
        entries = pronoun_table(told(texts, weights), texts).entries
        wrong += any(entry.all_low > entry.null for entry in entries)
        flattered += any(min(entry.low, entry.frames_low) > entry.null for entry in entries)
    assert wrong <= 1  # 5% of models are allowed to
    assert flattered == 20


def test_more_heads_make_the_interval_for_all_of_them_wider_and_no_other(texts):
    weights = torch.rand(len(texts.contexts), 30, 2, generator=torch.Generator().manual_seed(1)).double()
    many = pronoun_table(told(texts, weights), texts).entries
    (one,) = pronoun_table(told(texts, weights[:, :1]), texts).entries
    assert (many[0].low, many[0].frames_low, many[0].score) == (one.low, one.frames_low, one.score)
    assert many[0].all_low < one.all_low <= min(one.low, one.frames_low)
    assert many[0].all_high > one.all_high >= max(one.high, one.frames_high)
    assert one.weight == pytest.approx(float(weights[:, 0, 0].mean()))


def test_a_single_frame_says_nothing(texts):
    weights = torch.tensor([0.8, 0.1]).double().expand(4, 1, 2)
    (entry,) = pronoun_table(told(texts, weights), texts).entries
    assert (entry.score, entry.all_low, entry.all_high) == (1.0, 0.0, 1.0)


def test_sentences_longer_than_the_context_are_left_out_with_their_frame():
    sentences = pronoun_sentences("en")
    lengths = [len(context.ids) for context in pronoun_texts(sentences, byte_level()).contexts]
    short = pronoun_texts(sentences, byte_level(), longest=sorted(lengths)[15])
    assert 0 < len(short.contexts) <= 16
    assert len(short.contexts) + short.unreadable == 40
    assert len(short.contexts) == 4 * len(set(short.frames))
    assert max(len(context.ids) for context in short.contexts) <= sorted(lengths)[15]


def test_a_role_is_given_by_the_interval_for_all_heads(texts):
    """A head that is right, one that is in the English half only, one that hardly looks, one that knows nothing."""
    count = len(texts.contexts)
    right, chance = torch.tensor([0.3, 0.1]), torch.tensor([0.2, 0.2])
    half = torch.stack([right if frame < 10 else chance for frame in texts.frames])
    hardly = torch.tensor([0.19, 0.1])  # and even attention has 0.1
    weights = torch.stack([right.expand(count, 2), half, hardly.expand(count, 2), chance.expand(count, 2)], 1).double()
    site = AttentionSite("layer.0", "self", "layer.*", 0, 4)
    table = pronoun_table(told(texts, weights, site), texts)
    evidence = {site: EvidenceCollector().empty(site, torch.device("cpu"))}
    one, other, looks_away, even = head_roles(evidence, pronouns=table)
    assert one.roles == {"pronoun"}
    assert one["pronoun"].evidence == (
        "attends from a pronoun to its antecedent more than to another name in 100% of sentences (chance 50%), "
        "with 30% of its attention"
    )
    assert other["pronoun"].score == 0.75 == other["pronoun"].threshold
    assert (other["pronoun"].low > 0.5) == ("pronoun" in other.roles)
    assert (looks_away["pronoun"].score, looks_away.roles) == (1.0, frozenset())
    assert (even["pronoun"].score, even.roles) == (0.5, frozenset())
    weights[3, 3] = torch.nan
    broken = pronoun_table(told(texts, weights, site), texts)
    assert [len(head.scores) for head in head_roles(evidence, pronouns=broken)] == [1, 1, 1, 0]
    elsewhere = AttentionSite("layer.1", "self", "layer.*", 1, 3)
    evidence = {elsewhere: EvidenceCollector().empty(elsewhere, torch.device("cpu"))}
    assert head_roles(evidence, pronouns=table)[0].scores == ()
