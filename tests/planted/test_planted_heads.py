"""Every planted head does what its role says and nothing else does, read off the materialised weights."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from polyhead.geometry import HeadId
from polyhead.layers.transformer import LanguageModel
from tests.planted import Planted, Sharpness, Sizes, planted_model, random_model, random_tokens, repeated_tokens

DRAWN = [(0, True), (1, False), (2, True)]
LENGTH, BLOCK, BATCH = 61, 29, 3
SHARE = 0.95
OFFSETS = {"previous": 1, "self": 0, "next": -1, "long-range": Sharpness().offset}
NEAR = 8


class Seen(NamedTuple):
    """Statistics of every head from one pass over a text."""

    tokens: Tensor  # [batch, queries]
    weights: dict[HeadId, Tensor]  # [batch, queries, keys]
    contributions: dict[HeadId, Tensor]  # [batch, queries, embed_dim], through the head's slice of W_O
    logits: Tensor  # [batch, queries, vocab_size]


@torch.no_grad()
def look(model: LanguageModel, tokens: Tensor) -> Seen:
    weights, contributions = {}, {}
    stream = model.embed(tokens)
    for index, block in enumerate(model.blocks):
        normed = block.attention_norm(stream)
        result = block.attention(normed, weights=True)
        parts = []
        for number, head in enumerate(block.attention.heads):
            name = HeadId(index, number)
            weights[name] = result.weights[:, number]
            contributions[name] = weights[name] @ (normed @ head.value) @ head.output
            parts.append(contributions[name])
        torch.testing.assert_close(sum(parts), result.output, rtol=1e-4, atol=1e-5)
        stream = block(stream)
    return Seen(tokens, weights, contributions, model(tokens))


@cache
def planted_once(seed: int, causal: bool) -> Planted:
    return planted_model(seed, causal=causal)


@cache
def random_once(seed: int, causal: bool) -> LanguageModel:
    return random_model(seed, causal=causal)


@cache
def look_at_random(model: LanguageModel, seed: int) -> Seen:
    vocab_size = model.embedding.num_embeddings
    return look(model, random_tokens(seed + 100, batch=BATCH, length=LENGTH, vocab_size=vocab_size))


@cache
def look_at_repeated(model: LanguageModel, seed: int) -> Seen:
    vocab_size = model.embedding.num_embeddings
    return look(model, repeated_tokens(seed + 200, batch=BATCH, block=BLOCK, vocab_size=vocab_size))


def offset_shares(weights: Tensor) -> dict[int, float]:
    """For each way back, the share of the queries with a key there whose largest weight is on it."""
    queries, peaks = torch.arange(LENGTH), weights.argmax(-1)
    shares = {}
    for back in range(-LENGTH // 2, LENGTH // 2):
        exists = (queries - back >= 0) & (queries - back < LENGTH)
        shares[back] = float((peaks == queries - back)[:, exists].double().mean())
    return shares


def near_mass(weights: Tensor) -> float:
    places = torch.arange(weights.shape[1])
    near = (places[:, None] - places).abs() <= NEAR
    return float((weights * near).sum(-1).mean())


def sink_mass(weights: Tensor) -> float:
    return float(weights[:, 1:, 0].mean())


def entropy_gap(weights: Tensor, causal: bool) -> float:
    """By how much the entropy of any row differs from that of a uniform one."""
    count = weights.shape[1]
    visible = torch.arange(1, count + 1) if causal else torch.full((count,), count)
    weights = weights.double()
    entropy = -torch.xlogy(weights, weights).sum(-1)
    return float((entropy - visible.double().log()).abs().max())


def duplicate_share(weights: Tensor, tokens: Tensor, causal: bool) -> float:
    """Share of the repeated tokens whose largest weight is on another occurrence of the same one."""
    places = torch.arange(tokens.shape[1])
    other = places[:, None] > places if causal else places[:, None] != places
    same = (tokens[:, :, None] == tokens[:, None, :]) & other
    hit = same.gather(-1, weights.argmax(-1, keepdim=True))[..., 0]
    return float(hit[same.any(-1)].double().mean())


def induction_share(weights: Tensor) -> float:
    """Share of the second block's queries whose largest weight is on what followed their token in the first.

    The last one's token was followed by the second block's first.
    """
    queries = torch.arange(BLOCK + 1, 2 * BLOCK + 1)
    return float((weights.argmax(-1)[:, queries] == queries - BLOCK + 1).double().mean())


@torch.no_grad()
def copy_shares(model: LanguageModel, head: HeadId) -> tuple[float, float]:
    """Share of the words that the OV circuit raises above all other words, and of those that it lowers below all."""
    matrices = model.blocks[head.layer].attention.heads[head.head]
    words = slice(1, None)
    effect = (model.embedding.weight[words] @ matrices.value) @ (matrices.output @ model.output.weight[words].T)
    itself = torch.arange(len(effect))
    return float((effect.argmax(1) == itself).double().mean()), float((effect.argmin(1) == itself).double().mean())


def roles_seen(model: LanguageModel, seed: int, causal: bool) -> dict[HeadId, frozenset[str]]:
    """Every role that the weights of a head show, by the thresholds above."""
    plain, repeated = look_at_random(model, seed), look_at_repeated(model, seed)
    found = {}
    for head, weights in plain.weights.items():
        at_offset = offset_shares(weights)
        copied, removed = copy_shares(model, head)
        shares = {
            **{role: at_offset[back] for role, back in OFFSETS.items()},
            "positional": max(at_offset.values()),
            "sink": sink_mass(weights),
            "duplicate-token": duplicate_share(weights, plain.tokens, causal),
            "induction": induction_share(repeated.weights[head]),
            "copy": copied,
            "anti-copy": removed,
        }
        roles = {role for role, share in shares.items() if share >= SHARE}
        if near_mass(weights) >= SHARE and "positional" not in roles:
            roles.add("local")
        if entropy_gap(weights, causal) <= 1e-3:
            roles.add("broad")
        found[head] = frozenset(roles)
    return found


def cosines(contributions: dict[HeadId, Tensor]) -> dict[tuple[HeadId, HeadId], float]:
    """Of each pair of heads' contributions, centred over tokens, seen as one long vector each."""
    heads = list(contributions)
    flat = torch.stack([contributions[head].flatten(0, 1).double() for head in heads])
    flat = torch.nn.functional.normalize((flat - flat.mean(1, keepdim=True)).flatten(1), dim=1)
    table = flat @ flat.T
    return {(heads[i], heads[j]): float(table[i, j]) for i in range(len(heads)) for j in range(i + 1, len(heads))}


