"""Attention maps, offsets and examples of a page, pooled so that a page of a large model still opens quickly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from polyhead.inspection import Inspection
from polyhead.inspection.head_maps import bin_edges
from polyhead.observation import AttentionSite
from polyhead.report.packing import clipped, packed_floats, packed_weights

# One byte per cell, 4/3 of that in base64: 12 layers of 12 heads have maps of 64 x 64.
MAX_MAP_CELLS = 1 << 20
MAX_EXAMPLE_CELLS = 1 << 20
MIN_MAP_SIDE = 8  # of a map, regardless of the number of heads


def pictures_of(inspection: Inspection, index: Mapping[AttentionSite, int]) -> dict[str, Any]:
    """Return the parts `maps`, `map_block`, `offsets` and `examples` of a page."""
    maps = inspection.head_maps
    factor = _pooling(inspection)
    first, last = _used_bins(inspection)
    edges = bin_edges()
    return {
        "maps": {str(index[site]): packed_weights(pooled(x.map, factor)) for site, x in maps.items()},
        "map_block": factor * max((x.block for x in maps.values()), default=1),
        "offsets": {
            "edges": edges[first : last + 1] if first < last else [],
            "sites": {
                str(index[site]): packed_floats(x.offsets[:, first:last])
                for site, x in maps.items()
                if site.kind == "self" and first < last
            },
        },
        "examples": _examples(inspection, index),
    }


def pooled(grid: Tensor, factor: int) -> Tensor:
    """Pool a map [heads, rows, columns] into larger blocks; rows are averaged and columns summed, so row sums remain.

    The rows of a block have equal weight; an incomplete last block averages the rows it has.
    """
    if factor == 1:
        return grid
    side = -(-grid.shape[1] // factor)
    padded = torch.nn.functional.pad(grid, (0, side * factor - grid.shape[2], 0, side * factor - grid.shape[1]))
    blocks = padded.unflatten(2, (side, factor)).unflatten(1, (side, factor)).sum((2, 4))
    rows = torch.full((side,), factor, dtype=grid.dtype)
    rows[-1] = grid.shape[1] - (side - 1) * factor
    return blocks / rows[:, None]


def _pooling(inspection: Inspection) -> int:
    """Return the pooling factor with which the maps of all heads fit the limit."""
    heads = sum(site.num_heads for site in inspection.head_maps)
    side = max((x.map.shape[-1] for x in inspection.head_maps.values()), default=0)
    factor = 1
    while heads * (-(-side // factor)) ** 2 > MAX_MAP_CELLS and side // (2 * factor) >= MIN_MAP_SIDE:
        factor *= 2
    return factor


def _used_bins(inspection: Inspection) -> tuple[int, int]:
    """Return the range of offset bins with attention from any head: first, and one past the last.

    A head that is NaN has no attention in any bin; where there are no others, the range is that of their bins.
    """
    offsets = [x.offsets for x in inspection.head_maps.values() if x.offsets.shape[-1]]
    if not offsets:
        return 0, 0
    by_head = torch.cat(offsets)
    used = (by_head > 0).any(0)
    places = (used if bool(used.any()) else by_head.isnan().any(0)).nonzero()[:, 0].tolist()
    return (places[0], places[-1] + 1) if places else (0, 0)


def _examples(inspection: Inspection, index: Mapping[AttentionSite, int]) -> list[dict[str, Any]]:
    """Return as many examples as fit the limit, at least one."""
    examples: list[dict[str, Any]] = []
    cells = 0
    for example in inspection.examples:
        cells += sum(weights.numel() for weights in example.weights.values())
        if examples and cells > MAX_EXAMPLE_CELLS:
            break
        examples.append(
            {
                "title": clipped(example.title),
                "queries": [clipped(text) for text in example.queries],
                "keys": [clipped(text) for text in example.keys],
                "sites": {str(index[site]): packed_weights(x) for site, x in example.weights.items()},
            }
        )
    return examples
