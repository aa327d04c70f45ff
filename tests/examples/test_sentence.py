"""A sentence keeps its tokens, its order and its weights on the way through the layer."""

from __future__ import annotations

import pytest
import torch

from examples.sentence import SENTENCES, tokenize, trace
from polyhead.errors import OptionError


def test_chinese_is_split_by_character_and_english_by_word():
    assert tokenize("它太累了。") == ("它", "太", "累", "了", "。")
    assert tokenize("It didn't, did it?") == ("It", "didn't", ",", "did", "it", "?")
    assert tokenize("用GPU跑 2 个") == ("用", "GPU", "跑", "2", "个")


@pytest.mark.parametrize("text", SENTENCES)
def test_no_character_of_a_sentence_is_lost(text):
    assert "".join(tokenize(text)) == text.replace(" ", "")


@pytest.mark.parametrize("text", ["", "  \n"])
def test_a_sentence_without_tokens_is_refused(text):
    with pytest.raises(OptionError, match="at least one word, character or punctuation mark, got"):
        trace(text)


@pytest.mark.parametrize("text", SENTENCES)
def test_every_step_has_the_shape_it_says(text):
    seen = trace(text)
    n = len(seen.tokens)
    assert seen.ids.shape == (1, n)
    assert seen.embedded.shape == seen.positioned.shape == seen.output.shape == (1, n, 512)
    assert seen.queries.shape == (1, 8, n, 64)
    assert seen.weights.shape == (1, 8, n, n)
    torch.testing.assert_close(seen.weights.sum(-1), torch.ones(1, 8, n), rtol=0, atol=n * 2**-23)


def test_one_word_at_two_places_has_one_embedding_and_two_positions():
    seen = trace(SENTENCES[1])
    first, second = 0, 4  # The, the
    assert seen.ids[0, first] == seen.ids[0, second]
    assert torch.equal(seen.embedded[0, first], seen.embedded[0, second])
    assert not torch.equal(seen.positioned[0, first], seen.positioned[0, second])


def test_it_says_which_backend_ran_and_the_weights_come_from_one_that_has_them():
    seen = trace("它太累了。")
    assert seen.explanation.chosen == seen.backend
    assert seen.explanation.kernel
    assert not seen.weights_explanation["sdpa"].supported
    assert seen.weights_explanation.chosen == "reference"


def test_a_seed_repeats_the_run_and_leaves_the_random_state_alone():
    before = torch.random.get_rng_state()
    first, again, other = trace("它太累了。", seed=3), trace("它太累了。", seed=3), trace("它太累了。", seed=4)
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(first.output, again.output)
    assert not torch.equal(first.output, other.output)
