"""Heads that can go so that every layer ends alike: as many heads and key heads as a stock class can be told."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from polyhead.errors import OptionError
from polyhead.geometry import HeadLayout
from polyhead.surgery.anatomy.finding import find_layers
from polyhead.surgery.anatomy.head_weights import HeadWeights, pack_heads, read_heads
from polyhead.surgery.calibration.moments import OutputMoments
from polyhead.surgery.choosing.orders import pruning_order, weighed
from polyhead.surgery.edits.applying import changed
from polyhead.surgery.edits.head_edits import PruneHeads
from polyhead.surgery.repair.least_squares import RIDGE, Problem
from polyhead.surgery.stock.fitting import config_changes

MOST_SETS = 512  # that are all compared; of more, one head goes after the other


def uniform_heads(
    moments: OutputMoments,
    heads: HeadWeights,
    num_heads: int,
    num_kv_heads: int,
    *,
    ridge: float = RIDGE,
    root: Tensor | None = None,
) -> tuple[int, ...]:
    """The heads of a layer that go so that it ends with `num_heads` over `num_kv_heads`, in groups of one size.

    Key heads go whole, with all their readers; of those that stay, each loses equally many. The cheapest, after repair,
    of all such sets where they are not too many.
    """
    groups = heads.readers
    size = num_heads // num_kv_heads if num_kv_heads else 0
    if not 0 < num_kv_heads <= len(groups) or num_heads % num_kv_heads or size > min(map(len, groups)):
        raise OptionError(
            f"a layer of {heads.num_heads} heads over {len(groups)} key heads can end with fewer of both, in groups of "
            f"one size, got {num_heads} over {num_kv_heads}"
        )
    problem = Problem.of(moments, heads, ridge)
    sets = math.comb(len(groups), num_kv_heads) * math.prod(math.comb(len(group), size) for group in groups)
    if problem.scale == 0 or sets > MOST_SETS:
        return _one_after_the_other(moments, heads, groups, size, num_kv_heads, ridge, root)
    inverse = torch.cholesky_inverse(problem.factor(problem.channels(range(heads.num_heads))))
    matrix = weighed(problem.matrix, root)

    def cost(gone: Sequence[int]) -> float:
        at = problem.channels(gone)
        return float((matrix[at] * torch.linalg.solve(inverse[at][:, at], matrix[at])).sum())

    found = [
        tuple(head for head in range(heads.num_heads) if head not in {x for own in kept for x in own})
        for stay in itertools.combinations(groups, num_kv_heads)
        for kept in itertools.product(*(itertools.combinations(group, size) for group in stay))
    ]
    return min(found, key=lambda gone: cost(gone) if gone else 0.0)


def _one_after_the_other(
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


def fits_stock(model: nn.Module, gone: Mapping[str, Sequence[int]]) -> bool:
    """Whether a stock class of transformers has these shapes when these heads are gone; no weight is touched."""
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
