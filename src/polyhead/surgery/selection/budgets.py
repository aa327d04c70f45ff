"""Budgets: a target size, and the size and quality of a model without some of its heads."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from torch import nn

from polyhead.costs import Workload
from polyhead.errors import OptionError
from polyhead.surgery.adapters.attention_layer import is_conv1d
from polyhead.surgery.adapters.discovery import find_layers
from polyhead.surgery.compensation.least_squares import Problem
from polyhead.surgery.compensation.masked_trial import Outputs, plain_outputs, with_outputs
from polyhead.surgery.edits.head_edits import PruneHeads
from polyhead.surgery.edits.preview import HeadCounts, Preview, preview, uncached_layers
from polyhead.surgery.selection.measurements import Evidence, Weighting
from polyhead.surgery.selection.quality import Measurement, Quality

Kind = Literal["heads", "cache", "faster"]
RemovedHeads = dict[str, tuple[int, ...]]  # pruned heads, by layer
NO_CACHE = (
    "a cache target needs a model with a KV cache, got {target} for a model without one, such as an encoder; "
    "use a share of its heads (30%-heads) or of its FLOPs (1.2x-faster)"
)
SEEDS = (0, 1, 2)  # of the randomly pruned controls of a curve


@dataclass(frozen=True, slots=True)
class Target:
    """A budget: the share of heads to prune, or the factor by which to shrink the KV cache or the FLOPs.

    >>> Target.parse("30%-heads"), Target.parse("1.2x-faster")
    (Target(kind='heads', amount=0.3), Target(kind='faster', amount=1.2))
    """

    kind: Kind
    amount: float

    @classmethod
    def parse(cls, text: str) -> Target:
        share = re.fullmatch(r"(\d+(?:\.\d+)?)%-heads", text.strip())
        times = re.fullmatch(r"(\d+(?:\.\d+)?)x-(cache|faster)", text.strip())
        if share is not None and 0 < float(share[1]) < 100:
            return cls("heads", float(share[1]) / 100)
        if times is not None and float(times[1]) > 1:
            return cls(times[2], float(times[1]))  # type: ignore[arg-type]
        raise OptionError(
            "a target must be a share of heads to prune (30%-heads), a factor of KV cache (2x-cache) or a factor of "
            f"FLOPs (1.2x-faster), got {text!r}"
        )

    def __str__(self) -> str:
        if self.kind == "heads":
            return f"{100 * self.amount:g}% fewer heads"
        return f"{self.amount:g} times " + ("less cache" if self.kind == "cache" else "fewer FLOPs")


@dataclass(frozen=True, slots=True)
class Size:
    """Remaining shares of a model: heads, KV cache bytes per token, FLOPs.

    `cache` is None for a model without a KV cache, such as an encoder.
    """

    heads: float
    cache: float | None
    flops: float

    def reaches(self, target: Target) -> bool:
        """Return whether this size meets the target."""
        if target.kind == "heads":
            return self.heads <= 1 - target.amount + 1e-9
        remaining = self.cache if target.kind == "cache" else self.flops
        if remaining is None:
            raise OptionError(NO_CACHE.format(target=target))
        return remaining * target.amount <= 1 + 1e-9

    def __str__(self) -> str:
        cache = "" if self.cache is None else f", {self.cache:.0%} of the cache"
        return f"{self.heads:.0%} of the heads{cache} and {self.flops:.0%} of the FLOPs"


@dataclass(frozen=True, slots=True)
class Choice:
    """Heads to prune, and as many random heads for each seed as controls; `layout` is the uniform layout, if any."""

    removed: RemovedHeads
    random: tuple[RemovedHeads, ...]
    layout: str | None = None

    @property
    def measurements(self) -> int:
        """Number of quality measurements for this point: compensated, not compensated, and each control."""
        return 2 + len(self.random)


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """A model with `removed` heads pruned: its size, its quality, and the quality of its controls."""

    removed: int
    size: Size
    compensated: Measurement
    not_compensated: Measurement
    random: tuple[Measurement, ...]  # as many random heads pruned and compensated, for each seed
    layout: str | None = None  # heads/KV heads of every layer, if uniform


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Result of a search: the heads to prune, the initial choice, and the loss after each."""

    removed: RemovedHeads
    first: RemovedHeads  # initial choice, from the evidence alone
    loss: float
    first_loss: float
    measured: int  # number of measurements made

    @property
    def moved(self) -> int:
        """Number of heads by which the result differs from the initial choice."""
        paths = {**self.removed, **self.first}
        sets = [(set(self.removed.get(path, ())), set(self.first.get(path, ()))) for path in paths]
        return max(sum(len(last - first) for last, first in sets), sum(len(first - last) for last, first in sets))


@dataclass(eq=False)
class Losses:
    """Measures the loss of a model with other output projections; `made` counts the measurements."""

    trials: Trials
    quality: Quality
    progress: Callable[[int], None] | None = None  # called with 1 after every measurement
    made: int = 0

    def __call__(self, outputs: Mapping[str, Outputs]) -> float:
        with with_outputs(self.trials.model, self.trials.evidence.layers, outputs):
            loss = self.quality.loss()
        self.made += 1
        if self.progress is not None:
            self.progress(1)
        return loss


