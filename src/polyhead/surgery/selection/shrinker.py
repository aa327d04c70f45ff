"""Shrink a model to a budget: choose heads to prune, and measure the model without them."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from polyhead.costs import Workload
from polyhead.costs.measuring import runner
from polyhead.errors import OptionError
from polyhead.integrations.huggingface import register, set_attention
from polyhead.surgery.compensation.least_squares import OutputProjection, unchanged_projections
from polyhead.surgery.edits.applying import apply
from polyhead.surgery.edits.head_edits import PruneHeads
from polyhead.surgery.edits.preview import Preview
from polyhead.surgery.options import Target
from polyhead.surgery.selection.budgets import Size, SizeCounter, check_reachable, prune_edits
from polyhead.surgery.selection.criteria import PruningOrder, choose_heads, order_by_score, orders_by, pruning_order
from polyhead.surgery.selection.evidence import Evidence, Weighting
from polyhead.surgery.selection.journal import Journal
from polyhead.surgery.selection.pruned_model import PrunedModel
from polyhead.surgery.selection.quality import Measurement, Quality
from polyhead.surgery.selection.search import TRIES, Measure, Projections, measured_orders, refined

RemovedHeads = dict[str, tuple[int, ...]]  # pruned heads, by layer
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)  # of the heads, pruned at the points of a curve
SEEDS = (0, 1, 2)  # of the randomly pruned controls of a curve


@dataclass(frozen=True, slots=True)
class Choice:
    """Heads to prune, and as many random heads for each seed as controls; `layout` is the uniform layout, if any."""

    removed: RemovedHeads
    random: tuple[RemovedHeads, ...]
    layout: str | None = None

    @property
    def measurements(self) -> int:
        """Number of quality measurements for this point: compensated, not compensated, and each control."""
        return 2 + len(self.random)


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """A model with `removed` heads pruned: its size, its quality, and the quality of its controls."""

    removed: int
    size: Size
    compensated: Measurement
    not_compensated: Measurement
    random: tuple[Measurement, ...]  # as many random heads pruned and compensated, for each seed
    layout: str | None = None  # heads/KV heads of every layer, if uniform


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Result of a search: the heads to prune, the initial choice, and the loss after each."""

    removed: RemovedHeads
    first: RemovedHeads  # initial choice, from the evidence alone
    loss: float
    first_loss: float
    measured: int  # number of measurements made

    @property
    def moved(self) -> int:
        """Number of heads by which the result differs from the initial choice."""
        paths = {**self.removed, **self.first}
        sets = [(set(self.removed.get(path, ())), set(self.first.get(path, ()))) for path in paths]
        return max(sum(len(last - first) for last, first in sets), sum(len(first - last) for last, first in sets))


def ignore_count(count: int) -> None:
    """Report nothing; the default callback of measurements."""


