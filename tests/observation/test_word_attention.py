"""Word attention agrees with materialised weights, for any padding and split."""

from __future__ import annotations

import functools
import itertools
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import polyhead
from polyhead.errors import OptionError, ShapeError
from polyhead.observation import BatchMetadata
from polyhead.observation.role_evidence_rows import without_biases
from polyhead.observation.statistics import AttentionSite
from polyhead.observation.word_attention import SPANS, ByContext, SpanAttention, WordAttention, WordMap
from polyhead.ops.attended import Attended

HEADS = 4  # of the small models

# Two tokens are special, a word has three pieces, one has none; the second text is two sentences.
MAPS = (
    WordMap((-1, 0, 0, 1, 2, 2, 2, 4, -1), (1, -1, 1, 4, 1), ("a", "root", "b", "c", "d"), (0,) * 5),
    WordMap((-1, 0, 1, 1, 2, 3, 4, -1), (1, -1, 1, -1, 3), ("a", "root", "b", "root", "a"), (0, 0, 0, 1, 1)),
    WordMap((-1, 0, 1, 1, -1), (-1, 0), ("root", "a"), (0, 0)),
)
LENGTHS = [len(found.tokens) for found in MAPS]
LONGEST = max(LENGTHS)


def word_by_word(weights: Tensor, found: WordMap, visible: Tensor) -> dict[str, Tensor]:
    """[heads, tokens, tokens] of one unpadded text, in plain loops."""
    words = len(found)
    tokens_of = [[place for place, word in enumerate(found.tokens) if word == index] for index in range(words)]

    def between(table: Tensor, query: int, key: int) -> Tensor:
        if not tokens_of[query] or not tokens_of[key]:
            return torch.zeros(table.shape[0], dtype=torch.float64)
        return table[:, tokens_of[query]][:, :, tokens_of[key]].double().sum(-1).mean(-1)

    looks = torch.full((words, weights.shape[0]), -1)
    for query in range(words):
        for head in range(weights.shape[0]):
            best = 0.0
            for key in range(words):
                weight = float(between(weights, query, key)[head])
                if key != query and weight > best:
                    best, looks[query, head] = weight, key
    sees = [[bool(visible[tokens_of[q]][:, tokens_of[k]].any()) for k in range(words)] for q in range(words)]
    seen = [(g >= 0 and sees[w][g], g >= 0 and sees[g][w]) for w, g in enumerate(found.governors)]
    others = weights.double() * (1 - torch.eye(weights.shape[-1]))  # not the token itself
    shares, expected, totals = torch.zeros(3, weights.shape[0], 3, dtype=torch.float64)
    counts = torch.zeros(3, dtype=torch.int64)
    for word in range(words):
        for index, span in enumerate(SPANS):
            inside = members(found, word, span, len(tokens_of[word]))
            counts[index] += len(inside) > 0
            if inside:
                totals[:, index] += others[:, tokens_of[word]].sum(-1).mean(-1)
                for query, key in itertools.product(tokens_of[word], range(weights.shape[-1])):
                    rate = inside_at(span, key - query)
                    expected[:, index] += others[:, query, key] * rate / len(tokens_of[word])
            for key in inside:
                shares[:, index] += between(others, word, key)
    sums = {"shares": shares, "expected": expected, "totals": totals, "counts": counts}
    return {"looks": looks, "visible": torch.tensor(seen), **sums}


@functools.cache
def inside_at(span: str, offset: int) -> float:
    """How often the token at an offset is in the span, over the words of all texts that have one."""
    inside = pairs = 0.0
    for found in MAPS:
        for query, word in enumerate(found.tokens):
            pieces = found.tokens.count(word)
            within = members(found, word, span, pieces) if word >= 0 else []
            if within and 0 <= query + offset < len(found.tokens):
                pairs += 1 / pieces
                inside += (found.tokens[query + offset] in within) / pieces
    return inside / pairs if pairs else 0.0


def members(found: WordMap, word: int, span: str, pieces: int) -> list[int]:
    def above(index: int) -> list[int]:
        return [index] if found.governors[index] < 0 else [index, *above(found.governors[index])]

    if not pieces:
        return []
    if span == "word":
        return [word] if pieces > 1 else []
    if span == "sentence":
        several = len(set(found.sentences)) > 1
        return [k for k in range(len(found)) if several and found.sentences[k] == found.sentences[word]]
    top = word if word in found.governors else found.governors[word]
    if top < 0 or found.governors[top] < 0:
        return []
    return [k for k in range(len(found)) if top in above(k)]


