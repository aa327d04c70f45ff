"""Weights that are a difference of two softmax maps, computed in windows: no n x n is ever held."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polyhead.ops.attended import Attended
from polyhead.ops.common.combined_weights import COMBINED, CombinedWeights

# Weights of one window, all heads and both maps together.
_WINDOW_ELEMENTS = 1 << 22
_WINDOW_KEYS = 2048


@torch.no_grad()
def combined_weights(attended: Attended, factor: Tensor, names: Sequence[str] = COMBINED) -> CombinedWeights:
    """What is told of p1 - factor * p2 for the first half p1 of an attention's heads and the second half p2."""
    batch, maps, queries, _ = attended.query.shape
    keys, heads = attended.key.shape[2], maps // 2
    width = min(_WINDOW_KEYS, max(keys, 1))
    height = max(1, _WINDOW_ELEMENTS // max(batch * maps * width, 1))
    wide = torch.float64 if attended.query.dtype is torch.float64 else torch.float32
    found = {name: attended.query.new_zeros(batch, heads, queries, dtype=wide) for name in names}
    for top in range(0, queries, height):
        rows = (top, min(top + height, queries))
        for left in range(0, keys, width):
            # Blocks of one query and one key: their sums are the weights.
            seen = attended.profile(block_map=(1, 1), rows=rows, columns=(left, min(left + width, keys))).block_map
            assert seen is not None
            first, second = seen.to(wide).chunk(2, 1)
            tile = first - factor.to(wide) * second
            for name, sums in found.items():
                own = sums[..., rows[0] : rows[1]]
                if name == "signed_mass":
                    own += tile.sum(-1)
                elif name == "absolute_mass":
                    own += tile.abs().sum(-1)
                else:
                    torch.maximum(own, tile.abs().amax(-1), out=own)
    return CombinedWeights(**found)
