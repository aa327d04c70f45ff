"""Search the number of heads to prune per layer by the measured loss of the whole model.

A pruning order ranks the heads of a layer; how many to prune is chosen by losses measured with the layer's heads pruned
and compensated, first each layer by itself, then by moving one head at a time between layers (local search).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from polyhead.errors import OptionError
from polyhead.surgery.compensation.least_squares import OutputProjection
from polyhead.surgery.selection.criteria import PruningOrder

Projections = Mapping[str, OutputProjection]  # by path of the layer
# W_O of a layer without the first n heads of its order: (path, n) -> projection.
ProjectionOf = Callable[[str, int], OutputProjection]
# Loss of the model with these output projections.
Measure = Callable[[Projections], float]
TRIES = 80
DOUBT = 0.5  # assumed relative error of the evidence's costs


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


@dataclass(frozen=True, slots=True)
class RankedSet:
    """Heads of a layer that can be pruned together, and the cost by the evidence."""

    cost: float
    heads: tuple[int, ...]


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