def built(family: str):
    pytest.importorskip("transformers")
    from tests.integrations.huggingface.models import DECODERS, ENCODERS, build

    (wanted,) = [found for found in (*DECODERS, *ENCODERS) if found.name == family]
    return build(wanted, dtype=torch.float32)


def padded(side: str, batch: list[int]) -> tuple[Tensor, Tensor]:
    from tests.integrations.huggingface.models import tokens

    ids, mask = tokens(len(batch), LONGEST), torch.zeros(len(batch), LONGEST, dtype=torch.int64)
    for row, text in enumerate(batch):
        ids[row, : LENGTHS[text]] = tokens(1, LENGTHS[text], seed=text)[0]
        mask[row, : LENGTHS[text]] = 1
        if side == "left":
            ids[row], mask[row] = ids[row].roll(-LENGTHS[text]), mask[row].roll(-LENGTHS[text])
    return ids, mask


def test_spans_contain_word_phrase_and_sentence():
    word, phrase, sentence = MAPS[1].spans()
    assert word.nonzero().tolist() == [[1, 1]]
    assert phrase.any() == torch.tensor(False)  # every phrase here is a whole sentence
    assert sentence.int().tolist() == [[1, 1, 1, 0, 0]] * 3 + [[0, 0, 0, 1, 1]] * 2
    chain = WordMap((0, 1, 2, 3), (1, 2, -1, 2), ("x",) * 4, (0,) * 4)
    assert chain.spans()[1].int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [0] * 4, [0] * 4]
    assert not chain.spans()[0].any()
    assert not chain.spans()[2].any()


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_words_of_a_model_are_those_of_the_weights_it_returns(family, side):
    model = built(family)
    collector = WordAttention(MAPS)
    batch = [1, 0, 2]
    ids, mask = padded(side, batch)
    with torch.no_grad():
        returned = model(ids, attention_mask=mask, output_attentions=True).attentions
        with polyhead.observe(model, statistics=False, collect=[collector]) as session:
            session.metadata = BatchMetadata(documents=torch.tensor(batch))
            model(ids, attention_mask=mask)
    collected = session.observations.collected
    assert len(collected) == len(returned) == 2
    for site, weights in zip(collected, returned, strict=True):
        state = collected[site]["words"].state()
        assert state["contexts"].tolist() == [0, 1, 2]
        found = []
        for text in (0, 1, 2):
            real = mask[batch.index(text)].bool()
            own = weights[batch.index(text)][:, real][:, :, real]
            visible = torch.ones(own.shape[1:], dtype=torch.bool)
            found.append(word_by_word(own, MAPS[text], visible.tril() if family == "llama" else visible))
        for name in ("looks", "visible"):
            expected = torch.cat([one[name] for one in found])
            assert torch.equal(state[name].to(expected.dtype), expected), name
        assert (state["looks"] >= 0).any()
        for name in ("shares", "expected", "totals", "counts"):
            torch.testing.assert_close(state[name], torch.stack([one[name] for one in found]), rtol=0, atol=1e-5)
        assert state["counts"].tolist() == [[2, 1, 0], [1, 0, 5], [1, 0, 0]]


@pytest.mark.parametrize("side", ["right", "left"])
def test_spans_are_those_of_the_weights(side):
    model = built("llama")
    labels = [[-1, 1, 1, -1, 2, -1, -1, 0, 0], [-1, 2, -1, 1, 1, 0, -1, -1], [1, 1, 2, 2, 0]]
    ids, mask = padded(side, [0, 1, 2])
    with torch.no_grad():
        returned = model(ids, attention_mask=mask, output_attentions=True).attentions
        with polyhead.observe(model, statistics=False, collect=[SpanAttention(labels, 2)]) as session:
            session.metadata = BatchMetadata(documents=torch.arange(3))
            model(ids, attention_mask=mask)
    for values, weights in zip(session.observations.collected.values(), returned, strict=True):
        found = values["spans"].state()["weights"]
        assert found.shape == (3, HEADS, 2)
        for row, marks in enumerate(labels):
            real = mask[row].bool()
            own, mark = weights[row][:, real][:, :, real].double(), torch.tensor(marks)
            for index in (1, 2):
                expected = own[:, mark == 0][:, :, mark == index].sum(-1).mean(-1)
                torch.testing.assert_close(found[row, :, index - 1], expected, rtol=0, atol=1e-6)


