"""Local search of the heads to prune by the measured loss of the whole model, which evidence only predicts.

In the uniform form sets of heads are exchanged within layers. In the others a pruning order ranks the heads of a layer;
how many to prune is chosen by losses measured with the layer's heads pruned and compensated, first each layer by
itself, then by moving one head at a time between layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from polyhead.errors import OptionError
from polyhead.progress import ProgressCallback, Step, ignore_progress
from polyhead.surgery.compensation.least_squares import OutputProjection
from polyhead.surgery.options import Target
from polyhead.surgery.selection.budgets import RemovedHeads
from polyhead.surgery.selection.criteria import PruningOrder, choose_heads
from polyhead.surgery.selection.free import FreeSelection
from polyhead.surgery.selection.quality import Projections, Quality
from polyhead.surgery.selection.uniform import RankedSet, UniformSelection

# W_O of a layer without the first n heads of its order: (path, n) -> projection.
ProjectionOf = Callable[[str, int], OutputProjection]
# Loss of the model with these output projections.
Measure = Callable[[Projections], float]
TRIES = 80
DOUBT = 0.5  # assumed relative error of the evidence's costs


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Result of a search: the heads to prune, the initial choice, and the loss after each."""

    removed: RemovedHeads
    first: RemovedHeads  # initial choice, from the evidence alone
    loss: float
    first_loss: float
    measured: int = 0  # number of measurements made

    @property
    def moved(self) -> int:
        """Number of heads by which the result differs from the initial choice."""
        paths = {**self.removed, **self.first}
        sets = [(set(self.removed.get(path, ())), set(self.first.get(path, ()))) for path in paths]
        return max(sum(len(last - first) for last, first in sets), sum(len(first - last) for last, first in sets))


def search_heads(
    selection: UniformSelection | FreeSelection,
    target: Target,
    quality: Quality,
    *,
    tries: int = TRIES,
    progress: ProgressCallback = ignore_progress,
) -> SearchResult:
    """Choose heads for a target, improved by local search while the target holds.

    Compensation is by least squares. On this quality the loss is at most that of `for_target`.

    Args:
        selection: the initial choice.
        target: the target, which can be reached.
        quality: evaluated several hundred times, so its data should be small.
        tries: maximum number of measurements of moves.
        progress: called with the progress.
    """
    total = max_measurements(selection, tries)
    step = Step(progress, f"Search heads, up to {total:,} measurements of the {quality.name}", total, "runs")
    losses: list[float] = []

    def measure(projections: Projections) -> float:
        losses.append(quality.loss(projections))
        step.advance()
        return losses[-1]

    if isinstance(selection, UniformSelection):
        found = _exchange_heads(selection, target, measure, tries)
    else:
        found = _move_heads(selection, target, measure, tries)
    return replace(found, measured=len(losses))


def max_measurements(selection: UniformSelection | FreeSelection, tries: int = TRIES) -> int:
    """Return the maximum number of measurements of a search."""
    if isinstance(selection, UniformSelection):
        return tries
    return 1 + selection.steps + 2 + tries  # unpruned model, every unit, two initial choices, and moves


def _exchange_heads(selection: UniformSelection, target: Target, measure: Measure, tries: int) -> SearchResult:
    """Try other sets of heads of the same layout in each layer."""
    layout = selection.layout_for(target)
    chosen, loss, first_loss = refined_sets(
        selection.sets(layout),
        lambda path, heads: selection.evidence.compensated({path: heads})[path],
        measure,
        tries=tries,
    )
    removed = {path: heads for path, heads in chosen.items() if heads}
    return SearchResult(removed, selection.removed(layout), loss, first_loss)


def refined_sets(
    ranked: Mapping[str, Sequence[RankedSet]],
    projection_of: Callable[[str, tuple[int, ...]], OutputProjection],
    measure: Measure,
    *,
    tries: int = TRIES,
) -> tuple[dict[str, tuple[int, ...]], float, float]:
    """Choose one set per layer, starting with the first, and switch while that lowers the measured loss.

    Alternatives are tried in the order of their possible gain if the evidence were off by `DOUBT`, each once. Returns
    the heads to prune, the loss then, and the initial loss.
    """
    if tries < 1:
        raise OptionError(f"tries must be at least 1, got {tries}")
    current = {path: sets[0].heads for path, sets in ranked.items()}
    projections = {path: projection_of(path, heads) for path, heads in current.items() if heads}
    best = first = measure(projections)
    alternatives = [
        (x.cost - (1 + DOUBT) * sets[0].cost, path, x.heads) for path, sets in ranked.items() for x in sets[1:]
    ]
    for _, path, heads in sorted(alternatives)[: tries - 1]:
        tried = {**projections, path: projection_of(path, heads)}
        loss = measure(tried)
        if loss < best:
            best, projections, current = loss, tried, {**current, path: heads}
    return current, best, first


