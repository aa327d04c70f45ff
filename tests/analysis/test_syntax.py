"""A head that knows a relation is found, and a head that is best by chance is not believed."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import polyhead
from polyhead.analysis.dependency_accuracy import DOWNWARD, EVERY, UPWARD, syntax_table
from polyhead.analysis.intervals import ratio_of_sums, wilson
from polyhead.analysis.pronouns import pronoun_table, pronoun_texts
from polyhead.analysis.shares import inner_shares
from polyhead.analysis.syntax_table import SyntaxTable
from polyhead.errors import OptionError
from polyhead.observation import BatchMetadata, Observations
from polyhead.observation.statistics import AttentionSite, StatisticsRequest
from polyhead.observation.word_attention import SpanAttention, WordAttention, WordMap
from polyhead.ops.attended import Attended
from polyhead.sources.pronoun_sentences import pronoun_sentences

RELATIONS = ("nsubj", "obj", "det")


def random_trees(count: int, seed: int = 0, words: tuple[int, int] = (4, 11)) -> list[WordMap]:
    """Words of one or two tokens between two special ones; relations drawn at random, so that none has a shape."""
    draw = random.Random(seed)
    maps = []
    for _ in range(count):
        size = draw.randint(*words)
        order = draw.sample(range(size), size)
        governors = [-1] * size
        for place, word in enumerate(order[1:], start=1):
            governors[word] = order[draw.randrange(place)]
        tokens = [word for word in range(size) for _ in range(draw.choice((1, 1, 2)))]
        relations = tuple("root" if governor < 0 else draw.choice(RELATIONS) for governor in governors)
        maps.append(WordMap((-1, *tokens, -1), tuple(governors), relations, (0,) * size))
    return maps


def collected(maps: list[WordMap], looks: list[Tensor], mask=None) -> Observations:
    """Observations of sites with a head for each column of `looks` [words, heads], read from real attention."""
    collector = WordAttention(maps)
    found = {}
    for layer, columns in enumerate(looks):
        site = AttentionSite(f"layer.{layer}", "self", "layer.*", layer, columns.shape[1])
        value = collector.empty(site, torch.device("cpu"))
        assert value is not None
        start = 0
        for text, words in enumerate(maps):
            own = columns[start : start + len(words)]
            start += len(words)
            # Every token of a word looks at the first token of the word it is told to.
            first = torch.tensor([words.tokens.index(word) for word in range(len(words))])
            of_word = torch.tensor(words.tokens).clamp_min(0)
            toward = first[own[of_word].T][None]  # [1, heads, tokens]
            query = 30.0 * torch.nn.functional.one_hot(toward, len(words.tokens)).double()
            key = torch.eye(len(words.tokens), dtype=torch.float64).expand(1, columns.shape[1], -1, -1)
            result = polyhead.attention(query, key, key, mask=mask, scale=1.0, logsumexp=True)
            value = value.update(
                Attended(query, key, key, result, mask, 1.0), None, BatchMetadata(documents=torch.tensor([text]))
            )
        found[site] = {"words": value}
    return Observations(StatisticsRequest(()), (), found)


def at_random(maps: list[WordMap], heads: int, seed: int = 1) -> Tensor:
    """At any other word, each as likely."""
    generator = torch.Generator().manual_seed(seed)
    looks = []
    for words in maps:
        away = torch.randint(1, max(len(words), 2), (len(words), heads), generator=generator)
        looks.append((torch.arange(len(words))[:, None] + away) % len(words))
    return torch.cat(looks)


def at_governors(maps: list[WordMap], relation: str | None = None) -> Tensor:
    """At the governor if the word hangs on it by the relation, else at its neighbour."""
    looks = []
    for words in maps:
        for word, governor in enumerate(words.governors):
            knows = governor >= 0 and relation in (None, words.relations[word])
            looks.append(governor if knows else (word + 1) % len(words))
    return torch.tensor(looks)[:, None]


def rows_of(table: SyntaxTable) -> dict[tuple[str, str], object]:
    return {(row.relation, row.direction): row for row in table.entries}


def test_a_head_that_always_looks_at_the_governor_is_found_with_certainty():
    maps = random_trees(60)
    noise = at_random(maps, 6)
    planted = torch.cat([noise[:, :2], at_governors(maps), noise[:, 2:]], 1)
    table = syntax_table(collected(maps, [noise, planted]), minimum=20)
    rows = rows_of(table)
    assert set(rows) == {(name, way) for name in (EVERY, *RELATIONS) for way in (UPWARD, DOWNWARD)}
    assert table.heads == 13
    assert table.texts == (30, 30)
    for name in (EVERY, *RELATIONS):
        row = rows[name, UPWARD]
        assert (row.site, row.layer, row.head) == ("layer.1", 1, 2)
        assert row.accuracy == row.high == row.chosen_accuracy == 1.0
        assert row.low == pytest.approx(1 / (1 + 1.959963984540054**2 / row.count))
        assert row.verdict == "better"
        assert row.head_only == round(row.count * (1 - row.baseline))
        assert row.baseline_only == 0
    assert [row.relation for row in table.entries[:2]] == [EVERY, EVERY]


def test_a_head_that_knows_one_relation_is_the_best_of_that_one_alone():
    maps = random_trees(60, seed=3)
    table = syntax_table(collected(maps, [torch.cat([at_random(maps, 5), at_governors(maps, "obj")], 1)]), minimum=20)
    rows = rows_of(table)
    assert (rows["obj", UPWARD].head, rows["obj", UPWARD].accuracy) == (5, 1.0)
    assert all(rows[name, UPWARD].accuracy < 0.5 for name in ("nsubj", "det"))


def test_numbers_are_those_of_counting_by_hand():
    maps = random_trees(40, seed=5)
    looks = at_random(maps, 3, seed=2)
    table = syntax_table(collected(maps, [looks]), minimum=1, seed=7)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(7)).tolist()
    halves = [set(order[:20]), set(order[20:])]
    starts = [sum(len(words) for words in maps[:text]) for text in range(40)]
    for row in table.entries:
        requested = []  # for each half: (the words that are right, where the word stands, what each head looks at)
        for half in halves:
            requested.append([])
            for text in half:
                words = maps[text]
                edges = [(w, g) for w, g in enumerate(words.governors)
                         if g >= 0 and row.relation in (EVERY, words.relations[w])]  # fmt: skip
                if row.direction == UPWARD:
                    questions = {w: {g} for w, g in edges}
                else:
                    questions = {g: {w for w, h in edges if h == g} for _, g in edges}
                requested[-1] += [(right, w, looks[starts[text] + w].tolist()) for w, right in questions.items()]
        scores = [[sum(seen[head] in right for right, _, seen in half) for head in range(3)] for half in requested]
        best = max(range(3), key=lambda head: scores[0][head])
        offsets = range(-12, 13)
        by_offset = {o: sum(w + o in right for right, w, _ in requested[0]) for o in offsets}
        assert (row.head, row.count, row.chosen_count) == (best, len(requested[1]), len(requested[0]))
        assert row.accuracy == scores[1][best] / len(requested[1])
        assert row.chosen_accuracy == scores[0][best] / len(requested[0])
        assert by_offset[row.offset] == max(by_offset.values())
        assert row.baseline == sum(w + row.offset in right for right, w, _ in requested[1]) / len(requested[1])
        both = [(seen[best] in right, w + row.offset in right) for right, w, seen in requested[1]]
        assert (row.head_only, row.baseline_only) == (both.count((True, False)), both.count((False, True)))


def test_the_best_of_many_random_heads_is_believed_only_as_far_as_it_goes():
    maps = random_trees(60, seed=11, words=(6, 6))
    looks = [at_random(maps, 80, seed=layer) for layer in range(2)]  # five other words: the truth is 1/5
    observations = collected(maps, looks)
    inside, flattered, total = 0, 0, 0
    for seed in range(10):
        for row in syntax_table(observations, minimum=20, seed=seed).entries:
            if row.direction == UPWARD:
                inside += row.low <= 0.2 <= row.high
                chosen_low = wilson(round(row.chosen_accuracy * row.chosen_count), row.chosen_count)[0]
                flattered += chosen_low > 0.2
                total += 1
    assert total == 40
    assert inside >= 33  # 95% of 40, less three standard deviations and what the splits share
    assert flattered >= 36  # in the half that chose, the best of 160 looks better than chance


def test_a_fixed_offset_is_found_where_it_is_the_rule():
    maps = [WordMap(tuple(range(7)), (1, 2, 3, 4, 5, 6, -1), ("next",) * 6 + ("root",), (0,) * 7) for _ in range(10)]
    table = syntax_table(collected(maps, [at_random(maps, 2)]), minimum=5)
    rows = rows_of(table)
    assert (rows["next", UPWARD].offset, rows["next", UPWARD].baseline) == (1, 1.0)
    assert (rows["next", DOWNWARD].offset, rows["next", DOWNWARD].baseline) == (-1, 1.0)
    assert rows["next", UPWARD].verdict == "worse"


def test_words_that_may_not_be_seen_are_not_asked_for():
    maps = random_trees(40, seed=4)
    table = syntax_table(collected(maps, [at_governors(maps)], polyhead.Mask.causal()), minimum=1)
    before = sum(0 <= governor < word for words in maps for word, governor in enumerate(words.governors))
    row = rows_of(table)[EVERY, UPWARD]
    assert row.count + row.chosen_count == before
    assert row.accuracy == 1.0
    assert row.offset < 0
    assert rows_of(table)[EVERY, DOWNWARD].offset < 0


def test_rare_relations_are_left_out_and_counted():
    maps = random_trees(30)
    table = syntax_table(collected(maps, [at_random(maps, 2)]), minimum=80)
    assert [row.relation for row in table.entries] == [EVERY]
    assert len(table.left_out) == 7
    assert all(count < 200 for _, _, count in table.left_out)
    assert "Excluded: 7 with fewer than 80 words in a half (--minimum)." in str(table)
    assert "Unreliable" not in str(table)
    table = syntax_table(collected(maps[:20], [at_random(maps[:20], 2)]), minimum=1)
    few = sum(min(row.count, row.chosen_count) < 30 for row in table.entries)
    assert 0 < few < len(table)
    assert f"Unreliable: {few} with fewer than 30." in str(table)


@pytest.mark.parametrize("ending", ["json", "parquet"])
def test_a_table_comes_back_from_its_file(tmp_path, ending):
    if ending == "parquet":
        pytest.importorskip("pyarrow")
    maps = random_trees(30)
    table = syntax_table(collected(maps, [at_random(maps, 2)]), minimum=20)
    path = tmp_path / f"table.{ending}"
    table.save(path, model="mine")
    assert SyntaxTable.load(path) == table
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    with pytest.raises(OptionError, match=r"a .json or a .parquet file, got 'table.csv'"):
        table.save(tmp_path / "table.csv")
    assert next(iter(table.rows()))["verdict"] == table.entries[0].verdict
    assert table._repr_html_().count("<tr>") == len(table) + 1
    # A share of NaN, as of a head whose weights are NaN, is null in JSON, which has no NaN.
    unknown = replace(table, entries=(replace(table.entries[0], low=math.nan, high=math.nan), *table.entries[1:]))
    unknown.save(path)
    if ending == "json":
        rows = json.loads(path.read_text(), parse_constant=pytest.fail)["rows"]
        assert rows[0]["low"] is rows[0]["high"] is None
    again = SyntaxTable.load(path)
    assert math.isnan(again.entries[0].low)
    assert again.entries[1:] == table.entries[1:]


def test_what_was_not_gathered_is_said():
    with pytest.raises(OptionError, match=r"named 'words', got none; observe .* collect=\[WordAttention"):
        syntax_table(Observations(StatisticsRequest(())))
    with pytest.raises(OptionError, match="syntax needs data of"):
        inner_shares(Observations(StatisticsRequest(())))
    maps = [WordMap((0,), (-1,), ("root",), (0,))] * 2
    with pytest.raises(OptionError, match="texts without any"):
        syntax_table(collected(maps, [torch.zeros(2, 1, dtype=torch.int64)]))
    with pytest.raises(OptionError, match="at least 1 word, got 0"):
        syntax_table(collected(maps, [torch.zeros(2, 1, dtype=torch.int64)]), minimum=0)


def test_shares_are_means_over_words_beside_their_null():
    maps = random_trees(40)
    shares = inner_shares(collected(maps, [torch.cat([at_governors(maps), at_random(maps, 1)], 1)]))
    own_word = shares.of("word")
    assert len(own_word) == 2
    held_out = [maps[text] for text in torch.randperm(40, generator=torch.Generator().manual_seed(0))[20:]]
    assert own_word[0].words == sum(pieces > 1 for words in held_out for pieces in words.pieces())
    assert {row["span"] for row in shares.rows()} == {"word", "phrase"}, "no text has two sentences"
    for share in shares.entries:
        assert 0 <= share.low <= share.share <= share.high <= 1
        assert 0 < share.expected < 1
    with pytest.raises(OptionError, match="word, phrase, sentence; got 'page'"):
        shares.of("page")
    alone = [WordMap((0, 1), (1, -1), ("x", "root"), (0, 0))] * 4  # no word of two tokens, no phrase
    assert inner_shares(collected(alone, [at_random(alone, 1)])).entries == ()


def test_heads_are_ranked_on_one_half_and_their_shares_are_of_the_other():
    maps, seed = random_trees(40), 3
    order = torch.randperm(40, generator=torch.Generator().manual_seed(seed)).tolist()
    chosen = torch.cat([torch.full((len(words), 1), text in order[:20]) for text, words in enumerate(maps)])
    inside, noise = at_governors(maps), at_random(maps, 1)
    looks = torch.cat([torch.where(chosen, noise, inside), torch.where(chosen, inside, noise)], 1)
    first, second = inner_shares(collected(maps, [looks]), seed=seed).of("phrase")
    assert (first.head, second.head) == (1, 0)
    assert first.chosen_excess > second.chosen_excess
    assert first.low < first.share < first.high < second.low  # nothing of what ranked it first is in its share


def test_a_head_of_fixed_distances_has_the_share_of_its_distances():
    """It is inside short spans without knowing of them; one that follows the tree exceeds its distances."""
    maps = random_trees(40)
    collector = WordAttention(maps)
    site = AttentionSite("layer.0", "self", "layer.*", 0, 2)
    value = collector.empty(site, torch.device("cpu"))
    for text, words in enumerate(maps):
        size, index = len(words.tokens), torch.arange(len(words.tokens))
        local = -(index - index[:, None]).abs().double()  # the nearer, the more
        # Half of the attention of the second head is on its word's other tokens, where there are any.
        word = torch.tensor(words.tokens)
        aware = local + 5.0 * ((word[:, None] == word) & (word >= 0))
        scores = torch.stack([local, aware])[None]
        key = torch.eye(size, dtype=torch.float64).expand(1, 2, -1, -1)
        result = polyhead.attention(scores, key, key, scale=1.0, logsumexp=True)
        metadata = BatchMetadata(documents=torch.tensor([text]))
        value = value.update(Attended(scores, key, key, result, None, 1.0), None, metadata)
    shares = inner_shares(Observations(StatisticsRequest(()), (), {site: {"words": value}})).of("word")
    assert [share.head for share in shares] == [1, 0]
    aware, local = shares
    assert local.share > 0.2
    assert local.share == pytest.approx(local.expected, abs=0.02)
    assert aware.low > aware.expected + 0.3


def test_intervals_are_those_of_the_books():
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(0, 10)[0] == 0.0
    assert wilson(10, 10)[1] == 1.0
    assert wilson(15, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)  # Newcombe 1998, table I
    with pytest.raises(OptionError, match="got 3 of 2"):
        wilson(3, 2)
    values = torch.randn(500, 4, dtype=torch.float64)
    ratio, low, high = ratio_of_sums(values, torch.ones(500, 1))
    error = values.std(0) / 500**0.5
    torch.testing.assert_close(ratio, values.mean(0))
    torch.testing.assert_close(high - low, 2 * 1.9647293909873 * error)  # Student's t of 499 degrees of freedom
    empty = torch.cat([torch.ones(500, 1), torch.zeros(7, 1)])  # texts without counts are no samples
    padded = ratio_of_sums(torch.cat([values, torch.zeros(7, 4, dtype=torch.float64)]), empty)
    torch.testing.assert_close(padded, (ratio, low, high))


@pytest.mark.parametrize("texts", [0, 1, 2, 7, 40, 500])
def test_the_interval_of_a_column_does_not_depend_on_how_many_columns_there_are(texts):
    sums = torch.rand(texts, 67, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    counts = torch.arange(texts, dtype=torch.float64)[:, None] + 1
    for some in (1, 3, 8, 30):
        for all_of_them, alone in zip(ratio_of_sums(sums, counts), ratio_of_sums(sums[:, :some], counts), strict=True):
            assert torch.equal(all_of_them[:some].nan_to_num(-1), alone.nan_to_num(-1))


def planted_spans(texts, chosen: list[int | None]) -> Observations:
    """A head for each choice: its pronouns look at the antecedent (1), the distractor (2), or everywhere (None)."""
    collector = texts.collector()
    assert isinstance(collector, SpanAttention)
    site = AttentionSite("layer.0", "self", "layer.*", 0, len(chosen))
    value = collector.empty(site, torch.device("cpu"))
    assert value is not None
    for text, labels in enumerate(texts.labels):
        query = torch.zeros(1, len(chosen), len(labels), len(labels), dtype=torch.float64)
        for head, wanted in enumerate(chosen):
            if wanted is not None:
                query[0, head, :, labels.index(wanted)] = 20.0
        key = torch.eye(len(labels), dtype=torch.float64).expand(1, len(chosen), -1, -1)
        result = polyhead.attention(query, key, key, scale=1.0, logsumexp=True)
        value = value.update(
            Attended(query, key, key, result, None, 1.0), None, BatchMetadata(documents=torch.tensor([text]))
        )
    return Observations(StatisticsRequest(()), (), {site: {collector.name: value}})


@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_head_that_finds_antecedents_scores_one_and_position_scores_half(language):
    pytest.importorskip("transformers")
    from tests.sources.small_tokenizers import byte_level

    texts = pronoun_texts(pronoun_sentences(language), byte_level())
    assert (len(texts.contexts), texts.excluded) == (80, 0)
    finds, misses, even = pronoun_table(planted_spans(texts, [1, 2, None]), texts).entries
    assert (finds.score, finds.high, misses.score, misses.low) == (1.0, 1.0, 0.0, 0.0)
    assert finds.low > finds.null == 0.5 > misses.high
    assert (finds.frames_low, finds.frames_high) == (1.0, 1.0)  # no frame differs from another
    assert even.score == 0.5  # the longer name has more tokens, and is meant as often as not
    assert even.low < 0.5 < even.high
    assert even.frames_low == even.frames_high == 0.5  # every frame is balanced by itself
    assert max(pronoun_table(planted_spans(texts, [2, 1]), texts).entries, key=lambda x: x.score).head == 1
    with pytest.raises(OptionError, match="got none"):
        pronoun_table(Observations(StatisticsRequest(())), texts)


def test_frames_that_the_tokenizer_cannot_read_are_left_out_whole():
    pytest.importorskip("transformers")
    from tests.sources.small_tokenizers import wordpiece

    texts = pronoun_texts(pronoun_sentences("zh"), wordpiece())  # which knows no Chinese pronoun
    assert (len(texts.contexts), texts.excluded) == (0, 80)
    with pytest.raises(OptionError, match=r"got none \(0 sentences, and 80 that the tokenizer cannot represent\)"):
        pronoun_table(Observations(StatisticsRequest(())), texts)
