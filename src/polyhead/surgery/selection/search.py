"""How many heads of each layer are to go, by what the whole model then measures.

An order says which heads of a layer can go; how many is judged by losses that are measured with the layer's heads gone
and repaired, each layer by itself, and then, all layers together, by moving one head at a time from layer to layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from polyhead.errors import OptionError
from polyhead.surgery.compensation.masked_trial import Outputs
from polyhead.surgery.selection.orders import PruningOrder

# Of a layer without the first so many heads of its order.
OutputsOf = Callable[[str, int], Outputs]
# What the model loses with these outputs: less is better.
Measure = Callable[[Mapping[str, Outputs]], float]
TRIES = 80
DOUBT = 0.5  # how far off the evidence may be, as a share of what it says


def measured_orders(
    orders: Mapping[str, PruningOrder],
    outputs_of: OutputsOf,
    measure: Measure,
    *,
    most: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, PruningOrder]:
    """The same orders with losses that were measured: what the model loses with each beginning of each order gone.

    Args:
        most: so many heads of a layer are tried; whoever takes more of it is not asked for.
        progress: called after every measurement with how many were made and how many there are.
    """
    depth = {path: len(order.heads) if most is None else min(most, len(order.heads)) for path, order in orders.items()}
    whole, done, found = measure({}), 0, {}
    for path, order in orders.items():
        losses = []
        for taken in range(1, depth[path] + 1):
            losses.append(measure({path: outputs_of(path, taken)}) - whole)
            done += 1
            if progress is not None:
                progress(done, sum(depth.values()))
        found[path] = PruningOrder(order.heads[: depth[path]], tuple(losses))
    return found


@dataclass(frozen=True, slots=True)
class Refined:
    """How many heads of each layer go, what the model loses then, and how many measurements that took."""

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
    """Move single heads from layer to layer while that makes the model lose less.

    The moves that the orders' own losses promise most of are tried first, each once from where the search stands, and
    the first that helps is made.

    Args:
        counts: how many heads of each layer go to begin with.
        orders: of every layer; their losses rank the moves.
        tries: so many measurements are made at most.
        allowed: asked of every distribution before it is measured; moves to others are not made.
    """
    if tries < 1:
        raise OptionError(f"tries must be at least 1, got {tries}")
    now = {path: counts.get(path, 0) for path in orders}
    kept: dict[tuple[str, int], Outputs] = {}

    def outputs(numbers: Mapping[str, int]) -> dict[str, Outputs]:
        for path, taken in numbers.items():
            if taken and (path, taken) not in kept:
                kept[path, taken] = outputs_of(path, taken)
        return {path: kept[path, taken] for path, taken in numbers.items() if taken}

    def loss_at(path: str, taken: int) -> float:
        return orders[path].losses[taken - 1] if taken else 0.0

    best = first = measure(outputs(now))
    made, refused = 1, set[tuple[str, str]]()
    while made < tries:
        moves = sorted(
            (
                loss_at(more, now[more] + 1)
                - loss_at(more, now[more])
                - loss_at(less, now[less])
                + loss_at(less, now[less] - 1),
                less,
                more,
            )
            for less in now
            for more in now
            if less != more and now[less] and now[more] < len(orders[more].losses) and (less, more) not in refused
        )
        options = ((less, more, {**now, less: now[less] - 1, more: now[more] + 1}) for _, less, more in moves)
        option = next((x for x in options if allowed is None or allowed(x[2])), None)
        if option is None:
            break
        less, more, moved = option
        loss = measure(outputs(moved))
        made += 1
        if loss < best:
            best, now = loss, moved
            # Other moves may help from here, but those of layers that were not touched were refused a moment ago.
            refused = {pair for pair in refused if less not in pair and more not in pair}
            refused.add((more, less))
        else:
            refused.add((less, more))
        if progress is not None:
            progress(made, tries)
    return Refined({path: taken for path, taken in now.items() if taken}, best, first, made)


@dataclass(frozen=True, slots=True)
class RankedSet:
    """Heads of a layer that may go together, and what that costs by the evidence."""

    cost: float
    heads: tuple[int, ...]


def refined_sets(
    ranked: Mapping[str, Sequence[RankedSet]],
    outputs_of: Callable[[str, tuple[int, ...]], Outputs],
    measure: Measure,
    *,
    tries: int = TRIES,
) -> tuple[dict[str, tuple[int, ...]], float, float]:
    """Of every layer one of its sets, the first to begin with: others while they make the model lose less.

    Tried first is what could gain most if the evidence were off by half of what the first costs, each once. What is
    returned: the heads that go, what the model loses then, and what it lost to begin with.
    """
    if tries < 1:
        raise OptionError(f"tries must be at least 1, got {tries}")
    now = {path: sets[0].heads for path, sets in ranked.items()}
    outputs = {path: outputs_of(path, heads) for path, heads in now.items() if heads}
    best = first = measure(outputs)
    others = [(x.cost - (1 + DOUBT) * sets[0].cost, path, x.heads) for path, sets in ranked.items() for x in sets[1:]]
    for _, path, heads in sorted(others)[: tries - 1]:
        tried = {**outputs, path: outputs_of(path, heads)}
        loss = measure(tried)
        if loss < best:
            best, outputs, now = loss, tried, {**now, path: heads}
    return now, best, first
