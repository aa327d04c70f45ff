"""What a model shows when heads are to be chosen: moments, gradients and losses, each gathered when it is asked for."""

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
from polyhead.surgery.adapters.attention_layer import AttentionLayer
from polyhead.surgery.adapters.discovery import find_layers
from polyhead.surgery.adapters.head_weights import HeadWeights, read_heads
from polyhead.surgery.calibration.moments import OutputMoments, collect_moments
from polyhead.surgery.calibration.sensitivity import Sensitivity, loss_sensitivities, weighed_moments
from polyhead.surgery.compensation.least_squares import RIDGE

Weighting = Literal["none", "layer", "direction", "token"]
WEIGHTINGS: tuple[Weighting, ...] = get_args(Weighting)
Batch = Mapping[str, Any]
Scored = str | Loss | Callable[[nn.Module, Any], Tensor | RowLosses]


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
        return collect_moments(self.model, self.batches)

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
