"""Pruning criteria: each ranks the heads of every layer by an importance score.

| name | importance of a head |
|---|---|
| compensated | reconstruction error of the layer without it, after compensation (Optimal Brain Surgeon) |
| plain | reconstruction error of the layer without it and those pruned before it, uncompensated |
| ablation | increase of the loss when the head's output is multiplied by 0 |
| gradient | mean of |dL/dgate| at gate = 1 (Michel et al. 2019) |
| taylor | minus the mean of dL/dgate: the signed first-order Taylor term (cf. Molchanov et al. 2017) |
| magnitude | the norm of W_V W_O, which is independent of the basis between them |
| redundancy | 1 - the cosine of its output with that of the most similar head |
| random | a random number from the seed: the control |

The first two measure errors in a layer's output. `weighting` sets the cost of such an error: "none", equal in every
layer; "layer", by the layer's mean squared gradient; "direction", by its empirical Fisher information; "token", the
same with every token weighted by the norm of its own gradient.

"compensated" is the Optimal Brain Surgeon (Hassibi & Stork 1992) for blocks of channels. With P the inverse of the
regularised Hessian and W the current solution, removing the block h costs tr(W_hᵀ (P_hh)⁻¹ W_h), and both are updated
by W -= P_:h (P_hh)⁻¹ W_h and P -= P_:h (P_hh)⁻¹ P_h:. So every candidate is judged after compensation without solving
again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyhead.errors import OptionError
from polyhead.surgery.adapters.head_weights import HeadWeights
from polyhead.surgery.calibration.moments import OutputMoments
from polyhead.surgery.compensation.least_squares import (
    RIDGE,
    OutputRegression,
    check_moments,
    check_ridge,
    in_metric,
    output_projection,
)
from polyhead.surgery.options import check_criterion
from polyhead.surgery.selection.evidence import Evidence, Weighting


@dataclass(frozen=True, slots=True)
class PruningOrder:
    """Heads of a layer in the order in which they can be pruned, except the last, which remains.

    `losses[i]` is the loss with heads[: i + 1] pruned and the others compensated: the mean square error of the layer's
    output, in the units of that output, plus the small ridge term. Other criteria have their own losses, which
    accumulate the score of each head.
    """

    heads: tuple[int, ...]
    losses: tuple[float, ...]


Orders = dict[str, PruningOrder]  # by path of the layer
Criterion = Callable[[Evidence, Weighting, int], Orders]  # of the evidence, a weighting, and a seed


def orders_by(criterion: str, evidence: Evidence, *, weighting: Weighting = "none", seed: int = 0) -> Orders:
    """Return the pruning order of every layer, by path, for `choose_heads`.

    `weighting` affects only the criteria that measure errors, `seed` only the random one.
    """
    check_criterion(criterion)
    return _ORDERS[criterion](evidence, weighting, seed)


def _compensated(evidence: Evidence, weighting: Weighting, seed: int) -> Orders:
    return {
        path: pruning_order(layer.moments, layer.heads, root=layer.root)
        for path, layer in evidence.weighted(weighting).items()
    }


def pruning_order(
    moments: OutputMoments,
    heads: HeadWeights,
    *,
    ridge: float = RIDGE,
    root: Tensor | None = None,
    together: Sequence[Sequence[int]] | None = None,
    least: int = 0,
) -> PruningOrder:
    """Order the heads of one layer by reconstruction error after compensation.

    Args:
        root: metric of output errors, [embed_dim, any], as `Sensitivity.root` returns it: the loss is that of the error
            times this matrix.
        together: groups of heads that are pruned together, such as the readers of one KV head; the order is then over
            groups.
        least: number of readers that every KV head keeps, so that equal groups can stay equal.
        moments: moments of the layer's head outputs.
        heads: weights of the layer.
        ridge: ridge of the regression, relative to the mean second moment.

    Returns:
        Heads from the most to the least dispensable, and the loss of each prefix.
    """
    check_ridge(ridge)
    regression = OutputRegression.of(moments, heads, ridge)
    blocks = [[head] for head in range(heads.num_heads)] if together is None else [list(block) for block in together]
    if regression.scale == 0:  # all outputs are zero, so that no head costs anything
        inverse = torch.eye(len(regression.mean), dtype=torch.float64, device=regression.mean.device)
        matrix = torch.zeros_like(regression.matrix)
    else:
        inverse = torch.cholesky_inverse(regression.factor(regression.channels(range(heads.num_heads))))
        matrix = in_metric(regression.matrix, root)
    block_channels = [regression.channels(block) for block in blocks]
    remaining, pruned, losses, loss = list(range(len(blocks))), [], [], 0.0
    readers = [heads.key_heads.count(key) for key in range(heads.key.shape[0])]
    while len(remaining) > 1:
        candidates = [
            block for block in remaining if all(readers[heads.key_heads[head]] > least for head in blocks[block])
        ]
        if not candidates:
            break
        costs = _costs(inverse, matrix, [block_channels[block] for block in candidates])
        cheapest = candidates[int(torch.tensor(costs).argmin())]
        channels = block_channels[cheapest]
        solved = torch.linalg.solve(inverse[channels][:, channels], torch.cat((matrix[channels], inverse[channels]), 1))
        loss += costs[candidates.index(cheapest)]
        matrix = matrix - inverse[:, channels] @ solved[:, : matrix.shape[1]]
        inverse = inverse - inverse[:, channels] @ solved[:, matrix.shape[1] :]
        remaining.remove(cheapest)
        for head in blocks[cheapest]:
            readers[heads.key_heads[head]] -= 1
        pruned.append(cheapest)
        losses.append(loss)
    return PruningOrder(tuple(pruned), tuple(losses))


def _costs(inverse: Tensor, matrix: Tensor, blocks: Sequence[Tensor]) -> list[float]:
    """Return the cost of removing each block of channels; blocks of one size are solved as a batch."""
    costs = [0.0] * len(blocks)
    for size in {len(block) for block in blocks}:
        indices = [index for index, block in enumerate(blocks) if len(block) == size]
        channels = torch.stack([blocks[index] for index in indices])
        rows = matrix[channels]  # [blocks, channels, outputs]
        solved = torch.linalg.solve(inverse[channels[:, :, None], channels[:, None, :]], rows)
        for index, cost in zip(indices, (rows * solved).sum((1, 2)).tolist(), strict=True):
            costs[index] = cost
    return costs


def _plain(evidence: Evidence, weighting: Weighting, seed: int) -> Orders:
    return {
        path: plain_order(layer.moments, layer.heads, root=layer.root)
        for path, layer in evidence.weighted(weighting).items()
    }


def plain_order(moments: OutputMoments, heads: HeadWeights, *, root: Tensor | None = None) -> PruningOrder:
    """Order heads by reconstruction error without compensation: the energy of the summed pruned outputs."""
    energy = energies(moments, heads, root=root)
    remaining, loss = list(range(heads.num_heads)), 0.0
    pruned: list[int] = []
    losses: list[float] = []
    while len(remaining) > 1:
        increments = {head: float(energy[head, head] + 2 * energy[head, pruned].sum()) for head in remaining}
        cheapest = min(remaining, key=lambda head: increments[head])
        loss += increments[cheapest]
        remaining.remove(cheapest)
        pruned.append(cheapest)
        losses.append(loss)
    return PruningOrder(tuple(pruned), tuple(losses))


def energies(moments: OutputMoments, heads: HeadWeights, *, root: Tensor | None = None) -> Tensor:
    """Return [heads, heads], the mean over tokens of the inner product of two heads' outputs."""
    check_moments(moments, heads, "the layer")
    _, products = moments.compute(centred=False)
    matrix = in_metric(output_projection(heads)[0], root)
    count = heads.num_heads
    by_head = matrix.unflatten(0, (count, -1))
    pairs = products.unflatten(0, (count, -1)).unflatten(2, (count, -1))  # [heads, channels, heads, channels]
    return torch.einsum("hae,hakb,kbe->hk", by_head, pairs, by_head)


