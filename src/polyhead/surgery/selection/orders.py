"""Which heads can go: one after the other, each time the one whose loss the remaining heads can best make up for.

Taking a block h of channels out of a least-squares problem costs tr(W_hᵀ (P_hh)⁻¹ W_h), P being the inverse of the
system and W its solution; both are then brought down by a product with P_hh⁻¹. So every candidate is judged after
repair, and nothing is solved anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyhead.errors import OptionError, ShapeError
from polyhead.surgery.adapters.head_weights import HeadWeights
from polyhead.surgery.calibration.moments import OutputMoments
from polyhead.surgery.compensation.least_squares import RIDGE, Problem, check_moments, check_ridge, output_projection


@dataclass(frozen=True, slots=True)
class PruningOrder:
    """The heads of a layer in the order in which they can go, but for the last, which stays.

    `losses[i]` is what is lost when heads[: i + 1] are gone and the others are repaired: the mean square of what is
    missing in the layer's output, in the units of that output, and the ridge's small part. Other criteria have losses
    of their own, that grow by what each head costs.
    """

    heads: tuple[int, ...]
    losses: tuple[float, ...]


def pruning_order(
    moments: OutputMoments,
    heads: HeadWeights,
    *,
    ridge: float = RIDGE,
    root: Tensor | None = None,
    together: Sequence[Sequence[int]] | None = None,
    least: int = 0,
) -> PruningOrder:
    """The heads of one layer, by loss in repaired reconstruction.

    Args:
        root: what errors in each direction of the output cost, [embed_dim, any], as `Sensitivity.root` gives it: the
            loss is then that of the error times this matrix.
        together: heads that go at once, such as those that read one KV head; the order is then one of these groups.
        least: so many readers of every KV head stay, so that groups which begin equal can end equal.
    """
    check_ridge(ridge)
    problem = Problem.of(moments, heads, ridge)
    blocks = [[head] for head in range(heads.num_heads)] if together is None else [list(block) for block in together]
    if problem.scale == 0:  # heads that write nothing can go in any order
        return PruningOrder(tuple(range(len(blocks) - 1)), (0.0,) * (len(blocks) - 1))
    inverse = torch.cholesky_inverse(problem.factor(problem.channels(range(heads.num_heads))))
    matrix = in_metric(problem.matrix, root)
    places = [problem.channels(block) for block in blocks]
    left, gone, losses, lost = list(range(len(blocks))), [], [], 0.0
    readers = [heads.key_heads.count(key) for key in range(heads.key.shape[0])]
    while len(left) > 1:
        free = [block for block in left if all(readers[heads.key_heads[head]] > least for head in blocks[block])]
        if not free:
            break
        costs = _costs(inverse, matrix, [places[block] for block in free])
        cheapest = free[int(torch.tensor(costs).argmin())]
        at = places[cheapest]
        solved = torch.linalg.solve(inverse[at][:, at], torch.cat((matrix[at], inverse[at]), 1))
        lost += costs[free.index(cheapest)]
        matrix = matrix - inverse[:, at] @ solved[:, : matrix.shape[1]]
        inverse = inverse - inverse[:, at] @ solved[:, matrix.shape[1] :]
        left.remove(cheapest)
        for head in blocks[cheapest]:
            readers[heads.key_heads[head]] -= 1
        gone.append(cheapest)
        losses.append(lost)
    return PruningOrder(tuple(gone), tuple(losses))


def _costs(inverse: Tensor, matrix: Tensor, blocks: Sequence[Tensor]) -> list[float]:
    """What it costs to take out each of these blocks of channels; those of one size are solved at once."""
    costs = [0.0] * len(blocks)
    for size in {len(block) for block in blocks}:
        alike = [number for number, block in enumerate(blocks) if len(block) == size]
        at = torch.stack([blocks[number] for number in alike])
        rows = matrix[at]  # [blocks, channels, outputs]
        solved = torch.linalg.solve(inverse[at[:, :, None], at[:, None, :]], rows)
        for number, cost in zip(alike, (rows * solved).sum((1, 2)).tolist(), strict=True):
            costs[number] = cost
    return costs


def plain_order(moments: OutputMoments, heads: HeadWeights, *, root: Tensor | None = None) -> PruningOrder:
    """The heads of one layer by loss in reconstruction without repair: the mean square of what they write together."""
    energy = energies(moments, heads, root=root)
    left, lost = list(range(heads.num_heads)), 0.0
    gone: list[int] = []
    losses: list[float] = []
    while len(left) > 1:
        steps = {head: float(energy[head, head] + 2 * energy[head, gone].sum()) for head in left}
        cheapest = min(left, key=lambda head: steps[head])
        lost += steps[cheapest]
        left.remove(cheapest)
        gone.append(cheapest)
        losses.append(lost)
    return PruningOrder(tuple(gone), tuple(losses))


def energies(moments: OutputMoments, heads: HeadWeights, *, root: Tensor | None = None) -> Tensor:
    """[heads, heads]: the mean over tokens of the product of what two heads write."""
    check_moments(moments, heads, "the layer")
    _, products = moments.compute(centred=False)
    matrix = in_metric(output_projection(heads)[0], root)
    count = heads.num_heads
    by_head = matrix.unflatten(0, (count, -1))
    pairs = products.unflatten(0, (count, -1)).unflatten(2, (count, -1))  # [heads, channels, heads, channels]
    return torch.einsum("hae,hakb,kbe->hk", by_head, pairs, by_head)


def order_by_score(scores: Sequence[float]) -> PruningOrder:
    """The heads of one layer by a score of each, least first; a loss is the sum of the scores of what is gone."""
    ranked = sorted(range(len(scores)), key=lambda head: scores[head])[: len(scores) - 1]
    losses = torch.tensor([scores[head] for head in ranked], dtype=torch.float64).cumsum(0)
    return PruningOrder(tuple(ranked), tuple(losses.tolist()))


def choose_heads(
    orders: Mapping[str, PruningOrder], count: int, *, weights: Mapping[str, float] | None = None
) -> dict[str, tuple[int, ...]]:
    """`count` heads of a whole model, by layer: those beginnings of the orders whose losses have the least sum.

    `weights` say how much a loss of each layer matters to the model, 1 for every one by default.
    """
    possible = sum(len(order.heads) for order in orders.values())
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= possible:
        raise OptionError(f"of these layers 0 to {possible} heads can go, one staying in each, got {count!r}")
    if weights is not None and set(weights) != set(orders):
        raise OptionError(f"weights are given for each layer, got {sorted(weights)} for layers {sorted(orders)}")
    # least[k]: the smallest sum with k heads gone from the layers so far; taken: how many of each layer that takes.
    least = torch.full((count + 1,), torch.inf, dtype=torch.float64)
    least[0] = 0.0
    taken = []
    for path, order in orders.items():
        losses = torch.tensor((0.0, *order.losses), dtype=torch.float64)
        losses = losses if weights is None else losses * weights[path]
        options = torch.full((len(losses), count + 1), torch.inf, dtype=torch.float64)
        for number in range(min(len(losses), count + 1)):
            options[number, number:] = least[: count + 1 - number] + losses[number]
        least, best = options.min(0)
        taken.append(best)
    left, chosen = count, {}
    for (path, order), best in reversed(list(zip(orders.items(), taken, strict=True))):
        number = int(best[left])
        left -= number
        if number:
            chosen[path] = tuple(sorted(order.heads[:number]))
    return {path: chosen[path] for path in orders if path in chosen}


def in_metric(matrix: Tensor, root: Tensor | None) -> Tensor:
    """What is written, in the metric that `root` gives it."""
    if root is None:
        return matrix.clone()
    if root.ndim != 2 or root.shape[0] != matrix.shape[1]:
        raise ShapeError(f"root must be [{matrix.shape[1]}, any], a row for each output, got {list(root.shape)}")
    return matrix @ root.to(matrix)
