"""Prune every layer to the same numbers of heads and KV heads, as a native transformers class requires."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from polyhead.costs import Workload
from polyhead.errors import OptionError
from polyhead.surgery.adapters.discovery import find_layers
from polyhead.surgery.adapters.head_weights import HeadWeights, read_heads
from polyhead.surgery.calibration.moments import OutputMoments
from polyhead.surgery.compensation.least_squares import RIDGE, OutputRegression
from polyhead.surgery.edits.native_form import fit_after
from polyhead.surgery.options import OTHER_FORMS, Target
from polyhead.surgery.selection.budgets import Size, SizeCounter, prune_edits
from polyhead.surgery.selection.criteria import in_metric, pruning_order
from polyhead.surgery.selection.evidence import Evidence, Weighting, editable_layers
from polyhead.surgery.selection.search import TRIES, Measure, RankedSet, refined_sets
from polyhead.surgery.selection.shrinker import SEEDS, BaseShrinker, Choice, RemovedHeads

MAX_SETS = 512  # compared exhaustively; beyond that, heads are pruned greedily
MAX_LAYOUTS = 12  # points of a curve
MAX_EXCESS = 0.1  # of the heads, the cache or the FLOPs, removed beyond a target


@dataclass(frozen=True, slots=True)
class UniformLayout:
    """Heads and KV heads of every layer after pruning, as in 6/3."""

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
    """Rank sets of heads whose removal leaves `num_heads` over `num_kv_heads`, in groups of one size.

    KV heads are removed with all their readers, and each remaining one keeps equally many. Sets are sorted by the error
    that remains after compensation; if there are more than `MAX_SETS`, only one is returned, found greedily.
    """
    groups = heads.readers
    size = num_heads // num_kv_heads if num_kv_heads else 0
    if not 0 < num_kv_heads <= len(groups) or num_heads % num_kv_heads or size > min(map(len, groups)):
        raise OptionError(
            f"a layer of {heads.num_heads} heads over {len(groups)} KV heads can be reduced to fewer of both, in "
            f"groups of one size, got {num_heads} over {num_kv_heads}"
        )
    regression = OutputRegression.of(moments, heads, ridge)
    sets = math.comb(len(groups), num_kv_heads) * math.prod(math.comb(len(group), size) for group in groups)
    if regression.scale == 0 or sets > MAX_SETS:
        order = partial(pruning_order, moments, heads, ridge=ridge, root=root)
        dropped_keys = order(together=groups).heads[: len(groups) - num_kv_heads]
        pruned = {head for key in dropped_keys for head in groups[key]} | set(order(least=size).heads)
        return [RankedSet(0.0, tuple(sorted(pruned)))]
    inverse = torch.cholesky_inverse(regression.factor(regression.channels(range(heads.num_heads))))
    matrix = in_metric(regression.matrix, root)

    def cost(pruned: Sequence[int]) -> float:
        channels = regression.channels(pruned)
        return float((matrix[channels] * torch.linalg.solve(inverse[channels][:, channels], matrix[channels])).sum())

    candidates = []
    for kept_groups in itertools.combinations(groups, num_kv_heads):
        for remaining in itertools.product(*(itertools.combinations(group, size) for group in kept_groups)):
            remaining_heads = set(itertools.chain(*remaining))
            candidates.append(tuple(head for head in range(heads.num_heads) if head not in remaining_heads))
    return sorted((RankedSet(cost(pruned) if pruned else 0.0, pruned) for pruned in candidates), key=lambda x: x.cost)


def fits_native(model: nn.Module, removed: Mapping[str, Sequence[int]]) -> bool:
    """Return whether a native transformers class has the shapes of the model without these heads."""
    return not _native_rule(model, removed)


def _native_rule(model: nn.Module, removed: Mapping[str, Sequence[int]]) -> str:
    """Return why no native transformers class has the shapes of the model without these heads; empty if one has."""
    edits = prune_edits({layer.path: layer for layer in find_layers(model)}, removed)
    return fit_after(model, edits).rule if edits else ""


def _candidates(groups: Mapping[str, Sequence[Sequence[int]]]) -> list[UniformLayout]:
    """Return every smaller layout in groups of one size, largest first; `groups` are the readers of the KV heads."""
    max_keys = min((len(layer) for layer in groups.values()), default=0)
    max_readers = min((len(group) for layer in groups.values() for group in layer), default=0)
    most_heads = max((sum(map(len, layer)) for layer in groups.values()), default=0)
    layouts = [
        UniformLayout(keys * readers, keys)
        for keys in range(1, max_keys + 1)
        for readers in range(1, max_readers + 1)
        if keys * readers < most_heads
    ]
    return sorted(layouts, key=lambda x: (-x.num_heads, -x.num_kv_heads))


def uniform_layouts(model: nn.Module, stack: str | None = None) -> Iterator[UniformLayout]:
    """Yield every smaller layout that a native class can hold in all layers, or those of a stack, largest first.

    Each candidate is checked against the native config; raises if none fits.
    """
    layers = editable_layers(model, stack).items()
    groups = {path: read_heads(model, layer, device="meta").readers for path, layer in layers}
    fitting, rule = 0, ""
    for layout in _candidates(groups):
        rule = _native_rule(model, {path: any_heads_for(readers, layout) for path, readers in groups.items()})
        if not rule:
            fitting += 1
            yield layout
    if not fitting:
        raise OptionError(
            "the uniform form needs a native config with fewer heads in every layer, got a "
            f"{type(model).__name__}, which has none{rule and f': {rule}'}; {OTHER_FORMS}"
        )


def any_heads_for(groups: Sequence[Sequence[int]], layout: UniformLayout) -> tuple[int, ...]:
    """Return some heads to prune for a layout: all but the first readers of the first KV heads."""
    readers_per_group = layout.num_heads // layout.num_kv_heads
    remaining = [head for group in groups[: layout.num_kv_heads] for head in group[:readers_per_group]]
    return tuple(sorted(head for group in groups for head in group if head not in remaining))


def heads_for_target(model: nn.Module, target: Target, stack: str | None = None, *, option: str) -> RemovedHeads:
    """Return some heads to prune for the layout that a target gets, by the shapes of the model's weights.

    The command line's `option` is for the error that is raised if there is no such layout.
    """
    layers = editable_layers(model, stack)
    groups = {path: read_heads(model, layer, device="meta").readers for path, layer in layers.items()}
    size_of = SizeCounter(model, layers, Workload.forward(512))
    layout = _largest_meeting(target, uniform_layouts(model, stack), groups, size_of, option=option)
    return {path: any_heads_for(readers, layout) for path, readers in groups.items()}


def _largest_meeting(
    target: Target,
    layouts: Iterable[UniformLayout],
    groups: Mapping[str, Sequence[Sequence[int]]],
    size_of: SizeCounter,
    *,
    fits: Callable[[UniformLayout], bool] = lambda layout: True,
    option: str = "--target",
) -> UniformLayout:
    """Return the largest layout that meets a target and exceeds it by at most `MAX_EXCESS`; raises if none does."""
    unpruned = size_of({}).excess(target)  # raises for a cache target of a model without a cache
    sizes: dict[UniformLayout, Size] = {}
    beyond: list[UniformLayout] = []
    for layout in layouts:
        size = sizes[layout] = size_of({path: any_heads_for(readers, layout) for path, readers in groups.items()})
        if size.reaches(target) and fits(layout):
            if size.excess(target) <= MAX_EXCESS + 1e-9:
                return layout
            beyond.append(layout)
    rule = (
        f"in the uniform form, every layer of this {type(size_of.model).__name__} can have heads/KV heads "
        f"{', '.join(map(str, sizes))}"
    )
    for layout in _candidates(groups):  # the first that would do
        removed = {path: any_heads_for(readers, layout) for path, readers in groups.items()}
        size = size_of(removed)
        if layout not in sizes and size.reaches(target) and size.excess(target) <= MAX_EXCESS + 1e-9:
            rule += f" (not {layout}: {_native_rule(size_of.model, removed)})"
            break
    smallest = list(sizes)[-1]
    if not beyond:
        raise OptionError(
            f"{rule}, of which {smallest} leaves {sizes[smallest]}, got a target of {target}; choose a smaller "
            f"target, or {OTHER_FORMS}"
        )
    nearest = min(beyond, key=lambda x: sizes[x].excess(target))
    short = [x for x in sizes if unpruned + 1e-9 < sizes[x].excess(target) < 0]
    below = sorted(short, key=lambda x: sizes[x].excess(target))[-1:]
    choices = [f"{option} {sizes[x].meets(target)} ({x})" for x in (*below, nearest)]
    if option == "--share":
        choices = [choice.replace("-heads", "") for choice in choices]
    raise OptionError(
        f"{rule}, and a target is exceeded by at most {100 * MAX_EXCESS:g} percentage points, got {target}, for which "
        f"{nearest} leaves {sizes[nearest]}; use {', '.join(choices)}, {OTHER_FORMS.removeprefix('use ')}"
    )


def uniform_sets(
    evidence: Evidence, num_heads: int, num_kv_heads: int, weighting: Weighting
) -> dict[str, list[RankedSet]]:
    """Return, for every layer, the sets of heads to prune for a layout, cheapest first."""
    moments = evidence.moments_for(weighting)
    return {
        path: ranked_sets(
            moments[path], heads, num_heads, num_kv_heads, ridge=evidence.ridge, root=evidence.root(path, weighting)
        )
        for path, heads in evidence.heads.items()
    }


class UniformShrinker(BaseShrinker):
    """A model, its evidence, and the uniform layouts that a native class can hold."""

    search_action = "exchanged within layers"

    def __init__(
        self,
        evidence: Evidence,
        *,
        weighting: Weighting = "token",
        layouts: Sequence[UniformLayout] | None = None,
        work: Workload | None = None,
    ) -> None:
        """Set up the layouts to choose from, largest first; by default all that a native class can hold."""
        super().__init__(evidence, weighting=weighting, work=work)
        self.layouts = tuple(uniform_layouts(self.model, evidence.stack) if layouts is None else layouts)
        self._sets: dict[UniformLayout, dict[str, list[RankedSet]]] = {}

    def sets(self, layout: UniformLayout) -> dict[str, list[RankedSet]]:
        """Return, for every layer, the sets of heads to prune, cheapest first."""
        if layout not in self._sets:
            self._sets[layout] = uniform_sets(self.evidence, layout.num_heads, layout.num_kv_heads, self.weighting)
        return self._sets[layout]

    def removed(self, layout: UniformLayout) -> RemovedHeads:
        """Return the heads to prune, by layer."""
        return {path: layer_sets[0].heads for path, layer_sets in self.sets(layout).items() if layer_sets[0].heads}

    def meet_target(self, target: Target) -> RemovedHeads:
        """Return the heads to prune for the largest layout that meets a target; raises if none does."""
        return self.removed(self._largest_meeting(target))

    def _largest_meeting(self, target: Target) -> UniformLayout:
        groups = {path: heads.readers for path, heads in self.evidence.heads.items()}
        # Which heads are removed matters where heads do not read KV heads in order.
        return _largest_meeting(
            target, self.layouts, groups, self.size, fits=lambda x: fits_native(self.model, self.removed(x))
        )

    def search_measurements(self, tries: int = TRIES) -> int:
        """Return the maximum number of measurements of a search."""
        return tries

    def _search(self, target: Target, measure: Measure, tries: int) -> tuple[RemovedHeads, RemovedHeads, float, float]:
        """Try other sets of heads of the same layout in each layer, by `refined_sets`; return as the base class."""
        layout = self._largest_meeting(target)
        chosen, loss, first_loss = refined_sets(
            self.sets(layout), lambda path, heads: self.compensated({path: heads})[path], measure, tries=tries
        )
        return {path: heads for path, heads in chosen.items() if heads}, self.removed(layout), loss, first_loss

    def stages(self) -> list[RemovedHeads]:
        """Return the heads to prune for each layout, the fewest first; they need not contain each other."""
        return [self.removed(layout) for layout in self.layouts]

    def choices(self, *, seeds: Sequence[int] = SEEDS) -> list[Choice]:
        """Return the heads to prune for each layout, for the curve; evenly spaced layouts if there are many."""
        count = min(len(self.layouts), MAX_LAYOUTS)
        some = [self.layouts[place * (len(self.layouts) - 1) // max(count - 1, 1)] for place in range(count)]
        return [Choice(self.removed(x), tuple(self._random(x, seed) for seed in seeds), str(x)) for x in some]

    def summary(self, removed: Mapping[str, Sequence[int]]) -> str:
        """Describe the number of pruned heads and the remaining layout."""
        path, heads = next(iter(self.evidence.heads.items()))
        remaining = [head for head in range(heads.num_heads) if head not in removed.get(path, ())]
        layout = UniformLayout(len(remaining), len({heads.key_heads[head] for head in remaining}))
        return f"{super().summary(removed)}, {layout} heads/KV heads remain in every layer"

    def _random(self, layout: UniformLayout, seed: int) -> RemovedHeads:
        """Return random heads to prune for a layout, as a control."""
        generator = torch.Generator().manual_seed(seed)
        by_layer = {}
        for path, heads in self.evidence.heads.items():
            groups = [heads.readers[key] for key in _permutation(len(heads.readers), generator)]
            removed = any_heads_for(
                [[readers[place] for place in _permutation(len(readers), generator)] for readers in groups], layout
            )
            if removed:
                by_layer[path] = removed
        return by_layer


def _permutation(count: int, generator: torch.Generator) -> list[int]:
    """Return a random permutation of the numbers below `count`."""
    return [int(x) for x in torch.randperm(count, generator=generator)]