def _redundancy(evidence: Evidence, weighting: Weighting, seed: int) -> Orders:
    return {path: redundancy_order(energies(evidence.moments[path], heads)) for path, heads in evidence.heads.items()}


def redundancy_order(energy: Tensor) -> PruningOrder:
    """Prune the smaller of the two heads with the most similar outputs, until one is left.

    `energy` is [heads, heads], the mean product of the outputs of two heads. Heads with zero output are pruned first.
    """
    sizes = energy.diagonal().clamp_min(0).sqrt()
    alike = energy / torch.outer(sizes, sizes).clamp_min(torch.finfo(energy.dtype).tiny)
    left, removed, losses, lost = list(range(len(energy))), [], [], 0.0
    while len(left) > 1:
        silent = [head for head in left if sizes[head] == 0]
        pairs = [(float(alike[one, other]), one, other) for one in left for other in left if one < other]
        likeness, one, other = max(pairs, key=lambda pair: (pair[0], -pair[1], -pair[2]))
        loser = one if sizes[one] < sizes[other] else other
        loser, likeness = (silent[0], 1.0) if silent else (loser, likeness)
        lost += 1 - likeness
        left.remove(loser)
        removed.append(loser)
        losses.append(lost)
    return PruningOrder(tuple(removed), tuple(losses))