def attended(weights_toward: Tensor, mask=None, logit: float = 40.0) -> Attended:
    """An attention whose tokens look where they are told, [batch, heads, tokens] of keys."""
    tokens = weights_toward.shape[-1]
    query = logit * torch.nn.functional.one_hot(weights_toward, tokens).double()
    key = torch.eye(tokens, dtype=torch.float64).expand(*weights_toward.shape[:2], -1, -1)
    result = polyhead.attention(query, key, key, mask=mask, scale=1.0, logsumexp=True)
    return Attended(query, key, key, result, mask, 1.0)


def empty(collector, heads: int = 1) -> ByContext:
    value = collector.empty(AttentionSite("x", "self", "x", 0, heads), torch.device("cpu"))
    assert value is not None
    return value


def test_ties_go_to_the_first_word_and_a_word_alone_looks_at_none():
    maps = [WordMap((0, 1, 2), (1, -1, 1), ("x",) * 3, (0,) * 3)]
    even = attended(torch.zeros(1, 1, 3, dtype=torch.int64))
    even = Attended(even.query * 0, even.key, even.value, polyhead.attention(
        even.query * 0, even.key, even.value, logsumexp=True))  # fmt: skip
    metadata = BatchMetadata(documents=torch.tensor([0]))
    state = empty(WordAttention(maps)).update(even, None, metadata).state()
    assert state["looks"].tolist() == [[1], [0], [0]]
    causal = attended(torch.tensor([[[0, 1, 2]]]), polyhead.Mask.causal())
    state = empty(WordAttention(maps)).update(causal, None, metadata).state()
    assert state["looks"].tolist()[0] == [-1]
    assert state["visible"].tolist() == [[False, True], [False, False], [True, False]]


def test_attention_of_a_token_to_itself_is_in_no_share():
    """The rest of a head that attends to its own token and alike to all others."""
    own = attended(torch.arange(LENGTHS[0]).expand(1, 1, -1), logit=7.0)
    state = empty(WordAttention(MAPS)).update(own, None, BatchMetadata(documents=torch.tensor([0]))).state()
    (head,) = state["shares"][0] / state["totals"][0]
    # 1 or 2 of the other 8 tokens; a word whose dependent has no token
    assert head[:2].tolist() == [pytest.approx(3 / 16), 0]
    assert (state["totals"][0, 0] < 0.02).all()


@pytest.mark.parametrize(
    "masked", [-math.inf, torch.finfo(torch.float64).min, torch.finfo(torch.float32).min, -1e9, -1e4]
)
def test_a_key_masked_by_a_bias_is_not_visible(masked):
    maps = [WordMap((0, 1, 2), (2, -1, 1), ("x",) * 3, (0,) * 3)]
    bias = torch.zeros(1, 1, 3, 3, dtype=torch.float64)
    bias[..., 2] = masked
    mask = polyhead.Mask.bias(bias)
    assert without_biases(mask).allowed[0].tolist() == (bias == 0).tolist()
    state = empty(WordAttention(maps)).update(
        attended(torch.tensor([[[1, 0, 0]]]), mask), None, BatchMetadata(documents=torch.tensor([0]))
    ).state()  # fmt: skip
    assert state["visible"].tolist() == [[False, True], [False, False], [True, False]]


@settings(max_examples=8)
@given(cuts=st.lists(st.integers(0, 7), max_size=3), order=st.randoms(use_true_random=False))
def test_any_split_merged_in_any_order_is_one_pass(cuts, order):
    collector = WordAttention(MAPS * 3)
    lengths = [len(found.tokens) for found in collector.maps]
    looks = [torch.randint(0, length, (1, 2, length), generator=torch.Generator().manual_seed(index))
             for index, length in enumerate(lengths)]  # fmt: skip

    def one(texts: list[int]) -> ByContext:
        value = empty(collector, 2)
        for text in texts:
            value = value.update(attended(looks[text]), None, BatchMetadata(documents=torch.tensor([text])))
        return value

    texts = list(range(len(collector.maps)))
    whole = one(texts).state()
    order.shuffle(texts)
    parts = [one(texts[a:b]) for a, b in pairwise([0, *sorted(cuts), len(texts)])]
    total = empty(collector, 2)
    for part in parts:
        total = total.merge(part)
    again = empty(collector, 2).with_state(total.state()).state()
    assert set(again) == set(whole)
    assert all(torch.equal(again[name], whole[name]) for name in whole)


