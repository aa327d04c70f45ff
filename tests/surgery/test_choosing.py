"""Which heads go: orders held to losses solved anew, and what is chosen of a whole model held to all that could be."""

from __future__ import annotations

import itertools

import pytest
import torch

from polyhead.errors import OptionError, ShapeError
from polyhead.layers import MultiHeadAttention
from polyhead.surgery import find_layers, gather_moments
from polyhead.surgery.choosing import PruningOrder, choose_heads, energies, order_by_score, plain_order, pruning_order
from polyhead.surgery.head_weights import read_heads
from polyhead.surgery.repair import Problem
from polyhead.surgery.uniform import fits_stock, uniform_heads
from tests.surgery.gated import FAMILIES, build
from tests.surgery.test_repair import Block, block, outputs_of_heads, text

ROOT = torch.randn(35, 11, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def gathered(model: Block, batches):
    (layer,) = find_layers(model)
    return gather_moments(model, batches)["attention"], read_heads(model, layer)


def grouped(heads: int = 6, kv_heads: int = 3) -> Block:
    return Block(MultiHeadAttention(35, heads, num_kv_heads=kv_heads, head_dim=5, bias=False).double())


def loss_without(problem: Problem, gone, root=None) -> float:
    """The mean square of what is missing after repair, solved anew, in a metric."""
    count = len(problem.mean) // problem.head_width
    kept = [head for head in range(count) if head not in gone]
    off = problem.matrix.clone()
    off[problem.channels(kept)] -= problem.solve(kept)[0]
    seen = off if root is None else off @ root
    return float((seen * (problem.products @ seen)).sum())


@pytest.mark.parametrize("root", [None, ROOT])
def test_orders_in_a_metric_cost_what_solving_anew_says(root):
    model = block(bias=False)
    moments, heads = gathered(model, text())
    order = pruning_order(moments, heads, ridge=1e-10, root=root)
    problem = Problem.of(moments, heads, 1e-10)
    for step in range(4):
        gone = order.heads[:step]
        costs = {head: loss_without(problem, (*gone, head), root) for head in range(5) if head not in gone}
        assert min(costs, key=costs.get) == order.heads[step]
        assert order.losses[step] == pytest.approx(costs[order.heads[step]], rel=1e-5)
    with pytest.raises(ShapeError, match=r"root must be \[35, any\]"):
        pruning_order(moments, heads, root=torch.eye(7))


def test_plain_losses_are_the_mean_square_of_what_is_no_longer_written():
    model, batches = block(), text()
    moments, heads = gathered(model, batches)
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
    moments, heads = gathered(model, text())
    problem = Problem.of(moments, heads, 1e-4)
    groups = [[head for head in range(6) if heads.key_heads[head] == key] for key in range(3)]
    order = pruning_order(moments, heads, together=groups)
    assert len(order.heads) == 2
    assert order.heads[0] == min(range(3), key=lambda key: loss_without(problem, groups[key]))
    even = pruning_order(moments, heads, least=1)
    assert sorted(heads.key_heads[head] for head in even.heads) == [0, 1, 2]


@pytest.mark.parametrize(("heads_left", "keys_left", "options"), [(3, 3, 8), (4, 2, 3), (2, 2, 12), (2, 1, 3)])
def test_uniform_heads_are_the_cheapest_of_all_sets_in_equal_groups(heads_left, keys_left, options):
    model = grouped()
    moments, heads = gathered(model, text())
    problem = Problem.of(moments, heads, 1e-10)
    found = uniform_heads(moments, heads, heads_left, keys_left, ridge=1e-10)
    size = heads_left // keys_left
    sets = []
    for gone in itertools.combinations(range(6), 6 - heads_left):
        left = [sum(heads.key_heads[head] == key for head in range(6) if head not in gone) for key in range(3)]
        if sorted(left) == [0] * (3 - keys_left) + [size] * keys_left:
            sets.append(gone)
    assert len(sets) == options
    assert found == min(sets, key=lambda gone: loss_without(problem, gone))


def test_uniform_heads_of_many_sets_go_one_after_the_other(monkeypatch):
    from polyhead.surgery import uniform

    monkeypatch.setattr(uniform, "MOST_SETS", 0)
    moments, heads = gathered(grouped(), text())
    for left, keys in ((3, 3), (4, 2), (2, 2)):
        gone = uniform_heads(moments, heads, left, keys)
        counts = [sum(heads.key_heads[head] == key for head in range(6) if head not in gone) for key in range(3)]
        assert sorted(counts) == [0] * (3 - keys) + [left // keys] * keys
    with pytest.raises(OptionError, match=r"6 heads over 3 key heads can end with fewer of both.*got 5 over 3"):
        uniform_heads(moments, heads, 5, 3)


def test_what_a_stock_class_holds_is_known_before_a_weight_is_touched():
    llama, bert = build(FAMILIES["llama"]), build(FAMILIES["bert"])
    for model, even in ((llama, True), (bert, False)):
        layers = [layer for layer in find_layers(model) if not layer.refusals]
        count = layers[0].layout.num_heads
        assert count == 4
        groups = [[layer.layout.key_head(head) for head in range(count)] for layer in layers]
        gone = {
            layer.path: tuple(keys.index(key) for key in set(keys)) for layer, keys in zip(layers, groups, strict=True)
        }
        gone = gone if even else {layer.path: (0, 1) for layer in layers}
        assert fits_stock(model, gone) == even
        assert not fits_stock(model, {layers[0].path: gone[layers[0].path]})
        assert fits_stock(model, {})
