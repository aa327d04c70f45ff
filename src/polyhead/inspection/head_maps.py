"""Where each head looks, as pictures: a map of places and a histogram of offsets, both shares of its attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from polyhead.observation import AttentionSite, CollectorState
from polyhead.observation.attention_maps import SiteMaps
from polyhead.ops.profile.request import offset_bins


@dataclass(frozen=True, slots=True, eq=False)
class HeadMaps:
    """Where the heads of one site look, on average over the text.

    `map[head, i, j]` is the share of its attention that a query of block i gives to the keys of block j, so that a row
    sums to 1 (or to less, where heads may look at nothing). Blocks are `block` tokens long, counted from the start of
    the sequence; what no sequence reached is cut off. `offsets[head, bin]` is the share of its attention at the offsets
    of a bin of `polyhead.ops.profile.offset_bins`; there are none in a cross-attention.
    """

    block: int
    map: Tensor  # [heads, blocks, blocks] float32
    offsets: Tensor  # [heads, bins] float32

    @property
    def tokens(self) -> int:
        """How many tokens a side of the map has."""
        return self.block * self.map.shape[-1]


def looks_of(collected: Mapping[AttentionSite, Mapping[str, CollectorState]]) -> dict[AttentionSite, HeadMaps]:
    """What `AttentionMaps` gathered, as shares."""
    found = {site: values.get("maps") for site, values in collected.items()}
    return {site: _looks(maps) for site, maps in found.items() if isinstance(maps, SiteMaps)}


def bin_edges() -> list[int]:
    """The first offset of every bin, and one past the last offset of the last."""
    bins = offset_bins()
    return [*bins[:, 0].tolist(), int(bins[-1, 1]) + 1]


def _looks(maps: SiteMaps) -> HeadMaps:
    rows, grid = maps.rows.cpu(), maps.map.cpu()
    reached = (rows > 0) | (grid.sum((0, 1)) > 0)
    side = max(1, int(reached.nonzero().max()) + 1 if bool(reached.any()) else 1)
    shares = (grid / rows.clamp_min(1.0)[:, None])[:, :side, :side]
    offsets = maps.offsets.cpu() / rows.sum().clamp_min(1.0)
    return HeadMaps(maps.block, shares.to(torch.float32), offsets.to(torch.float32))