class Trials:
    """A model and its evidence: size and quality without some of its heads, compensated or not."""

    def __init__(self, evidence: Evidence, *, weighting: Weighting = "token", work: Workload | None = None) -> None:
        """Set up trials; `work` is the call whose FLOPs are counted, 512 tokens by default."""
        self.evidence = evidence
        self.model = evidence.model
        self.weighting = weighting
        self.work = Workload.forward(512) if work is None else work
        self._problems: dict[str, Problem] = {}
        self._counts: dict[tuple[str, tuple[int, ...]], HeadCounts] = {}  # of layers without these heads

    def edits(self, removed: Mapping[str, Sequence[int]]) -> list[PruneHeads]:
        layers = self.evidence.layers
        return [
            PruneHeads(layers[path].number, tuple(heads), stack=layers[path].stack) for path, heads in removed.items()
        ]

    def preview(self, removed: Mapping[str, Sequence[int]]) -> Preview:
        """Preview the model without these heads."""
        return preview(self.model, self.edits(removed), work=self.work)

    def size(self, removed: Mapping[str, Sequence[int]]) -> Size:
        """Return the size of the model without these heads."""
        pruned = {path: tuple(heads) for path, heads in removed.items() if len(heads)}
        if not pruned:
            return Size(1.0, 1.0 if self._has_cache else None, 1.0)
        # A search requests many sizes, mostly of layers that were counted before.
        if unknown := {path: heads for path, heads in pruned.items() if (path, heads) not in self._counts}:
            for layer in self.preview(unknown).layers:
                self._counts[layer.path, ()] = layer.before
                if layer.path in unknown:
                    self._counts[layer.path, unknown[layer.path]] = layer.after
        before = [self._counts[path, ()] for path in self.evidence.layers]
        after = [self._counts[path, pruned.get(path, ())] for path in self.evidence.layers]
        return Size(
            sum(x.heads for x in after) / sum(x.heads for x in before),
            sum(x.cache_bytes_per_token for x in after) / sum(x.cache_bytes_per_token for x in before)
            if self._has_cache
            else None,
            (sum(x.flops for x in after) + self._other_flops) / (sum(x.flops for x in before) + self._other_flops),
        )

    def compensated(self, removed: Mapping[str, Sequence[int]]) -> dict[str, Outputs]:
        """Return the compensated outputs of layers without these heads, calibrated on the unpruned model."""
        evidence = self.evidence
        moments = evidence.moments_for(self.weighting)
        for path in removed:
            if path not in self._problems:
                self._problems[path] = Problem.of(moments[path], evidence.heads[path], evidence.ridge, path)
        return {path: Outputs.solved(self._problems[path], heads) for path, heads in removed.items() if len(heads)}

    def measure_without(self, removed: Mapping[str, Sequence[int]], quality: Quality) -> Measurement:
        """Measure the model without these heads, all layers compensated at once."""
        with with_outputs(self.model, self.evidence.layers, self.compensated(removed)):
            return quality.measure()

    def curve(
        self, quality: Quality, choices: Iterable[Choice], *, progress: Callable[[int], None] | None = None
    ) -> list[CurvePoint]:
        """Measure each choice compensated, uncompensated, and with as many random heads pruned instead.

        `progress` is called with 1 after every measurement.
        """
        points = []

        def report(measurement: Measurement) -> Measurement:
            if progress is not None:
                progress(1)
            return measurement

        for choice in choices:
            compensated = report(self.measure_without(choice.removed, quality))
            with with_outputs(
                self.model, self.evidence.layers, plain_outputs(self.model, self.evidence.layers, choice.removed)
            ):
                uncompensated = report(quality.measure())
            controls = tuple(report(self.measure_without(removed, quality)) for removed in choice.random)
            count = sum(map(len, choice.removed.values()))
            points.append(
                CurvePoint(count, self.size(choice.removed), compensated, uncompensated, controls, choice.layout)
            )
        return points

    @cached_property
    def _has_cache(self) -> bool:
        return keeps_cache(self.model)

    @cached_property
    def _other_flops(self) -> int:
        return other_flops(self.model, self.work)


def keeps_cache(model: nn.Module) -> bool:
    """Return whether some of a model's layers keep a KV cache."""
    layers = [layer for layer in find_layers(model) if not layer.refusals]
    return len(uncached_layers(model, layers)) < len(layers)


def check_target(target: Target, model: nn.Module) -> None:
    """Raise `OptionError` for a cache target of a model without a KV cache."""
    if target.kind == "cache" and not keeps_cache(model):
        raise OptionError(NO_CACHE.format(target=target))


def other_flops(model: nn.Module, work: Workload) -> int:
    """Return the FLOPs of all linear layers outside attention, for one call."""
    attention = {source.path for layer in find_layers(model) for source in layer.sources}
    attention |= {layer.output for layer in find_layers(model)}
    count = sum(
        module.get_parameter("weight").numel()
        for path, module in model.named_modules()
        if (isinstance(module, nn.Linear) or is_conv1d(module)) and path not in attention
    )
    return 2 * work.batch * work.queries * count
