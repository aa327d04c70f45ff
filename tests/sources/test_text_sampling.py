"""A sample of a long text is spread over all of it, within the requested tokens, and its contexts form groups."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from typing import Any

import pytest

from polyhead.sources import Context, Document
from polyhead.sources.models import LoadedModel
from polyhead.sources.text_contexts import TextContexts, read_contexts
from polyhead.sources.text_sampling import evenly_spaced, sample_contexts

pytest.importorskip("transformers")
from tests.sources.small_tokenizers import FAMILIES, byte_level, wordpiece

LETTERS = "bcdefghjkl"  # one token each


def read(text: Any, tokens: int, *, tokenizer: Any = None, context: int = 61, sampled: bool = True) -> TextContexts:
    tokenizer = tokenizer or byte_level()
    loaded = LoadedModel(None, tokenizer, "small", "causal", "handmade", "input_ids", None)
    return read_contexts(loaded, text, context=context, tokens=tokens, sampled=sampled)


def decoded(found: TextContexts) -> list[str]:
    return [byte_level().decode(context.ids) for context in found.contexts]


def in_tenths(characters: int) -> str:
    """A text with a letter for each tenth."""
    return "".join((letter * 6 + " ") * (characters // 70) for letter in LETTERS)


def shares(found: TextContexts) -> list[float]:
    letters = Counter("".join(decoded(found)).replace(" ", ""))
    return [letters[letter] / letters.total() for letter in LETTERS]


@pytest.mark.parametrize("documents", ["one", "many", "mixed"])
@pytest.mark.parametrize("characters", [9_000, 12_000, 40_000, 1_000_000])
def test_a_sample_has_its_share_of_every_tenth_of_a_text(documents, characters):
    text = in_tenths(characters)
    if documents == "many":
        texts = [text[start : start + 350] for start in range(0, len(text), 350)]
    else:
        first = len(text) // 2 if documents == "mixed" else len(text)
        texts = [text[:first], *(text[start : start + 35] for start in range(first, len(text), 35))]
    found = read(texts, 8000)
    assert shares(found) == pytest.approx([0.1] * 10, abs=0.025)
    assert 0.98 * 8000 <= found.tokens <= 8000
    assert found.digest == read(texts, 8000).digest


def test_without_sampling_the_beginning_is_read():
    assert shares(read([in_tenths(100_000)], 8000, sampled=False)) == [1.0] + [0.0] * 9


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 60, 61, 62, 200, 1001, 4999])
def test_at_most_the_requested_tokens_are_read_or_one_context(tokens, sampled):
    found = read([in_tenths(30_000), in_tenths(500), "b" * 100, "c" * 20], tokens, sampled=sampled)
    assert max(61, tokens) - 61 < found.tokens <= max(61, tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_that_fits_is_read_as_without_sampling(family):
    tokenizer = FAMILIES[family]()
    texts = ["a river runs. " * 50, "run", "a 河 " * 41, " ".join(["run" * 7] * 30), "a"]
    everything = read(texts, 10**6, tokenizer=tokenizer, sampled=False)
    for tokens in (everything.tokens, everything.tokens + 1, 10**5):
        found = read(texts, tokens, tokenizer=tokenizer)
        assert (found.contexts, found.documents) == (everything.contexts, everything.documents)
    fewer = read(texts, everything.tokens - 1, tokenizer=tokenizer)
    assert everything.tokens - 61 <= fewer.tokens < everything.tokens
    assert [context.ids for context in fewer.contexts] in (
        [context.ids for context in everything.contexts if context is not missing] for missing in everything.contexts
    )


def test_sparse_text_that_fits_is_read_as_without_sampling():
    texts = [("run" + " " * 197) * 90]  # no tokens for white space
    everything = read(texts, 10**6, tokenizer=wordpiece(), sampled=False)
    assert everything.tokens == 94
    assert read(texts, 94, tokenizer=wordpiece()).contexts == everything.contexts
    assert 900 < read(texts * 20, 1000, tokenizer=wordpiece()).tokens <= 1000


@pytest.mark.parametrize("num_texts", [1, 3])
def test_contexts_of_a_long_text_are_complete_and_consecutive_text(num_texts):
    numbers = "".join(f"{number:05d} " for number in range(90_000))
    size = len(numbers) // num_texts
    texts = [numbers[start : start + size] for start in range(0, len(numbers), size)]
    found = read(texts, 6100)
    assert len(found.contexts) == 100
    assert {len(context.ids) for context in found.contexts} == {61}
    for context, text in zip(found.contexts, decoded(found), strict=True):
        assert text in texts[context.document]
    positions = [(context.document, texts[context.document].index(text)) for context, text in
                 zip(found.contexts, decoded(found), strict=True)]  # fmt: skip
    assert positions == sorted(positions)
    assert len({(context.document, context.piece) for context in found.contexts}) == 100


def test_words_are_not_cut():
    found = read(["running river. " * 20_000], 4000, tokenizer=wordpiece())
    tokens = Counter(token for context in found.contexts for token in context.ids)
    assert found.tokens > 3900
    assert 1 not in tokens  # [UNK], which "iver" would be


def test_characters_are_not_cut_in_a_text_without_white_space():
    found = read(["河" * 100_000], 4000)
    assert found.tokens > 3900
    assert {token for context in found.contexts for token in context.ids} == set(read(["河" * 61], 61).contexts[0].ids)


def test_documents_are_never_joined_and_keep_their_names():
    texts = [letter * length for length in (9, 100, 40_000, 7, 30) for letter in LETTERS]
    found = read(texts, 3000)
    assert len(found.documents) == len({context.document for context in found.contexts}) < len(texts)
    for context, text in zip(found.contexts, decoded(found), strict=True):
        number = int(found.documents[context.document].removeprefix("document "))
        assert set(text) == set(texts[number])


def test_a_jsonl_file_of_thousands_of_short_documents(tmp_path):
    path = tmp_path / "pages.jsonl"
    lines = [f"page {number:04d} has the same words as others" for number in range(1, 6001)]
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    found = read(path, 4000)
    assert found.tokens > 3950
    for name, text in zip(found.documents, decoded(found), strict=True):
        assert lines[int(name.removeprefix("pages.jsonl:")) - 1] == text
    numbers = [int(text[5:9]) for text in decoded(found)]
    assert [sum(start <= number < start + 600 for number in numbers) for start in range(1, 6001, 600)] == pytest.approx(
        [len(numbers) / 10] * 10, abs=2
    )
    assert found.groups == tuple(range(len(found.contexts)))


@pytest.mark.parametrize("period", [2, 3, 4, 5, 8])
def test_a_sample_has_no_period_in_common_with_the_text(period):
    chosen = evenly_spaced([7] * 40 * period, 7 * 40)
    assert len(chosen) == 40
    for phase in range(period):
        assert sum(index % period == phase for index in chosen) == pytest.approx(40 / period, abs=2)


def test_only_some_characters_of_a_long_text_are_tokenised():
    class Counting(type(byte_level())):
        characters = 0

        def __call__(self, text, **options):
            Counting.characters += len(text)
            return super().__call__(text, **options)

    tokenizer = byte_level()
    tokenizer.__class__ = Counting
    read([in_tenths(1_000_000)], 2000, tokenizer=tokenizer)
    assert Counting.characters < 16 * 2000 + 100


@pytest.mark.parametrize(("text", "most"), [(in_tenths(7_000), 100), ("b", 9000)])
def test_reading_endless_documents_stops(monkeypatch, text, most):
    monkeypatch.setattr("polyhead.sources.text_sampling.MAX_CHARACTERS", 500_000)
    numbers = itertools.count()
    documents = (Document(str(number), text + "running" * (number == 5)) for number in numbers)
    sample_contexts(documents, byte_level(), 61, 1000)
    assert 70 <= next(numbers) < most


def of(*contexts_per_document: int) -> TextContexts:
    """Documents of so many contexts."""
    contexts = [
        Context(document, piece, [0], [False])
        for document, count in enumerate(contexts_per_document)
        for piece in range(count)
    ]
    return TextContexts(tuple(contexts), tuple(map(str, contexts_per_document)), 61)


@pytest.mark.parametrize(
    ("contexts", "groups"),
    [
        ([1], [1]),
        ([15], [1] * 15),
        ([8, 7], [1] * 15),
        ([31], [1] * 31),
        ([63], [1] * 63),
        ([64], [2] * 32),
        ([100], [3] * 33 + [1]),
        ([200], [4] * 50),
        ([33, 31], [2] * 16 + [1] + [2] * 15 + [1]),
        ([0, 5] * 15, [2, 2, 1] * 15),
        ([3, 0] * 16, [3] * 16),
        ([100] + [1] * 15, [100] + [1] * 15),
    ],
)
def test_groups_are_documents_if_there_are_many_else_neighbouring_contexts(contexts, groups):
    assert of(*contexts).groups == tuple(group for group, size in enumerate(groups) for _ in range(size))


def test_contexts_that_are_far_apart_are_groups_of_their_own():
    found = read([in_tenths(3_000_000)], 61 * 128)
    assert len(found.contexts) == 128
    assert len(set(found.groups)) > 120


def test_contexts_with_few_between_them_are_in_one_group():
    found = read(["b" * 61 * 150], 61 * 128)
    assert len(found.contexts) == 128
    assert len(set(found.groups)) < 40
    assert list(found.groups) == sorted(found.groups)
