"""The best of many heads is no pronoun head by luck, and one that finds antecedents is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from polyhead.analysis.intervals import normal_quantile, student_quantile
from polyhead.analysis.pronouns import (
    AGREEMENT,
    CUES,
    NAME,
    PronounTable,
    PronounTexts,
    pronoun_table,
    pronoun_texts,
)
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


def observations_of(texts: PronounTexts, weights: Tensor, site: AttentionSite | None = None) -> Observations:
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
        entries = pronoun_table(observations_of(texts, weights), texts).entries
        wrong += any(entry.all_low > entry.null for entry in entries)
        flattered += any(min(entry.low, entry.frames_low) > entry.null for entry in entries)
    assert wrong <= 1  # 5% of models are allowed to
    assert flattered == 20


def test_more_heads_make_the_interval_for_all_of_them_wider_and_no_other(texts):
    weights = torch.rand(len(texts.contexts), 30, 2, generator=torch.Generator().manual_seed(1)).double()
    many = pronoun_table(observations_of(texts, weights), texts).entries
    (one,) = pronoun_table(observations_of(texts, weights[:, :1]), texts).entries
    assert (many[0].low, many[0].frames_low, many[0].score) == (one.low, one.frames_low, one.score)
    assert many[0].all_low < one.all_low <= min(one.low, one.frames_low)
    assert many[0].all_high > one.all_high >= max(one.high, one.frames_high)
    assert one.weight == pytest.approx(float(weights[:, 0, 0].mean()))


def test_a_single_frame_says_nothing(texts):
    weights = torch.tensor([0.8, 0.1]).double().expand(4, 1, 2)
    (entry,) = pronoun_table(observations_of(texts, weights), texts).entries
    assert (entry.score, entry.all_low, entry.all_high) == (1.0, 0.0, 1.0)


def test_sentences_longer_than_the_context_are_left_out_with_their_frame():
    sentences = pronoun_sentences("en")
    lengths = [len(context.ids) for context in pronoun_texts(sentences, byte_level()).contexts]
    short = pronoun_texts(sentences, byte_level(), longest=sorted(lengths)[15])
    assert 0 < len(short.contexts) <= 16
    assert len(short.contexts) + short.excluded == 80
    assert len(short.contexts) == 4 * len(set(short.frames))
    assert max(len(context.ids) for context in short.contexts) <= sorted(lengths)[15]


def tables_of(texts: PronounTexts, weights: Tensor, site: AttentionSite) -> dict[str, PronounTable]:
    of_cue = {"agreement": AGREEMENT, **{cue: (cue,) for cue in CUES}}
    return {name: pronoun_table(observations_of(texts, weights, site), texts, cues) for name, cues in of_cue.items()}


def test_a_role_is_given_by_what_was_shown(texts):
    """Heads that are right, right by agreement only, by meaning only, that hardly look, and that know nothing."""
    count = len(texts.contexts)
    right, chance = torch.tensor([0.3, 0.1]), torch.tensor([0.2, 0.2])
    agrees = torch.stack([chance if cue == "meaning" else right for cue in texts.cues])
    understands = torch.stack([right if cue == "meaning" else chance for cue in texts.cues])
    hardly = torch.tensor([0.19, 0.1])  # and even attention has 0.1
    heads = [right.expand(count, 2), agrees, understands, hardly.expand(count, 2), chance.expand(count, 2)]
    weights = torch.stack(heads, 1).double()
    site = AttentionSite("layer.0", "self", "layer.*", 0, 5)
    evidence = {site: EvidenceCollector().empty(site, torch.device("cpu"))}
    found = head_roles(evidence, pronouns=tables_of(texts, weights, site))
    assert [head.roles for head in found] == [{"pronoun"}, {"agreement"}, set(), set(), set()]
    assert [head["agreement"].score for head in found] == [1.0, 1.0, 0.5, 1.0, 0.5]
    assert [head["pronoun"].score for head in found] == [1.0, 0.5, 1.0, 1.0, 0.5]
    assert found[0]["pronoun"].evidence == (
        "attends from a pronoun to its antecedent more than to another in 100% of sentences where only the meaning "
        "decides (chance 50%; by gender 100%, by number 100%, by meaning alone 100%), with 30% of its attention"
    )
    assert found[1]["agreement"].text.zh == (
        "在性或数可判断的句子中，有 100% 从代词关注一致的名字多于另一个名字"
        "（随机水平 50%；靠性 100%，靠数 100%，只靠意思 50%），占其注意力的 30%"
    )
    weights[3, 4] = torch.nan  # a sentence that gender decides
    broken = head_roles(evidence, pronouns=tables_of(texts, weights, site))
    assert [len(head.scores) for head in broken] == [2, 2, 2, 2, 1]
    elsewhere = AttentionSite("layer.1", "self", "layer.*", 1, 3)
    evidence = {elsewhere: EvidenceCollector().empty(elsewhere, torch.device("cpu"))}
    assert head_roles(evidence, pronouns=tables_of(texts, weights, site))[0].scores == ()


def test_one_language_has_sentences_enough_for_either_role():
    """Of the 270 heads of a small model, one that is right in nine tenths of the sentences."""
    texts = pronoun_texts(pronoun_sentences("en"), byte_level())
    weights = torch.full((len(texts.contexts), 270, 2), 0.2).double()
    weights[:, 0] = torch.tensor([0.3, 0.1]).double()
    weights[::10, 0] = torch.tensor([0.1, 0.3]).double()
    for cues in (AGREEMENT, ("meaning",)):
        best = max(pronoun_table(observations_of(texts, weights), texts, cues).entries, key=lambda x: x.score)
        assert best.score == 0.9
        assert best.all_low > best.null
