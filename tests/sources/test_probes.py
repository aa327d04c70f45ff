"""Probes repeat words drawn from the vocabulary, inside the model's own special tokens."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from polyhead.errors import OptionError
from polyhead.sources.probes import BLOCKS, ordinary_words, repeated_batch, repeated_batches
from polyhead.sources.token_class import token_classes

WORDS = [f"word{letter}{other}" for letter in "abcdefg" for other in "hijklmn"]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"[CLS]": 0, "[SEP]": 1, "[UNK]": 2, ".": 3, "7": 4, "a": 5}
    vocabulary |= {word: len(vocabulary) + index for index, word in enumerate(WORDS)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, cls_token="[CLS]", sep_token="[SEP]", unk_token="[UNK]", pad_token="[SEP]"
    )


def test_a_block_of_different_words_stands_twice() -> None:
    words = torch.arange(11, 41)
    found = repeated_batch(words, batch=5, block=13, seed=3, before=(1, 2), after=(4,), first_document=7)
    assert found.ids.shape == (5, 2 + 26 + 1)
    assert torch.equal(found.ids[:, 2:15], found.ids[:, 15:28])
    assert found.ids[:, :2].tolist() == [[1, 2]] * 5
    assert found.ids[:, 28].tolist() == [4] * 5
    assert found.special.sum(1).tolist() == [3] * 5
    assert found.special[:, [0, 1, 28]].all()
    assert found.documents.tolist() == [7, 8, 9, 10, 11]
    assert found.mask.all()
    for row in found.ids[:, 2:15].tolist():
        assert len(set(row)) == 13
        assert set(row) <= set(words.tolist())
    assert len({tuple(row) for row in found.ids.tolist()}) == 5
    assert torch.equal(repeated_batch(words, batch=5, block=13, seed=3).ids, found.ids[:, 2:28])
    assert not torch.equal(repeated_batch(words, batch=5, block=13, seed=4).ids, found.ids[:, 2:28])


def test_no_special_tokens_mark_nothing() -> None:
    assert not repeated_batch(torch.arange(9), batch=2, block=5).special.any()


def test_words_come_from_the_tokenizer(tokenizer: PreTrainedTokenizerFast) -> None:
    classes = token_classes(tokenizer)
    words = ordinary_words(classes)
    assert set(tokenizer.convert_ids_to_tokens(words.tolist())) == {"a", *WORDS}
    found = list(repeated_batches(tokenizer, classes, batch=3, blocks=(7, 11, 300), context=26))
    assert [batch.ids.shape[1] for batch in found] == [16, 24]
    assert torch.cat([batch.documents for batch in found]).tolist() == list(range(6))
    for batch in found:
        assert batch.ids[:, 0].eq(0).all()
        assert batch.ids[:, -1].eq(1).all()
        assert torch.isin(batch.ids[:, 1:-1], words).all()


def test_different_seeds_draw_different_texts(tokenizer: PreTrainedTokenizerFast) -> None:
    classes = token_classes(tokenizer)
    texts = {
        seed: [
            tuple(row)
            for batch in repeated_batches(tokenizer, classes, blocks=(11, 11, 11, 11), seed=seed)
            for row in batch.ids.tolist()
        ]
        for seed in range(5)
    }
    assert len({text for drawn in texts.values() for text in drawn}) == sum(map(len, texts.values())) == 5 * 4 * 8


def test_what_does_not_fit_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(
        OptionError, match="a block of 1 to 5 words, the size of the vocabulary, got batch 2 and block 6"
    ):
        repeated_batch(torch.arange(5), batch=2, block=6)
    with pytest.raises(OptionError, match="words must be ids"):
        repeated_batch(torch.ones(3), batch=2, block=2)
    with pytest.raises(OptionError, match="got room for 3 twice"):
        list(repeated_batches(tokenizer, token_classes(tokenizer), context=8))


def test_no_offset_fits_two_blocks() -> None:
    for one in BLOCKS:
        for other in BLOCKS:
            assert one == other or one % other
