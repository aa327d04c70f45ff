"""The free forms, padded and uneven: heads are pruned from all layers together, by the pruning order of each layer."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from polyhead.errors import OptionError
from polyhead.surgery.options import Target
from polyhead.surgery.selection.budgets import RemovedHeads, SizeCounter, check_reachable, describe_removed
from polyhead.surgery.selection.criteria import Orders, PruningOrder, choose_heads, orders_by, pruning_order
from polyhead.surgery.selection.evidence import Evidence


class FreeSelection:
    """Heads to prune for a number of heads or a target, over all layers.

    The unit of an order is a head or, with `by_kv_heads`, a KV head with all query heads that read it, which shrinks
    the KV cache of grouped layers. Every layer keeps at least one unit.
    """

    def __init__(self, evidence: Evidence, *, criterion: str = "compensated", by_kv_heads: bool = False) -> None:
        """Compute the pruning orders by a criterion, one of `criteria`; whole KV heads only if a layer is grouped."""
        self.evidence = evidence
        self.size = SizeCounter(evidence.model, evidence.layers)
        self.by_kv_heads = by_kv_heads and any(
            len(set(heads.key_heads)) < heads.num_heads for heads in evidence.heads.values()
        )
        if self.by_kv_heads and criterion != "compensated":
            raise OptionError(f"pruning KV heads needs the criterion compensated, got {criterion!r}")
        self.orders = (
            _orders_of_kv_heads(evidence) if self.by_kv_heads else orders_by(criterion, evidence, weighting="token")
        )

    def for_target(self, target: Target) -> RemovedHeads:
        """Return the first heads in pruning order that suffice for a target; raise if it cannot be reached."""
        return self.removed(self.fewest(target, self.orders), self.orders)

    def fewest(self, target: Target, orders: Mapping[str, PruningOrder]) -> int:
        """Return the least number of units to prune in these orders for a target; raise if it cannot be reached."""
        check_reachable(target, self.size(self.removed(self.steps, orders)))
        numbers = range(1, self.steps + 1)
        return numbers[
            bisect_left(numbers, True, key=lambda steps: self.size(self.removed(steps, orders)).reaches(target))
        ]

    @property
    def steps(self) -> int:
        """Number of units that can be pruned: all but the one that each layer keeps."""
        return sum(len(order.heads) for order in self.orders.values())

    @property
    def units(self) -> int:
        """Number of heads, or of KV heads, including those that cannot be pruned."""
        heads = self.evidence.heads.values()
        return sum(
            len(set(layer_heads.key_heads)) if self.by_kv_heads else layer_heads.num_heads for layer_heads in heads
        )

    def removed(self, steps: int, orders: Mapping[str, PruningOrder]) -> RemovedHeads:
        """Return the heads to prune, by layer, if this many units are pruned from all layers together."""
        return {path: self.heads_of(path, units) for path, units in choose_heads(orders, steps).items()}

    def heads_of(self, path: str, units: Sequence[int]) -> tuple[int, ...]:
        """Return the query heads of an order's units: the units themselves, or the readers of KV heads."""
        if not self.by_kv_heads:
            return tuple(sorted(units))
        readers = self.evidence.heads[path].readers
        return tuple(sorted(head for key in units for head in readers[key]))

    def summary(self, removed: Mapping[str, Sequence[int]]) -> str:
        """Describe how many heads are pruned."""
        return describe_removed(self.evidence.heads, removed)


def _orders_of_kv_heads(evidence: Evidence) -> Orders:
    """Return the order of each layer's KV heads by the error without all their readers, after compensation."""
    layers = evidence.weighted()
    return {
        path: pruning_order(layers[path].moments, heads, root=layers[path].root, together=heads.readers)
        for path, heads in evidence.heads.items()
    }