def _move_heads(selection: FreeSelection, target: Target, measure: Measure, tries: int) -> SearchResult:
    """Start from the orders by evidence or by measured losses, whichever is better, and move heads between layers."""
    evidence, by_evidence = selection.evidence, selection.orders

    def heads_of(counts: Mapping[str, int]) -> RemovedHeads:
        return {
            path: selection.heads_of(path, by_evidence[path].heads[:count]) for path, count in counts.items() if count
        }

    def projection_of(path: str, count: int) -> OutputProjection:
        return evidence.compensated(heads_of({path: count}))[path]

    def initial_choice(orders: Mapping[str, PruningOrder]) -> tuple[float, dict[str, int]]:
        chosen = choose_heads(orders, selection.fewest(target, orders))
        counts = {path: len(heads) for path, heads in chosen.items()}
        return measure(evidence.compensated(heads_of(counts))), counts

    first_loss, first = initial_choice(by_evidence)
    orders = measured_orders(by_evidence, projection_of, measure)
    loss, counts = initial_choice(orders)
    counts, loss, _ = refined(
        counts if loss < first_loss else first,
        orders,
        projection_of,
        measure,
        tries=tries,
        allowed=lambda moved: selection.size(heads_of(moved)).reaches(target),
    )
    return SearchResult(heads_of(counts), heads_of(first), loss, first_loss)


def measured_orders(
    orders: Mapping[str, PruningOrder], projection_of: ProjectionOf, measure: Measure
) -> dict[str, PruningOrder]:
    """Return the orders with measured losses: of the model without each prefix of each order."""
    baseline = measure({})
    return {
        path: PruningOrder(
            order.heads,
            tuple(measure({path: projection_of(path, count)}) - baseline for count in range(1, len(order.heads) + 1)),
        )
        for path, order in orders.items()
    }


def refined(
    counts: Mapping[str, int],
    orders: Mapping[str, PruningOrder],
    projection_of: ProjectionOf,
    measure: Measure,
    *,
    tries: int = TRIES,
    allowed: Callable[[Mapping[str, int]], bool] | None = None,
) -> tuple[dict[str, int], float, float]:
    """Move single heads between layers while that lowers the measured loss.

    Moves are tried in the order of the gain that the orders' own losses predict, each once from the current
    distribution, and the first improvement is taken. Returns the number of heads to prune per layer, the loss then, and
    the initial loss.

    Args:
        counts: initial number of heads to prune per layer.
        orders: of every layer; their losses rank the moves.
        tries: maximum number of measurements.
        allowed: predicate on distributions; moves to others are skipped.
    """
    if tries < 1:
        raise OptionError(f"tries must be at least 1, got {tries}")
    current = {path: counts.get(path, 0) for path in orders}
    cache: dict[tuple[str, int], OutputProjection] = {}

    def projections(numbers: Mapping[str, int]) -> dict[str, OutputProjection]:
        for path, count in numbers.items():
            if count and (path, count) not in cache:
                cache[path, count] = projection_of(path, count)
        return {path: cache[path, count] for path, count in numbers.items() if count}

    def loss_at(path: str, count: int) -> float:
        return orders[path].losses[count - 1] if count else 0.0

    def predicted_loss(less: str, more: str) -> float:
        added = loss_at(more, current[more] + 1) - loss_at(more, current[more])
        return added - loss_at(less, current[less]) + loss_at(less, current[less] - 1)

    best = first = measure(projections(current))
    rejected: set[tuple[str, str]] = set()
    for _ in range(1, tries):
        moves = sorted(
            (predicted_loss(less, more), less, more)
            for less in current
            for more in current
            if less != more
            and current[less]
            and current[more] < len(orders[more].losses)
            and (less, more) not in rejected
        )
        options = (
            (less, more, {**current, less: current[less] - 1, more: current[more] + 1}) for _, less, more in moves
        )
        option = next((x for x in options if allowed is None or allowed(x[2])), None)
        if option is None:
            break
        less, more, moved = option
        loss = measure(projections(moved))
        if loss < best:
            best, current = loss, moved
            # Moves that involve the changed layers may help now; the others have just been rejected.
            rejected = {pair for pair in rejected if less not in pair and more not in pair}
            rejected.add((more, less))
        else:
            rejected.add((less, more))
    return {path: count for path, count in current.items() if count}, best, first
