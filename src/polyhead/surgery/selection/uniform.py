"""The uniform form: every layer is pruned to the same numbers of heads and KV heads, as a native class requires.

A target gets the largest layout that meets it; the heads of each layer are those whose removal to that layout costs
least after compensation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from polyhead.errors import OptionError
from polyhead.progress import Progress, ProgressCallback, ignore_progress
from polyhead.surgery.adapters.discovery import find_layers
from polyhead.surgery.adapters.head_weights import HeadWeights, read_heads
from polyhead.surgery.calibration.moments import OutputMoments
from polyhead.surgery.compensation.least_squares import RIDGE, OutputRegression, in_metric
from polyhead.surgery.edits.preview import fit_after
from polyhead.surgery.options import OTHER_FORMS, Target
from polyhead.surgery.selection.budgets import RemovedHeads, Size, SizeCounter, describe_removed, prune_edits
from polyhead.surgery.selection.criteria import pruning_order
from polyhead.surgery.selection.evidence import Evidence, Weighting, editable_layers

MAX_SETS = 512  # compared exhaustively; beyond that, heads are pruned greedily
MAX_EXCESS = 0.1  # of the heads, the cache or the FLOPs, removed beyond a target

Groups = Mapping[str, Sequence[Sequence[int]]]  # readers of each KV head, by path of the layer


@dataclass(frozen=True, slots=True)
class UniformLayout:
    """Heads and KV heads of every layer after pruning, as in 6/3."""

    num_heads: int
    num_kv_heads: int

    def __str__(self) -> str:
        return f"{self.num_heads}/{self.num_kv_heads}"


def heads_for_target(model: nn.Module, target: Target, stack: str | None = None, *, option: str) -> RemovedHeads:
    """Return some heads to prune for the layout that a target gets, by the shapes of the model's weights.

    The command line's `option` is for the error that is raised if there is no such layout.
    """
    layers = editable_layers(model, stack)
    groups = {path: read_heads(model, layer, device="meta").readers for path, layer in layers.items()}
    layout = _largest_meeting(target, uniform_layouts(model, stack), groups, SizeCounter(model, layers), option=option)
    return _any_heads(groups, layout)


def uniform_layouts(model: nn.Module, stack: str | None = None) -> Iterator[UniformLayout]:
    """Yield every smaller layout that a native class can hold in all layers, or those of a stack, largest first.

    Each candidate is checked against the native config; raises if none fits.
    """
    layers = editable_layers(model, stack).items()
    groups = {path: read_heads(model, layer, device="meta").readers for path, layer in layers}
    fitting, rule = 0, ""
    for layout in _candidates(groups):
        rule = _native_rule(model, _any_heads(groups, layout))
        if not rule:
            fitting += 1
            yield layout
    if not fitting:
        raise OptionError(
            "the uniform form needs a native config with fewer heads in every layer, got a "
            f"{type(model).__name__}, which has none{rule and f': {rule}'}; {OTHER_FORMS}"
        )


def _candidates(groups: Groups) -> list[UniformLayout]:
    """Return every smaller layout in groups of one size, largest first."""
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


def _any_heads(groups: Groups, layout: UniformLayout) -> RemovedHeads:
    """Return some heads to prune for a layout, by layer, where only their numbers matter."""
    return {path: any_heads_for(readers, layout) for path, readers in groups.items()}


def any_heads_for(groups: Sequence[Sequence[int]], layout: UniformLayout) -> tuple[int, ...]:
    """Return some heads of a layer to prune for a layout: all but the first readers of the first KV heads."""
    readers_per_group = layout.num_heads // layout.num_kv_heads
    remaining = [head for group in groups[: layout.num_kv_heads] for head in group[:readers_per_group]]
    return tuple(sorted(head for group in groups for head in group if head not in remaining))


def _native_rule(model: nn.Module, removed: Mapping[str, Sequence[int]]) -> str:
    """Return why no native transformers class has the shapes of the model without these heads; empty if one has."""
    edits = prune_edits({layer.path: layer for layer in find_layers(model)}, removed)
    return fit_after(model, edits).rule if edits else ""


def fits_native(model: nn.Module, removed: Mapping[str, Sequence[int]]) -> bool:
    """Return whether a native transformers class has the shapes of the model without these heads."""
    return not _native_rule(model, removed)


def _largest_meeting(
    target: Target,
    layouts: Iterable[UniformLayout],
    groups: Groups,
    size_of: SizeCounter,
    *,
    fits: Callable[[UniformLayout], bool] = lambda layout: True,
    option: str = "--target",
) -> UniformLayout:
    """Return the largest layout that meets a target and exceeds it by at most `MAX_EXCESS`; raises if none does."""
    size_of({}).excess(target)  # raises for a cache target of a model without a cache
    sizes: dict[UniformLayout, Size] = {}
    beyond: list[UniformLayout] = []
    for layout in layouts:
        size = sizes[layout] = size_of(_any_heads(groups, layout))
        if size.reaches(target) and fits(layout):
            if size.excess(target) <= MAX_EXCESS + 1e-9:
                return layout
            beyond.append(layout)
    raise _no_layout_error(target, sizes, beyond, groups, size_of, option)


class UniformSelection:
    """Heads to prune for a layout or a target, of the layouts that a native class can hold, largest first."""

    def __init__(self, evidence: Evidence, progress: ProgressCallback = ignore_progress) -> None:
        progress(Progress("List the layouts that the model class supports"))
        self.evidence = evidence
        self.layouts = tuple(uniform_layouts(evidence.model, evidence.stack))
        self.size = SizeCounter(evidence.model, evidence.layers)
        self._sets: dict[UniformLayout, dict[str, list[RankedSet]]] = {}

    def for_target(self, target: Target) -> RemovedHeads:
        """Return the heads to prune for the largest layout that meets a target; raises if none does."""
        return self.removed(self.layout_for(target))

    def layout_for(self, target: Target) -> UniformLayout:
        """Return the largest layout that meets a target; raises if none does."""
        groups = {path: heads.readers for path, heads in self.evidence.heads.items()}
        # Which heads are removed matters where heads do not read KV heads in order.
        return _largest_meeting(
            target, self.layouts, groups, self.size, fits=lambda x: fits_native(self.evidence.model, self.removed(x))
        )

    def removed(self, layout: UniformLayout) -> RemovedHeads:
        """Return the heads to prune for a layout, by layer."""
        return {path: layer_sets[0].heads for path, layer_sets in self.sets(layout).items() if layer_sets[0].heads}

    def sets(self, layout: UniformLayout) -> dict[str, list[RankedSet]]:
        """Return, for every layer, the sets of heads to prune for a layout, cheapest first."""
        if layout not in self._sets:
            self._sets[layout] = uniform_sets(self.evidence, layout.num_heads, layout.num_kv_heads)
        return self._sets[layout]

    def summary(self, removed: Mapping[str, Sequence[int]]) -> str:
        """Describe the number of pruned heads and the remaining layout."""
        path, heads = next(iter(self.evidence.heads.items()))
        remaining = [head for head in range(heads.num_heads) if head not in removed.get(path, ())]
        layout = UniformLayout(len(remaining), len({heads.key_heads[head] for head in remaining}))
        return f"{describe_removed(self.evidence.heads, removed)}, {layout} heads/KV heads remain in every layer"


@dataclass(frozen=True, slots=True)
class RankedSet:
    """Heads of a layer that can be pruned together, and the cost by the evidence."""

    cost: float
    heads: tuple[int, ...]


def uniform_sets(
    evidence: Evidence, num_heads: int, num_kv_heads: int, weighting: Weighting = "token"
) -> dict[str, list[RankedSet]]:
    """Return, for every layer, the sets of heads to prune for a layout, cheapest first."""
    layers = evidence.weighted(weighting)
    return {
        path: ranked_sets(layers[path].moments, heads, num_heads, num_kv_heads, root=layers[path].root)
        for path, heads in evidence.heads.items()
    }


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


def _no_layout_error(
    target: Target,
    sizes: Mapping[UniformLayout, Size],
    beyond: Sequence[UniformLayout],
    groups: Groups,
    size_of: SizeCounter,
    option: str,
) -> OptionError:
    """Return the error of a target that no layout meets closely, with the targets that the nearest layouts meet.

    `sizes` are those of all layouts; the layouts `beyond` remove too much.
    """
    rule = (
        f"in the uniform form, every layer of this {type(size_of.model).__name__} can have heads/KV heads "
        f"{', '.join(map(str, sizes))}"
    )
    for layout in _candidates(groups):  # the first that would do
        removed = _any_heads(groups, layout)
        size = size_of(removed)
        if layout not in sizes and size.reaches(target) and size.excess(target) <= MAX_EXCESS + 1e-9:
            rule += f" (not {layout}: {_native_rule(size_of.model, removed)})"
            break
    smallest = list(sizes)[-1]
    if not beyond:
        return OptionError(
            f"{rule}, of which {smallest} leaves {sizes[smallest]}, got a target of {target}; choose a smaller "
            f"target, or {OTHER_FORMS}"
        )
    nearest = min(beyond, key=lambda x: sizes[x].excess(target))
    unpruned = size_of({}).excess(target)
    short = [x for x in sizes if unpruned + 1e-9 < sizes[x].excess(target) < 0]
    below = sorted(short, key=lambda x: sizes[x].excess(target))[-1:]
    choices = [f"{option} {sizes[x].meets(target)} ({x})" for x in (*below, nearest)]
    if option == "--share":
        choices = [choice.replace("-heads", "") for choice in choices]
    return OptionError(
        f"{rule}, and a target is exceeded by at most {100 * MAX_EXCESS:g} percentage points, got {target}, for which "
        f"{nearest} leaves {sizes[nearest]}; use {', '.join(choices)}, {OTHER_FORMS.removeprefix('use ')}"
    )
