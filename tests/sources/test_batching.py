"""Batches contain every context once, padding is masked, and a resumed run gets the same batches."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyhead.errors import OptionError
from polyhead.sources import Context, batches, batching

PAD = 97
TOKENIZER = SimpleNamespace(pad_token_id=PAD)


def contexts_of(lengths: list[int]) -> list[Context]:
    return [
        Context(
            document=number // 2, piece=number % 2, ids=[number + 1] * length, special=[True] + [False] * (length - 1)
        )
        for number, length in enumerate(lengths)
    ]


LENGTHS = st.lists(st.integers(1, 23), min_size=1, max_size=40)


@settings(max_examples=80)
@given(lengths=LENGTHS, batch_tokens=st.integers(1, 80), side=st.sampled_from(["left", "right"]))
def test_each_context_comes_back_once_and_padding_is_never_real(lengths, batch_tokens, side):
    contexts = contexts_of(lengths)
    found = {}
    for index, batch in enumerate(batches(contexts, TOKENIZER, batch_tokens=batch_tokens, side=side)):
        assert batch.index == index
        assert batch.ids.shape == batch.mask.shape == batch.special.shape
        assert len(batch.ids) == len(batch.documents) == len(batch.pieces)
        assert batch.ids.numel() <= batch_tokens or len(batch.ids) == 1
        assert torch.all(batch.ids[batch.mask == 0] == PAD)
        assert not batch.special[batch.mask == 0].any()
        rows = batch.mask.flip(1) if side == "left" else batch.mask
        assert torch.all(rows[:, 1:] <= rows[:, :-1])
        assert bool(rows.any(0).all())
        for row in range(len(batch.ids)):
            real = batch.mask[row] == 1
            place = (int(batch.documents[row]), int(batch.pieces[row]))
            assert place not in found
            found[place] = (batch.ids[row, real].tolist(), batch.special[row, real].tolist())
    assert found == {(context.document, context.piece): (context.ids, context.special) for context in contexts}


@settings(max_examples=40)
@given(lengths=LENGTHS, batch_tokens=st.integers(1, 60), data=st.data())
def test_a_run_that_goes_on_sees_the_batches_it_would_have_seen(lengths, batch_tokens, data):
    whole = list(batches(contexts_of(lengths), TOKENIZER, batch_tokens=batch_tokens))
    start = data.draw(st.integers(0, len(whole)))
    digest = whole[start - 1].digest if start else None
    rest = list(batches(contexts_of(lengths), TOKENIZER, batch_tokens=batch_tokens, start=start, digest=digest))
    assert [batch.index for batch in rest] == [batch.index for batch in whole[start:]]
    for one, other in zip(rest, whole[start:], strict=True):
        assert one.digest == other.digest
        for name in ("ids", "mask", "special", "documents", "pieces"):
            assert torch.equal(getattr(one, name), getattr(other, name))


def test_a_loop_can_be_run_again_and_gives_the_same():
    made = batches(contexts_of([3, 17, 5, 2]), TOKENIZER, batch_tokens=11)
    assert [batch.digest for batch in made] == [batch.digest for batch in made]


def test_a_changed_text_is_told_before_the_first_new_batch():
    first, second, *_ = batches(contexts_of([5, 5, 5, 5, 5]), TOKENIZER, batch_tokens=10)
    assert first.digest != second.digest
    changed = contexts_of([5, 5, 5, 5, 5])
    changed[0].ids[2] = 11
    resumed = iter(batches(changed, TOKENIZER, batch_tokens=10, start=2, digest=second.digest))
    with pytest.raises(OptionError, match=f"different batches before batch 2: digest .*, not {second.digest}"):
        next(resumed)
    with pytest.raises(OptionError, match="after 9 batches needs the same text and contexts, got only 3 batches"):
        list(batches(changed, TOKENIZER, batch_tokens=10, start=9))


def test_like_lengths_lie_side_by_side():
    lengths = [23, 2] * 11
    made = list(batches(contexts_of(lengths), TOKENIZER, batch_tokens=46))
    assert sum(batch.tokens for batch in made) == sum(lengths)
    assert sum(batch.ids.numel() for batch in made) - sum(lengths) == 0


def test_less_than_half_of_a_batch_is_padding():
    lengths = [13, 256, 250, 26, 5, 27, 255]
    made = list(batches(contexts_of(lengths), TOKENIZER, batch_tokens=4096))
    assert [sorted(batch.mask.sum(1).tolist()) for batch in made] == [[5], [13, 26], [27], [250, 255, 256]]


def test_a_long_corpus_streams(monkeypatch):
    monkeypatch.setattr(batching, "_STRETCH_TOKENS", 20)
    taken = 0

    def endless():
        nonlocal taken
        while True:
            taken += 1
            yield Context(taken, 0, [1] * 7, [False] * 7)

    assert next(iter(batches(endless(), TOKENIZER, batch_tokens=14))).ids.shape == (2, 7)
    assert taken == 3


def test_a_tokenizer_without_padding_pads_with_the_first_token():
    (batch,) = batches(contexts_of([3, 2]), SimpleNamespace(pad_token_id=None))
    assert batch.ids.tolist() == [[2, 2, 0], [1, 1, 1]]
    assert batch.mask.tolist() == [[1, 1, 0], [1, 1, 1]]


def test_a_batch_moves_whole():
    (batch,) = batches(contexts_of([3, 2]), TOKENIZER)
    moved = batch.to("meta")
    assert {getattr(moved, name).device.type for name in ("ids", "mask", "special", "documents", "pieces")} == {"meta"}
    assert (moved.index, moved.digest) == (batch.index, batch.digest)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_tokens": 0}, "batch_tokens must be at least 1, got 0"),
        ({"side": "top"}, "'left' or 'right', got 'top'"),
        ({"start": -1}, "at least 0, got -1"),
    ],
)
def test_options_out_of_range_are_refused(options, words):
    with pytest.raises(OptionError, match=words):
        batches([], TOKENIZER, **options)
