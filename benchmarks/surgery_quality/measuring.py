"""Measure points: choose heads, compensate for them, and evaluate the model without them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property, partial
from typing import Any

from benchmarks.surgery_quality.points import Point, Result, parse_native
from benchmarks.surgery_quality.tasks import SPLITS, Split, Task
from polyhead.surgery.compensation.distillation import distil
from polyhead.surgery.compensation.least_squares import (
    OutputProjection,
    OutputRegression,
    swapped_projections,
    unchanged_projections,
)
from polyhead.surgery.selection.criteria import PruningOrder, choose_heads, orders_by
from polyhead.surgery.selection.evidence import Evidence, Weighting
from polyhead.surgery.selection.quality import Fidelity, Perplexity
from polyhead.surgery.selection.search import TRIES, measured_orders, refined, refined_sets
from polyhead.surgery.selection.uniform import fits_native, uniform_sets

RemovedHeads = dict[str, tuple[int, ...]]


class Bench:
    """One task, whose evidence is collected once for all points."""

    def __init__(
        self,
        task: Task,
        *,
        facts: Mapping[str, Any] | None = None,
        tries: int = TRIES,
        report: Callable[[str], None] | None = None,
    ) -> None:
        """Set up a bench; `report` is called per step."""
        self.task = task
        self.facts = facts or {}
        self.evidence = Evidence(task.model, task.calibration, task.objectives)
        self.tries = tries
        self.report = report or (lambda text: None)
        self._orders = cache(self._orders)  # type: ignore[method-assign]
        self._problem = cache(self._problem)  # type: ignore[method-assign]
        self._measured = cache(self._measured)  # type: ignore[method-assign]

    @cached_property
    def heads(self) -> int:
        return sum(heads.num_heads for heads in self.evidence.heads.values())

    def measure(self, point: Point, splits: Sequence[Split] = SPLITS) -> Result:
        """Return the figures of a point on these splits; the model is as before afterwards."""
        began = time.perf_counter()
        gone = self.choose(point)
        outputs = self.outputs(point, gone)
        with swapped_projections(self.task.model, self.evidence.layers, outputs):
            figures = {split: self.task.figures(split) for split in splits}
        form = "native" if fits_native(self.task.model, gone) else "own"
        seconds = round(time.perf_counter() - began, 2)
        numbers = {path: len(heads) for path, heads in gone.items()}
        return Result(point, numbers, self.heads, form, figures, seconds, self.facts)

    def choose(self, point: Point) -> RemovedHeads:
        """Return the removed heads by layer."""
        if point.native is not None:
            sets = uniform_sets(self.evidence, *parse_native(point.native), point.weighting)
            if not point.searched:
                return {path: own[0].heads for path, own in sets.items()}
            self.report("exchanging heads within layers")
            outputs_of = partial(self._once, weighting=point.weighting)
            return refined_sets(sets, outputs_of, self._loss, tries=self.tries)[0]
        orders = self._orders(point.criterion, point.weighting, point.seed)
        count = round(point.share * self.heads)
        if not point.searched:
            return choose_heads(orders, count)
        measured = self._measured(point.criterion, point.weighting, point.seed)
        counts = {path: len(heads) for path, heads in choose_heads(measured, count).items()}
        self.report("moving heads between layers")
        numbers, *_ = refined(
            counts,
            measured,
            lambda path, taken: self._once(path, orders[path].heads[:taken], point.weighting),
            self._loss,
            tries=self.tries,
        )
        return {path: orders[path].heads[:taken] for path, taken in numbers.items()}

    def outputs(self, point: Point, gone: RemovedHeads) -> dict[str, OutputProjection]:
        """Return the output matrices of the layers without those heads."""
        model = self.task.model
        if point.compensation == "no":
            return unchanged_projections(model, self.evidence.layers, gone)
        solved = {
            path: self._problem(path, point.ridge, point.weighting).without(heads) for path, heads in gone.items()
        }
        if point.compensation == "once":
            return solved
        self.report("distilling")
        objective = Perplexity if self.task.name == "language" else Fidelity
        return distil(model, self.evidence.layers, solved, self.task.calibration, objective)

    def _orders(self, criterion: str, weighting: Weighting, seed: int) -> dict[str, PruningOrder]:
        self.report(f"choosing by {criterion}")
        return orders_by(criterion, self.evidence, weighting=weighting, seed=seed)

    def _problem(self, path: str, ridge: float, weighting: Weighting) -> OutputRegression:
        layer = self.evidence.weighted(weighting)[path]
        return OutputRegression.of(layer.moments, layer.heads, ridge, path)

    def _measured(self, criterion: str, weighting: Weighting, seed: int) -> dict[str, PruningOrder]:
        orders = self._orders(criterion, weighting, seed)
        self.report("measuring each layer without its first heads")
        return measured_orders(
            orders, lambda path, taken: self._once(path, orders[path].heads[:taken], weighting), self._loss
        )

    def _once(self, path: str, gone: tuple[int, ...], weighting: Weighting) -> OutputProjection:
        return self._problem(path, 1e-3, weighting).without(gone)

    def _loss(self, outputs: Mapping[str, OutputProjection]) -> float:
        with swapped_projections(self.task.model, self.evidence.layers, outputs):
            return self.task.loss()
