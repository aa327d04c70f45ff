"""Sampled logits are reproduced from the weights, and shared keys are refitted to them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import polyhead.integrations.huggingface
from polyhead.surgery import HeadWeights, KeyTransform, find_key_transforms, find_layers, read_heads, share
from polyhead.surgery.calibration.streams import uncached_pieces
from polyhead.surgery.kv_sharing import refine_logits as module
from polyhead.surgery.kv_sharing.refine_logits import LogitSample, refined_logits, sample_logits
from tests.integrations.huggingface import models
from tests.surgery.gated import FAMILIES, build


def seen_in(name: str, *, padded: bool = False) -> tuple[HeadWeights, KeyTransform, list[LogitSample]]:
    family = FAMILIES[name]
    model = build(family)
    model.set_attn_implementation(polyhead.integrations.huggingface.register())
    given = dict(models.inputs(family))
    if padded:
        given["attention_mask"] = torch.ones(3, 23)
        given["attention_mask"][1, 15:] = 0
    layer = find_layers(model)[1]
    forms = find_key_transforms(model, given)
    heads = read_heads(model, layer)
    return (
        heads,
        forms[layer.path],
        sample_logits(model, layer, heads, forms[layer.path], uncached_pieces([given, given]), {}),
    )


def loss(heads: HeadWeights, transform: KeyTransform, seen: list[LogitSample]) -> float:
    """Return twice the second-order KL divergence for these logit errors, by the formula."""
    total = 0.0
    for one in seen:
        off = again(heads, transform, one) - one.logits
        mean = (off * one.weights).sum(-1, keepdim=True)
        total += float(((off - mean).square() * one.weights).sum())
    return total


def again(heads: HeadWeights, transform: KeyTransform, one: LogitSample) -> Tensor:
    """Return the logits of these heads, with rotary positions applied by hand."""
    rotated = []
    for x, turns, held in (
        (one.inputs["query"], one.rotations["query"], heads.augmented("query")),
        (one.inputs["key"], one.rotations["key"], heads.augmented("key")[list(heads.key_heads)]),
    ):
        made = torch.einsum("bni,hdi->bhnd", x.double(), held)
        for number, (first, second) in enumerate(transform.pairs):
            turn = turns[..., number].to(torch.complex128)
            pair = torch.complex(made[..., first], made[..., second]) * turn
            made[..., first], made[..., second] = pair.real, pair.imag
        rotated.append(made)
    return one.scale * rotated[0] @ rotated[1].mT


@pytest.mark.parametrize("name", ["bert", "llama", "cohere", "stablelm", "bart", "gemma2", "qwen2"])
def test_seen_logits_are_those_of_the_weights_turned_as_tokens_were_seen_to_be(name):
    heads, transform, seen = seen_in(name)
    assert len(seen) == 2
    assert loss(heads, transform, seen) < 1e-6 * sum(float((x.logits.square() * x.weights).sum()) for x in seen)
    for one in seen:
        torch.testing.assert_close(one.weights.sum(-1), torch.ones_like(one.weights[..., 0]), rtol=0, atol=1e-5)
        if name in ("bert", "llama"):  # their weights are the softmax of these logits
            expected = torch.softmax(torch.where(one.weights > 0, one.logits, -torch.inf), -1)
            torch.testing.assert_close(expected, one.weights, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["bert", "llama", "cohere", "stablelm"])
def test_refitted_queries_and_keys_are_nearer_with_every_round(name):
    heads, transform, seen = seen_in(name)
    shared = share(heads, (tuple(range(heads.key.shape[0])),), transform)
    losses = [loss(shared, transform, seen)]
    losses += [loss(refined_logits(shared, transform, seen, rounds=rounds), transform, seen) for rounds in (0, 1, 3)]
    assert losses == sorted(losses, reverse=True)
    assert losses[3] < 0.8 * losses[0]
    found = refined_logits(shared, transform, seen, rounds=1)
    assert torch.equal(found.value, shared.value)
    assert torch.equal(found.output, shared.output)
    assert (found.query_bias is None) == (shared.query_bias is None)


def test_queries_are_those_of_least_squares_solved_at_once(monkeypatch):
    monkeypatch.setattr(module, "STEPS", 400)
    heads, transform, seen = seen_in("bert")
    shared = share(heads, ((0, 1, 2, 3),), transform)
    found = refined_logits(shared, transform, seen[:1], rounds=0)
    one, key = seen[0], shared.augmented("key")[0]
    keys = one.inputs["key"].double() @ key.T * one.scale
    for head in range(4):
        rows, wanted = [], []
        for batch in range(3):
            for place in range(23):
                weight = one.weights[batch, head, place].double()
                around = keys[batch] - weight @ keys[batch]
                x = one.inputs["query"][batch, place].double()
                rows.append(weight.sqrt()[:, None] * torch.einsum("md,i->mdi", around, x).flatten(1))
                wanted.append(weight.sqrt() * one.logits[batch, head, place].double())
        solution = torch.linalg.lstsq(torch.cat(rows), torch.cat(wanted), driver="gelsd").solution
        best = float((torch.cat(wanted) - torch.cat(rows) @ solution).square().sum())
        queries = (x.augmented("query")[head].flatten() for x in (found, shared))
        reached, before = (float((torch.cat(wanted) - torch.cat(rows) @ x).square().sum()) for x in queries)
        assert best <= reached <= best + 0.03 * (before - best)


def test_padding_weighs_nothing_and_a_long_text_is_thinned(monkeypatch):
    _, _, seen = seen_in("bert", padded=True)
    assert float(seen[0].weights[1, :, 15:].abs().max()) == 0
    assert float(seen[0].weights[1, :, :, 15:].abs().max()) == 0
    assert float(seen[0].weights[1, :, :15].sum()) > 0
    monkeypatch.setattr(module, "SAMPLE_BYTES", 10)
    assert len(seen_in("bert")[2]) == 1


def test_norms_and_nothing_seen_leave_heads_as_they_are():
    heads, transform, seen = seen_in("qwen3")
    assert transform.norm == "rms"
    assert refined_logits(heads, transform, seen, rounds=1) is heads
    plain, _, _ = seen_in("bert")
    assert refined_logits(plain, KeyTransform(), [], rounds=1) is plain