def magnitudes(heads: HeadWeights) -> list[float]:
    """Return the Frobenius norm of W_V W_O of every head."""
    value = heads.value.double()[list(heads.key_heads)]
    return [float((v.T @ o).norm()) for v, o in zip(value, heads.output.double(), strict=True)]


def order_by_score(scores: Sequence[float]) -> PruningOrder:
    """Order heads by ascending score; losses are the cumulative sums of the scores."""
    ranked = sorted(range(len(scores)), key=lambda head: scores[head])[: len(scores) - 1]
    losses = torch.tensor([scores[head] for head in ranked], dtype=torch.float64).cumsum(0)
    return PruningOrder(tuple(ranked), tuple(losses.tolist()))


def random_scores(evidence: Evidence, seed: int) -> dict[str, list[float]]:
    """Return a random number for every head, by layer."""
    generator = torch.Generator().manual_seed(seed)
    return {
        path: torch.rand(heads.num_heads, generator=generator, dtype=torch.float64).tolist()
        for path, heads in evidence.heads.items()
    }


def _by_score(scores: Callable[[Evidence, int], Mapping[str, Sequence[float]]]) -> Criterion:
    """Return the criterion that orders heads by these scores."""
    return lambda evidence, _, seed: {path: order_by_score(x) for path, x in scores(evidence, seed).items()}


_ORDERS: dict[str, Criterion] = {
    "compensated": _compensated,
    "plain": _plain,
    "ablation": _by_score(lambda evidence, _: evidence.ablation),
    "gradient": _by_score(lambda evidence, _: evidence.slopes("gradient")),
    "taylor": _by_score(lambda evidence, _: evidence.slopes("taylor")),
    "magnitude": _by_score(lambda evidence, _: {path: magnitudes(heads) for path, heads in evidence.heads.items()}),
    "redundancy": _redundancy,
    "random": _by_score(random_scores),
}
WEIGHTED = ("compensated", "plain")  # criteria that measure errors, to which a weighting applies


def choose_heads(
    orders: Mapping[str, PruningOrder], count: int, *, weights: Mapping[str, float] | None = None
) -> dict[str, tuple[int, ...]]:
    """Choose `count` heads of a model, by layer: the prefixes of the orders with the least total loss.

    Solved exactly by dynamic programming over layers. `weights` scale the losses of each layer, 1 by default.

    Args:
        orders: order of each layer, by path, as `pruning_order` returns it.
        count: heads to remove in total.
        weights: factor of each layer's losses, by path.

    Returns:
        The heads to remove from each layer, by path.
    """
    possible = sum(len(order.heads) for order in orders.values())
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= possible:
        raise OptionError(f"count must be 0 to {possible}, so that each layer keeps a head, got {count!r}")
    if weights is not None and set(weights) != set(orders):
        raise OptionError(f"weights must have one entry per layer, got {sorted(weights)} for layers {sorted(orders)}")
    # min_loss[k]: least total loss with k heads pruned from the layers so far; num_pruned: the layer's share of k.
    min_loss = torch.full((count + 1,), torch.inf, dtype=torch.float64)
    min_loss[0] = 0.0
    num_pruned = []
    for path, order in orders.items():
        losses = torch.tensor((0.0, *order.losses), dtype=torch.float64)
        losses = losses if weights is None else losses * weights[path]
        options = torch.full((len(losses), count + 1), torch.inf, dtype=torch.float64)
        for number in range(min(len(losses), count + 1)):
            options[number, number:] = min_loss[: count + 1 - number] + losses[number]
        min_loss, best = options.min(0)
        num_pruned.append(best)
    remaining, chosen = count, {}
    for (path, order), best in reversed(list(zip(orders.items(), num_pruned, strict=True))):
        number = int(best[remaining])
        remaining -= number
        if number:
            chosen[path] = tuple(sorted(order.heads[:number]))
    return {path: chosen[path] for path in orders if path in chosen}