@pytest.mark.parametrize(("seed", "causal"), DRAWN)
def test_every_planted_role_is_seen_and_no_other(seed, causal):
    planted = planted_once(seed, causal)
    assert roles_seen(planted.model, seed, causal) == planted.roles


@pytest.mark.parametrize(("seed", "causal"), DRAWN)
def test_a_random_model_shows_no_role_and_no_duplicates(seed, causal):
    model = random_once(seed, causal)
    assert set(roles_seen(model, seed, causal).values()) == {frozenset()}
    assert max(map(abs, cosines(look_at_random(model, seed).contributions).values())) < 0.9


@pytest.mark.parametrize(("seed", "causal"), DRAWN)
def test_duplicates_contribute_the_same_and_no_other_pair_does(seed, causal):
    planted = planted_once(seed, causal)
    found = cosines(look_at_random(planted.model, seed).contributions)
    inside, across = planted.duplicates
    assert inside[0].layer == inside[1].layer
    assert across[0].layer < across[1].layer
    assert min(found.pop(inside), found.pop(across)) >= 0.9999
    assert max(map(abs, found.values())) < 0.9


@pytest.mark.parametrize(("seed", "causal"), DRAWN)
def test_a_copy_head_raises_the_attended_token_and_an_anti_copy_head_lowers_it(seed, causal):
    planted = planted_once(seed, causal)
    seen = look_at_random(planted.model, seed)
    for role, sign in (("copy", 1), ("anti-copy", -1)):
        for head in planted.having(role):
            change = seen.logits - without(planted.model, {head}, seen.tokens)
            attended = seen.tokens.gather(1, seen.weights[head].argmax(-1))
            own = change.gather(-1, attended[..., None])[..., 0] - change.mean(-1)
            assert float((sign * own > 0).double().mean()) >= SHARE


@torch.no_grad()
def without(model: LanguageModel, heads: Iterable[HeadId], tokens: Tensor) -> Tensor:
    """The model's logits when some heads are silent."""
    heads = set(heads)
    for index, block in enumerate(model.blocks):
        silent = [HeadId(index, number) in heads for number in range(block.attention.layout.num_heads)]
        block.attention.head_gate = 1.0 - torch.tensor(silent, dtype=torch.float32)
    try:
        return model(tokens)
    finally:
        for block in model.blocks:
            block.attention.head_gate = None


