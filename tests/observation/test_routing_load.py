"""Observed routed heads: statistics of the selected rows, load, gate weights and co-selection."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polyhead
from polyhead import Mask
from polyhead.errors import ShapeError
from polyhead.layers.variants import RoutedHeads
from polyhead.layers.variants.routed.router import Routing
from polyhead.observation import Contributions, RoutingCounts, RoutingLoad, find_projections, load, save
from tests.layers.head_formula import earlier
from tests.layers.variants.routed_formula import routed_formula, scramble

BATCH, LENGTH, EMBED, HEADS = 3, 13, 20, 5
DOUBLE = torch.float64
SHAPES: dict[str, dict[str, Any]] = {
    "shared": {"top_k": 2, "num_kv_heads": 2},
    "shared, top_p": {"top_p": 0.6},
    "full": {"shape": "full", "top_k": 2, "always_on": 1},
}
shapes = pytest.mark.parametrize("options", SHAPES.values(), ids=SHAPES)


def make(options: dict[str, Any]) -> nn.Module:
    layer = RoutedHeads(EMBED, HEADS, head_dim=4, causal=True, dtype=DOUBLE, **options)
    return nn.ModuleDict({"attention": scramble(layer).eval()})


def tokens(batch: int = BATCH) -> Tensor:
    return torch.randn(batch, LENGTH, EMBED, dtype=DOUBLE)


@shapes
def test_observed_statistics_are_those_of_the_weights_of_chosen_rows(options):
    model, x = make(options), tokens()
    layer, lengths = model["attention"], [LENGTH, 6, 1]
    real = torch.arange(LENGTH) < torch.tensor(lengths)[:, None]
    plain = layer(x, mask=Mask.lengths(lengths))
    with polyhead.observe(model, statistics=["entropy", "confidence", "mean_distance"]) as session:
        watched = layer(x, mask=Mask.lengths(lengths))
    torch.testing.assert_close(watched.output, plain.output)  # another backend may have served it
    assert watched.statistics is None
    visible = earlier(LENGTH) & real[:, None] & real[..., None]
    _, weights = routed_formula(layer, x, plain.routing, visible=visible)
    looked = weights.sum(-1) > 0.5  # [batch, rows, queries]
    distance = (torch.arange(LENGTH) - torch.arange(LENGTH)[:, None]).abs()
    table = session.profile
    for name, rows in (
        ("entropy", -torch.special.xlogy(weights, weights).sum(-1)),
        ("confidence", weights.amax(-1)),
        ("mean_distance", (weights * distance).sum(-1)),
    ):
        expected = torch.where(looked, rows, 0.0).sum((0, 2)) / looked.sum((0, 2))
        found = torch.as_tensor(table[name], dtype=DOUBLE)
        torch.testing.assert_close(found, expected, msg=lambda text, name=name: f"{name}: {text}")
    assert torch.equal(torch.as_tensor(table["tokens"], dtype=DOUBLE), looked.sum((0, 2)).double())


@shapes
def test_routing_is_gathered_over_real_tokens(options):
    model, x = make(options), tokens()
    layer, lengths = model["attention"], [LENGTH, 6, 1]
    with polyhead.observe(model, collect=[RoutingLoad()]) as session:
        routing = layer(x, mask=Mask.lengths(lengths)).routing
    (collected,) = session.observations.collected.values()
    found = collected["routing"].counts
    real = torch.arange(LENGTH) < torch.tensor(lengths)[:, None]
    chosen = routing.is_chosen[real].double()
    assert float(found.tokens) == sum(lengths)
    torch.testing.assert_close(found.load, chosen.sum(0) / chosen.sum())
    both = torch.einsum("ti,tj->ij", chosen, chosen)
    torch.testing.assert_close(found.co_selection, both / chosen.sum(0)[:, None], equal_nan=True)
    likely = torch.softmax(routing.logits[real], -1)
    entropy = -(likely * likely.log()).sum(-1)
    torch.testing.assert_close(found.gate_entropy.mean, entropy.mean())
    torch.testing.assert_close(found.gate_entropy.std, entropy.std(correction=0))
    torch.testing.assert_close(found.heads_per_token.mean, chosen.sum(-1).mean())
    weights = torch.zeros(BATCH, LENGTH, HEADS, dtype=DOUBLE).scatter_add(2, routing.heads, routing.weights)[real]
    torch.testing.assert_close(found.mean_weight, weights.sum(0) / chosen.sum(0), equal_nan=True)


def test_any_split_merged_in_any_order_equals_one_pass():
    layer, x = make(SHAPES["shared, top_p"])["attention"], tokens(6)
    whole = RoutingCounts.empty(HEADS).update(layer(x).routing)
    parts = [RoutingCounts.empty(HEADS).update(layer(part).routing) for part in x.split([1, 3, 2])]
    merged = parts[2].merge(parts[0]).merge(parts[1]).merge(RoutingCounts.empty(HEADS))
    for name, expected in whole.state().items():
        torch.testing.assert_close(merged.state()[name], expected)
        assert torch.equal(whole.with_state(merged.state()).state()[name], merged.state()[name])
    with pytest.raises(ShapeError, match="got 5 and 4"):
        whole.merge(RoutingCounts.empty(4))
    with pytest.raises(ShapeError, match="must have 4 heads, got 5"):
        RoutingCounts.empty(4).update(layer(x).routing)


def test_a_routing_without_a_gate_has_no_entropy():
    found = RoutingCounts.empty(HEADS).update(Routing.every_head(BATCH, LENGTH, HEADS, tokens()))
    assert found.load.tolist() == [1 / HEADS] * HEADS
    assert bool(found.gate_entropy.mean.isnan())


def test_observations_go_through_a_file(tmp_path):
    model = make(SHAPES["shared"])
    with polyhead.observe(model, collect=[RoutingLoad()]) as session:
        model["attention"](tokens())
    save(tmp_path / "seen.safetensors", session.observations)
    (there,) = load(tmp_path / "seen.safetensors", collect=[RoutingLoad()]).collected.values()
    (here,) = session.observations.collected.values()
    for name, expected in here["routing"].state().items():
        assert torch.equal(there["routing"].state()[name], expected)


def test_layers_without_routing_have_no_routing_state():
    layer = polyhead.MultiHeadAttention(16, 4)
    with polyhead.observe(layer, collect=[RoutingLoad()]) as session:
        layer(torch.randn(1, 3, 16))
    (collected,) = session.observations.collected.values()
    assert collected["routing"].counts is None


@shapes
def test_a_head_is_gated_by_the_session(options):
    model, x = make(options), tokens()
    layer = model["attention"]
    rows = HEADS * layer.rows_per_head
    routing = layer(x).routing
    gate = torch.ones(rows, dtype=DOUBLE)
    gate[1::HEADS] = 0.0
    with polyhead.observe(model, statistics=False) as session:
        session.gates["attention", "self"] = gate
        watched = layer(x).output
    torch.testing.assert_close(watched, layer(x, head_gate=gate).output)
    without = Routing(routing.heads, routing.weights * (routing.heads != 1), HEADS, counts=routing.counts)
    torch.testing.assert_close(watched, layer(x, routing=without).output)


@shapes
def test_projections_match_the_heads(options):
    model, x = make(options), tokens(1)
    (head_projections,) = find_projections(model, lambda: model["attention"](x)).values()
    layer = model["attention"]
    seen = []
    layer._listener = seen.append
    layer(x, logsumexp=True)
    del layer._listener
    (attended,) = seen
    with torch.no_grad():
        rows = layer.rows_per_head
        bias = layer.query_bias.unflatten(1, (rows, -1)).transpose(0, 1).flatten(0, 1)
        query = torch.einsum("bnd,hdc->bhnc", x, head_projections.query) + bias[:, None]
        chosen = attended.routing.is_chosen.transpose(1, 2).repeat(1, rows, 1)
        torch.testing.assert_close(attended.query, query * chosen[..., None])
        weights = torch.zeros(1, LENGTH, HEADS, dtype=DOUBLE)
        weights = weights.scatter_add(2, attended.routing.heads, attended.routing.weights)
        factor = weights.transpose(1, 2).repeat(1, rows, 1)[..., None]
        output = (
            torch.einsum("bhnc,hcd->bnd", attended.result.output * factor, head_projections.output) + layer.output_bias
        )
        torch.testing.assert_close(output, layer(x).output)


def test_collectors_receive_the_weights_of_selected_rows():
    model, x = make(SHAPES["full"]), tokens()
    layer, seen = model["attention"], []
    layer._listener = seen.append
    result = layer(x, logsumexp=True)
    del layer._listener
    _, weights = routed_formula(layer, x, result.routing, visible=earlier(LENGTH))
    found = seen[0].profile(received=True).received
    torch.testing.assert_close(found.double(), weights.sum(2), rtol=1e-5, atol=1e-5)
    with polyhead.observe(model, collect=[Contributions()]):
        layer(x)
