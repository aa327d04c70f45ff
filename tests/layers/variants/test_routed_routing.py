"""The gate of routed heads: who is chosen, with what weight, and the losses, each held to its definition."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from polyhead.errors import OptionError, ShapeError
from polyhead.layers.variants.routed.router import HeadRouter, Routing

BATCH, LENGTH, EMBED, HEADS = 3, 17, 11, 7
DOUBLE = torch.float64


def router(**options: object) -> HeadRouter:
    made = HeadRouter(EMBED, HEADS, **{"dtype": DOUBLE, **options})
    with torch.no_grad():
        made.gate.weight.copy_(torch.randn_like(made.gate.weight) * 0.7)
    return made


def tokens() -> Tensor:
    return torch.randn(BATCH, LENGTH, EMBED, dtype=DOUBLE)


def test_the_likeliest_heads_are_chosen_and_weighed_by_the_softmax_over_all():
    gate, x = router(top_k=3), tokens()
    found = gate(x)
    likely = torch.softmax(x @ gate.gate.weight.T, -1)
    weights, heads = likely.topk(3, -1)
    assert torch.equal(found.heads, heads)
    assert found.counts is None
    torch.testing.assert_close(found.weights, weights)
    torch.testing.assert_close(found.probabilities, likely)


def test_weights_of_the_chosen_alone_add_up_to_one():
    x = tokens()
    for rule in ({"top_k": 3}, {"top_p": 0.7}, {"threshold": 0.2}):
        gate = router(**rule, normalise="chosen")
        found = gate(x)
        likely = torch.where(found.is_chosen, torch.softmax(found.logits, -1), 0.0)
        expected = (likely / likely.sum(-1, keepdim=True)).gather(2, found.heads)
        torch.testing.assert_close(found.weights, expected)
        torch.testing.assert_close(found.weights.sum(-1), torch.ones(BATCH, LENGTH, dtype=DOUBLE))


@pytest.mark.parametrize(("k_min", "k_max"), [(1, None), (2, 4), (3, 3)])
def test_top_p_takes_the_fewest_heads_that_hold_so_much(k_min, k_max):
    found = router(top_p=0.6, k_min=k_min, k_max=k_max)(tokens())
    for row, count in zip(found.probabilities.flatten(0, 1), found.counts.flatten(), strict=True):
        fewest = next(k for k in range(1, HEADS + 1) if row.sort(descending=True).values[:k].sum() >= 0.6)
        assert int(count) == min(max(fewest, k_min), k_max or HEADS)
    assert torch.equal(found.is_chosen.sum(-1), found.counts)
    assert torch.equal(found.weights == 0, ~found.used)
    if k_max is None:
        assert found.counts.unique().numel() > 2  # tokens do differ


def test_a_threshold_takes_the_heads_above_it():
    found = router(threshold=0.15, k_max=5)(tokens())
    above = (found.probabilities >= 0.15).sum(-1)
    assert torch.equal(found.counts, above.clamp(1, 5))
    assert torch.equal(found.is_chosen.sum(-1), found.counts)


@pytest.mark.parametrize("rule", [{"top_k": 2}, {"top_p": 0.5}])
def test_heads_that_are_always_on_stand_first_with_weight_one(rule):
    found = router(always_on=2, **rule)(tokens())
    assert torch.equal(found.heads[..., :2], torch.arange(2).expand(BATCH, LENGTH, 2))
    assert torch.equal(found.weights[..., :2], torch.ones(BATCH, LENGTH, 2, dtype=DOUBLE))
    assert int(found.heads[..., 2:].min()) >= 2
    assert found.logits.shape == (BATCH, LENGTH, HEADS - 2)
    assert bool(found.is_chosen[..., :2].all())


def test_noise_moves_choices_in_training_alone():
    gate, x = router(top_k=2, noise=5.0), tokens()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        noisy = gate(x)
        torch.manual_seed(1)
        torch.testing.assert_close(noisy.logits, gate.gate(x) + 5.0 * torch.randn(BATCH, LENGTH, HEADS, dtype=DOUBLE))
    torch.testing.assert_close(gate.eval()(x).logits, gate.gate(x))
    assert not torch.equal(noisy.heads, gate(x).heads)


def test_half_precision_is_weighed_in_float32():
    gate = HeadRouter(EMBED, HEADS, top_k=2).half()
    found = gate(tokens().half())
    assert (found.logits.dtype, found.weights.dtype) == (torch.float32, torch.float16)


# ---- losses


def test_losses_are_those_of_their_papers_over_real_tokens():
    real = torch.arange(LENGTH) < torch.tensor([LENGTH, 5, 0])[:, None]
    x = tokens()
    x[~real] = torch.nan  # padding is never read
    found = router(top_p=0.6, always_on=1, budget=1.5)(x, real)
    likely = torch.softmax(found.logits[real], -1)  # [tokens, heads]
    chosen = found.is_chosen[real][:, 1:].to(DOUBLE)
    share = chosen.sum(0) / chosen.sum()
    torch.testing.assert_close(found.balance_loss, (HEADS - 1) * (share * likely.mean(0)).sum())
    torch.testing.assert_close(found.z_loss, torch.logsumexp(found.logits[real], -1).square().mean())
    hesitates = torch.exp(-(likely * likely.log()).sum(-1)).mean()
    assert hesitates > 1.5
    torch.testing.assert_close(found.budget_loss, (hesitates / 1.5 - 1) ** 2)
    everybody = found.is_chosen[real].to(DOUBLE).sum(0)
    torch.testing.assert_close(found.load, everybody / everybody.sum())


def test_balanced_heads_have_a_balance_loss_of_one_and_a_crowd_has_more():
    logits = torch.zeros(1, HEADS, HEADS, dtype=DOUBLE)
    heads = torch.arange(HEADS).view(1, HEADS, 1)
    weights = torch.ones(1, HEADS, 1, dtype=DOUBLE)
    assert float(Routing(heads, weights, HEADS, logits=logits).balance_loss) == pytest.approx(1.0)
    crowd = torch.full_like(logits, -30.0)
    crowd[..., 2] = 0.0
    heads = torch.full((1, HEADS, 1), 2)
    assert float(Routing(heads, weights, HEADS, logits=crowd).balance_loss) == pytest.approx(HEADS)


def test_a_budget_above_the_heads_that_are_taken_is_felt_by_a_gate_that_hesitates():
    gate = router(top_p=0.9, k_max=2, budget=3.0)
    with torch.no_grad():
        gate.gate.weight.zero_()  # every head is as likely as the others
    torch.testing.assert_close(gate(tokens()).budget_loss, torch.tensor((HEADS / 3.0 - 1) ** 2, dtype=DOUBLE))
    assert float(router(top_p=0.9, budget=float(HEADS))(tokens()).budget_loss.detach()) == 0.0


def test_sizes_of_a_gate_are_integers():
    for sizes, words in (((None, 4), "embed_dim must be an integer, got None"), ((8, "4"), "num_heads must be an")):
        with pytest.raises(ShapeError, match=words):
            HeadRouter(*sizes, top_k=1)


def test_every_loss_moves_the_gate_the_right_way():
    x = tokens()
    for name, options in (("balance_loss", {"top_k": 1}), ("z_loss", {"top_k": 1}), ("budget_loss", {"top_p": 0.9})):
        gate = router(**options, **({"budget": 1.1} if name == "budget_loss" else {}))
        optimiser = torch.optim.Adam(gate.parameters(), lr=0.03)
        first = getattr(gate(x), name).item()
        for _ in range(30):
            optimiser.zero_grad()
            getattr(gate(x), name).backward()
            optimiser.step()
        assert getattr(gate(x), name).item() < first
    # Fewer heads in doubt are fewer heads taken.
    assert gate(x).counts.double().mean() < router(top_p=0.9)(x).counts.double().mean()


def test_no_tokens_are_no_loss_and_no_nan():
    real = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    found = router(top_p=0.6, budget=2.0)(tokens(), real)
    assert [float(x.detach()) for x in (found.balance_loss, found.z_loss, found.budget_loss)] == [0.0, 0.0, 0.0]
    assert math.isfinite(float(found.load.sum()))


def test_every_head_is_a_routing_without_a_gate():
    x = tokens()
    found = Routing.every_head(BATCH, LENGTH, HEADS, x)
    assert bool(found.is_chosen.all())
    assert float(found.weights.min()) == 1.0
    with pytest.raises(OptionError, match="a routing without logits"):
        _ = found.balance_loss
    with pytest.raises(OptionError, match="pass budget="):
        _ = router(top_p=0.5)(x).budget_loss


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({}, OptionError, "one of top_k, top_p and threshold must be given, got none of them"),
        ({"top_k": 2, "top_p": 0.5}, OptionError, "got top_k and top_p"),
        ({"top_k": 8}, ShapeError, "at most the number of routed heads, 7, got 8"),
        ({"top_k": 6, "always_on": 2}, ShapeError, "at most the number of routed heads, 5"),
        ({"top_k": 0}, ShapeError, "top_k must be at least 1, got 0"),
        ({"top_k": 2, "k_max": 3}, OptionError, "k_max 3 and budget None; use top_p or threshold"),
        ({"top_k": 2, "budget": 3.0}, OptionError, "have no effect"),
        ({"top_p": 1.5}, OptionError, "top_p must be a probability, more than 0 and at most 1, got 1.5"),
        ({"threshold": 0.0}, OptionError, "threshold must be a probability"),
        ({"top_p": 0.5, "k_min": 4, "k_max": 3}, ShapeError, "got k_min 4 and k_max 3"),
        ({"top_p": 0.5, "k_max": 8}, ShapeError, "k_min <= k_max <= 7 must hold"),
        ({"top_p": 0.5, "budget": -1.0}, OptionError, "budget must be positive"),
        ({"top_k": 2, "always_on": 7}, ShapeError, "always_on must be 0 to num_heads - 1 = 6, got 7"),
        ({"top_k": 2, "normalise": "some"}, OptionError, "normalise must be 'all' or 'chosen'"),
        ({"top_k": 2, "noise": -1.0}, OptionError, "noise must be a standard deviation"),
        ({"top_k": 2, "noise": None}, OptionError, "noise must be a standard deviation of at least 0, got None"),
        ({"top_k": 2, "k_min": True}, ShapeError, "k_min must be an integer, got True"),
        ({"threshold": 0.5, "k_min": None}, ShapeError, "k_min must be an integer, got None"),
        ({"top_p": 0.5, "always_on": 2, "budget": 5.5}, OptionError, "at most the number of routed heads, 5, got 5.5"),
    ],
)
def test_options_are_checked(options, error, words):
    with pytest.raises(error, match=words):
        HeadRouter(EMBED, HEADS, **options)
