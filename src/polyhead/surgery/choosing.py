"""Which heads can go: one after the other, each time the one whose loss the remaining heads can best make up for.

Taking a block h of channels out of a least-squares problem costs tr(W_hᵀ (P_hh)⁻¹ W_h), P being the inverse of the
system and W its solution; both are then brought down by a product with P_hh⁻¹. So every candidate is judged after
repair, and nothing is solved anew.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from polyhead.errors import OptionError
from polyhead.surgery.head_weights import HeadWeights
from polyhead.surgery.moments import OutputMoments
from polyhead.surgery.repair import RIDGE, Problem, check_ridge


@dataclass(frozen=True, slots=True)
class PruningOrder:
    """The heads of a layer in the order in which they can go, but for the last, which stays.

    `losses[i]` is what is lost when heads[: i + 1] are gone and the others are repaired: the mean square of what is
    missing in the layer's output, in the units of that output, and the ridge's small part.
    """

    heads: tuple[int, ...]
    losses: tuple[float, ...]


def pruning_order(moments: OutputMoments, heads: HeadWeights, *, ridge: float = RIDGE) -> PruningOrder:
    """The heads of one layer, by loss in repaired reconstruction."""
    check_ridge(ridge)
    problem = Problem.of(moments, heads, ridge)
    count, width = heads.num_heads, problem.head_width
    if problem.scale == 0:  # heads that write nothing can go in any order
        return PruningOrder(tuple(range(count - 1)), (0.0,) * (count - 1))
    inverse = torch.cholesky_inverse(problem.factor(torch.arange(count * width)))
    matrix = problem.matrix.clone()
    left, gone, losses, lost = list(range(count)), [], [], 0.0
    while len(left) > 1:
        blocks = {head: problem.channels([head]) for head in left}
        solved = {head: torch.linalg.solve(inverse[at][:, at], matrix[at]) for head, at in blocks.items()}
        costs = {head: float((matrix[at] * solved[head]).sum()) for head, at in blocks.items()}
        least = min(left, key=lambda head: costs[head])
        at = blocks[least]
        matrix = matrix - inverse[:, at] @ solved[least]
        inverse = inverse - inverse[:, at] @ torch.linalg.solve(inverse[at][:, at], inverse[at])
        lost += costs[least]
        left.remove(least)
        gone.append(least)
        losses.append(lost)
    return PruningOrder(tuple(gone), tuple(losses))


def choose_heads(
    orders: Mapping[str, PruningOrder], count: int, *, weights: Mapping[str, float] | None = None
) -> dict[str, tuple[int, ...]]:
    """`count` heads of a whole model, by layer: always the next head of the layer where it costs least.

    `weights` say how much a loss of each layer matters to the model, 1 for every one by default.
    """
    possible = sum(len(order.heads) for order in orders.values())
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= possible:
        raise OptionError(f"of these layers 0 to {possible} heads can go, one staying in each, got {count!r}")
    if weights is not None and set(weights) != set(orders):
        raise OptionError(f"weights are given for each layer, got {sorted(weights)} for layers {sorted(orders)}")

    def cost(path: str, taken: int) -> float:
        losses = orders[path].losses
        step = losses[taken] - (losses[taken - 1] if taken else 0.0)
        return step * (1.0 if weights is None else weights[path])

    waiting = [(cost(path, 0), path, 0) for path, order in orders.items() if order.heads]
    heapq.heapify(waiting)
    chosen: dict[str, int] = {}
    for _ in range(count):
        _, path, taken = heapq.heappop(waiting)
        chosen[path] = taken + 1
        if taken + 1 < len(orders[path].heads):
            heapq.heappush(waiting, (cost(path, taken + 1), path, taken + 1))
    return {path: tuple(sorted(orders[path].heads[:taken])) for path, taken in chosen.items()}
