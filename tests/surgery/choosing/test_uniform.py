"""Heads that go so that every layer ends alike: the cheapest of all such sets, and what a stock class holds."""

from __future__ import annotations

import itertools

import pytest

from polyhead.errors import OptionError
from polyhead.surgery import find_layers
from polyhead.surgery.choosing import uniform
from polyhead.surgery.choosing.uniform import fits_stock, uniform_heads
from polyhead.surgery.repair.least_squares import Problem
from tests.surgery.blocks import grouped, loss_without, of_layer, text
from tests.surgery.gated import FAMILIES, build


@pytest.mark.parametrize(("heads_left", "keys_left", "options"), [(3, 3, 8), (4, 2, 3), (2, 2, 12), (2, 1, 3)])
def test_uniform_heads_are_the_cheapest_of_all_sets_in_equal_groups(heads_left, keys_left, options):
    model = grouped()
    moments, heads = of_layer(model, text())
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
    monkeypatch.setattr(uniform, "MOST_SETS", 0)
    moments, heads = of_layer(grouped(), text())
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
