"""Pruning orders against losses solved directly, and choices against exhaustive search."""

from __future__ import annotations

import itertools

import pytest
import torch

from polyhead.errors import OptionError, ShapeError
from polyhead.surgery.compensation.least_squares import OutputRegression
from polyhead.surgery.selection.criteria import (
    PruningOrder,
    choose_heads,
    energies,
    order_by_score,
    plain_order,
    pruning_order,
)
from tests.surgery.blocks import block, grouped, loss_without, of_layer, outputs_of_heads, text

ROOT = torch.randn(35, 11, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@pytest.mark.parametrize(("root", "bias"), [(None, False), (ROOT, False), (None, True)])
def test_orders_in_a_metric_cost_what_solving_anew_says(root, bias):
    model = block(bias=bias)
    moments, heads = of_layer(model, text())
    order = pruning_order(moments, heads, ridge=1e-10, root=root)
    problem = OutputRegression.of(moments, heads, 1e-10)
    assert len(order.heads) == 4
    for step in range(4):
        removed = order.heads[:step]
        costs = {head: loss_without(problem, (*removed, head), root) for head in range(5) if head not in removed}
        assert min(costs, key=costs.get) == order.heads[step]
        assert order.losses[step] == pytest.approx(costs[order.heads[step]], rel=1e-5)
    with pytest.raises(ShapeError, match=r"root must be \[35, any\]"):
        pruning_order(moments, heads, root=torch.eye(7))


def test_plain_losses_are_the_mean_square_of_what_is_no_longer_written():
    model, batches = block(), text()
    moments, heads = of_layer(model, batches)
    rows = outputs_of_heads(model, batches)
    written = torch.einsum("thc,hce->the", rows.unflatten(1, (5, 7)), heads.output)
    expected = torch.einsum("the,tke->hk", written, written) / len(rows)
    torch.testing.assert_close(energies(moments, heads), expected)
    order = plain_order(moments, heads)
    for step in range(1, 5):
        missing = written[:, list(order.heads[:step])].sum(1)
        assert order.losses[step - 1] == pytest.approx(float(missing.square().sum() / len(rows)))
    seen = plain_order(moments, heads, root=ROOT)
    missing = written[:, list(seen.heads[:2])].sum(1) @ ROOT
    assert seen.losses[1] == pytest.approx(float(missing.square().sum() / len(rows)))


@pytest.mark.parametrize("seed", range(4))
def test_no_other_choice_of_beginnings_loses_less(seed):
    generator = torch.Generator().manual_seed(seed)
    orders, weights = {}, {}
    for name, length in (("a", 3), ("b", 2), ("c", 4)):
        steps = torch.rand(length, generator=generator, dtype=torch.float64) - 0.1
        orders[name] = PruningOrder(tuple(range(length)), tuple(steps.cumsum(0).tolist()))
        weights[name] = float(torch.rand((), generator=generator))
    for count in range(10):
        chosen = choose_heads(orders, count, weights=weights)

        def cost(numbers) -> float:
            return sum(
                weights[name] * orders[name].losses[number - 1]
                for name, number in zip("abc", numbers, strict=True)
                if number
            )

        every = [x for x in itertools.product(range(4), range(3), range(5)) if sum(x) == count]
        found = tuple(len(chosen.get(name, ())) for name in "abc")
        assert sum(found) == count
        assert cost(found) == pytest.approx(min(map(cost, every)))


def test_scores_become_orders_least_first():
    assert order_by_score([3.0, -1.0, 2.0]) == PruningOrder((1, 2), (-1.0, 1.0))
    assert choose_heads({"a": order_by_score([3.0, -1.0, 2.0])}, 0) == {}


def test_readers_of_a_key_head_go_together_or_equally():
    model = grouped()
    moments, heads = of_layer(model, text())
    problem = OutputRegression.of(moments, heads, 1e-4)
    groups = [[head for head in range(6) if heads.key_heads[head] == key] for key in range(3)]
    order = pruning_order(moments, heads, together=groups)
    assert len(order.heads) == 2
    assert order.heads[0] == min(range(3), key=lambda key: loss_without(problem, groups[key]))
    even = pruning_order(moments, heads, least=1)
    assert sorted(heads.key_heads[head] for head in even.heads) == [0, 1, 2]


def test_heads_of_a_model_are_chosen_where_they_cost_least():
    orders = {"a": PruningOrder((2, 0), (1.0, 9.0)), "b": PruningOrder((1, 3, 0), (2.0, 3.0, 20.0))}
    assert choose_heads(orders, 3) == {"a": (2,), "b": (1, 3)}
    assert choose_heads(orders, 2, weights={"a": 9.0, "b": 1.0}) == {"b": (1, 3)}
    assert choose_heads(orders, 5) == {"a": (0, 2), "b": (0, 1, 3)}
    with pytest.raises(OptionError, match="count must be 0 to 5, so that each layer keeps a head, got 6"):
        choose_heads(orders, 6)
    with pytest.raises(OptionError, match="weights must have one entry per layer"):
        choose_heads(orders, 1, weights={"a": 1.0})