class BaseShrinker(PrunedModel, ABC):
    """Choose heads to prune for a target, and measure the size and quality of the model without them."""

    search_action: str  # what a search does with heads, for the summary: "3 heads moved between layers"

    def __init__(self, evidence: Evidence, *, weighting: Weighting = "token", work: Workload | None = None) -> None:
        """Set up the evidence; `work` is the call whose FLOPs are counted, 512 tokens by default."""
        super().__init__(evidence, weighting=weighting)
        self.work = Workload.forward(512) if work is None else work

    @cached_property
    def size(self) -> SizeCounter:
        """The size of the model without heads: a function of them."""
        return SizeCounter(self.model, self.evidence.layers, self.work)

    @abstractmethod
    def meet_target(self, target: Target) -> RemovedHeads:
        """Return the heads to prune for a target; raises if it cannot be reached."""

    @abstractmethod
    def choices(self) -> list[Choice]:
        """Return heads to prune for models of several sizes, with random controls, for `curve`."""

    @abstractmethod
    def stages(self) -> list[RemovedHeads]:
        """Return increasing sets of heads to prune."""

    @abstractmethod
    def search_measurements(self, tries: int = TRIES) -> int:
        """Return the maximum number of measurements of a search."""

    @abstractmethod
    def _search(self, target: Target, measure: Measure, tries: int) -> tuple[RemovedHeads, RemovedHeads, float, float]:
        """Return the heads to prune after a search and before it, and the loss after each."""

    def summary(self, removed: Mapping[str, Sequence[int]]) -> str:
        """Describe how many heads are pruned."""
        total = sum(heads.num_heads for heads in self.evidence.heads.values())
        return f"{sum(map(len, removed.values()))} of {total} heads are pruned"

    def edits(self, removed: Mapping[str, Sequence[int]]) -> list[PruneHeads]:
        return prune_edits(self.evidence.layers, removed)

    def preview(self, removed: Mapping[str, Sequence[int]]) -> Preview:
        """Preview the model without these heads."""
        return self.size.preview(removed)

    def curve(
        self, quality: Quality, choices: Iterable[Choice], *, progress: Callable[[int], object] = ignore_count
    ) -> list[CurvePoint]:
        """Measure each choice compensated, uncompensated, and with as many random heads pruned instead.

        `progress` is called with 1 after every measurement.
        """
        points = []
        for choice in choices:
            measurements = []
            for projections in self._trials(choice):
                measurements.append(self.measure(projections, quality))
                progress(1)
            compensated, not_compensated, *random = measurements
            count = sum(map(len, choice.removed.values()))
            size = self.size(choice.removed)
            points.append(CurvePoint(count, size, compensated, not_compensated, tuple(random), choice.layout))
        return points

    def _trials(self, choice: Choice) -> Iterator[Projections]:
        yield self.compensated(choice.removed)
        yield unchanged_projections(self.model, self.evidence.layers, choice.removed)
        for removed in choice.random:
            yield self.compensated(removed)

    def meet_measured_target(
        self,
        stages: Sequence[RemovedHeads],
        target: Target,
        batches: Sequence[Mapping[str, Any]],
        journal: Journal,
        *,
        progress: Callable[[int], object] = ignore_count,
    ) -> RemovedHeads:
        """Return the first of increasing sets of removed heads that reaches a speed target on this machine.

        `progress` is called with 1 after every measurement.
        """
        ratio = 0.0
        for removed in stages:
            (ratio,) = journal.numbers("times faster", partial(self._measure_speedup, removed, batches))
            progress(1)
            if ratio >= target.amount:
                return removed
        raise OptionError(
            f"the target must be at most {ratio:.2f}x-faster, measured here without all removable heads, got "
            f"{target.amount:g}x-faster"
        )

    def _measure_speedup(self, removed: RemovedHeads, batches: Sequence[Mapping[str, Any]]) -> tuple[float]:
        """Return the original model's time over the pruned model's, measured in alternation."""
        # Copies, since both run on polyhead's attention, which supports uneven groups; the model itself is not changed.
        original, pruned = (copy.deepcopy(self.model) for _ in range(2))
        apply(pruned, self.edits(removed))
        for candidate in (original, pruned):
            set_attention(candidate, register())
        batch = max(batches, key=lambda inputs: inputs["input_ids"].numel())
        with torch.no_grad():
            timings = runner.alternate(
                {"original": lambda: original(**batch), "pruned": lambda: pruned(**batch)},
                device=next(pruned.parameters()).device,
                alternations=7,
            )
        return (timings.median_ms("original") / timings.median_ms("pruned"),)

    def searched(
        self, target: Target, quality: Quality, *, tries: int = TRIES, progress: Callable[[int], object] = ignore_count
    ) -> SearchResult:
        """Choose heads for a target, improved by local search while the target holds.

        Compensation is by least squares. On this quality the loss is at most that of `meet_target`.

        Args:
            quality: evaluated several hundred times, so its data should be small.
            tries: maximum number of measurements of moves.
            progress: called with 1 after every measurement.
        """
        measured = 0

        def measure(projections: Projections) -> float:
            nonlocal measured
            loss = self.loss(projections, quality)
            measured += 1
            progress(1)
            return loss

        return SearchResult(*self._search(target, measure, tries), measured)


