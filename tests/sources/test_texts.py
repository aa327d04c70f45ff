"""Texts are read completely and in order, and errors report the position."""

from __future__ import annotations

import gzip
import io
import json
import sys
from pathlib import Path

import pytest

from polyhead.errors import OptionError
from polyhead.sources import Document, default_documents, read_texts


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content if isinstance(content, bytes) else content.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def write_parquet(path: Path, columns: dict[str, list]) -> Path:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table(columns), path, row_group_size=2)
    return path


@pytest.mark.parametrize("ending", [".txt", ".md", ".TXT", ".txt.gz", ".md.gz"])
def test_a_plain_file_is_one_document(tmp_path, ending):
    path = write(tmp_path / f"notes{ending}", "one\n\ntwo 河\r\n")
    assert list(read_texts(path)) == [Document(f"notes{ending}", "one\n\ntwo 河\r\n")]


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz"])
def test_a_line_of_json_is_one_document_named_by_its_line(tmp_path, ending):
    lines = [{"text": "one", "id": 3}, {"text": "二"}]
    path = write(tmp_path / f"pages{ending}", "".join(json.dumps(line) + "\n" for line in lines))
    assert list(read_texts(str(path))) == [Document(f"pages{ending}:1", "one"), Document(f"pages{ending}:2", "二")]


def test_another_field_is_read_when_it_is_named(tmp_path):
    path = write(tmp_path / "pages.jsonl", '{"text": "title", "body": "page"}')
    assert [document.text for document in read_texts(path, field="body")] == ["page"]
    table = write_parquet(tmp_path / "pages.parquet", {"text": ["title"], "body": ["page"]})
    assert [document.text for document in read_texts(table, field="body")] == ["page"]


def test_a_row_of_a_table_is_one_document_named_by_its_row(tmp_path):
    path = write_parquet(tmp_path / "pages.parquet", {"text": ["one", None, "二", "three", ""], "id": [1, 2, 3, 4, 5]})
    texts = read_texts(path)
    assert list(texts) == [
        Document("pages.parquet:1", "one"),
        Document("pages.parquet:3", "二"),
        Document("pages.parquet:4", "three"),
    ]
    assert texts.empty == 2


def test_a_dictionary_encoded_column_is_text(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    column = arrow.array(["one", "two", "one"]).dictionary_encode()
    path = write_parquet(tmp_path / "pages.parquet", {"text": column})
    assert [document.text for document in read_texts(path)] == ["one", "two", "one"]


def test_a_folder_is_read_in_the_order_of_its_names_whatever_order_they_were_written_in(tmp_path):
    for name in ("z.txt", "b/two.md", "b/one.txt", "a.jsonl", "picture.png", ".hidden.txt", ".git/config.txt"):
        write(tmp_path / name, json.dumps({"text": name}))
    texts = read_texts(tmp_path)
    assert [document.name for document in texts] == ["a.jsonl:1", "b/one.txt", "b/two.md", "z.txt"]
    assert texts.ignored == ("picture.png",)
    assert list(texts) == list(texts)


def test_empty_documents_are_skipped_and_counted_anew_by_each_loop(tmp_path):
    write(tmp_path / "pages.jsonl", '{"text": "one"}\n\n{"text": " \\n"}\n{"text": null}\n{"text": "two"}\n')
    write(tmp_path / "void.txt", "")
    texts = read_texts(tmp_path)
    for _ in range(2):
        assert [document.name for document in texts] == ["pages.jsonl:1", "pages.jsonl:5"]
        assert texts.empty == 4


def test_standard_input_is_one_document_that_can_be_read_again(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("eins 二".encode())))
    texts = read_texts("-")
    assert list(texts) == list(texts) == [Document("standard input", "eins 二")]


