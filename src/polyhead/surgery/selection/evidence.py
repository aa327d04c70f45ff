"""Evidence for choosing heads: moments, gradients and losses of a model on a calibration text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from polyhead.analysis.importance import ablate, gradient_scores
from polyhead.analysis.importance.head_importance import Importance
from polyhead.analysis.importance.losses import Loss, RowLosses
from polyhead.errors import OptionError
from polyhead.progress import Progress, ProgressCallback, Step, ignore_progress
from polyhead.surgery.adapters.attention_layer import AttentionLayer
from polyhead.surgery.adapters.discovery import find_layers
from polyhead.surgery.adapters.head_weights import HeadWeights, read_heads
from polyhead.surgery.calibration.moments import (
    GradientStatistics,
    OutputMoments,
    collect_moments,
    gradient_statistics,
)
from polyhead.surgery.calibration.streams import CachedBlocks, in_float32, recording_blocks
from polyhead.surgery.compensation.least_squares import OutputProjection, OutputRegression
from polyhead.surgery.selection.journal import Journal

Weighting = Literal["none", "layer", "direction", "token"]
WEIGHTINGS: tuple[Weighting, ...] = get_args(Weighting)
READING = "Read the text to choose heads"
Batch = Mapping[str, Any]
Scored = str | Loss | Callable[[nn.Module, Any], Tensor | RowLosses]


@dataclass(frozen=True)
class Objectives:
    """Objectives of a model for the criteria; None where one is not available.

    `slope(model, batch)` returns one differentiable number, whose gradients weight the errors. `ablated` and `gradient`
    are losses as `polyhead.analysis.importance` takes them; `labelled` are the batches for `gradient` if it needs
    others than the calibration text.
    """

    slope: Callable[[nn.Module, Batch], Tensor] | None = None
    ablated: Scored | None = None
    gradient: Scored | None = None
    labelled: Sequence[Any] | None = None
    slopes: int | None = None  # number of batches for gradients, all by default
    ablations: int | None = None  # number of batches for ablation, all by default


@dataclass(frozen=True, slots=True, eq=False)
class WeightedLayer:
    """Weights of a layer's heads, the moments of their outputs, and a root of the metric of errors in its output.

    An error e costs |e root|²; the root is None if all errors cost the same.
    """

    heads: HeadWeights
    moments: OutputMoments
    root: Tensor | None


class Evidence:
    """Measurements of a model that select heads and compensate for them; a pass over the text is made on first use.

    With a journal, the results of a pass are stored, and read instead of computed. `stack` restricts the layers to one
    stack.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Batch],
        objectives: Objectives,
        *,
        journal: Journal | None = None,
        stack: str | None = None,
        progress: ProgressCallback = ignore_progress,
    ) -> None:
        self.model = model
        self.stack = stack
        self.layers = editable_layers(model, stack)
        self.heads = {path: read_heads(model, layer) for path, layer in self.layers.items()}
        self.batches = batches
        self.objectives = objectives
        self.journal = Journal() if journal is None else journal
        self.recorded: list[CachedBlocks] = []  # with the gradients: the last block's output on each batch
        self._progress = progress
        self._weighted: dict[Weighting, dict[str, WeightedLayer]] = {}
        self._regressions: dict[str, OutputRegression] = {}

    @cached_property
    def gradient_statistics(self) -> dict[str, GradientStatistics]:
        """Statistics of each layer from gradients of the loss, in one pass that also records the last block."""
        stored = self._stored("gradient_statistics", self._collect_gradient_statistics)
        return {path: GradientStatistics.from_tensors(parts) for path, parts in stored.items()}

    def _collect_gradient_statistics(self) -> dict[str, dict[str, Tensor]]:
        with recording_blocks(self.model, list(self.layers.values())[-1]) as self.recorded:
            by_layer = gradient_statistics(self.model, self._read(), self._slope)
        return {path: statistics.to_tensors() for path, statistics in by_layer.items()}

    def weighted(self, weighting: Weighting = "token") -> dict[str, WeightedLayer]:
        """Return each layer with the moments and the metric by which errors of its output are weighted."""
        if weighting not in WEIGHTINGS:
            raise OptionError(f"weighting must be one of {', '.join(WEIGHTINGS)}, got {weighting!r}")
        if weighting not in self._weighted:
            if weighting == "token":
                moments = {path: x.moments for path, x in self.gradient_statistics.items()}
            else:
                moments = self.moments
            self._weighted[weighting] = {
                path: WeightedLayer(self.heads[path], x, self._root(path, weighting)) for path, x in moments.items()
            }
        return self._weighted[weighting]

    def _root(self, path: str, weighting: Weighting) -> Tensor | None:
        if weighting == "none":
            return None
        sensitivity = self.gradient_statistics[path].sensitivity
        if weighting == "layer":
            return torch.eye(len(sensitivity.products), dtype=torch.float64) * sensitivity.weight**0.5
        return sensitivity.root()

    def compensated(self, removed: Mapping[str, Sequence[int]]) -> dict[str, OutputProjection]:
        """Return W_O of layers without these heads, by least squares over the weighted moments."""
        for path in removed:
            if path not in self._regressions:
                moments = self.gradient_statistics[path].moments
                self._regressions[path] = OutputRegression.of(moments, self.heads[path], path=path)
        return {path: self._regressions[path].without(pruned) for path, pruned in removed.items() if len(pruned)}

    @cached_property
    def moments(self) -> dict[str, OutputMoments]:
        """Moments of each layer's head outputs, every token weighted equally."""
        stored = self._stored("moments", self._collect_moments)
        return {path: OutputMoments.from_tensors(parts) for path, parts in stored.items()}

    def _collect_moments(self) -> dict[str, dict[str, Tensor]]:
        return {path: moments.to_tensors() for path, moments in collect_moments(self.model, self._read()).items()}

    @cached_property
    def ablation(self) -> dict[str, list[float]]:
        """Increase of the loss without each head, by layer."""

        def compute() -> Importance:
            if self.objectives.ablated is None:
                raise OptionError("ablation needs a loss to evaluate without each head, got objectives without ablated")
            return ablate(self.model, _some(self.batches, self.objectives.ablations), self.objectives.ablated)

        return self._scores("ablation", compute)

    def slopes(self, measure: Literal["gradient", "taylor"]) -> dict[str, list[float]]:
        """Return a score of each head from the gradient of the loss by its gate, by layer."""
        return self._scores(measure, lambda: self.gradients)

    @cached_property
    def gradients(self) -> Importance:
        if self.objectives.gradient is None:
            raise OptionError(
                "gradient and taylor need the gradient of a loss at the unpruned model, got objectives without one: "
                "similarity to the unpruned model has none there; pass labels, or choose another criterion"
            )
        batches = self.batches if self.objectives.labelled is None else self.objectives.labelled
        return gradient_scores(
            self.model, _some(batches, self.objectives.slopes), self.objectives.gradient, overlap=False
        )

    def _read(self) -> Iterator[Batch]:
        """Yield the batches and report how many were read."""
        step = Step(self._progress, READING, len(self.batches), "batches")
        for batch in self.batches:
            yield batch
            step.advance()

    @property
    def _slope(self) -> Callable[[nn.Module, Batch], Tensor]:
        if self.objectives.slope is None:
            raise OptionError("weighting errors needs the gradients of a loss, got objectives without slope")
        return self.objectives.slope

    def _scores(self, name: str, compute: Callable[[], Importance]) -> dict[str, list[float]]:
        """Return the scores of this name by layer, 0 for heads that the loss does not depend on."""

        def by_layer() -> dict[str, dict[str, Tensor]]:
            scores = {path: torch.zeros(heads.num_heads, dtype=torch.float64) for path, heads in self.heads.items()}
            self._progress(Progress(READING))
            importance = compute()
            for site, head, score in zip(importance.sites, importance.heads, importance[name].tolist(), strict=True):
                if site.name in scores:
                    scores[site.name][head] = score
            return {path: {"scores": x} for path, x in scores.items()}

        return {path: parts["scores"].tolist() for path, parts in self._stored(name, by_layer).items()}

    def _stored(
        self, name: str, compute: Callable[[], Mapping[str, Mapping[str, Tensor]]]
    ) -> dict[str, Mapping[str, Tensor]]:
        """Return the tensors of a part, by layer in the order of the model; a file lists them in another."""

        def computed() -> Mapping[str, Mapping[str, Tensor]]:
            with in_float32(self.model):
                return compute()

        stored = self.journal.by_layer(name, computed, getattr(self.objectives.slope, "generator", None))
        return {path: stored[path] for path in self.layers if path in stored}


def editable_layers(model: nn.Module, stack: str | None = None) -> dict[str, AttentionLayer]:
    """Return the layers of a model, or of one stack of it, whose heads can be edited, by path; raises if none can."""
    editable = {layer.path: layer for layer in find_layers(model) if not layer.refusals}
    if not editable:
        raise OptionError("choosing heads needs attention layers with a known head layout, got a model without any")
    selected = {path: layer for path, layer in editable.items() if stack in (None, layer.stack)}
    if not selected:
        stacks = ", ".join(dict.fromkeys(layer.stack for layer in editable.values()))
        raise OptionError(f"stack must be one of {stacks}, got {stack!r}")
    return selected


def _some(batches: Sequence[Any], count: int | None) -> Sequence[Any]:
    """Return a number of batches, evenly spread over the text."""
    if count is None or count >= len(batches):
        return batches
    return [batches[index * len(batches) // count] for index in range(count)]
