"""Moves between layers, budgets and sequential compensation, against results computed by hand."""

from __future__ import annotations

import pytest
import torch

from polyhead.errors import OptionError
from polyhead.surgery.compensation.least_squares import OutputProjection
from polyhead.surgery.selection.criteria import PruningOrder
from polyhead.surgery.selection.search import measured_orders, refined

LOSSES = {"a": (1.0, 2.0, 9.0), "b": (0.5, 4.0, 5.0), "c": (0.1, 0.3, 0.6)}


def projection_of(path: str, taken: int) -> OutputProjection:
    return OutputProjection(tuple(range(taken)), torch.zeros(1), torch.zeros(1))


def loss(outputs) -> float:
    """Independent layers, except that a and c are bad together."""
    own = sum(LOSSES[path][len(x.heads) - 1] for path, x in outputs.items())
    return 7.0 + own + (3.0 if "a" in outputs and "c" in outputs else 0.0)


def test_losses_are_measured_layer_by_layer():
    orders = {path: PruningOrder((2, 0, 1), (0.0, 0.0, 0.0)) for path in LOSSES}
    found = measured_orders(orders, projection_of, loss)
    assert {path: order.losses for path, order in found.items()} == {k: pytest.approx(v) for k, v in LOSSES.items()}
    assert all(order.heads == (2, 0, 1) for order in found.values())


def test_heads_move_to_where_the_model_loses_less():
    orders = {path: PruningOrder((2, 0, 1), losses) for path, losses in LOSSES.items()}
    counts, last, first = refined({"a": 2, "c": 2}, orders, projection_of, loss)
    assert first == pytest.approx(7 + 2 + 0.3 + 3)
    assert counts == {"b": 1, "c": 3}  # the best of all four
    assert last == pytest.approx(7 + 0.5 + 0.6)
    assert refined({"a": 2, "c": 2}, orders, projection_of, loss, tries=1)[0] == {"a": 2, "c": 2}
    with pytest.raises(OptionError, match="tries must be at least 1"):
        refined({}, orders, projection_of, loss, tries=0)


def test_only_moves_that_are_allowed_are_measured():
    orders = {path: PruningOrder((2, 0, 1), losses) for path, losses in LOSSES.items()}
    requested = []

    def allowed(counts) -> bool:
        requested.append(counts)
        return counts["a"] >= 1

    seen = []

    def measure(outputs) -> float:
        seen.append({path: len(x.heads) for path, x in outputs.items()})
        return loss(outputs)

    counts, *_ = refined({"a": 2, "c": 2}, orders, projection_of, measure, allowed=allowed)
    assert counts == {"a": 1, "c": 3}  # the best of those that leave one in a
    assert all(counts.get("a") for counts in seen)
    assert any(not counts["a"] for counts in requested)
    seen.clear()
    refined({"a": 2}, orders, projection_of, measure, allowed=lambda counts: False)
    assert seen == [{"a": 2}]