def test_a_byte_order_mark_is_not_text(tmp_path):
    assert [document.text for document in read_texts(write(tmp_path / "a.txt", b"\xef\xbb\xbfone"))] == ["one"]
    assert [document.text for document in read_texts(write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"text": "one"}'))] == [
        "one"
    ]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"one\ntw\xffo", r"got 0xff in a\.txt at byte 6, line 2"),
        ("a.txt", b"\xef\xbb\xbfone\xff", r"got 0xff in a\.txt at byte 6, line 1"),
        ("a.txt.gz", b"caf\xe9", r"got 0xe9 in a\.txt\.gz at byte 3, line 1"),
        ("a.jsonl", b'{"text": "one"}\n{"text": "\xff"}', r"got 0xff in a\.jsonl at byte 26, line 2"),
        ("a.jsonl", b'{"text": "one"}\n{"text": ', r"one JSON object, got a\.jsonl:2, column 10"),
        ("a.jsonl", b'["one"]', r"one JSON object, got a\.jsonl:1: list"),
        ("a.jsonl", b'{"body": "one", "id": 1}', r"a\.jsonl:1 has no field 'text', only 'body', 'id'"),
        ("a.jsonl", b"{}", r"a\.jsonl:1 has no field 'text', only none at all"),
        ("a.jsonl", b'{"text": 7}', r"must be a string, got a\.jsonl:1: int"),
        ("a.jsonl", b'{"text": "ab\\ud800"}', r"half of a surrogate pair in a\.jsonl:1, character 2"),
        ("a.parquet", b"one", r"must be Parquet data, got .*a\.parquet"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_with_its_place(tmp_path, name, content, words):
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    texts = read_texts(write(tmp_path / name, content))
    with pytest.raises(OptionError, match=words):
        list(texts)


def test_documents_before_a_bad_line_are_still_given(tmp_path):
    stream = iter(read_texts(write(tmp_path / "a.jsonl", '{"text": "one"}\nnonsense\n')))
    assert next(stream).text == "one"
    with pytest.raises(OptionError, match=r"a\.jsonl:2"):
        next(stream)


@pytest.mark.parametrize(
    "content", [b"plain text", gzip.compress(b"text" * 99, mtime=0)[:-9]], ids=["plain", "cut off"]
)
def test_broken_compression_is_refused(tmp_path, content):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(content)
    with pytest.raises(OptionError, match=r"must be complete gzip data, got .*a\.txt\.gz"):
        list(read_texts(path))


def test_a_column_that_is_missing_or_no_text_is_refused(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", {"text": [1, 2], "body": ["one", "two"]})
    with pytest.raises(OptionError, match=r"the column 'text' must contain strings, got a\.parquet: int64"):
        list(read_texts(path))
    with pytest.raises(OptionError, match=r"a\.parquet has no column 'page', only 'text', 'body'"):
        list(read_texts(path, field="page"))


def test_a_cell_that_is_no_utf8_is_refused_with_its_row(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    column = arrow.array([b"one", b"caf\xe9"], arrow.binary()).view(arrow.string())
    path = write_parquet(tmp_path / "a.parquet", {"text": column})
    with pytest.raises(OptionError, match=r"got 0xe9 in a\.parquet:2 at byte 3"):
        list(read_texts(path))


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(OptionError, match=r"^a\.parquet needs pyarrow; install it with: pip install 'polyhead\[hf\]'"):
        list(read_texts(write(tmp_path / "a.parquet", b"")))


def test_names_that_lead_to_no_text_are_refused(tmp_path):
    with pytest.raises(OptionError, match=r"got .*nowhere\.txt: there is no such file"):
        read_texts(tmp_path / "nowhere.txt")
    with pytest.raises(OptionError, match=r"got 'The cat.{60,80}\.\.\.: there is no .* as a list of documents"):
        read_texts("The cat sat on the mat. " * 400)  # longer than the name of a file may be
    with pytest.raises(OptionError, match=r"got ~nobody-of-this-name/a\.txt: there is no such file"):
        read_texts("~nobody-of-this-name/a.txt")
    with pytest.raises(OptionError, match=r"must end in \.txt, \.md, .*, got page\.html"):
        read_texts(write(tmp_path / "page.html", "<p>"))
    with pytest.raises(OptionError, match="with 1 other files"):
        read_texts(tmp_path)


def test_the_default_text_is_english_and_chinese_and_says_names_more_than_once():
    documents = default_documents()
    english = [document.text for document in documents if document.name.startswith("en_")]
    chinese = [document.text for document in documents if document.name.startswith("zh_")]
    assert len(english) == len(chinese) == 7
    assert len(english) + len(chinese) == len(documents)
    assert 1100 <= sum(len(text.split()) for text in english) <= 1500
    assert 1400 <= sum("\u4e00" <= character <= "\u9fff" for text in chinese for character in text) <= 1800
    assert all("\ufffd" not in text and "\r" not in text for text in english + chinese)
    together = "".join(english + chinese)
    for name in ("Marta", "Anna", "Brandt", "Ada", "老周", "王芳", "赵海燕"):
        assert together.count(name) >= 2
