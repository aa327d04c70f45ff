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
same with every token weighted by its own squared gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from polyhead.errors import OptionError
from polyhead.surgery.adapters.head_weights import HeadWeights
from polyhead.surgery.selection.measurements import Evidence, Weighting
from polyhead.surgery.selection.orders import PruningOrder, energies, order_by_score, plain_order, pruning_order

Orders = dict[str, PruningOrder]


@dataclass(frozen=True)
class Criterion:
    """A pruning criterion. `weighs` is True if it measures errors to which `weighting` applies."""

    name: str
    order: Callable[[Evidence, Weighting, int], Orders]
    weighs: bool = False


def orders_by(criterion: str, evidence: Evidence, *, weighting: Weighting = "none", seed: int = 0) -> Orders:
    """Return the pruning order of every layer, by path, for `choose_heads`.

    `weighting` affects only the criteria that measure errors, `seed` only the random one.
    """
    if criterion not in CRITERIA:
        raise OptionError(f"criterion must be one of {', '.join(CRITERIA)}, got {criterion!r}")
    return CRITERIA[criterion].order(evidence, weighting, seed)


def _compensated(evidence: Evidence, weighting: Weighting, seed: int) -> Orders:
    return {
        path: pruning_order(moments, evidence.heads[path], ridge=evidence.ridge, root=evidence.root(path, weighting))
        for path, moments in evidence.moments_for(weighting).items()
    }


def _plain(evidence: Evidence, weighting: Weighting, seed: int) -> Orders:
    return {
        path: plain_order(moments, evidence.heads[path], root=evidence.root(path, weighting))
        for path, moments in evidence.moments_for(weighting).items()
    }


def _ablation(evidence: Evidence, weighting: Weighting, seed: int) -> Orders:
    return {path: order_by_score(scores) for path, scores in evidence.ablation.items()}


def _gradient(evidence: Evidence, weighting: Weighting, seed: int) -> Orders:
    return {path: order_by_score(scores) for path, scores in evidence.slopes("gradient").items()}


def _taylor(evidence: Evidence, weighting: Weighting, seed: int) -> Orders:
    return {path: order_by_score(scores) for path, scores in evidence.slopes("taylor").items()}


def _magnitude(evidence: Evidence, weighting: Weighting, seed: int) -> Orders:
    return {path: order_by_score(magnitudes(heads)) for path, heads in evidence.heads.items()}


def magnitudes(heads: HeadWeights) -> list[float]:
    """Return the Frobenius norm of W_V W_O of every head."""
    value = heads.value.double()[list(heads.key_heads)]
    return [float((v.T @ o).norm()) for v, o in zip(value, heads.output.double(), strict=True)]


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


def _random(evidence: Evidence, weighting: Weighting, seed: int) -> Orders:
    generator = torch.Generator().manual_seed(seed)
    return {
        path: order_by_score(torch.rand(heads.num_heads, generator=generator, dtype=torch.float64).tolist())
        for path, heads in evidence.heads.items()
    }


CRITERIA: dict[str, Criterion] = {
    criterion.name: criterion
    for criterion in (
        Criterion("compensated", _compensated, weighs=True),
        Criterion("plain", _plain, weighs=True),
        Criterion("ablation", _ablation),
        Criterion("gradient", _gradient),
        Criterion("taylor", _taylor),
        Criterion("magnitude", _magnitude),
        Criterion("redundancy", _redundancy),
        Criterion("random", _random),
    )
}
