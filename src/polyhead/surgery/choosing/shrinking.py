"""Shrinking a model to a budget: which heads go, and what the model is worth at every size on the way."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from polyhead.errors import OptionError
from polyhead.plan import Workload
from polyhead.surgery.anatomy.finding import find_layers
from polyhead.surgery.anatomy.layers import is_conv1d
from polyhead.surgery.choosing.criteria import orders_by
from polyhead.surgery.choosing.evidence import Evidence, Weighting
from polyhead.surgery.choosing.orders import PruningOrder, choose_heads, order_by_score, pruning_order
from polyhead.surgery.choosing.quality import Quality, Worth
from polyhead.surgery.edits.head_edits import PruneHeads
from polyhead.surgery.edits.preview import Preview, preview
from polyhead.surgery.repair.as_if import Outputs, as_if, plain_outputs
from polyhead.surgery.repair.least_squares import Problem

Kind = Literal["heads", "cache", "faster"]
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
SEEDS = (0, 1, 2)


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
    """What is left of a model, each as a share of the whole: heads, bytes that a token leaves in a cache, FLOPs."""

    heads: float
    cache: float
    flops: float

    def reaches(self, target: Target) -> bool:
        if target.kind == "heads":
            return self.heads <= 1 - target.amount + 1e-9
        left = self.cache if target.kind == "cache" else self.flops
        return left * target.amount <= 1 + 1e-9


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """A model without so many heads: how large it is and what it is worth, and what the controls are worth."""

    gone: int
    size: Size
    repaired: Worth
    not_repaired: Worth
    random: tuple[Worth, ...]  # as many heads drawn at random and repaired, seed by seed


class Shrinker:
    """One model, its evidence, and its heads in the order in which they can go.

    Heads go one by one or, for a smaller cache where several heads read one key head, with all that read theirs.
    """

    def __init__(
        self,
        evidence: Evidence,
        *,
        criterion: str = "repaired",
        weighting: Weighting = "token",
        by_key_heads: bool = False,
        work: Workload | None = None,
    ) -> None:
        """`work` is the call that FLOPs are counted for, 512 tokens by default."""
        self.evidence = evidence
        self.model = evidence.model
        self.criterion, self.weighting = criterion, weighting
        self.by_key_heads = by_key_heads and any(
            len(set(heads.key_heads)) < heads.num_heads for heads in evidence.heads.values()
        )
        self.work = Workload.forward(512) if work is None else work
        self._problems: dict[str, Problem] = {}
        if self.by_key_heads and criterion != "repaired":
            raise OptionError(f"key heads go by the criterion repaired, with their readers, got {criterion!r}")
        self.orders = self._orders()

    @property
    def steps(self) -> int:
        """How many heads, or key heads with their readers, can go."""
        return sum(len(order.heads) for order in self.orders.values())

    def _orders(self) -> dict[str, PruningOrder]:
        evidence = self.evidence
        if not self.by_key_heads:
            return orders_by(self.criterion, evidence, weighting=self.weighting)
        return {
            path: pruning_order(
                evidence.moments_for(self.weighting)[path],
                heads,
                ridge=evidence.ridge,
                root=evidence.root(path, self.weighting),
                together=heads.readers,
            )
            for path, heads in evidence.heads.items()
        }

    def gone(self, steps: int, orders: Mapping[str, PruningOrder] | None = None) -> dict[str, tuple[int, ...]]:
        """The heads that go, by layer."""
        chosen = choose_heads(self.orders if orders is None else orders, steps)
        if not self.by_key_heads:
            return chosen
        readers = {path: heads.readers for path, heads in self.evidence.heads.items()}
        return {
            path: tuple(sorted(head for key in keys for head in readers[path][key])) for path, keys in chosen.items()
        }

    def edits(self, gone: Mapping[str, Sequence[int]]) -> list[PruneHeads]:
        layers = self.evidence.layers
        return [PruneHeads(layers[path].number, tuple(own), stack=layers[path].stack) for path, own in gone.items()]

    def counted(self, gone: Mapping[str, Sequence[int]]) -> Preview:
        return preview(self.model, self.edits(gone), work=self.work)

    def size(self, gone: Mapping[str, Sequence[int]]) -> Size:
        """What is left, counted."""
        if not any(len(own) for own in gone.values()):
            return Size(1.0, 1.0, 1.0)
        found = self.counted(gone)
        rest = other_flops(self.model, self.work)
        before, after = found.before, found.after
        return Size(
            after.heads / before.heads,
            after.cache_bytes_per_token / before.cache_bytes_per_token,
            (after.flops + rest) / (before.flops + rest),
        )

    def reach(self, target: Target) -> dict[str, tuple[int, ...]]:
        """The fewest heads that have to go for a target; refused where it cannot be reached."""
        least = self.size(self.gone(self.steps))
        if not least.reaches(target):
            raise OptionError(
                f"a layer keeps a head at least, which leaves {least.heads:.0%} of the heads, {least.cache:.0%} of the "
                f"cache and {least.flops:.0%} of the FLOPs of this model, got a target of {target}"
            )
        steps = bisect_left(range(self.steps), True, key=lambda x: self.size(self.gone(x + 1)).reaches(target)) + 1
        return self.gone(steps)

    def curve(
        self,
        quality: Quality,
        *,
        shares: Sequence[float] = SHARES,
        seeds: Sequence[int] = SEEDS,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[CurvePoint]:
        """What the model is worth at every size, repaired at once, with the same heads not repaired and random ones."""
        found = []
        sizes = sorted({round(share * self._units) for share in shares} & set(range(1, self.steps + 1)))
        done, total = 0, len(sizes) * (2 + len(seeds))

        def worth(outputs: Mapping[str, Outputs]) -> Worth:
            nonlocal done
            with as_if(self.model, self.evidence.layers, outputs):
                measured = quality.measure()
            done += 1
            if progress is not None:
                progress(done, total)
            return measured

        for steps in sizes:
            gone = self.gone(steps)
            repaired, plain = worth(self.repaired(gone)), worth(plain_outputs(self.model, self.evidence.layers, gone))
            drawn = tuple(worth(self.repaired(self.gone(steps, self._random(seed)))) for seed in seeds)
            found.append(CurvePoint(sum(map(len, gone.values())), self.size(gone), repaired, plain, drawn))
        return found

    def repaired(self, gone: Mapping[str, Sequence[int]]) -> dict[str, Outputs]:
        """What layers write with when these heads are gone, solved on what the whole model feeds them."""
        evidence = self.evidence
        moments = evidence.moments_for(self.weighting)
        for path in gone:
            if path not in self._problems:
                self._problems[path] = Problem.of(moments[path], evidence.heads[path], evidence.ridge, path)
        return {path: Outputs.solved(self._problems[path], own) for path, own in gone.items() if len(own)}

    @property
    def _units(self) -> int:
        heads = self.evidence.heads.values()
        return sum(len(set(own.key_heads)) if self.by_key_heads else own.num_heads for own in heads)

    def _random(self, seed: int) -> dict[str, PruningOrder]:
        if not self.by_key_heads:
            return orders_by("random", self.evidence, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        return {
            path: order_by_score(torch.rand(len(set(heads.key_heads)), generator=generator).tolist())
            for path, heads in self.evidence.heads.items()
        }


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