def test_nothing_seen_has_a_state_and_a_cross_attention_has_no_words():
    collector = WordAttention(MAPS)
    state = empty(collector, 5).state()
    assert {name: list(x.shape) for name, x in state.items()} == {
        "contexts": [0], "looks": [0, 5], "visible": [0, 2], "shares": [0, 5, 3], "expected": [0, 5, 3],
        "totals": [0, 5, 3], "counts": [0, 3]
    }  # fmt: skip
    assert collector.empty(AttentionSite("x", "cross", "x", 0, 5), torch.device("cpu")) is None
    del state["totals"]
    with pytest.raises(OptionError, match="need the tensors totals to be resumed"):
        empty(collector, 5).with_state(state)
    assert SpanAttention([[0, 1]], 1).empty(AttentionSite("x", "cross", "x", 0, 5), torch.device("cpu")) is None


def test_what_cannot_be_read_is_refused():
    value = empty(WordAttention(MAPS))
    three = attended(torch.zeros(1, 1, 3, dtype=torch.int64))
    with pytest.raises(OptionError, match=r"session.metadata = BatchMetadata\(documents"):
        value.update(three, None, BatchMetadata())
    with pytest.raises(ShapeError, match=r"\[1\], got shape \[2\]"):
        value.update(three, None, BatchMetadata(documents=torch.tensor([0, 1])))
    with pytest.raises(OptionError, match="must index the 3 texts of words, got 7"):
        value.update(three, None, BatchMetadata(documents=torch.tensor([7])))
    with pytest.raises(ShapeError, match="got 9 tokens in a row of 3"):
        value.update(three, None, BatchMetadata(documents=torch.tensor([0])))
    with pytest.raises(OptionError, match="limited to 512 tokens, got 513; split the text into sentences"):
        value.update(
            attended(torch.zeros(1, 1, 513, dtype=torch.int64)), None, BatchMetadata(documents=torch.tensor([0]))
        )
    one_query = Attended(three.query[:, :, :1], three.key, three.value, three.result)
    with pytest.raises(ShapeError, match="1 queries for 3 keys; run without a cache"):
        value.update(one_query, None, BatchMetadata(documents=torch.tensor([2])))
    with pytest.raises(ShapeError, match="one entry per word, got 2, 1 and 2"):
        WordMap((0,), (-1, 0), ("x",), (0, 0))
    with pytest.raises(OptionError, match="tokens must be indices of 1 words or -1, got 1"):
        WordMap((0, 1), (-1,), ("x",), (0,))


@pytest.mark.gpu
def test_on_a_gpu_nothing_waits_and_the_words_are_the_same():
    from tests.waiting import waiting_is_an_error

    collector = WordAttention(MAPS)
    mask = polyhead.Mask.lengths(torch.tensor(LENGTHS))
    real = torch.arange(LONGEST) < torch.tensor(LENGTHS)[:, None]
    metadata = BatchMetadata(documents=torch.arange(3))
    tensors = torch.randn(3, 3, 2, LONGEST, 32).unbind()

    def on(device: str) -> Attended:
        query, key, value = (x.to(device) for x in tensors)
        result = polyhead.attention(query, key, value, mask=mask, logsumexp=True)
        return Attended(query, key, value, result, mask)

    here = empty(collector, 2).update(on("cpu"), real, metadata).state()
    there, real = on("cuda"), real.cuda()
    value = empty(collector, 2).update(there, real, metadata)  # compiles
    with waiting_is_an_error():
        value = value.update(there, real, metadata)
    found = value.state()
    assert torch.equal(found["looks"], here["looks"])
    assert torch.equal(found["visible"], here["visible"])
    torch.testing.assert_close(found["shares"], here["shares"], rtol=0, atol=1e-5)
