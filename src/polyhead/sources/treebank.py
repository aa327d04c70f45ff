"""Read dependency treebanks in the CoNLL-U format.

The reader is strict where an invalid file would give wrong numbers (columns, numbering, governors, cycles), and errors
report the line. Only the columns needed to align words and tokens are read.
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
_MAX_LINE_BYTES, _MAX_LINES = 1 << 20, 1 << 14  # maximum bytes per line, and lines per sentence
_NUMBER = re.compile(r"[1-9][0-9]{0,8}")
_RANGE = re.compile(r"([1-9][0-9]{0,8})-([1-9][0-9]{0,8})")
_EMPTY_NODE = re.compile(r"[0-9]+\.[1-9][0-9]*")

Span = tuple[int, int]  # the first character and one past the last


@dataclass(frozen=True, slots=True)
class Sentence:
    """One sentence: its words with governors and relations, and its text.

    A multiword token ("didn't", "du") is represented by its words. If their concatenation equals the token, each has
    its own span of the text; otherwise ("de" and "le" for "du"), the first word gets the span of the token and the
    others have none.
    """

    words: tuple[str, ...]
    heads: tuple[int, ...]  # the index of each word's governor, -1 for the root
    relations: tuple[str, ...]  # of each word to its governor, subtypes included: nmod:poss
    text: str
    spans: tuple[Span | None, ...]  # character span of each word in the text
    spaces: tuple[bool, ...]  # whether white space follows each word

    def __len__(self) -> int:
        return len(self.words)


def read_treebank(path: str | os.PathLike[str], limit: int | None = None) -> Iterator[Sentence]:
    """Return the sentences of a CoNLL-U file (or `.gz`), in order, at most `limit`."""
    if limit is not None and limit < 1:
        raise OptionError(f"the number of sentences to read must be at least 1, got {limit}")
    file = Path(path)
    if not os.path.isfile(file):  # unlike Path.is_file, False for a name that is too long
        what = "a folder" if os.path.isdir(file) else "no such file"
        raise OptionError(f"a treebank must be a CoNLL-U file, got {file}: {what}")
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
        raise OptionError(f"a treebank must contain sentences, got {file} without any")


# ---- lines


@dataclass(frozen=True, slots=True)
class _Line:
    number: int  # from 1
    text: str


def _blocks(opened: BinaryIO | gzip.GzipFile, file: Path) -> Iterator[list[_Line]]:
    """Yield the lines of each sentence; sentences are separated by blank lines."""
    block: list[_Line] = []
    for line in _lines(opened, file):
        if line.text.strip():
            block.append(line)
            if len(block) > _MAX_LINES:
                _refuse(file, block[-1], f"a sentence may have at most {_MAX_LINES:,} lines", "more")
        elif block:
            yield block
            block = []
    if block:
        yield block


def _lines(opened: BinaryIO | gzip.GzipFile, file: Path) -> Iterator[_Line]:
    number = 0
    try:
        for number in itertools.count(1):
            raw = opened.readline(_MAX_LINE_BYTES + 1)
            if not raw:
                return
            if len(raw) > _MAX_LINE_BYTES:
                raise OptionError(f"{file}, line {number}: a line may have at most {_MAX_LINE_BYTES:,} bytes, got more")
            text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            yield _Line(number, text.rstrip("\r\n"))
    except UnicodeDecodeError as error:
        raise OptionError(
            f"{file}, line {number}: text must be UTF-8, got the byte 0x{error.object[error.start]:02x} "
            f"at position {error.start} of the line"
        ) from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise OptionError(f"{file}, after line {number}: the file cannot be decompressed: {error}") from None


def _refuse(file: Path, line: _Line, rule: str, got: str) -> NoReturn:
    raise OptionError(f"{file}, line {line.number}: {rule}, got {got}")


# ---- one sentence


@dataclass(frozen=True, slots=True)
class _Token:
    """A surface token of the text: one word, or a multiword token."""

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
                file, line, f"a word must have {COLUMNS} tab-separated columns", f"{len(columns)}: {line.text[:60]!r}"
            )
        name, form = columns[0], columns[1]
        space_after = "SpaceAfter=No" not in columns[9].split("|")
        if _EMPTY_NODE.fullmatch(name):
            continue  # an empty node of the enhanced graph has no text
        multiword = _RANGE.fullmatch(name)
        if multiword is not None:
            first, last = int(multiword[1]) - 1, int(multiword[2]) - 1
            if first != len(words) or last <= first or _num_covered(tokens) > first:
                _refuse(file, line, "a multiword token must precede its words, two or more", repr(name))
            tokens.append(_Token(form, first, last, space_after))
            continue
        if not _NUMBER.fullmatch(name) or int(name) != len(words) + 1:
            _refuse(file, line, f"words must be numbered in order, the next one {len(words) + 1}", repr(name))
        if not form.strip():
            _refuse(file, line, "a word must have a form", repr(form))
        if columns[6] != "0" and not _NUMBER.fullmatch(columns[6]):
            _refuse(file, line, "column 7 must be the number of the word's governor, 0 for the root", repr(columns[6]))
        if columns[7] in ("", "_"):
            _refuse(file, line, "column 8 must be the word's relation to its governor", repr(columns[7]))
        if _num_covered(tokens) <= len(words):
            tokens.append(_Token(form, len(words), len(words), space_after))
        words.append(form)
        governors.append((line, int(columns[6]) - 1))
        relations.append(columns[7])
    if not words:
        _refuse(file, block[0], "a sentence must have words", "only comments")
    if _num_covered(tokens) > len(words):
        _refuse(file, block[-1], "a multiword token must be followed by all its words", f"{len(words)} words")
    heads = _check_governors(governors, file)
    text, places = _token_spans(tokens, text)
    spans: list[Span | None] = []
    spaces: list[bool] = []
    for token, place in zip(tokens, places, strict=True):
        spans += _spans_within(words[token.first : token.last + 1], text, place)
        spaces += [False] * (token.last - token.first) + [_followed_by_space(text, place, token)]
    return Sentence(tuple(words), heads, tuple(relations), text, tuple(spans), tuple(spaces))


def _num_covered(tokens: Sequence[_Token]) -> int:
    """Return the number of words covered by the tokens so far."""
    return tokens[-1].last + 1 if tokens else 0


def _check_governors(governors: Sequence[tuple[_Line, int]], file: Path) -> tuple[int, ...]:
    """Return the governors; raise if a word does not lead to a root."""
    heads = tuple(head for _, head in governors)
    for line, head in governors:
        if head >= len(heads):
            _refuse(file, line, f"a governor must be one of the sentence's {len(heads)} words", str(head + 1))
    leads_to_root = [head < 0 for head in heads]
    for index in range(len(heads)):
        path = []
        word = index
        while not leads_to_root[word]:
            leads_to_root[word] = True
            path.append(word)
            word = heads[word]
            if word in path:
                cycle = [*path[path.index(word) :], word]
                names = " -> ".join(str(number + 1) for number in cycle)
                _refuse(file, governors[word][0], "every word must lead to the root", f"a cycle, {names}")
    return heads


def _token_spans(tokens: Sequence[_Token], text: str | None) -> tuple[str, list[Span]]:
    """Return the text and the span of each token: the text of the file if the tokens match it, else their join."""
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
    joined, places = "", []
    for index, token in enumerate(tokens):
        places.append((len(joined), len(joined) + len(token.form)))
        joined += token.form + (" " if token.space_after and index + 1 < len(tokens) else "")
    return joined, places


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
