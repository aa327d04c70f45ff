"""Sentences whose grammar somebody has written down: treebanks in the CoNLL-U format.

The reader is strict where a wrong file would give wrong numbers (columns, numbering, governors, circles) and says the
line. It reads what the alignment of words and tokens needs and leaves the other columns alone.
"""

from __future__ import annotations

import gzip
import itertools
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn

from polyhead.errors import OptionError

COLUMNS = 10
_LONGEST_LINE, _MOST_LINES = 1 << 20, 1 << 14  # bytes, and lines of one sentence
_NUMBER = re.compile(r"[1-9][0-9]{0,8}")
_RANGE = re.compile(r"([1-9][0-9]{0,8})-([1-9][0-9]{0,8})")
_EMPTY_NODE = re.compile(r"[0-9]+\.[1-9][0-9]*")

Span = tuple[int, int]  # the first character and one past the last


@dataclass(frozen=True, slots=True)
class Sentence:
    """One sentence: its words, the governor and the relation of each, and the text they stand in.

    A multiword token ("didn't", "du") is its words. Where these spell it, letter by letter, each has its own span of
    the text; where they do not ("de" and "le" for "du"), the first word stands for the token and the others have none.
    """

    words: tuple[str, ...]
    heads: tuple[int, ...]  # the index of each word's governor, -1 for the root
    relations: tuple[str, ...]  # of each word to its governor, subtypes included: nmod:poss
    text: str
    spans: tuple[Span | None, ...]  # where each word stands in the text
    spaces: tuple[bool, ...]  # whether white space follows each word

    def __len__(self) -> int:
        return len(self.words)


def read_treebank(path: str | os.PathLike[str], limit: int | None = None) -> Iterator[Sentence]:
    """The sentences of a CoNLL-U file (`.gz` too), in order, at most `limit` of them."""
    if limit is not None and limit < 1:
        raise OptionError(f"the number of sentences to read must be at least 1, got {limit}")
    file = Path(path)
    if not file.is_file():
        what = "a folder" if file.is_dir() else "no such file"
        raise OptionError(f"a treebank is a file in the CoNLL-U format, got {file}: {what}")
    return _read(file, limit)


def _read(file: Path, limit: int | None) -> Iterator[Sentence]:
    count = 0
    with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as opened:
        for block in _blocks(opened, file):
            yield _sentence(block, file)
            count += 1
            if count == limit:
                return
    if not count:
        raise OptionError(f"a treebank must hold sentences, got {file} without any")


# ---- lines


@dataclass(frozen=True, slots=True)
class _Line:
    number: int  # from 1
    text: str


def _blocks(opened: BinaryIO | gzip.GzipFile, file: Path) -> Iterator[list[_Line]]:
    """The lines of each sentence; blank lines stand between sentences."""
    block: list[_Line] = []
    for number, text in _lines(opened, file):
        if text.strip():
            block.append(_Line(number, text))
            if len(block) > _MOST_LINES:
                _refuse(file, block[-1], f"a sentence has at most {_MOST_LINES:,} lines", "more")
        elif block:
            yield block
            block = []
    if block:
        yield block


def _lines(opened: BinaryIO | gzip.GzipFile, file: Path) -> Iterator[tuple[int, str]]:
    number = 0
    try:
        for number in itertools.count(1):
            raw = opened.readline(_LONGEST_LINE + 1)
            if not raw:
                return
            if len(raw) > _LONGEST_LINE:
                raise OptionError(f"{file}, line {number}: a line has at most {_LONGEST_LINE:,} bytes, got more")
            text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            yield number, text.rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise OptionError(
            f"{file}, line {number}: text must be UTF-8, got the byte 0x{error.object[error.start]:02x} "
            f"at place {error.start} of the line"
        ) from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise OptionError(f"{file}, after line {number}: the file cannot be unpacked: {error}") from None


def _refuse(file: Path, line: _Line, rule: str, got: str) -> NoReturn:
    raise OptionError(f"{file}, line {line.number}: {rule}, got {got}")


# ---- one sentence


@dataclass(frozen=True, slots=True)
class _Token:
    """What the text shows as one: a word, or several that were written together."""

    form: str
    first: int  # of its words
    last: int
    space_after: bool


