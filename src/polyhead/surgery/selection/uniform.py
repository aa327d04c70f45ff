"""Heads that can go so that every layer ends alike: as many heads and KV heads as a native class can be told."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from polyhead.costs import Workload
from polyhead.errors import OptionError
from polyhead.geometry import HeadLayout
from polyhead.surgery.adapters.discovery import find_layers
from polyhead.surgery.adapters.head_weights import HeadWeights, pack_heads, read_heads
from polyhead.surgery.calibration.moments import OutputMoments
from polyhead.surgery.compensation.least_squares import RIDGE, Problem
from polyhead.surgery.edits.applying import changed
from polyhead.surgery.edits.head_edits import PruneHeads
from polyhead.surgery.native.fitting import config_changes
from polyhead.surgery.selection.budgets import SEEDS, Choice, Gone, Losses, Searched, Target, Trials
from polyhead.surgery.selection.measurements import Evidence, Weighting
from polyhead.surgery.selection.orders import in_metric, pruning_order
from polyhead.surgery.selection.quality import Quality
from polyhead.surgery.selection.search import TRIES, RankedSet, refined_sets

MAX_SETS = 512  # that are all compared; of more, one head goes after the other
MAX_LAYOUTS = 12  # that a curve has points of


@dataclass(frozen=True, slots=True)
class UniformLayout:
    """Heads and KV heads that every layer is left with, as in 6/3."""

    num_heads: int
    num_kv_heads: int

    def __str__(self) -> str:
        return f"{self.num_heads}/{self.num_kv_heads}"


def ranked_sets(
    moments: OutputMoments,
    heads: HeadWeights,
    num_heads: int,
    num_kv_heads: int,
    *,
    ridge: float = RIDGE,
    root: Tensor | None = None,
) -> list[RankedSet]:
    """Sets of heads that can go so that a layer ends with `num_heads` over `num_kv_heads`, in groups of one size.

    KV heads go whole, with all their readers; of those that stay, each loses equally many. The cheapest after repair
    come first; where there are too many sets to compare, one is found head by head.
    """
    groups = heads.readers
    size = num_heads // num_kv_heads if num_kv_heads else 0
    if not 0 < num_kv_heads <= len(groups) or num_heads % num_kv_heads or size > min(map(len, groups)):
        raise OptionError(
            f"a layer of {heads.num_heads} heads over {len(groups)} KV heads can end with fewer of both, in groups of "
            f"one size, got {num_heads} over {num_kv_heads}"
        )
    problem = Problem.of(moments, heads, ridge)
    sets = math.comb(len(groups), num_kv_heads) * math.prod(math.comb(len(group), size) for group in groups)
    if problem.scale == 0 or sets > MAX_SETS:
        return [RankedSet(0.0, _greedy_set(moments, heads, groups, size, num_kv_heads, ridge, root))]
    inverse = torch.cholesky_inverse(problem.factor(problem.channels(range(heads.num_heads))))
    matrix = in_metric(problem.matrix, root)

    def cost(gone: Sequence[int]) -> float:
        at = problem.channels(gone)
        return float((matrix[at] * torch.linalg.solve(inverse[at][:, at], matrix[at])).sum())

    found = [
        tuple(head for head in range(heads.num_heads) if head not in {x for own in kept for x in own})
        for stay in itertools.combinations(groups, num_kv_heads)
        for kept in itertools.product(*(itertools.combinations(group, size) for group in stay))
    ]
    return sorted((RankedSet(cost(gone) if gone else 0.0, gone) for gone in found), key=lambda x: x.cost)


def _greedy_set(
    moments: OutputMoments,
    heads: HeadWeights,
    groups: list[list[int]],
    size: int,
    num_kv_heads: int,
    ridge: float,
    root: Tensor | None,
) -> tuple[int, ...]:
    order = pruning_order(moments, heads, ridge=ridge, root=root, together=groups)
    dropped = order.heads[: len(groups) - num_kv_heads]
    gone = [head for key in dropped for head in groups[key]]
    each = pruning_order(moments, heads, ridge=ridge, root=root, least=size)
    return tuple(sorted({*gone, *(head for head in each.heads if head not in gone)}))


def fits_native(model: nn.Module, gone: Mapping[str, Sequence[int]]) -> bool:
    """Whether a native class of transformers has these shapes when these heads are gone; no weight is touched."""
    layers = find_layers(model)
    layouts: dict[str, HeadLayout] = {}
    parameters: dict[str, Tensor] = {}
    for layer in layers:
        if not gone.get(layer.path):
            continue
        edit = PruneHeads(layer.number, tuple(gone[layer.path]))
        heads = changed(layer, read_heads(model, layer, device="meta"), [edit])
        layouts[layer.path] = heads.layout
        parameters |= pack_heads(model, layer, heads)
    return not layouts or bool(config_changes(model, layers, layouts, parameters))


def uniform_layouts(model: nn.Module) -> tuple[UniformLayout, ...]:
    """Every layout with fewer heads that a native class can hold in all layers, found by trying; the largest first.

    Refused where there is none.
    """
    heads = {layer.path: read_heads(model, layer, device="meta") for layer in find_layers(model) if not layer.refusals}
    groups = {path: own.readers for path, own in heads.items()}
    most_keys = min((len(own) for own in groups.values()), default=0)
    most_readers = min((len(group) for own in groups.values() for group in own), default=0)
    options = [
        UniformLayout(keys * readers, keys)
        for keys in range(1, most_keys + 1)
        for readers in range(1, most_readers + 1)
        if any(keys * readers < own.num_heads for own in heads.values())
    ]
    found = [x for x in options if fits_native(model, {path: any_heads_for(own, x) for path, own in groups.items()})]
    if not found:
        raise OptionError(
            "uniform, every layer is left with as many heads as a native config can say, got a "
            f"{type(model).__name__}, of which no config says fewer heads than it has; the forms for it are padded, "
            "which plain transformers loads and which saves no time, and uneven, which polyhead.load loads"
        )
    return tuple(sorted(found, key=lambda x: (-x.num_heads, -x.num_kv_heads)))


def any_heads_for(groups: Sequence[Sequence[int]], layout: UniformLayout) -> tuple[int, ...]:
    """Heads that go for a layout, whichever: all but the first readers of the first KV heads."""
    each = layout.num_heads // layout.num_kv_heads
    kept = [head for group in groups[: layout.num_kv_heads] for head in group[:each]]
    return tuple(sorted(head for group in groups for head in group if head not in kept))


def uniform_sets(
    evidence: Evidence, num_heads: int, num_kv_heads: int, weighting: Weighting
) -> dict[str, list[RankedSet]]:
    """Of every layer the sets of heads that can go for a layout, the cheapest first."""
    moments = evidence.moments_for(weighting)
    return {
        path: ranked_sets(
            moments[path],
            heads,
            num_heads,
            num_kv_heads,
            ridge=evidence.ridge,
            root=evidence.root(path, weighting),
        )
        for path, heads in evidence.heads.items()
    }


class UniformShrinker(Trials):
    """One model, its evidence, and the layouts of all its layers that a native class can hold."""

    searches = "exchanged within layers"

    def __init__(
        self,
        evidence: Evidence,
        *,
        weighting: Weighting = "token",
        layouts: Sequence[UniformLayout] | None = None,
        work: Workload | None = None,
    ) -> None:
        """`layouts` are those to choose from, the largest first; all that there are by default."""
        super().__init__(evidence, weighting=weighting, work=work)
        self.layouts = uniform_layouts(self.model) if layouts is None else tuple(layouts)
        self._sets: dict[UniformLayout, dict[str, list[RankedSet]]] = {}

    def sets(self, layout: UniformLayout) -> dict[str, list[RankedSet]]:
        """Of every layer the sets of heads that can go, the cheapest first."""
        if layout not in self._sets:
            sizes = layout.num_heads, layout.num_kv_heads
            self._sets[layout] = uniform_sets(self.evidence, *sizes, self.weighting)
        return self._sets[layout]

    def gone(self, layout: UniformLayout) -> Gone:
        """The heads that go, by layer."""
        return {path: own[0].heads for path, own in self.sets(layout).items() if own[0].heads}

    def meet_target(self, target: Target) -> Gone:
        """The heads that go for the largest layout that reaches a target; refused where none does."""
        return self.gone(self._reached(target))

    def _reached(self, target: Target) -> UniformLayout:
        groups = {path: heads.readers for path, heads in self.evidence.heads.items()}
        sizes = {x: self.size({path: any_heads_for(own, x) for path, own in groups.items()}) for x in self.layouts}
        for layout, size in sizes.items():
            if size.reaches(target) and fits_native(self.model, self.gone(layout)):
                return layout
        smallest = self.layouts[-1]
        raise OptionError(
            f"uniform, every layer of this {type(self.model).__name__} can be left with heads/KV heads "
            f"{', '.join(map(str, self.layouts))}, of which {smallest} leaves {sizes[smallest]}, got a target of "
            f"{target}; ask for less, or let layers keep different numbers of heads"
        )

    def search_measurements(self, tries: int = TRIES) -> int:
        """How many measurements a search takes at most."""
        return tries

    def searched(
        self,
        target: Target,
        quality: Quality,
        *,
        tries: int = TRIES,
        progress: Callable[[int], None] | None = None,
    ) -> Searched:
        """Heads for a target, which of each layer chosen by what the whole model measures, repaired at once.

        Layers keep their layout: of the sets that a layer could lose instead, those are tried that cost little more by
        the evidence. On this quality the model loses no more than with what `meet_target` gives.
        """
        layout, measure = self._reached(target), Losses(self, quality, progress)
        found, loss, first_loss = refined_sets(
            self.sets(layout), lambda path, heads: self.compensated({path: heads})[path], measure, tries=tries
        )
        gone = {path: own for path, own in found.items() if own}
        return Searched(gone, self.gone(layout), loss, first_loss, measure.made)

    def stages(self) -> list[Gone]:
        """Ever more heads that go, layout by layout."""
        return [self.gone(layout) for layout in self.layouts]

    def choices(self, *, seeds: Sequence[int] = SEEDS) -> list[Choice]:
        """The heads that go for each layout, for the curve; for some of them, evenly, where they are many."""
        count = min(len(self.layouts), MAX_LAYOUTS)
        some = [self.layouts[place * (len(self.layouts) - 1) // max(count - 1, 1)] for place in range(count)]
        return [Choice(self.gone(x), tuple(self._random(x, seed) for seed in seeds), str(x)) for x in some]

    def in_words(self, gone: Mapping[str, Sequence[int]]) -> str:
        """How many heads go, and what every layer is left with."""
        path, heads = next(iter(self.evidence.heads.items()))
        left = [head for head in range(heads.num_heads) if head not in gone.get(path, ())]
        layout = UniformLayout(len(left), len({heads.key_heads[head] for head in left}))
        return f"{sum(map(len, gone.values()))} heads go, {layout} heads/KV heads stay in every layer"

    def _random(self, layout: UniformLayout, seed: int) -> Gone:
        generator = torch.Generator().manual_seed(seed)
        found = {}
        for path, heads in self.evidence.heads.items():
            groups = [heads.readers[key] for key in _drawn(len(heads.readers), generator)]
            gone = any_heads_for([[own[place] for place in _drawn(len(own), generator)] for own in groups], layout)
            if gone:
                found[path] = gone
        return found


def _drawn(count: int, generator: torch.Generator) -> list[int]:
    """Numbers below `count` in an order drawn at random."""
    return [int(x) for x in torch.randperm(count, generator=generator)]
