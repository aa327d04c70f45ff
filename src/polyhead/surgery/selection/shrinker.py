"""Shrink a model to a budget, with any number of remaining heads per layer."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence

import torch

from polyhead.costs import Workload
from polyhead.errors import OptionError
from polyhead.surgery.compensation.masked_trial import Outputs
from polyhead.surgery.selection.budgets import SEEDS, Choice, Losses, RemovedHeads, SearchResult, Target, Trials
from polyhead.surgery.selection.criteria import orders_by
from polyhead.surgery.selection.measurements import Evidence, Weighting
from polyhead.surgery.selection.orders import PruningOrder, choose_heads, order_by_score, pruning_order
from polyhead.surgery.selection.quality import Quality
from polyhead.surgery.selection.search import TRIES, measured_orders, refined

SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)


class Shrinker(Trials):
    """Choose the heads of a model to prune for a target, by the pruning order of each layer.

    The unit of an order is a head or, with `by_key_heads`, a KV head with all query heads that read it, which shrinks
    the KV cache of grouped layers. Every layer keeps at least one unit.
    """

    searches = "moved between layers"  # what a search does with heads, for the summary: "3 heads moved between layers"

    def __init__(
        self,
        evidence: Evidence,
        *,
        criterion: str = "compensated",
        weighting: Weighting = "token",
        by_key_heads: bool = False,
        work: Workload | None = None,
    ) -> None:
        """Compute the pruning orders.

        Args:
            criterion: score that orders the heads, one of `criteria`.
            weighting: how errors of the layer outputs are weighted, as in `Evidence`.
            by_key_heads: prune whole KV heads; without effect if no layer is grouped.
            work: the call whose FLOPs are counted, 512 tokens by default.
        """
        super().__init__(evidence, weighting=weighting, work=work)
        self.criterion = criterion
        self.by_key_heads = by_key_heads and any(
            len(set(heads.key_heads)) < heads.num_heads for heads in evidence.heads.values()
        )
        if self.by_key_heads and criterion != "compensated":
            raise OptionError(f"pruning KV heads needs the criterion compensated, got {criterion!r}")
        self.orders = self._orders()

    @property
    def steps(self) -> int:
        """Number of units that can be pruned: all but the one that each layer keeps."""
        return sum(len(order.heads) for order in self.orders.values())

    def _orders(self) -> dict[str, PruningOrder]:
        evidence = self.evidence
        if not self.by_key_heads:
            return orders_by(self.criterion, evidence, weighting=self.weighting)
        return {
            path: pruning_order(
                evidence.moments_for(self.weighting)[path],
                heads,
                ridge=evidence.ridge,
                root=evidence.root(path, self.weighting),
                together=heads.readers,
            )
            for path, heads in evidence.heads.items()
        }

    def removed(self, steps: int, orders: Mapping[str, PruningOrder] | None = None) -> RemovedHeads:
        """Return the heads to prune, by layer, if this many units are pruned from all layers together."""
        chosen = choose_heads(self.orders if orders is None else orders, steps)
        return {path: self._heads(path, units) for path, units in chosen.items()}

    def _heads(self, path: str, units: Sequence[int]) -> tuple[int, ...]:
        """Return the query heads of an order's units: the units themselves, or the readers of KV heads."""
        if not self.by_key_heads:
            return tuple(sorted(units))
        readers = self.evidence.heads[path].readers
        return tuple(sorted(head for key in units for head in readers[key]))

    def meet_target(self, target: Target) -> RemovedHeads:
        """Return the first heads in pruning order that suffice for a target; raise if it cannot be reached."""
        return self.removed(self._fewest(target, self.orders))

    def _fewest(self, target: Target, orders: Mapping[str, PruningOrder]) -> int:
        smallest = self.size(self.removed(self.steps, orders))
        if not smallest.reaches(target):
            raise OptionError(
                f"every layer keeps at least one head, which leaves {smallest} of this model, got a target of {target}"
            )
        numbers = range(1, self.steps + 1)
        return numbers[
            bisect_left(numbers, True, key=lambda steps: self.size(self.removed(steps, orders)).reaches(target))
        ]

    def stages(self) -> list[RemovedHeads]:
        """Return about 20 increasing sets of heads to prune, up to all that can be pruned."""
        stride = max(1, self.steps // 20)
        return [self.removed(steps) for steps in range(stride, self.steps + 1, stride)]

    def choices(self, *, shares: Sequence[float] = SHARES, seeds: Sequence[int] = SEEDS) -> list[Choice]:
        """Return the heads to prune for these shares of all units, with random controls, for `curve`."""
        sizes = sorted({round(share * self._units) for share in shares} & set(range(1, self.steps + 1)))
        random = [self._random_orders(seed) for seed in seeds]
        return [Choice(self.removed(steps), tuple(self.removed(steps, orders) for orders in random)) for steps in sizes]

    def summary(self, removed: Mapping[str, Sequence[int]]) -> str:
        return f"{sum(map(len, removed.values()))} heads are pruned"

    def search_measurements(self, tries: int = TRIES) -> int:
        """Return the maximum number of measurements: unpruned model, every unit, two initial choices, and moves."""
        return 1 + self.steps + 2 + tries

    def searched(
        self,
        target: Target,
        quality: Quality,
        *,
        tries: int = TRIES,
        progress: Callable[[int], None] | None = None,
    ) -> SearchResult:
        """Choose heads for a target, with the number per layer searched by the measured loss.

        The loss is measured with the first 1, 2, ... units of one layer pruned, for each layer by itself. Starting from
        the better of the choices by `orders` and by these losses, one unit at a time is moved between layers while that
        lowers the loss and the target is still met. All layers are compensated at once. The loss measured by `quality`
        is at most that of `meet_target`.

        Args:
            quality: evaluated several hundred times, so its data should be small.
            tries: maximum number of measurements of moves.
            progress: called with 1 after every measurement.
        """
        measure = Losses(self, quality, progress)

        def heads_of(counts: Mapping[str, int]) -> RemovedHeads:
            return {path: self._heads(path, self.orders[path].heads[:count]) for path, count in counts.items() if count}

        def outputs_of(path: str, count: int) -> Outputs:
            return self.compensated(heads_of({path: count}))[path]

        def initial_choice(orders: Mapping[str, PruningOrder]) -> tuple[float, dict[str, int]]:
            chosen = choose_heads(orders, self._fewest(target, orders))
            counts = {path: len(heads) for path, heads in chosen.items()}
            return measure(self.compensated(heads_of(counts))), counts

        first_loss, first = initial_choice(self.orders)
        orders = measured_orders(self.orders, outputs_of, measure)
        loss, counts = initial_choice(orders)
        best = refined(
            counts if loss < first_loss else first,
            orders,
            outputs_of,
            measure,
            tries=tries,
            allowed=lambda moved: self.size(heads_of(moved)).reaches(target),
        )
        return SearchResult(heads_of(best.counts), heads_of(first), best.loss, first_loss, measure.made)

    @property
    def _units(self) -> int:
        """Number of heads, or of KV heads, including those that cannot be pruned."""
        heads = self.evidence.heads.values()
        return sum(
            len(set(layer_heads.key_heads)) if self.by_key_heads else layer_heads.num_heads for layer_heads in heads
        )

    def _random_orders(self, seed: int) -> dict[str, PruningOrder]:
        if not self.by_key_heads:
            return orders_by("random", self.evidence, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        return {
            path: order_by_score(torch.rand(len(set(heads.key_heads)), generator=generator).tolist())
            for path, heads in self.evidence.heads.items()
        }