class Shrinker(BaseShrinker):
    """Choose the heads of a model to prune for a target, by the pruning order of each layer.

    The unit of an order is a head or, with `by_kv_heads`, a KV head with all query heads that read it, which shrinks
    the KV cache of grouped layers. Every layer keeps at least one unit.
    """

    search_action = "moved between layers"

    def __init__(
        self,
        evidence: Evidence,
        *,
        criterion: str = "compensated",
        weighting: Weighting = "token",
        by_kv_heads: bool = False,
        work: Workload | None = None,
    ) -> None:
        """Compute the pruning orders.

        Args:
            criterion: score that orders the heads, one of `criteria`.
            weighting: how errors of the layer outputs are weighted, one of `WEIGHTINGS`; see `criteria`.
            by_kv_heads: prune whole KV heads; without effect if no layer is grouped.
            work: the call whose FLOPs are counted, 512 tokens by default.
        """
        super().__init__(evidence, weighting=weighting, work=work)
        self.criterion = criterion
        self.by_kv_heads = by_kv_heads and any(
            len(set(heads.key_heads)) < heads.num_heads for heads in evidence.heads.values()
        )
        if self.by_kv_heads and criterion != "compensated":
            raise OptionError(f"pruning KV heads needs the criterion compensated, got {criterion!r}")
        self.orders = self._orders()

    @property
    def steps(self) -> int:
        """Number of units that can be pruned: all but the one that each layer keeps."""
        return sum(len(order.heads) for order in self.orders.values())

    def _orders(self) -> dict[str, PruningOrder]:
        evidence = self.evidence
        if not self.by_kv_heads:
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
        if not self.by_kv_heads:
            return tuple(sorted(units))
        readers = self.evidence.heads[path].readers
        return tuple(sorted(head for key in units for head in readers[key]))

    def meet_target(self, target: Target) -> RemovedHeads:
        """Return the first heads in pruning order that suffice for a target; raise if it cannot be reached."""
        return self.removed(self._fewest(target, self.orders))

    def _fewest(self, target: Target, orders: Mapping[str, PruningOrder]) -> int:
        check_reachable(target, self.size(self.removed(self.steps, orders)))
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

    def search_measurements(self, tries: int = TRIES) -> int:
        """Return the maximum number of measurements: unpruned model, every unit, two initial choices, and moves."""
        return 1 + self.steps + 2 + tries

    def _search(self, target: Target, measure: Measure, tries: int) -> tuple[RemovedHeads, RemovedHeads, float, float]:
        """Start from the orders by evidence or by measured losses, whichever is better, and move heads."""

        def heads_of(counts: Mapping[str, int]) -> RemovedHeads:
            return {path: self._heads(path, self.orders[path].heads[:count]) for path, count in counts.items() if count}

        def projection_of(path: str, count: int) -> OutputProjection:
            return self.compensated(heads_of({path: count}))[path]

        def initial_choice(orders: Mapping[str, PruningOrder]) -> tuple[float, dict[str, int]]:
            chosen = choose_heads(orders, self._fewest(target, orders))
            counts = {path: len(heads) for path, heads in chosen.items()}
            return measure(self.compensated(heads_of(counts))), counts

        first_loss, first = initial_choice(self.orders)
        orders = measured_orders(self.orders, projection_of, measure)
        loss, counts = initial_choice(orders)
        counts, loss, _ = refined(
            counts if loss < first_loss else first,
            orders,
            projection_of,
            measure,
            tries=tries,
            allowed=lambda moved: self.size(heads_of(moved)).reaches(target),
        )
        return heads_of(counts), heads_of(first), loss, first_loss

    @property
    def _units(self) -> int:
        """Number of heads, or of KV heads, including those that cannot be pruned."""
        heads = self.evidence.heads.values()
        return sum(
            len(set(layer_heads.key_heads)) if self.by_kv_heads else layer_heads.num_heads for layer_heads in heads
        )

    def _random_orders(self, seed: int) -> dict[str, PruningOrder]:
        if not self.by_kv_heads:
            return orders_by("random", self.evidence, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        return {
            path: order_by_score(torch.rand(len(set(heads.key_heads)), generator=generator).tolist())
            for path, heads in self.evidence.heads.items()
        }
