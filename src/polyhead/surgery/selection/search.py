"""Search the number of heads to prune per layer by the measured loss of the whole model.

A pruning order ranks the heads of a layer; how many to prune is chosen by losses measured with the layer's heads pruned
and compensated, first each layer by itself, then by moving one head at a time between layers (local search).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from polyhead.errors import OptionError
from polyhead.surgery.compensation.masked_trial import Outputs
from polyhead.surgery.selection.orders import PruningOrder

# Outputs of a layer without the first n heads of its order: (path, n) -> outputs.
OutputsOf = Callable[[str, int], Outputs]
# Loss of the model with these outputs.
Measure = Callable[[Mapping[str, Outputs]], float]
TRIES = 80
DOUBT = 0.5  # assumed relative error of the evidence's costs


def measured_orders(
    orders: Mapping[str, PruningOrder],
    outputs_of: OutputsOf,
    measure: Measure,
    *,
    most: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, PruningOrder]:
    """Return the orders with measured losses: of the model without each prefix of each order.

    Args:
        most: maximum number of heads to prune per layer; the orders are cut there.
        progress: called after every measurement with the number done and the total.
    """
    depth = {path: len(order.heads) if most is None else min(most, len(order.heads)) for path, order in orders.items()}
    baseline, done, measured = measure({}), 0, {}
    for path, order in orders.items():
        losses = []
        for count in range(1, depth[path] + 1):
            losses.append(measure({path: outputs_of(path, count)}) - baseline)
            done += 1
            if progress is not None:
                progress(done, sum(depth.values()))
        measured[path] = PruningOrder(order.heads[: depth[path]], tuple(losses))
    return measured


@dataclass(frozen=True, slots=True)
class Refined:
    """Number of heads to prune per layer, the loss then, and the number of measurements it took."""

    counts: Mapping[str, int]
    loss: float
    first_loss: float
    measured: int


def refined(
    counts: Mapping[str, int],
    orders: Mapping[str, PruningOrder],
    outputs_of: OutputsOf,
    measure: Measure,
    *,
    tries: int = TRIES,
    allowed: Callable[[Mapping[str, int]], bool] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Refined:
    """Move single heads between layers while that lowers the measured loss.

    Moves are tried in the order of the gain that the orders' own losses predict, each once from the current
    distribution, and the first improvement is taken.

    Args:
        counts: initial number of heads to prune per layer.
        orders: of every layer; their losses rank the moves.
        tries: maximum number of measurements.
        allowed: predicate on distributions; moves to others are skipped.
    """
    if tries < 1:
        raise OptionError(f"tries must be at least 1, got {tries}")
    current = {path: counts.get(path, 0) for path in orders}
    cache: dict[tuple[str, int], Outputs] = {}

    def outputs(numbers: Mapping[str, int]) -> dict[str, Outputs]:
        for path, count in numbers.items():
            if count and (path, count) not in cache:
                cache[path, count] = outputs_of(path, count)
        return {path: cache[path, count] for path, count in numbers.items() if count}

    def loss_at(path: str, count: int) -> float:
        return orders[path].losses[count - 1] if count else 0.0

    best = first = measure(outputs(current))
    measurements, rejected = 1, set[tuple[str, str]]()
    while measurements < tries:
        moves = sorted(
            (
                loss_at(more, current[more] + 1)
                - loss_at(more, current[more])
                - loss_at(less, current[less])
                + loss_at(less, current[less] - 1),
                less,
                more,
            )
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
        loss = measure(outputs(moved))
        measurements += 1
        if loss < best:
            best, current = loss, moved
            # Moves that involve the changed layers may help now; the others have just been rejected.
            rejected = {pair for pair in rejected if less not in pair and more not in pair}
            rejected.add((more, less))
        else:
            rejected.add((less, more))
        if progress is not None:
            progress(measurements, tries)
    return Refined({path: count for path, count in current.items() if count}, best, first, measurements)


@dataclass(frozen=True, slots=True)
class RankedSet:
    """Heads of a layer that can be pruned together, and the cost by the evidence."""

    cost: float
    heads: tuple[int, ...]


def refined_sets(
    ranked: Mapping[str, Sequence[RankedSet]],
    outputs_of: Callable[[str, tuple[int, ...]], Outputs],
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
    outputs = {path: outputs_of(path, heads) for path, heads in current.items() if heads}
    best = first = measure(outputs)
    alternatives = [
        (x.cost - (1 + DOUBT) * sets[0].cost, path, x.heads) for path, sets in ranked.items() for x in sets[1:]
    ]
    for _, path, heads in sorted(alternatives)[: tries - 1]:
        tried = {**outputs, path: outputs_of(path, heads)}
        loss = measure(tried)
        if loss < best:
            best, outputs, current = loss, tried, {**current, path: heads}
    return current, best, first
