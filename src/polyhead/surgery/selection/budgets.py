"""Budgets: how small a model is to be, how small it is without some of its heads, and what it is worth then."""

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
from polyhead.surgery.compensation.masked_trial import Outputs, as_if, plain_outputs
from polyhead.surgery.edits.head_edits import PruneHeads
from polyhead.surgery.edits.preview import HeadCounts, Preview, preview, uncached_layers
from polyhead.surgery.selection.measurements import Evidence, Weighting
from polyhead.surgery.selection.quality import Quality, Worth

Kind = Literal["heads", "cache", "faster"]
Gone = dict[str, tuple[int, ...]]  # heads that go, by layer
NO_CACHE = (
    "a target of cache is for a model that generates, token by token, got {target} for one that keeps no cache, as an "
    "encoder; name a share of its heads (30%-heads) or of its FLOPs (1.2x-faster)"
)
SEEDS = (0, 1, 2)  # of the random heads that stand beside a curve


@dataclass(frozen=True, slots=True)
class Target:
    """A budget: a share of heads that go, how many times smaller the cache is, or how many times fewer FLOPs.

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
            "a target is a share of the heads that go (30%-heads), a cache so many times smaller (2x-cache), or a "
            f"model of so many times fewer FLOPs (1.2x-faster), got {text!r}"
        )

    def __str__(self) -> str:
        if self.kind == "heads":
            return f"{100 * self.amount:g}% fewer heads"
        return f"{self.amount:g} times " + ("less cache" if self.kind == "cache" else "fewer FLOPs")


@dataclass(frozen=True, slots=True)
class Size:
    """What is left of a model, each as a share of the whole: heads, bytes that a token leaves in a cache, FLOPs.

    `cache` is None for a model that keeps no cache, as an encoder.
    """

    heads: float
    cache: float | None
    flops: float

    def reaches(self, target: Target) -> bool:
        if target.kind == "heads":
            return self.heads <= 1 - target.amount + 1e-9
        left = self.cache if target.kind == "cache" else self.flops
        if left is None:
            raise OptionError(NO_CACHE.format(target=target))
        return left * target.amount <= 1 + 1e-9

    def __str__(self) -> str:
        cache = "" if self.cache is None else f", {self.cache:.0%} of the cache"
        return f"{self.heads:.0%} of the heads{cache} and {self.flops:.0%} of the FLOPs"


@dataclass(frozen=True, slots=True)
class Choice:
    """Heads that may go, and as many drawn at random, seed by seed; `layout` names what every layer is left with."""

    gone: Gone
    random: tuple[Gone, ...]
    layout: str | None = None

    @property
    def measurements(self) -> int:
        """How many a point of the curve takes."""
        return 2 + len(self.random)


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """A model without so many heads: how large it is and what it is worth, and what the controls are worth."""

    gone: int
    size: Size
    compensated: Worth
    not_compensated: Worth
    random: tuple[Worth, ...]  # as many heads drawn at random and repaired, seed by seed
    layout: str | None = None  # heads/KV heads of every layer, where all end alike


@dataclass(frozen=True, slots=True)
class Searched:
    """The heads that a search ends with, those it began with, and what the model loses without either."""

    gone: Gone
    first: Gone  # what the evidence alone chooses
    loss: float
    first_loss: float
    measured: int

    @property
    def moved(self) -> int:
        """How many heads go that would have stayed, or stay that would have gone, whichever are more."""
        paths = {**self.gone, **self.first}
        sets = [(set(self.gone.get(path, ())), set(self.first.get(path, ()))) for path in paths]
        return max(sum(len(now - before) for now, before in sets), sum(len(before - now) for now, before in sets))


@dataclass(eq=False)
class Losses:
    """What a model loses with other outputs, measured again and again; `made` is how often."""

    trials: Trials
    quality: Quality
    progress: Callable[[int], None] | None = None  # told after every measurement that one more was made
    made: int = 0

    def __call__(self, outputs: Mapping[str, Outputs]) -> float:
        with as_if(self.trials.model, self.trials.evidence.layers, outputs):
            loss = self.quality.loss()
        self.made += 1
        if self.progress is not None:
            self.progress(1)
        return loss


class Trials:
    """One model and its evidence: how small it is without some of its heads, and what it is worth, repaired or not."""

    def __init__(self, evidence: Evidence, *, weighting: Weighting = "token", work: Workload | None = None) -> None:
        """`work` is the call that FLOPs are counted for, 512 tokens by default."""
        self.evidence = evidence
        self.model = evidence.model
        self.weighting = weighting
        self.work = Workload.forward(512) if work is None else work
        self._problems: dict[str, Problem] = {}
        self._counts: dict[tuple[str, tuple[int, ...]], HeadCounts] = {}  # of layers without these heads

    def edits(self, gone: Mapping[str, Sequence[int]]) -> list[PruneHeads]:
        layers = self.evidence.layers
        return [PruneHeads(layers[path].number, tuple(own), stack=layers[path].stack) for path, own in gone.items()]

    def counted(self, gone: Mapping[str, Sequence[int]]) -> Preview:
        return preview(self.model, self.edits(gone), work=self.work)

    def size(self, gone: Mapping[str, Sequence[int]]) -> Size:
        """What is left, counted."""
        wanted = {path: tuple(own) for path, own in gone.items() if len(own)}
        if not wanted:
            return Size(1.0, 1.0 if self._caches else None, 1.0)
        # A search asks for many sizes, most of them of layers that it asked for before.
        if unknown := {path: own for path, own in wanted.items() if (path, own) not in self._counts}:
            for layer in self.counted(unknown).layers:
                self._counts[layer.path, ()] = layer.before
                if layer.path in unknown:
                    self._counts[layer.path, unknown[layer.path]] = layer.after
        before = [self._counts[path, ()] for path in self.evidence.layers]
        after = [self._counts[path, wanted.get(path, ())] for path in self.evidence.layers]
        return Size(
            sum(x.heads for x in after) / sum(x.heads for x in before),
            sum(x.cache_bytes_per_token for x in after) / sum(x.cache_bytes_per_token for x in before)
            if self._caches
            else None,
            (sum(x.flops for x in after) + self._rest) / (sum(x.flops for x in before) + self._rest),
        )

    def compensated(self, gone: Mapping[str, Sequence[int]]) -> dict[str, Outputs]:
        """What layers write with when these heads are gone, solved on what the whole model feeds them."""
        evidence = self.evidence
        moments = evidence.moments_for(self.weighting)
        for path in gone:
            if path not in self._problems:
                self._problems[path] = Problem.of(moments[path], evidence.heads[path], evidence.ridge, path)
        return {path: Outputs.solved(self._problems[path], own) for path, own in gone.items() if len(own)}

    def worth(self, gone: Mapping[str, Sequence[int]], quality: Quality) -> Worth:
        """Of the model without these heads, repaired at once."""
        with as_if(self.model, self.evidence.layers, self.compensated(gone)):
            return quality.measure()

    def curve(
        self, quality: Quality, choices: Iterable[Choice], *, progress: Callable[[int], None] | None = None
    ) -> list[CurvePoint]:
        """What the model is worth without these heads, repaired at once, beside the same heads not repaired and others.

        `progress` is told after every measurement that one more was made.
        """
        found = []

        def told(worth: Worth) -> Worth:
            if progress is not None:
                progress(1)
            return worth

        for choice in choices:
            compensated = told(self.worth(choice.gone, quality))
            with as_if(self.model, self.evidence.layers, plain_outputs(self.model, self.evidence.layers, choice.gone)):
                plain = told(quality.measure())
            drawn = tuple(told(self.worth(gone, quality)) for gone in choice.random)
            count = sum(map(len, choice.gone.values()))
            found.append(CurvePoint(count, self.size(choice.gone), compensated, plain, drawn, choice.layout))
        return found

    @cached_property
    def _caches(self) -> bool:
        return keeps_cache(self.model)

    @cached_property
    def _rest(self) -> int:
        return other_flops(self.model, self.work)


def keeps_cache(model: nn.Module) -> bool:
    """Whether some of a model's heads leave keys in a cache."""
    layers = [layer for layer in find_layers(model) if not layer.refusals]
    return len(uncached_layers(model, layers)) < len(layers)


def check_target(target: Target, model: nn.Module) -> None:
    """Refuse a target that a model has no figure for."""
    if target.kind == "cache" and not keeps_cache(model):
        raise OptionError(NO_CACHE.format(target=target))


def other_flops(model: nn.Module, work: Workload) -> int:
    """FLOPs of all linear layers outside of attention, for one call."""
    attention = {source.path for layer in find_layers(model) for source in layer.sources}
    attention |= {layer.output for layer in find_layers(model)}
    count = sum(
        module.get_parameter("weight").numel()
        for path, module in model.named_modules()
        if (isinstance(module, nn.Linear) or is_conv1d(module)) and path not in attention
    )
    return 2 * work.batch * work.queries * count
