"""Token classes follow the text of the token, for every family of vocabularies."""

from __future__ import annotations

import pytest
import torch

from polyhead.errors import OptionError
from polyhead.sources import TokenClass, token_classes

pytest.importorskip("transformers")
from tests.sources.small_tokenizers import byte_level, sentence_piece, wordpiece


def classes_by_token(tokenizer) -> dict[str, str]:
    found = token_classes(tokenizer)
    assert found.dtype == torch.int8
    assert found.shape == (len(tokenizer),)
    names = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    return {name: TokenClass(number).name for name, number in zip(names, found.tolist(), strict=True)}


def test_every_entry_of_a_wordpiece_vocabulary():
    assert classes_by_token(wordpiece()) == {
        "[PAD]": "SPECIAL", "[UNK]": "UNKNOWN", "[CLS]": "SPECIAL", "[SEP]": "SPECIAL", "[MASK]": "SPECIAL",
        "a": "WORD", "river": "WORD", "run": "WORD", "##ning": "CONTINUATION", "##s": "CONTINUATION",
        ".": "PUNCTUATION", "1968": "NUMBER", "河": "WORD", "+": "SYMBOL",
    }  # fmt: skip


def test_a_byte_level_vocabulary():
    found = classes_by_token(byte_level())
    expected = {
        "<|end|>": "SPECIAL", "Ġrun": "WORD", "ing": "CONTINUATION", "a": "CONTINUATION", "7": "NUMBER",
        "!": "PUNCTUATION", "$": "SYMBOL", "Ġ": "WHITESPACE", "ĠĠ": "WHITESPACE", "ĉ": "WHITESPACE",
        "Ċ": "NEWLINE", "ĊĊ": "NEWLINE", "æ²³": "WORD", "æ²": "FRAGMENT", "æ": "FRAGMENT", "Ā": "OTHER",
    }  # fmt: skip
    assert {token: found[token] for token in expected} == expected


def test_a_sentencepiece_vocabulary_with_bytes():
    found = classes_by_token(sentence_piece())
    expected = {
        "<unk>": "SPECIAL", "<s>": "SPECIAL", "▁run": "WORD", "▁a": "WORD", "a": "CONTINUATION", "s": "CONTINUATION",
        "河": "WORD", ".": "PUNCTUATION", "▁": "WHITESPACE", "<0x0A>": "NEWLINE", "<0x37>": "NUMBER",
        "<0xE6>": "FRAGMENT",
    }  # fmt: skip
    assert {token: found[token] for token in expected} == expected


def test_a_tokenizer_written_in_python():
    from transformers import ByT5Tokenizer

    found = token_classes(ByT5Tokenizer()).tolist()
    assert [TokenClass(found[byte + 3]).name for byte in b"a.7 \n"] == [
        "CONTINUATION", "PUNCTUATION", "NUMBER", "WHITESPACE", "NEWLINE",
    ]  # fmt: skip
    assert [TokenClass(number).name for number in found[:2]] == ["SPECIAL", "SPECIAL"]


def test_the_numbers_of_the_classes_stay_because_files_hold_them():
    assert {found.name: found.value for found in TokenClass} == {
        "SPECIAL": 0, "UNKNOWN": 1, "WORD": 2, "CONTINUATION": 3, "NUMBER": 4, "PUNCTUATION": 5, "SYMBOL": 6,
        "WHITESPACE": 7, "NEWLINE": 8, "FRAGMENT": 9, "OTHER": 10,
    }  # fmt: skip


def test_a_vocabulary_without_an_anchor_token_is_rejected():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"?": 0, "!": 1}, unk_token="?")), unk_token="?"
    )
    with pytest.raises(OptionError, match="must contain one of a, A, 0, 一, e as a token"):
        token_classes(tokenizer)
