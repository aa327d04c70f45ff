"""Curve of quality over size, with two controls: the same heads without compensation, and random heads with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from polyhead.progress import ProgressCallback, Step, ignore_progress
from polyhead.surgery.adapters.head_weights import HeadWeights
from polyhead.surgery.compensation.least_squares import OutputProjection, unchanged_projections
from polyhead.surgery.selection.budgets import RemovedHeads, Size
from polyhead.surgery.selection.criteria import Orders, order_by_score, orders_by
from polyhead.surgery.selection.free import FreeSelection
from polyhead.surgery.selection.quality import Measurement, Quality
from polyhead.surgery.selection.uniform import UniformLayout, UniformSelection, any_heads_for

MAX_LAYOUTS = 12  # points of a curve of the uniform form
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)  # of the heads, pruned at the points of another
SEEDS = (0, 1, 2)  # of the randomly pruned controls


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


def measure_curve(
    selection: UniformSelection | FreeSelection,
    choices: Sequence[Choice],
    quality: Quality,
    *,
    progress: ProgressCallback = ignore_progress,
) -> list[CurvePoint]:
    """Measure each choice compensated, uncompensated, and with as many random heads pruned instead."""
    total = sum(choice.measurements for choice in choices)
    step = Step(progress, f"Measure the {quality.name} at every size", total, "runs")
    points = []
    for choice in choices:
        measurements = []
        for projections in _trials(selection, choice):
            measurements.append(quality.measure(projections))
            step.advance()
        compensated, not_compensated, *random = measurements
        count = sum(map(len, choice.removed.values()))
        size = selection.size(choice.removed)
        points.append(CurvePoint(count, size, compensated, not_compensated, tuple(random), choice.layout))
    return points


def _trials(selection: UniformSelection | FreeSelection, choice: Choice) -> Iterator[dict[str, OutputProjection]]:
    evidence = selection.evidence
    yield evidence.compensated(choice.removed)
    yield unchanged_projections(evidence.model, evidence.layers, choice.removed)
    for removed in choice.random:
        yield evidence.compensated(removed)


def choices_of(selection: UniformSelection | FreeSelection, *, seeds: Sequence[int] = SEEDS) -> list[Choice]:
    """Return the heads to prune at the points of a curve, with random controls."""
    if isinstance(selection, UniformSelection):
        return _uniform_choices(selection, seeds)
    return free_choices(selection, seeds=seeds)


def _uniform_choices(selection: UniformSelection, seeds: Sequence[int]) -> list[Choice]:
    """Return the heads to prune for each layout; evenly spaced layouts if there are many."""
    layouts, heads = selection.layouts, selection.evidence.heads
    count = min(len(layouts), MAX_LAYOUTS)
    some = [layouts[place * (len(layouts) - 1) // max(count - 1, 1)] for place in range(count)]
    return [
        Choice(selection.removed(layout), tuple(_random_heads(heads, layout, seed) for seed in seeds), str(layout))
        for layout in some
    ]


def _random_heads(heads: Mapping[str, HeadWeights], layout: UniformLayout, seed: int) -> RemovedHeads:
    """Return random heads to prune for a layout."""
    generator = torch.Generator().manual_seed(seed)
    by_layer = {}
    for path, layer_heads in heads.items():
        groups = [layer_heads.readers[key] for key in _permutation(len(layer_heads.readers), generator)]
        removed = any_heads_for(
            [[readers[place] for place in _permutation(len(readers), generator)] for readers in groups], layout
        )
        if removed:
            by_layer[path] = removed
    return by_layer


def _permutation(count: int, generator: torch.Generator) -> list[int]:
    """Return a random permutation of the numbers below `count`."""
    return [int(x) for x in torch.randperm(count, generator=generator)]


def free_choices(
    selection: FreeSelection, *, shares: Sequence[float] = SHARES, seeds: Sequence[int] = SEEDS
) -> list[Choice]:
    """Return the heads to prune for these shares of all units."""
    sizes = sorted({round(share * selection.units) for share in shares} & set(range(1, selection.steps + 1)))
    random = [_random_orders(selection, seed) for seed in seeds]
    return [
        Choice(
            selection.removed(steps, selection.orders),
            tuple(selection.removed(steps, orders) for orders in random),
        )
        for steps in sizes
    ]


def _random_orders(selection: FreeSelection, seed: int) -> Orders:
    if not selection.by_kv_heads:
        return orders_by("random", selection.evidence, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    return {
        path: order_by_score(torch.rand(len(set(heads.key_heads)), generator=generator).tolist())
        for path, heads in selection.evidence.heads.items()
    }
