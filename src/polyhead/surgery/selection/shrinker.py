"""Shrink a model to a budget, with any number of remaining heads per layer."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence

import torch

from polyhead.costs import Workload
from polyhead.errors import OptionError
from polyhead.surgery.compensation.masked_trial import Outputs
from polyhead.surgery.selection.budgets import SEEDS, Choice, Losses, RemovedHeads, Searched, Target, Trials
from polyhead.surgery.selection.criteria import orders_by
from polyhead.surgery.selection.measurements import Evidence, Weighting
from polyhead.surgery.selection.orders import PruningOrder, choose_heads, order_by_score, pruning_order
from polyhead.surgery.selection.quality import Quality
from polyhead.surgery.selection.search import TRIES, measured_orders, refined

SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)


class Shrinker(Trials):
    """A model, its evidence, and the pruning orders of its layers.

    Heads are pruned one by one or, for a smaller KV cache of grouped layers, with all readers of a KV head.
    """

    searches = "moved between layers"

    def __init__(
        self,
        evidence: Evidence,
        *,
        criterion: str = "compensated",
        weighting: Weighting = "token",
        by_key_heads: bool = False,
        work: Workload | None = None,
    ) -> None:
        """Compute the pruning orders; `work` is the call whose FLOPs are counted, 512 tokens by default."""
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
        """Number of heads, or KV heads with their readers, that can be pruned."""
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
        """Return the heads to prune, by layer."""
        chosen = choose_heads(self.orders if orders is None else orders, steps)
        return {path: self._heads(path, units) for path, units in chosen.items()}

    def _heads(self, path: str, units: Sequence[int]) -> tuple[int, ...]:
        """Return the query heads of an order's units: the units themselves, or the readers of KV heads."""
        if not self.by_key_heads:
            return tuple(sorted(units))
        readers = self.evidence.heads[path].readers
        return tuple(sorted(head for key in units for head in readers[key]))

    def meet_target(self, target: Target) -> RemovedHeads:
        """Return the fewest heads to prune for a target; raises if it cannot be reached."""
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
        """Return increasing sets of heads to prune, in steps of a twentieth."""
        stride = max(1, self.steps // 20)
        return [self.removed(steps) for steps in range(stride, self.steps + 1, stride)]

    def choices(self, *, shares: Sequence[float] = SHARES, seeds: Sequence[int] = SEEDS) -> list[Choice]:
        """Return the heads to prune at each of these shares, for the curve."""
        sizes = sorted({round(share * self._units) for share in shares} & set(range(1, self.steps + 1)))
        random = [self._random(seed) for seed in seeds]
        return [Choice(self.removed(steps), tuple(self.removed(steps, orders) for orders in random)) for steps in sizes]

    def summary(self, removed: Mapping[str, Sequence[int]]) -> str:
        return f"{sum(map(len, removed.values()))} heads go"

    def search_measurements(self, tries: int = TRIES) -> int:
        """Return the maximum number of measurements: the unpruned model, every step, two starts, and moves."""
        return 1 + self.steps + 2 + tries

    def searched(
        self,
        target: Target,
        quality: Quality,
        *,
        tries: int = TRIES,
        progress: Callable[[int], None] | None = None,
    ) -> Searched:
        """Choose heads for a target, with the number per layer searched by the measured loss.

        Each layer is measured without the prefixes of its order; then single heads, or KV heads with their readers, are
        moved between layers while that lowers the loss and the target is still met. All layers are compensated at once.
        On this quality the loss is at most that of `meet_target`.

        Args:
            quality: evaluated some hundred times, so it should be of a few rows.
            tries: maximum number of measurements of moves.
            progress: called with 1 after every measurement.
        """
        measure = Losses(self, quality, progress)

        def heads_of(counts: Mapping[str, int]) -> RemovedHeads:
            return {path: self._heads(path, self.orders[path].heads[:count]) for path, count in counts.items() if count}

        def outputs_of(path: str, count: int) -> Outputs:
            return self.compensated(heads_of({path: count}))[path]

        def start(orders: Mapping[str, PruningOrder]) -> tuple[float, dict[str, int]]:
            chosen = choose_heads(orders, self._fewest(target, orders))
            counts = {path: len(heads) for path, heads in chosen.items()}
            return measure(self.compensated(heads_of(counts))), counts

        first_loss, first = start(self.orders)
        orders = measured_orders(self.orders, outputs_of, measure)
        loss, counts = start(orders)
        best = refined(
            counts if loss < first_loss else first,
            orders,
            outputs_of,
            measure,
            tries=tries,
            allowed=lambda moved: self.size(heads_of(moved)).reaches(target),
        )
        return Searched(heads_of(best.counts), heads_of(first), best.loss, first_loss, measure.made)

    @property
    def _units(self) -> int:
        heads = self.evidence.heads.values()
        return sum(
            len(set(layer_heads.key_heads)) if self.by_key_heads else layer_heads.num_heads for layer_heads in heads
        )

    def _random(self, seed: int) -> dict[str, PruningOrder]:
        if not self.by_key_heads:
            return orders_by("random", self.evidence, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        return {
            path: order_by_score(torch.rand(len(set(heads.key_heads)), generator=generator).tolist())
            for path, heads in self.evidence.heads.items()
        }
