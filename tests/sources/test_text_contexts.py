"""The built-in text is read in the languages that a tokenizer knows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from polyhead.errors import OptionError
from polyhead.sources.text_contexts import known_default_documents, knows, read_contexts
from tests.sources.small_tokenizers import byte_level, wordpiece

pytest.importorskip("transformers")


def languages(tokenizer) -> set[str]:
    return {document.name[:2] for document in known_default_documents(tokenizer)}


def test_a_tokenizer_of_bytes_knows_english_alone():
    assert languages(byte_level()) == {"en"}


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("河 " * 30, True),
        ("河 " * 29 + "湖 ", True),  # 3% unknown
        ("河 " * 27 + "湖 " * 3, False),  # 10%
    ],
)
def test_a_text_is_known_with_few_unknown_tokens(text, known):
    assert knows(wordpiece(), text) is known


@pytest.mark.parametrize(("text", "known"), [("河" * 30, True), ("running", True), ("湖" * 30, False)])
def test_a_text_is_known_if_its_characters_are_not_split(text, known):
    assert knows(byte_level(), text) is known


def test_a_tokenizer_that_knows_neither_language_reads_both():
    assert languages(wordpiece()) == {"en", "zh"}


def test_a_text_of_few_tokens_is_refused_however_many_documents_it_has():
    loaded = SimpleNamespace(tokenizer=wordpiece(), main_input="input_ids", trained_context=None, name="small")
    with pytest.raises(OptionError, match="reading text needs a text of at least 8 tokens, got 6 in 4 documents"):
        read_contexts(loaded, ["a river"] * 3 + ["a"])
    assert len(read_contexts(loaded, ["a river"] * 4).contexts) == 4
