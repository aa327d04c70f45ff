"""Row statistics of the difference of two softmax maps, tile by tile: no n x n tensor is materialised."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polyhead.ops.attended import Attended
from polyhead.ops.common.combined_weights import COMBINED, CombinedWeights

# Elements of one tile over all heads and both maps.
_TILE_ELEMENTS = 1 << 22
_TILE_KEYS = 2048


@torch.no_grad()
def combined_weights(attended: Attended, factor: Tensor, names: Sequence[str] = COMBINED) -> CombinedWeights:
    """Return row statistics of p1 - factor * p2, p1 and p2 being the weights of the two halves of the heads."""
    batch, maps, queries, _ = attended.query.shape
    keys, heads = attended.key.shape[2], maps // 2
    width = min(_TILE_KEYS, max(keys, 1))
    height = max(1, _TILE_ELEMENTS // max(batch * maps * width, 1))
    dtype = torch.float64 if attended.query.dtype is torch.float64 else torch.float32
    statistics = {name: attended.query.new_zeros(batch, heads, queries, dtype=dtype) for name in names}
    for top in range(0, queries, height):
        rows = (top, min(top + height, queries))
        for left in range(0, keys, width):
            # Blocks of one query and one key: their masses are the weights.
            block_map = attended.profile(block_map=(1, 1), rows=rows, columns=(left, min(left + width, keys))).block_map
            assert block_map is not None
            first, second = block_map.to(dtype).chunk(2, 1)
            tile = first - factor.to(dtype) * second
            for name, sums in statistics.items():
                row_values = sums[..., rows[0] : rows[1]]
                if name == "signed_mass":
                    row_values += tile.sum(-1)
                elif name == "absolute_mass":
                    row_values += tile.abs().sum(-1)
                else:
                    torch.maximum(row_values, tile.abs().amax(-1), out=row_values)
    return CombinedWeights(**statistics)