@pytest.mark.parametrize("seed", [seed for seed, causal in DRAWN if causal])
def test_the_induction_pair_says_what_followed_and_needs_both_its_heads(seed):
    planted = planted_once(seed, True)
    (previous,), (induction,) = planted.having("previous"), planted.having("induction")
    assert previous.layer < induction.layer
    # The other heads that write to the output speak of other tokens; without them the pair is heard alone.
    others = {*planted.having("copy"), *planted.having("anti-copy")} - {induction}
    tokens = repeated_tokens(seed, batch=BATCH, block=BLOCK, vocab_size=Sizes().vocab_size)
    requested = slice(BLOCK + 1, 2 * BLOCK)  # the second block, as far as its next tokens are in the text

    def share_right(silent: set[HeadId]) -> float:
        predicted = without(planted.model, silent, tokens).argmax(-1)
        return float((predicted[:, requested] == tokens[:, BLOCK + 2 :]).double().mean())

    assert share_right(others) >= SHARE
    assert share_right({previous}) < 0.2
    assert share_right({induction}) < 0.2


@pytest.mark.parametrize(("seed", "gap"), [(3, 8.0), (4, 10.0), (3, 13.0)])
def test_the_gap_is_the_one_that_was_asked_for(seed, gap):
    planted = planted_model(seed, sharpness=Sharpness(gap=gap))
    (previous,), (induction,) = planted.having("previous"), planted.having("induction")
    plain, repeated = look_at_random(planted.model, seed), look_at_repeated(planted.model, seed)

    def gaps(weights: Tensor) -> Tensor:
        two = weights.double().log().topk(2, dim=-1).values
        return two[..., 0] - two[..., 1]

    for head in (previous, *planted.having("self"), *planted.having("sink")):
        measured = gaps(plain.weights[head])[:, 1:]
        torch.testing.assert_close(measured, torch.full_like(measured, gap), rtol=0.01, atol=0)

    # An equal token counts four gaps, less what the previous-token head saw elsewhere, and the first place three.
    # One per cent of four gaps is four per cent of their difference.
    noted = repeated.weights[previous].double().diagonal(-1, dim1=1, dim2=2)[:, 1 : BLOCK + 1]  # into keys 2 to BLOCK+1
    measured = gaps(repeated.weights[induction])[:, BLOCK + 1 :]
    torch.testing.assert_close(measured, gap * (4 * noted - 3), rtol=0.04, atol=0)

    # How much of a word lies in the half that is copied has a deviation of a quarter; the mean of sixty, of 3%.
    change = repeated.logits - without(planted.model, {induction}, repeated.tokens)
    raised = change[:, BLOCK + 1 : 2 * BLOCK].gather(-1, repeated.tokens[:, BLOCK + 2 :, None])
    assert float(raised.mean()) == pytest.approx(gap, rel=0.1)


def test_a_very_large_gap_stays_finite():
    planted = planted_model(3, sharpness=Sharpness(gap=200.0))
    seen = look_at_random(planted.model, 3)
    assert seen.logits.isfinite().all()
    assert all(weights.isfinite().all() for weights in seen.weights.values())
    (previous,) = planted.having("previous")
    assert offset_shares(seen.weights[previous])[1] == 1.0


def test_other_sizes_and_settings_plant_the_same_heads():
    sizes = Sizes(vocab_size=37, max_length=71, token_dim=41, num_layers=3, num_heads=7)
    sharpness = Sharpness(gap=11.0, spread=1.5, window=2.5, offset=13, write=0.03)
    planted = planted_model(5, sizes=sizes, sharpness=sharpness)
    found = roles_seen(planted.model, 5, True)
    (far,) = planted.having("long-range")
    assert found.pop(far) == {"positional"}  # it is looked for at another offset
    assert found == {head: roles for head, roles in planted.roles.items() if head != far}
    seen = look_at_random(planted.model, 5)
    assert offset_shares(seen.weights[far])[13] >= SHARE
    similar = cosines(seen.contributions)
    assert min(similar.pop(pair) for pair in planted.duplicates) >= 0.9999
    assert max(map(abs, similar.values())) < 0.9
