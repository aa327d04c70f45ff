"""The built-in text is read in the languages that a tokenizer knows."""

from __future__ import annotations

import pytest

from polyhead.sources.text_contexts import known_default_documents, knows
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
