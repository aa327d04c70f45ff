"""Attention that a model writes as a softmax by hand is observed exactly, or listed with the reason why it is not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import polyhead
from polyhead.errors import OptionError
from polyhead.observation import AttentionMaps, Contributions, find_projections
from tests.observation.direct_models import DIM, HEADS, WIDTH, join_heads, weights_of
from tests.observation.from_weights import Expected, assert_table
from tests.observation.softmax_models import LAYOUTS, ByHand, four_axes, merged, scores, upcast
from tests.observation.test_intercepted_calls import all_rows, build, process_state

TOKENS, SOURCE = 7, 11
CAUSAL = torch.zeros(1, 1, TOKENS, TOKENS).masked_fill(~torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril(), -1e9)


def tokens(batch: int = 2, length: int = TOKENS, seed: int = 1) -> torch.Tensor:
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(seed)).double()


def observed(model: nn.Module, *inputs: torch.Tensor, **options):
    """Run a model with and without a session, whose outputs must be equal."""
    with torch.no_grad():
        before = model(*inputs)
        with polyhead.observe(model, **options) as session:
            assert torch.equal(model(*inputs), before)
    return session


# ---- layouts


@pytest.mark.parametrize("batch", [2, HEADS])  # with as many sequences as heads, sizes do not tell them apart
@pytest.mark.parametrize("attend", LAYOUTS, ids=lambda x: x.__name__)
def test_statistics_are_those_of_the_materialised_weights(attend, batch):
    model, x = build(ByHand(attend)), tokens(batch)
    model.mask = CAUSAL
    query, key, _ = (part.detach() for part in model.heads(x))
    expected = Expected()
    expected.add([weights_of(query, key, CAUSAL[0, 0] == 0)], *all_rows(batch, TOKENS))
    session = observed(model, x)
    assert session.skipped == []
    assert session.materialised == ["ByHand"]
    assert_table(session.profile, {"self": expected})
    logits = (query @ key.mT * DIM**-0.5).masked_fill(CAUSAL < 0, -torch.inf).amax(-1)
    torch.testing.assert_close(session.profile["max_logit"], logits.mean((0, 2)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("attend", LAYOUTS, ids=lambda x: x.__name__)
def test_head_outputs_and_gates_are_those_of_each_head(attend):
    model, x = build(ByHand(attend)), tokens(HEADS)
    query, key, value = (part.detach() for part in model.heads(x))
    output = weights_of(query, key) @ value
    session = observed(model, x, collect=[Contributions()])
    (states,) = session.observations.collected.values()
    torch.testing.assert_close(
        states["contributions"].moments.mean.flatten().double(), output.mean((0, 2)).flatten(), rtol=1e-5, atol=1e-6
    )
    gate = torch.tensor([1.0, 0.0, 2.0]).double()
    expected = model.out(join_heads(output * gate[:, None, None]))
    with torch.no_grad(), polyhead.observe(model) as session:
        session.gates["ByHand", "self"] = gate
        torch.testing.assert_close(model(x), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("attend", [x for x in LAYOUTS if x.__name__ != "filled"], ids=lambda x: x.__name__)
def test_cross_attention(attend):
    model, x, context = build(ByHand(attend)), tokens(), tokens(length=SOURCE, seed=2)
    query, key, _ = (part.detach() for part in model.heads(x, context))
    expected = Expected(cross=True)
    expected.add([weights_of(query, key)], *all_rows(2, TOKENS))
    session = observed(model, x, context)
    assert session.skipped == []
    assert_table(session.profile, {"cross": expected})


@pytest.mark.parametrize("low", [-torch.inf, -1e4, -1e9, torch.finfo(torch.float64).min])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_recognised_by_any_masking_number(low, side):
    model, x = build(ByHand(merged)), tokens()
    real = torch.ones(2, TOKENS, dtype=torch.bool)
    real[1, : 3 if side == "left" else TOKENS] = side == "right"
    real[1, TOKENS - 2 :] = side == "left"
    model.mask = torch.zeros(2, 1, 1, TOKENS).double().masked_fill(~real[:, None, None], low)
    query, key, _ = (part.detach() for part in model.heads(x))
    expected = Expected()
    expected.add([weights_of(query, key, real[:, None, None])], real, real.to(torch.uint8).argmax(-1))
    assert_table(observed(model, x).profile, {"self": expected})


def test_projections_are_found_by_queries_and_keys_of_the_product():
    model = build(ByHand(merged))
    (found,) = find_projections(model, lambda: model(tokens(1))).values()
    assert found.query is not None
    torch.testing.assert_close(found.query[1].double(), model.q.weight.detach()[DIM : 2 * DIM].T)
    torch.testing.assert_close(found.key[2].double(), model.kv.weight.detach()[2 * DIM : 3 * DIM].T)
    torch.testing.assert_close(found.output[0].double(), model.out.weight.detach()[:, :DIM].T)


def test_maps_are_those_of_the_weights():
    model, x = build(ByHand()), tokens()
    query, key, _ = (part.detach() for part in model.heads(x))
    session = observed(model, x, collect=[AttentionMaps(TOKENS)])
    (states,) = session.observations.collected.values()
    torch.testing.assert_close(states["maps"].map, weights_of(query, key).sum(0), rtol=1e-5, atol=1e-5)


# ---- variants


class Sinks(ByHand):
    def __init__(self):
        super().__init__(self.with_sinks)
        self.sinks = nn.Parameter(torch.zeros(HEADS))

    def with_sinks(self, q, k, v, m):
        column = self.sinks.reshape(1, -1, 1, 1).expand(len(q), -1, q.shape[2], -1)
        weights = torch.cat([scores(q, k) + m, column], -1).softmax(-1)[..., :-1]
        return join_heads(weights @ v)


def test_a_removed_column_of_learned_sinks():
    model, x = build(Sinks()), tokens()
    nn.init.normal_(model.sinks)
    model.mask = CAUSAL
    query, key, _ = (part.detach() for part in model.heads(x))
    logits = (query @ key.mT * DIM**-0.5).masked_fill(CAUSAL < 0, -torch.inf)
    column = model.sinks.detach().reshape(1, -1, 1, 1).expand(2, -1, TOKENS, -1)
    expected = Expected(sinks=True)
    expected.add([torch.cat([logits, column], -1).softmax(-1)[..., :-1]], *all_rows(2, TOKENS))
    session = observed(model, x, statistics=("entropy", "mean_distance", "learned_sink_mass"))
    assert session.skipped == []
    assert_table(session.profile, {"self": expected})
    assert session.profile["learned_sink_mass"].gt(0).all()


def test_statistics_precede_dropout_and_head_masks():
    def masked(q, k, v, m):
        factors = torch.tensor([0.5, 0.0, 1.0]).to(q)[None, :, None, None]
        return join_heads(F.dropout(scores(q, k).softmax(-1), 0.5, training=True) * factors @ v)

    x, plain = tokens(), build(ByHand())
    with torch.no_grad(), polyhead.observe(plain) as expected:
        plain(x)
    model = build(ByHand(masked))
    with torch.no_grad(), polyhead.observe(model) as session:
        model(x)
    assert torch.equal(session.profile["entropy"], expected.profile["entropy"])


def test_in_half_precision_statistics_are_of_the_upcast_logits():
    model, x = build(ByHand(upcast)), tokens()
    with torch.no_grad(), polyhead.observe(model, statistics="entropy") as exact:
        model(x)
    half = build(ByHand(upcast)).bfloat16()
    with torch.inference_mode(), polyhead.observe(half, statistics="entropy") as session:
        half(x.bfloat16())
    assert session.skipped == []
    torch.testing.assert_close(session.profile["entropy"], exact.profile["entropy"], rtol=0.02, atol=0.02)


def test_kept_statistics_have_the_gradient_of_the_weights():
    model, x = build(ByHand(merged)).train(), tokens()
    query, key, _ = model.heads(x)
    weights = weights_of(query, key)
    expected = torch.autograd.grad(-torch.xlogy(weights, weights).sum(-1).mean(), model.q.weight)[0]
    with polyhead.observe(model, statistics="entropy", keep_statistics=True) as session:
        model(x)
        actual = torch.autograd.grad(session.statistics.mean("entropy").mean(), model.q.weight)[0]
        assert session.statistics["ByHand"].output.shape == (2, HEADS, TOKENS, DIM)
    torch.testing.assert_close(actual, expected)


# ---- what looks like attention, and what does not


def twice(q, k, v, m):
    weights = scores(q, k).softmax(-1)
    relative = torch.einsum("bhqk,qkd->bhqd", weights, v[0, 0][None].expand(TOKENS, -1, -1))
    return join_heads(weights @ v + relative)


def test_weights_that_are_multiplied_twice_have_no_head_outputs():
    model, x = build(ByHand(twice)), tokens()
    session = observed(model, x, collect=[Contributions()])
    assert len(session.profile) == HEADS
    (states,) = session.observations.collected.values()
    assert states["contributions"].moments is None
    with torch.no_grad(), polyhead.observe(model) as gated:
        gated.gates["ByHand", "self"] = torch.ones(HEADS)
        with pytest.raises(OptionError, match="gates need the whole output of a head, got a gate for 'ByHand'"):
            model(x)


def added_in_place(q, k, v, m):
    output = scores(q, k).softmax(-1) @ v
    output += v
    return join_heads(output)


def test_outputs_that_are_changed_in_place_are_not_read():
    session = observed(build(ByHand(added_in_place)), tokens(), collect=[Contributions()])
    (states,) = session.observations.collected.values()
    assert states["contributions"].moments is None
    assert len(session.profile) == HEADS


def over_heads(q, k, v, m):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # each token attends to its own heads
    return ((q @ k.mT).softmax(-1) @ v).flatten(2)


def linear(q, k, v, m):
    return join_heads(q.softmax(-1) @ (k.softmax(-2).mT @ v))


def channels(q, k, v, m):
    return join_heads(((q.mT @ k).softmax(-1) @ v.mT).mT)


def talking(q, k, v, m):
    mixed = torch.einsum("bhqk,hg->bgqk", scores(q, k).softmax(-1), torch.ones(HEADS, HEADS).to(q))
    return join_heads(mixed @ v)


def renormalised(q, k, v, m):
    weights = scores(q, k).softmax(-1) ** 2
    return join_heads(weights / weights.sum(-1, keepdim=True) @ v)


def inverted(q, k, v, m):
    return join_heads(torch.div(torch.ones(TOKENS, 1).to(q), scores(q, k).softmax(-1)) @ v)


def in_place(q, k, v, m):
    weights = scores(q, k).softmax(-1)
    weights[..., 0] = 0
    return join_heads(weights @ v)


def through_a_view(q, k, v, m):
    weights = scores(q, k).softmax(-1)
    weights.detach().numpy()  # no change
    weights.flatten().mul_(0.5)
    return join_heads(weights @ v)


def overwritten(q, k, v, m):
    logits = scores(q, k)
    weights = logits.softmax(-1)
    logits.mul_(2)
    return join_heads(weights @ v)


def partly(q, k, v, m):
    return join_heads(scores(q, k).softmax(-1)[..., :3] @ v[:, :, :3])


def dropped_keys(q, k, v, m):
    weights = scores(q, k).softmax(-1)
    return join_heads(weights.masked_fill(weights < weights.mean(), 0.0) @ v)


def summed(q, k, v, m):
    return join_heads((scores(q, k).softmax(-1)[..., None] * v[:, :, None]).sum(3))


def additive(q, k, v, m):
    return join_heads((q[:, :, :, None] + k[:, :, None]).tanh().sum(-1).softmax(-1) @ v)


def over_queries(q, k, v, m):
    return join_heads(scores(q, k).softmax(-2) @ v)


def blocks(q, k, v, m):
    x = [part.unflatten(2, (1, -1))[:, :, :, :3] for part in (q,)]
    return join_heads((scores(x[0][:, :, 0], k).softmax(-1) @ v).repeat(1, 1, 3, 1)[:, :, :TOKENS])


NOT_READ = {
    over_heads: "over the heads",
    linear: "no products of queries and keys",
    channels: "its queries must be the tokens of an input",
    talking: "another axis than that of the softmax",
    renormalised: "changed by '.*pow",
    inverted: "changed by 'div'",
    in_place: "changed by '__setitem__'",
    through_a_view: "changed in place|changed by 'numpy'",
    overwritten: "overwritten after the softmax",
    partly: "only a part of its weights",
    dropped_keys: "changed by 'masked_fill'",
    summed: "not multiplied with values by matmul",
    additive: "no products of queries and keys",
    over_queries: "another axis than that of the softmax",
    blocks: "its queries must be the tokens of an input",
}


@pytest.mark.parametrize("attend", NOT_READ, ids=lambda x: x.__name__)
def test_what_is_not_understood_runs_as_it_is_and_is_listed(attend):
    session = observed(build(ByHand(attend)), tokens())
    assert len(session.profile) == 0
    reasons = " ".join(skipped.reason for skipped in session.skipped)
    assert any(part in reasons for part in NOT_READ[attend].replace(".*", "").split("|")), reasons


class NoAttention(nn.Module):
    """A classifier with a router, a codebook and a pointer to tokens."""

    def __init__(self):
        super().__init__()
        self.attn = ByHand()
        self.router, self.codes, self.head = (
            nn.Linear(WIDTH, 4),
            nn.Parameter(torch.randn(4, WIDTH)),
            nn.Linear(WIDTH, 5),
        )

    def forward(self, x):
        x = self.attn(x)
        gates = self.router(x).softmax(-1)
        x = x + gates @ self.codes
        return self.head(x).softmax(-1)


def test_routers_codebooks_and_classifiers_are_no_sites():
    session = observed(build(NoAttention()), tokens())
    assert [site.name for site in session.observations.calls] == ["attn"]
    assert session.skipped == []


# ---- the session


def test_a_product_in_a_module_of_its_own_belongs_to_the_module_of_the_softmax():
    class Product(nn.Module):
        def forward(self, left, right):
            return left @ right

    class Split(ByHand):
        def __init__(self):
            super().__init__(lambda q, k, v, m: join_heads(self.product(scores(q, k).softmax(-1), v)))
            self.product = Product()

    session = observed(build(nn.Sequential(Split())), tokens())
    assert session.materialised == ["0"]


def test_such_sites_are_marked_as_materialised():
    session = observed(build(nn.Sequential(ByHand(), ByHand())), tokens())
    assert "weights materialised by the model: slow" in repr(session)
    assert "weights materialised by the model: slow" in session.profile.note
    assert "(0, 1)" in session.profile.note


@pytest.mark.parametrize("kind", ["reentrant", "plain"])
def test_a_checkpointed_layer_counts_once_and_keeps_its_gradients(kind):
    model, x = build(nn.Sequential(ByHand(), ByHand(merged))).train(), tokens().requires_grad_()
    model(x).sum().backward()
    expected = model[0].q.weight.grad.clone()
    model.zero_grad()
    with polyhead.observe(model) as session:
        y = x
        for layer in model:
            y = torch.utils.checkpoint.checkpoint(layer, y, use_reentrant=kind == "reentrant")
        y.sum().backward()
    assert torch.equal(model[0].q.weight.grad, expected)
    assert session.profile["tokens"].eq(2 * TOKENS).all()


def test_nothing_of_the_process_changes():
    model, x = build(ByHand(four_axes)), tokens()
    before = process_state(model)
    observed(model, x)
    assert process_state(model) == before


def test_no_tensor_outlives_its_module():
    import weakref

    kept = []

    def noting(q, k, v, m):
        weights = scores(q, k).softmax(-1)
        kept.append(weakref.ref(weights))
        return join_heads(weights @ v)

    model = build(nn.Sequential(ByHand(noting), ByHand(noting)))
    model[1].register_forward_pre_hook(lambda module, inputs: kept.append(kept[0]() is None))
    with torch.no_grad(), polyhead.observe(model):
        model(tokens())
    assert kept[1] is True
    assert kept[2]() is None


class WeighedThenAttending(nn.Module):
    """Sums weighed by a softmax of features, as in deformable attention, a layer, and then attention by hand."""

    def __init__(self):
        super().__init__()
        self.weigh, self.project, self.attention = nn.Linear(WIDTH, 6), nn.Linear(4, WIDTH), ByHand()

    def forward(self, x, is_padding):
        weights = self.weigh(x).unflatten(-1, (1, 2, 3)).softmax(-1)  # [batch, tokens, 1, 2, 3]
        x = (weights[..., None] * x[..., None, None, None, :2]).sum(-2).flatten(2)
        return self.attention(self.project(x).masked_fill(is_padding[..., None], 0.0))


def test_what_a_layer_computes_from_weights_is_no_longer_followed():
    model, is_padding = build(WeighedThenAttending()), torch.zeros(2, TOKENS, dtype=torch.bool)
    session = observed(model, tokens(), is_padding)
    assert (session.materialised, session.skipped) == (["attention"], [])
    assert len(session.profile) == HEADS
