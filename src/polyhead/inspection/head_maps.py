"""Mean attention of each head: a block map of positions and a histogram of offsets."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polyhead.observation import AttentionSite
from polyhead.observation.attention_maps import SiteMaps
from polyhead.observation.collectors import Collected, states_of
from polyhead.ops.profile.request import offset_bins


@dataclass(frozen=True, slots=True, eq=False)
class HeadMaps:
    """Mean attention of the heads of one site over the text.

    `map[head, i, j]` is the attention weight of a query of block i on the keys of block j, so that a row sums to 1 (or
    less, with a learned sink). Blocks are `block` tokens long, counted from the start of the sequence, and end at the
    longest sequence. `offsets[head, bin]` is the share of attention at the offsets of a bin of
    `polyhead.ops.profile.offset_bins`; cross-attention has none.
    """

    block: int
    map: Tensor  # [heads, blocks, blocks] float32
    offsets: Tensor  # [heads, bins] float32

    @property
    def tokens(self) -> int:
        """Number of tokens along a side of the map."""
        return self.block * self.map.shape[-1]


def head_maps_of(collected: Collected) -> dict[AttentionSite, HeadMaps]:
    """Return the maps that `AttentionMaps` collected, normalised to shares of attention."""
    return {site: _head_maps(maps) for site, maps in states_of(collected, "maps", SiteMaps).items()}


def bin_edges() -> list[int]:
    """Return the first offset of every bin, and one past the last offset of the last."""
    bins = offset_bins()
    return [*bins[:, 0].tolist(), int(bins[-1, 1]) + 1]


def _head_maps(maps: SiteMaps) -> HeadMaps:
    rows, grid = maps.rows.cpu(), maps.map.cpu()
    reached = (rows > 0) | (grid.sum((0, 1)) > 0)
    side = max(1, int(reached.nonzero().max()) + 1 if bool(reached.any()) else 1)
    shares = (grid / rows.clamp_min(1.0)[:, None])[:, :side, :side]
    offsets = maps.offsets.cpu() / rows.sum().clamp_min(1.0)
    return HeadMaps(maps.block, shares.to(torch.float32), offsets.to(torch.float32))
