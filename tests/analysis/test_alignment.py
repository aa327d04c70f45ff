"""Tokens find their words in every family of tokenizers, and what cannot be aligned is counted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from polyhead.analysis.alignment import align, cut, observe_contexts, pieces_of
from polyhead.errors import OptionError
from polyhead.observation.word_attention import WordAttention
from polyhead.sources import LoadedModel, special_tokens
from polyhead.sources.contexts import tokenise
from polyhead.sources.treebank import Sentence, read_treebank

pytest.importorskip("transformers")
from tests.sources.small_tokenizers import FAMILIES, WORDPIECE, byte_level, wordpiece

SMALL = Path(__file__).parents[1] / "sources" / "small.conllu"


def sentence(text: str, *words: str) -> Sentence:
    """Words that stand in a text, each governed by the one before."""
    spans, end = [], 0
    for word in words:
        start = text.index(word, end)
        end = start + len(word)
        spans.append((start, end))
    return Sentence(
        words, tuple(range(-1, len(words) - 1)), ("x",) * len(words), text, tuple(spans), (True,) * len(words)
    )


def spelled(found, tokenizer, text: str) -> list[str]:
    """The characters that the tokens of each word stand for, joined."""
    _, _, offsets = cut(text, tokenizer, special_tokens(tokenizer).ids)
    words = [""] * len(found)
    last = [-1] * len(found)
    for (start, end), word in zip(offsets, found.tokens, strict=True):
        if word >= 0:
            words[word] += text[max(start, last[word]) : end]
            last[word] = end
    return [word.strip() for word in words]


@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_token_of_a_word_and_nothing_else_is_its_piece(family):
    tokenizer = FAMILIES[family]()
    for one in read_treebank(SMALL):
        found = align([one], tokenizer)
        assert len(found) == 1
        (context,), (words,) = found.contexts, found.maps
        assert len(context.ids) == len(words.tokens) == len(context.special)
        assert all(word < 0 for word, special in zip(words.tokens, context.special, strict=True) if special)
        if one.text.startswith("Nobody"):
            continue  # WordPiece cuts didn't where no word ends
        expected = [one.text[slice(*span)] if span else "" for span in one.spans]
        assert spelled(words, tokenizer, one.text) == expected
        assert (words.governors, words.relations) == (one.heads, one.relations)
        assert found.wordless == expected.count("")


def test_a_token_over_two_words_belongs_to_the_one_it_shares_more_with():
    assert pieces_of([(0, 4), (4, 5), (5, 6)], [False] * 3, [(0, 3), (3, 6)]) == [0, 1, 1]
    assert pieces_of([(0, 4)], [False], [(0, 2), (2, 4)]) == [0]
    assert pieces_of([(0, 6)], [False], [(0, 1), (1, 5), (5, 6)]) == [1]
    assert pieces_of([(0, 3), (3, 4), (3, 7)], [False, False, True], [None, (0, 3), None, (4, 7)]) == [1, -1, -1]
    # One character in several tokens, as bytes have it, and white space before a word.
    assert pieces_of([(0, 1), (0, 1), (1, 3), (1, 3)], [False] * 4, [(0, 1), (2, 3)]) == [0, 0, 1, 1]
    assert pieces_of([], [], []) == []


def test_special_tokens_spelled_in_the_text_are_no_words():
    found = align([sentence("a [SEP] river", "a", "[SEP]", "river")], wordpiece())
    assert found.maps[0].tokens == (-1, 0, -1, 2, -1)
    assert found.wordless == 1
    # Of a vocabulary of bytes, the unknown token is the end of text alone.
    found = align([sentence("a<|end|>b", "a", "<|end|>", "b")], byte_level())
    assert found.maps[0].tokens == (0, -1, 2)
    assert found.wordless == 1


def test_sentences_read_together_keep_their_words_apart():
    first, second, *_ = read_treebank(SMALL)
    found = align([first, second, first], wordpiece(), together=2)
    assert (len(found), found.sentences, found.words) == (2, 3, 18)
    together, alone = found.maps
    assert together.sentences == (0,) * 5 + (1,) * 8
    assert together.governors == first.heads + tuple(head + 5 if head >= 0 else -1 for head in second.heads)
    assert alone.governors == first.heads
    text = f"{first.text} {second.text}"
    assert found.contexts[0].ids == tokenise(wordpiece(), text, special=True)
    chinese = list(read_treebank(SMALL))[2]
    ids = align([chinese, chinese], wordpiece(), together=2).contexts[0].ids
    assert ids == tokenise(wordpiece(), chinese.text * 2, special=True)


def test_what_is_too_long_or_has_no_word_is_left_out_and_counted():
    short, long = sentence("a river .", "a", "river", "."), sentence("a " * 600, *["a"] * 600)
    blank = Sentence(("\x00",), (-1,), ("root",), "\x00", ((0, 1),), (False,))  # BERT drops control characters
    found = align([long, short, blank], wordpiece())
    assert (len(found), found.sentences, found.too_long, found.unreadable, found.words) == (1, 1, 1, 1, 3)
    assert [context.document for context in found.contexts] == [0]
    assert "1 too long, 1 without words" in str(found)
    assert align([short], wordpiece(), longest=5).sentences == 1
    assert align([short], wordpiece(), longest=4).too_long == 1
    with pytest.raises(OptionError, match="at least 1 sentence, got 0"):
        align([short], wordpiece(), together=0)


def test_a_tokenizer_that_does_not_know_its_characters_is_refused():
    from transformers import ByT5Tokenizer

    with pytest.raises(OptionError, match=r"a fast tokenizer.* got ByT5Tokenizer"):
        align([sentence("a", "a")], ByT5Tokenizer())


@pytest.mark.parametrize("kind", ["encoder", "encoder-decoder"])
def test_a_model_reads_all_contexts_whatever_the_batch(kind):
    import transformers

    small = {"vocab_size": len(WORDPIECE), "num_layers": 1, "num_heads": 3, "d_model": 24, "d_kv": 8, "d_ff": 8}
    if kind == "encoder":
        config = transformers.BertConfig(vocab_size=len(WORDPIECE), hidden_size=24, num_hidden_layers=1,
                                         num_attention_heads=3, intermediate_size=8)  # fmt: skip
        model = transformers.BertModel(config).eval()
    else:
        model = transformers.T5ForConditionalGeneration(transformers.T5Config(**small)).eval()
    loaded = LoadedModel(model, wordpiece(), "small", kind, "made here", "input_ids", None)
    aligned = align(read_treebank(SMALL), loaded.tokenizer)
    states = []
    for batch_tokens in (1, 1000):
        reported: list[int] = []
        collector = WordAttention(aligned.maps)
        observations = observe_contexts(
            loaded, aligned.contexts, [collector], batch_tokens=batch_tokens, progress=reported.append
        )
        assert reported == ([0, *[1] * 5] if batch_tokens == 1 else [0, 5])  # none are read yet, then batch by batch
        ((site, values),) = observations.collected.items()
        assert site.kind == "self"
        states.append(values["words"].state())
    assert states[0]["contexts"].tolist() == [0, 1, 2, 3, 4]
    for name in ("shares", "totals"):
        torch.testing.assert_close(states[0][name], states[1][name], rtol=0, atol=1e-5)
    assert torch.equal(states[0]["visible"], states[1]["visible"])


def test_a_model_that_reads_no_text_is_refused():
    loaded = LoadedModel(torch.nn.Linear(1, 1), None, "eyes", "encoder", "made here", "pixel_values", None)
    with pytest.raises(OptionError, match="got eyes, whose input is pixel_values"):
        observe_contexts(loaded, [], [])