def _sentence(block: Sequence[_Line], file: Path) -> Sentence:
    words: list[str] = []
    governors: list[tuple[_Line, int]] = []
    relations: list[str] = []
    tokens: list[_Token] = []
    text = None
    for line in block:
        if line.text.startswith("#"):
            name, equals, value = line.text[1:].partition("=")
            text = value.strip() if equals and name.strip() == "text" else text
            continue
        columns = line.text.split("\t")
        if len(columns) != COLUMNS:
            _refuse(
                file, line, f"a word has {COLUMNS} columns with tabs between", f"{len(columns)}: {line.text[:60]!r}"
            )
        name, form = columns[0], columns[1]
        space_after = "SpaceAfter=No" not in columns[9].split("|")
        if _EMPTY_NODE.fullmatch(name):
            continue  # a word that was left unsaid stands nowhere in the text
        written = _RANGE.fullmatch(name)
        if written is not None:
            first, last = int(written[1]) - 1, int(written[2]) - 1
            if first != len(words) or last <= first or _covered(tokens) > first:
                _refuse(file, line, "a multiword token stands before its own words, two or more", repr(name))
            tokens.append(_Token(form, first, last, space_after))
            continue
        if not _NUMBER.fullmatch(name) or int(name) != len(words) + 1:
            _refuse(file, line, f"words are numbered in order, the next one {len(words) + 1}", repr(name))
        if not form.strip():
            _refuse(file, line, "a word has a form", repr(form))
        if columns[6] != "0" and not _NUMBER.fullmatch(columns[6]):
            _refuse(file, line, "column 7 is the number of the word's governor, 0 for the root", repr(columns[6]))
        if columns[7] in ("", "_"):
            _refuse(file, line, "column 8 is the word's relation to its governor", repr(columns[7]))
        if _covered(tokens) <= len(words):
            tokens.append(_Token(form, len(words), len(words), space_after))
        words.append(form)
        governors.append((line, int(columns[6]) - 1))
        relations.append(columns[7])
    if not words:
        _refuse(file, block[0], "a sentence has words", "comments alone")
    if _covered(tokens) > len(words):
        _refuse(file, block[-1], "a multiword token is followed by all its words", f"{len(words)} words")
    heads = _checked(governors, file)
    text, places = _placed(tokens, text)
    spans: list[Span | None] = []
    spaces: list[bool] = []
    for token, place in zip(tokens, places, strict=True):
        spans += _spans_within(words[token.first : token.last + 1], text, place)
        spaces += [False] * (token.last - token.first) + [_followed_by_space(text, place, token)]
    return Sentence(tuple(words), heads, tuple(relations), text, tuple(spans), tuple(spaces))


def _covered(tokens: Sequence[_Token]) -> int:
    """How many words the tokens so far hold."""
    return tokens[-1].last + 1 if tokens else 0


def _checked(governors: Sequence[tuple[_Line, int]], file: Path) -> tuple[int, ...]:
    """The governors, once it is sure that every word leads to a root."""
    heads = tuple(head for _, head in governors)
    for line, head in governors:
        if head >= len(heads):
            _refuse(file, line, f"a governor is one of the sentence's {len(heads)} words", str(head + 1))
    leads_to_root = [head < 0 for head in heads]
    for index in range(len(heads)):
        path = []
        word = index
        while not leads_to_root[word]:
            leads_to_root[word] = True
            path.append(word)
            word = heads[word]
            if word in path:
                circle = [*path[path.index(word) :], word]
                names = " -> ".join(str(number + 1) for number in circle)
                _refuse(file, governors[word][0], "every word leads to the root", f"a circle, {names}")
    return heads


def _placed(tokens: Sequence[_Token], text: str | None) -> tuple[str, list[Span]]:
    """The text and where each token stands in it: the text of the file if the tokens spell it, else their own."""
    if text is not None:
        places: list[Span] = []
        position = 0
        for token in tokens:
            while position < len(text) and text[position].isspace():
                position += 1
            if not text.startswith(token.form, position):
                break
            places.append((position, position + len(token.form)))
            position += len(token.form)
        if len(places) == len(tokens) and not text[position:].strip():
            return text, places
    written, places = "", []
    for index, token in enumerate(tokens):
        places.append((len(written), len(written) + len(token.form)))
        written += token.form + (" " if token.space_after and index + 1 < len(tokens) else "")
    return written, places


def _spans_within(words: Sequence[str], text: str, place: Span) -> list[Span | None]:
    if "".join(words) != text[slice(*place)]:
        return [place, *([None] * (len(words) - 1))]
    spans: list[Span | None] = []
    start = place[0]
    for word in words:
        spans.append((start, start + len(word)))
        start += len(word)
    return spans


def _followed_by_space(text: str, place: Span, token: _Token) -> bool:
    return text[place[1]].isspace() if place[1] < len(text) else token.space_after
