"""Treebanks are read word by word, and errors report the line."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from polyhead.errors import OptionError
from polyhead.sources.treebank import Sentence, read_treebank

SMALL = Path(__file__).with_name("small.conllu")


def line(number: str, form: str, governor: str = "0", relation: str = "root", misc: str = "_") -> str:
    return "\t".join([number, form, "_", "_", "_", "_", governor, relation, "_", misc])


def written(folder: Path, *lines: str) -> Path:
    path = folder / "some.conllu"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def spelled(sentence: Sentence) -> list[str | None]:
    return [None if span is None else sentence.text[slice(*span)] for span in sentence.spans]


def test_words_governors_relations_and_places_are_those_of_the_file():
    first, second, chinese, french, last = read_treebank(SMALL)
    assert first.words == ("A", "river", "runs", "slowly", ".")
    assert first.heads == (1, 2, -1, 2, 2)
    assert first.relations == ("det", "nsubj", "root", "advmod", "punct")
    assert first.text == "A river runs slowly."
    assert first.spaces == (True, True, True, False, True)
    assert spelled(first) == list(first.words)
    assert len(second) == 8
    assert spelled(chinese) == ["河", "很", "长", "。"]
    assert chinese.spaces == (False,) * 4
    assert french.words[2:4] == ("de", "le")
    assert last.words == ("One", "drinks", "tea", ",", "another", "coffee", ".")
    assert last.heads == (1, -1, 1, 4, 1, 4, 1)


def test_words_that_spell_a_multiword_token_have_their_own_places():
    sentence = list(read_treebank(SMALL))[1]
    assert sentence.words[1:3] == ("did", "n't")
    assert spelled(sentence) == list(sentence.words)
    assert sentence.spaces[:4] == (True, False, True, True)


def test_words_that_do_not_spell_it_leave_it_to_the_first():
    sentence = list(read_treebank(SMALL))[3]
    assert spelled(sentence) == ["Elle", "parle", "du", None, "fleuve"]
    assert sentence.text == "Elle parle du fleuve"


@pytest.mark.parametrize("comment", ["# text = a  b!", "# text = something else", "# no text"])
def test_a_text_that_the_words_do_not_spell_is_not_used(tmp_path, comment):
    path = written(
        tmp_path, comment, line("1", "a"), line("2", "b", "1", "x", "SpaceAfter=No"), line("3", "!", "1", "x")
    )
    (sentence,) = read_treebank(path)
    assert sentence.text == ("a  b!" if "a  b" in comment else "a b!")
    assert spelled(sentence) == ["a", "b", "!"]


def test_spaces_are_those_of_the_text_where_the_words_spell_it(tmp_path):
    words = line("1", "a"), line("2", "b", "1", "x"), line("3", "!", "1", "x", "SpaceAfter=No")
    (sentence,) = read_treebank(written(tmp_path, "# text = a b!", *words))
    assert sentence.spaces == (True, False, False)  # the second word says nothing of having none


def test_packed_files_byte_order_marks_and_other_line_ends_are_read(tmp_path):
    expected = list(read_treebank(SMALL))
    packed = tmp_path / "small.conllu.gz"
    packed.write_bytes(gzip.compress(SMALL.read_bytes()))
    assert list(read_treebank(packed)) == expected
    windows = tmp_path / "windows.conllu"
    windows.write_bytes(b"\xef\xbb\xbf" + SMALL.read_bytes().replace(b"\n", b"\r\n"))
    assert list(read_treebank(windows)) == expected
    assert list(read_treebank(SMALL, limit=2)) == expected[:2]
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(OptionError, match="cannot be decompressed"):
        list(read_treebank(packed))


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["# x", "1 a _ _ _ _ 0 root _ _"], "line 2: a word must have 10 tab-separated columns, got 1"),
        ([line("1", "a") + "\t_"], "line 1: a word must have 10 tab-separated columns, got 11"),
        ([line("1", "a"), line("3", "b", "1", "x")], "line 2: words must be numbered in order, .* 2, got '3'"),
        ([line("0", "a")], "the next one 1, got '0'"),
        ([line("1", "")], "a word must have a form, got ''"),
        ([line("1", "a", "_")], "column 7 must be the number of the word's governor, 0 for the root, got '_'"),
        ([line("1", "a", "2", "x")], "line 1: a governor must be one of the sentence's 1 words, got 2"),
        ([line("1", "a", "0", "_")], "column 8 must be the word's relation to its governor, got '_'"),
        ([line("1", "a"), line("2", "b", "2", "x")], "line 2: every word must lead to the root, got a cycle, 2 -> 2"),
        ([line("1", "a", "2", "x"), line("2", "b", "1", "x")], "line 1: .* got a cycle, 1 -> 2 -> 1"),
        ([line("1-2", "ab", "_", "_"), line("1", "a")], "must be followed by all its words, got 1 words"),
        ([line("1", "a"), line("1-2", "ab", "_", "_")], "a multiword token must precede its words, .* got '1-2'"),
        ([line("1-1", "a", "_", "_"), line("1", "a")], "two or more, got '1-1'"),
        ([line("1", "a"), "", "# text = b", "", line("1", "c")], "line 3: a sentence must have words, got only"),
        ([""], "must contain sentences"),
    ],
)  # fmt: skip
def test_a_wrong_line_is_refused_with_its_number(tmp_path, lines, words):
    with pytest.raises(OptionError, match=words):
        list(read_treebank(written(tmp_path, *lines)))


def test_bytes_that_are_no_text_are_refused_with_their_place(tmp_path):
    path = tmp_path / "latin.conllu"
    path.write_bytes(line("1", "a").encode() + b"\n" + line("2", "caf", "1", "x").encode().replace(b"caf", b"caf\xe9"))
    with pytest.raises(OptionError, match="line 2: text must be UTF-8, got the byte 0xe9 at position 5"):
        list(read_treebank(path))


def test_what_is_no_file_is_refused_at_once(tmp_path):
    with pytest.raises(OptionError, match="a folder"):
        read_treebank(tmp_path)
    for name in ("nothing.conllu", "x" * 300):  # a name may have 255 characters
        with pytest.raises(OptionError, match="no such file"):
            read_treebank(tmp_path / name)
    with pytest.raises(OptionError, match="at least 1, got 0"):
        read_treebank(SMALL, limit=0)


@pytest.mark.data
def test_every_word_of_real_treebanks_stands_in_its_text(data_dir):
    files = sorted(data_dir.rglob("*-dev.conllu"))
    if not files:
        pytest.skip("needs a treebank: `POLYHEAD_DATA=FOLDER make test` and an en_*-dev.conllu in it runs them")
    for file in files:
        sentences = list(read_treebank(file))
        assert len(sentences) == sum(row.startswith(b"# sent_id") for row in file.read_bytes().splitlines())
        for sentence in sentences:
            places = [(span, word) for span, word in zip(sentence.spans, sentence.words, strict=True) if span]
            assert all(sentence.text[slice(*span)] == word for span, word in places)
            assert sentence.heads.count(-1) == 1
