"""Words and sentences are found from tokens alone, in every family of vocabularies and in scripts without spaces."""

from __future__ import annotations

import pytest
import torch

from polyhead.sources import special_tokens
from polyhead.sources.segments import Segments
from polyhead.sources.token_class import token_classes

pytest.importorskip("transformers")
from tests.sources.small_tokenizers import FAMILIES, byte_level, sentence_piece, wordpiece


def cut(tokenizer, text: str) -> tuple[list[str], list[str]]:
    """The texts of the words and of the sentences, without white space around them."""
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    numbers = Segments.of(tokenizer, token_classes(tokenizer))(ids[None])
    found = []
    for (row,) in numbers:
        assert ((row < 0) == torch.isin(ids, torch.tensor(sorted(special_tokens(tokenizer).ids)))).all()
        assert (row[row >= 0].diff() >= 0).all()
        parts = [tokenizer.decode(ids[row == number]).strip() for number in row[row >= 0].unique()]
        found.append([part for part in parts if part])
    return found[0], found[1]


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_word_is_what_stands_between_spaces_and_marks(family):
    words, sentences = cut(FAMILIES[family](), "a river runs. running.")
    assert words == ["a", "river", "runs", ".", "running", "."]
    assert [sentence.replace(" .", ".") for sentence in sentences] == ["a river runs.", "running."]


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("It is late. Go home!", ["It is late.", "Go home!"]),
        ("He said “no.” She left.", ["He said “no.”", "She left."]),
        ('He said "no." She left.', ['He said "no."', "She left."]),
        ("Really?! Yes... (Perhaps.) So it is", ["Really?!", "Yes...", "(Perhaps.)", "So it is"]),
        ("It costs 3.14 now. 5 is too much.", ["It costs 3.14 now.", "5 is too much."]),
        ("It was in 1968. So it is", ["It was in 1968.", "So it is"]),
        ("a title\n\nand a text\nin two lines", ["a title", "and a text\nin two lines"]),
        ("今天很冷。我们回家吧！“好。”他说", ["今天很冷。", "我们回家吧！", "“好。”", "他说"]),
        ("क्या? हाँ। अच्छा", ["क्या?", "हाँ।", "अच्छा"]),
        ("no end", ["no end"]),
    ],
)
def test_sentences_end_where_people_end_them(text, sentences):
    assert cut(byte_level(), text)[1] == sentences


def test_in_scripts_without_spaces_every_token_is_a_word():
    assert cut(wordpiece(), "河河 a")[0] == ["河", "河", "a"]
    assert cut(byte_level(), "河河 run")[0] == ["河", "河", "run"]
    # Characters that the vocabulary spells in bytes are words of their own, and their bytes stay together.
    assert cut(byte_level(), "天地 run")[0] == ["天", "地", "run"]
    assert cut(sentence_piece(), "天地 run")[0] == ["天", "地", "run"]
    assert cut(byte_level(), "naïve")[0] == ["naïve"]


def test_numbers_and_what_hangs_on_a_word():
    assert cut(byte_level(), "in 1968's GPT4 (run)")[0] == ["in", "1968", "'", "s", "GPT4", "(", "run", ")"]
    assert cut(wordpiece(), "1968 running +")[0] == ["1968", "running", "+"]


def test_special_tokens_are_in_no_word_and_end_nothing():
    tokenizer = wordpiece()
    segments = Segments.of(tokenizer, token_classes(tokenizer))
    numbers, sentences = segments(torch.tensor([[2, 7, 8, 3, 8, 10, 3, 5]]))  # ##ning behind [SEP]
    assert numbers.tolist() == [[-1, 1, 1, -1, 3, 4, -1, 6]]
    assert sentences.tolist() == [[-1, 0, 0, -1, 0, 0, -1, 1]]
