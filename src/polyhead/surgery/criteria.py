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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from polyhead.analysis.importance import ablate, gradient_scores
from polyhead.analysis.importance.losses import Loss, RowLosses
from polyhead.analysis.importance.result import Importance
from polyhead.errors import OptionError
from polyhead.surgery.anatomy import AttentionLayer, find_layers
from polyhead.surgery.choosing import PruningOrder, energies, order_by_score, plain_order, pruning_order
from polyhead.surgery.head_weights import HeadWeights, read_heads
from polyhead.surgery.moments import OutputMoments, gather_moments
from polyhead.surgery.repair import RIDGE
from polyhead.surgery.sensitivity import Sensitivity, loss_sensitivities, weighed_moments

Weighting = Literal["none", "layer", "direction", "token"]
WEIGHTINGS: tuple[Weighting, ...] = get_args(Weighting)
Batch = Mapping[str, Any]
Scored = str | Loss | Callable[[nn.Module, Any], Tensor | RowLosses]
Orders = dict[str, PruningOrder]


@dataclass(frozen=True)
class Judge:
    """What a model is worth, as far as criteria ask: each is a loss, and None where there is none to ask.

    `slope` is one number with a gradient for a batch, whose gradients say what errors cost. `ablated` and `gradient`
    are losses as `polyhead.analysis.importance` takes them; `labelled` are the batches for `gradient` where it needs
    others than the calibration text.
    """

    slope: Callable[[nn.Module, Batch], Tensor] | None = None
    ablated: Scored | None = None
    gradient: Scored | None = None
    labelled: Sequence[Any] | None = None
    slopes: int | None = None  # so many batches for gradients, all by default
    ablations: int | None = None  # so many batches for ablation, all by default


class Evidence:
    """What criteria judge a model by; each part is gathered when it is first asked for, on the model as it is then."""

    def __init__(self, model: nn.Module, batches: Sequence[Batch], judge: Judge, *, ridge: float = RIDGE) -> None:
        self.model = model
        self.batches = batches
        self.judge = judge
        self.ridge = ridge
        self._roots: dict[str, Tensor] = {}

    @cached_property
    def layers(self) -> dict[str, AttentionLayer]:
        found = {layer.path: layer for layer in find_layers(self.model) if not layer.refusals}
        if not found:
            raise OptionError("heads are chosen in attention layers whose heads are known, got a model without any")
        return found

    @cached_property
    def heads(self) -> dict[str, HeadWeights]:
        return {path: read_heads(self.model, layer) for path, layer in self.layers.items()}

    @cached_property
    def moments(self) -> dict[str, OutputMoments]:
        return gather_moments(self.model, self.batches)

    @cached_property
    def weighed_moments(self) -> dict[str, OutputMoments]:
        return weighed_moments(self.model, self.batches, self._slope)

    def moments_for(self, weighting: Weighting) -> dict[str, OutputMoments]:
        """The moments that errors are measured, and repaired, over."""
        return self.weighed_moments if weighting == "token" else self.moments

    @property
    def _slope(self) -> Callable[[nn.Module, Batch], Tensor]:
        if self.judge.slope is None:
            raise OptionError("what an error costs is weighed by the gradients of a loss, got a judge without slope")
        return self.judge.slope

    @cached_property
    def sensitivities(self) -> dict[str, Sensitivity]:
        return loss_sensitivities(self.model, _some(self.batches, self.judge.slopes), self._slope)

    @cached_property
    def ablation(self) -> dict[str, list[float]]:
        if self.judge.ablated is None:
            raise OptionError("ablation asks what the loss gains without a head, got a judge without such a loss")
        found = ablate(self.model, _some(self.batches, self.judge.ablations), self.judge.ablated)
        return self._by_layer(found, "ablation")

    @cached_property
    def gradients(self) -> Importance:
        if self.judge.gradient is None:
            raise OptionError(
                "gradient and taylor ask for the slope of a loss where the model is whole, got a judge without one: "
                "likeness to the whole model is flat there; give labels, or choose by another criterion"
            )
        batches = self.batches if self.judge.labelled is None else self.judge.labelled
        return gradient_scores(self.model, _some(batches, self.judge.slopes), self.judge.gradient, overlap=False)

    def slopes(self, measure: Literal["gradient", "taylor"]) -> dict[str, list[float]]:
        return self._by_layer(self.gradients, measure)

    def root(self, path: str, weighting: Weighting) -> Tensor | None:
        """What an error in the output of a layer costs, as `pruning_order` takes it."""
        if weighting not in WEIGHTINGS:
            raise OptionError(f"weighting must be one of {', '.join(WEIGHTINGS)}, got {weighting!r}")
        if weighting == "none":
            return None
        found = self.sensitivities[path]
        if weighting == "layer":
            return torch.eye(len(found.products), dtype=torch.float64) * found.weight**0.5
        if path not in self._roots:
            self._roots[path] = found.root()
        return self._roots[path]

    def _by_layer(self, found: Importance, measure: str) -> dict[str, list[float]]:
        scores: dict[str, list[float]] = {path: [0.0] * heads.num_heads for path, heads in self.heads.items()}
        for site, head, score in zip(found.sites, found.heads, found[measure].tolist(), strict=True):
            if site.name in scores:
                scores[site.name][head] = score
        return scores


def _some(batches: Sequence[Any], few: int | None) -> Sequence[Any]:
    """A few batches, from all over the text."""
    if few is None or few >= len(batches):
        return batches
    return [batches[index * len(batches) // few] for index in range(few)]


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


def _repaired(evidence: Evidence, weighting: Weighting, seed: int) -> Orders:
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
        Criterion("repaired", _repaired, weighs=True),
        Criterion("plain", _plain, weighs=True),
        Criterion("ablation", _ablation),
        Criterion("gradient", _gradient),
        Criterion("taylor", _taylor),
        Criterion("magnitude", _magnitude),
        Criterion("redundancy", _redundancy),
        Criterion("random", _random),
    )
}
