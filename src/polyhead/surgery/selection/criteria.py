"""By what heads are chosen to go: one table of criteria, each an order of the heads of every layer.

| name | a head costs |
|---|---|
| repaired | what the other heads of its layer cannot make up for, after repair |
| plain | what it writes, with the heads that went before it |
| ablation | what the loss gains when it alone is multiplied by 0 |
| gradient | the mean of |dL/dgate| |
| taylor | minus the mean of dL/dgate: what its removal adds to the loss if the loss is straight |
| magnitude | the norm of W_V W_O, which does not change with the coordinates between them |
| redundancy | 1 - the cosine of what it writes with what the head most like it writes |
| random | a number drawn from the seed: the control |

The first two measure errors in what a layer writes. `weighting` says what such an error costs the model: "none", the
same in every layer; "layer", by the mean squared gradient there; "direction", by its Fisher information, direction by
direction; "token", the same with every token counted by its own squared gradient.
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
    """A way to choose heads. `weighs` says whether it measures errors that `weighting` can weigh."""

    name: str
    order: Callable[[Evidence, Weighting, int], Orders]
    weighs: bool = False


def orders_by(criterion: str, evidence: Evidence, *, weighting: Weighting = "none", seed: int = 0) -> Orders:
    """The heads of every layer in the order in which they can go, by path, for `choose_heads`.

    `weighting` changes the criteria that measure errors alone, and `seed` the random one alone.
    """
    if criterion not in CRITERIA:
        raise OptionError(f"a criterion is one of {', '.join(CRITERIA)}, got {criterion!r}")
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
    """The norm of W_V W_O of every head."""
    value = heads.value.double()[list(heads.key_heads)]
    return [float((v.T @ o).norm()) for v, o in zip(value, heads.output.double(), strict=True)]


def _redundancy(evidence: Evidence, weighting: Weighting, seed: int) -> Orders:
    return {path: redundancy_order(energies(evidence.moments[path], heads)) for path, heads in evidence.heads.items()}


def redundancy_order(energy: Tensor) -> PruningOrder:
    """Of the two heads that write what is most alike, the one that writes less goes, until one is left.

    `energy` is [heads, heads], the mean product of what two heads write. A head that writes nothing goes first.
    """
    sizes = energy.diagonal().clamp_min(0).sqrt()
    alike = energy / torch.outer(sizes, sizes).clamp_min(torch.finfo(energy.dtype).tiny)
    left, gone, losses, lost = list(range(len(energy))), [], [], 0.0
    while len(left) > 1:
        silent = [head for head in left if sizes[head] == 0]
        pairs = [(float(alike[one, other]), one, other) for one in left for other in left if one < other]
        likeness, one, other = max(pairs, key=lambda pair: (pair[0], -pair[1], -pair[2]))
        loser = one if sizes[one] < sizes[other] else other
        loser, likeness = (silent[0], 1.0) if silent else (loser, likeness)
        lost += 1 - likeness
        left.remove(loser)
        gone.append(loser)
        losses.append(lost)
    return PruningOrder(tuple(gone), tuple(losses))


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
