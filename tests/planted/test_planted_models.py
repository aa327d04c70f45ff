"""Planted models are drawn, repeatable, of one layout with their null, and show no trace of how they were made."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from polyhead.errors import OptionError, ShapeError
from polyhead.geometry import HeadId
from tests.planted import (
    BEGIN,
    PLANTED_ROLES,
    Planted,
    Sharpness,
    Sizes,
    planted_model,
    random_model,
    random_tokens,
    repeated_tokens,
)
from tests.planted.circuits import Drawer
from tests.planted.spaces import MAX_COSINE, draw_spaces

SIZES = Sizes(vocab_size=23, max_length=37, token_dim=19, num_layers=3, num_heads=5)


@cache
def planted_once(seed: int) -> Planted:
    """Only to be looked at."""
    return planted_model(seed)


def matrices(model, head):
    found = model.blocks[head.layer].attention.heads[head.head]
    return {name: getattr(found, name).detach().double() for name in ("query", "key", "value", "output")}


@pytest.mark.parametrize("causal", [True, False])
def test_each_role_is_planted_once_and_every_head_is_accounted_for(causal):
    planted = planted_model(7, causal=causal, sizes=SIZES)
    assert set(planted.roles) == {HeadId(layer, head) for layer in range(3) for head in range(5)}
    missing = "next" if causal else "induction"
    for name, roles in PLANTED_ROLES.items():
        assert sum(found == roles for found in planted.roles.values()) == (name != missing), name
    for pair in planted.duplicates:
        assert [planted.roles[head] for head in pair] == [frozenset(), frozenset()]


def test_every_block_sees_both_ways_only_where_it_was_asked_to():
    for causal in (True, False):
        for model in (planted_model(7, causal=causal, sizes=SIZES).model, random_model(7, causal=causal, sizes=SIZES)):
            tokens = random_tokens(7, batch=2, length=31, vocab_size=23)
            changed = tokens.clone()
            changed[:, -1] = 1 + tokens[:, -1] % 22
            with torch.no_grad():
                same = torch.allclose(model(tokens)[:, :-1], model(changed)[:, :-1], rtol=0, atol=1e-5)
            assert same == causal


@pytest.mark.parametrize(
    "build", [lambda seed: planted_model(seed, sizes=SIZES).model, lambda seed: random_model(seed)]
)
def test_a_seed_repeats_the_model_and_leaves_the_random_state_alone(build):
    before = torch.random.get_rng_state()
    first, again, other = build(7).state_dict(), build(7).state_dict(), build(8).state_dict()
    assert torch.equal(before, torch.random.get_rng_state())
    written = [name for name in first if "attention." in name and name.endswith("weight")]
    assert len(written) >= 8
    for name in [*written, "embedding.weight", "positions.weight", "output.weight"]:
        assert torch.equal(first[name], again[name]), name
        assert not torch.equal(first[name], other[name]), name


def test_heads_stand_somewhere_else_for_another_seed():
    places = {planted_model(seed, sizes=SIZES).having("sink") for seed in range(6)}
    assert len(places) > 1


def test_the_null_has_the_layout_of_the_planted_model():
    planted, null = planted_model(7, sizes=SIZES).model, random_model(7, sizes=SIZES)
    assert {name: x.shape for name, x in planted.state_dict().items()} == {
        name: x.shape for name, x in null.state_dict().items()
    }
    assert planted.embedding.weight.norm(dim=-1).allclose(null.embedding.weight.norm(dim=-1))
    assert planted.positions.weight.norm(dim=-1).allclose(null.positions.weight.norm(dim=-1))


@pytest.mark.parametrize("seed", range(3))
def test_duplicates_have_the_same_circuits_and_matrices_that_do_not_resemble_each_other(seed):
    planted = planted_once(seed)
    (inside, _) = planted.duplicates
    first, second = (matrices(planted.model, head) for head in inside)
    for name in first:
        cosine = torch.nn.functional.cosine_similarity(first[name].flatten(), second[name].flatten(), dim=0)
        assert abs(float(cosine)) < 0.1, name
    for left, right in (("query", "key"), ("value", "output")):
        ours, theirs = (
            head[left] @ (head[right].T if right == "key" else head[right]) for head in (first, second)
        )  # fmt: skip
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * float(ours.abs().max()))


@pytest.mark.parametrize("seed", range(3))
def test_no_channel_and_no_axis_of_the_stream_stands_out(seed):
    """The sink's logits have rank one: without rotations all its weight would lie on a single channel and axis. Of a
    random direction in 128 dimensions the largest square is about 12 / 128 of the whole."""
    planted = planted_once(seed)
    for head in planted.roles:
        for name, matrix in matrices(planted.model, head).items():
            squares = matrix.square() / matrix.square().sum()
            assert float(squares.sum(0).max()) < 0.25, (head, name)
            assert float(squares.sum(1).max()) < 0.25, (head, name)


def test_the_subspaces_are_at_right_angles_and_words_can_be_told_apart():
    spaces = draw_spaces(SIZES, torch.Generator().manual_seed(7))
    basis = torch.cat((spaces.position, spaces.token, spaces.previous, spaces.output, spaces.spare))
    torch.testing.assert_close(basis @ basis.T, torch.eye(SIZES.embed_dim, dtype=torch.float64), rtol=0, atol=1e-12)
    cosines = spaces.words @ spaces.words.T
    torch.testing.assert_close(cosines.diagonal(), torch.ones(23, dtype=torch.float64), rtol=0, atol=1e-12)
    assert float(cosines.fill_diagonal_(-1).max()) <= MAX_COSINE
    assert float(cosines[BEGIN, 1:].abs().max()) == 0.0


def test_texts_start_with_begin_and_hold_words_after_it():
    tokens = random_tokens(3, batch=5, length=29, vocab_size=7)
    assert tokens.shape == (5, 29)
    assert torch.equal(tokens[:, 0], torch.full((5,), BEGIN))
    assert set(tokens[:, 1:].unique().tolist()) == set(range(1, 7))
    assert torch.equal(tokens, random_tokens(3, batch=5, length=29, vocab_size=7))
    assert not torch.equal(tokens, random_tokens(4, batch=5, length=29, vocab_size=7))


def test_repeated_texts_say_a_block_of_different_words_twice():
    tokens = repeated_tokens(3, batch=5, block=11, vocab_size=13)
    assert tokens.shape == (5, 23)
    assert torch.equal(tokens[:, 0], torch.full((5,), BEGIN))
    assert torch.equal(tokens[:, 1:12], tokens[:, 12:])
    assert all(len(set(row)) == 11 and min(row) >= 1 and max(row) <= 12 for row in tokens[:, 1:12].tolist())
    assert torch.equal(tokens, repeated_tokens(3, batch=5, block=11, vocab_size=13))
    assert not torch.equal(tokens, repeated_tokens(4, batch=5, block=11, vocab_size=13))


@pytest.mark.parametrize(
    ("ask", "error", "words"),
    [
        (lambda: Sizes(num_layers=1), ShapeError, "num_layers must be an integer of at least 2, got 1"),
        (lambda: Sizes(token_dim=True), ShapeError, "token_dim must be an integer of at least 2, got True"),
        (lambda: Sharpness(gap=float("inf")), OptionError, "gap must be positive and finite, got inf"),
        (lambda: Sharpness(spread=-1.0), OptionError, r"spread must be positive and finite, got -1\.0"),
        (lambda: Sharpness(write=True), OptionError, "write must be positive and finite, got True"),
        (lambda: Sharpness(offset=2.5), OptionError, r"offset counts tokens, got 2\.5"),
        (lambda: planted_model(0, sharpness=Sharpness(offset=64)), OptionError, "less than max_length, got 64 and 64"),
        (lambda: planted_model(0, sharpness=Sharpness(gap=5.0)), OptionError, r"must be at least 7\.09 .* got 5\.0"),
        (lambda: planted_model(0, sizes=Sizes(num_heads=6)), OptionError, "needs 14 heads .* got 2 layers of 6"),
        (
            lambda: planted_model(0, sizes=Sizes(num_heads=3, num_layers=7)),
            OptionError,
            "4 a layer, got 7 layers of 3",
        ),
        (
            lambda: planted_model(0, sizes=Sizes(token_dim=3)),
            OptionError,
            r"up to 0\.5, got token_dim 3 for vocab_size 64",
        ),
        (lambda: Drawer(Sizes(), Sharpness(), torch.Generator()).draw("prev"), OptionError, "got 'prev'"),
        (lambda: random_tokens(0, batch=2, length=5, vocab_size=1), OptionError, "got 2, 5 and 1"),
        (lambda: repeated_tokens(0, batch=2, block=7, vocab_size=7), OptionError, "block 7 and vocab_size 7"),
    ],
)  # fmt: skip
def test_what_cannot_be_planted_is_refused_with_the_reason(ask, error, words):
    with pytest.raises(error, match=words):
        ask()
