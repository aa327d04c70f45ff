"""`AttentionMaps`: collect downsampled attention maps, attention by offset, and attention received per position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from polyhead.errors import OptionError
from polyhead.geometry import checked_integer
from polyhead.observation.accumulators import Sums
from polyhead.observation.collectors import BatchMetadata, counted_rows, exclude_padding, profile_rows
from polyhead.observation.statistics import AttentionSite
from polyhead.ops.attended import Attended
from polyhead.ops.profile import BlockMap
from polyhead.ops.profile.request import OFFSET_BINS


@dataclass(frozen=True, slots=True)
class AttentionMaps:
    """Collector of per-head attention weights summed over a grid of positions and over offsets.

    Args:
        tokens: the longest sequence to map, such as the context length; positions beyond it go into the last block.
        resolution: maximum number of blocks per side of the map.

    Positions count from the start of the sequence, padding included, so that maps of sequences of different lengths
    align. Padding queries are excluded. Over a cache they count from the first key that it holds.
    """

    name: ClassVar[str] = "maps"
    tokens: int
    resolution: int = 64

    def __post_init__(self) -> None:
        for name in ("tokens", "resolution"):
            checked_integer(name, getattr(self, name), at_least=1, error=OptionError)

    @property
    def block(self) -> int:
        """Side length of a block in tokens."""
        return BlockMap(resolution=(self.resolution, self.resolution)).block_of(self.tokens, self.tokens)[0]

    @property
    def side(self) -> int:
        """Number of blocks per side of the map."""
        return -(-self.tokens // self.block)

    def empty(self, site: AttentionSite, device: torch.device) -> SiteMaps:
        """Return an empty state for a site.

        Args:
            site: the attention site.
            device: device of the state.
        """

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        heads, side = site.num_heads, self.side
        offsets = zeros(heads, OFFSET_BINS) if site.kind == "self" else zeros(heads, 0)
        return SiteMaps(self.block, zeros(heads, side, side), zeros(side), offsets, zeros(heads, side))


@dataclass(frozen=True, slots=True, eq=False)
class SiteMaps(Sums):
    """State of `AttentionMaps` at one site; all tensors are sums, so two states add up."""

    block: int
    map: Tensor  # [heads, query blocks, key blocks]: summed weight from the queries of a block to the keys of another
    rows: Tensor  # [query blocks]: number of queries with a visible key in each block
    # [heads, bins]: summed weight by offset, binned as in `polyhead.ops.profile.offset_bins`; none for cross-attention
    offsets: Tensor
    received: Tensor  # [heads, key blocks]: summed weight received by the keys of a block

    @property
    def profiled(self) -> dict[str, Any]:
        with_offsets = {"offsets": True} if self.offsets.shape[-1] else {}
        return {"received": True, "block_map": (self.block, self.block), **with_offsets}

    def update(self, attended: Attended, non_padding: Tensor | None, metadata: BatchMetadata) -> Self:
        unpadded, side = exclude_padding(attended, non_padding), self.rows.shape[0]
        counted = counted_rows(unpadded)
        if self.offsets.shape[-1] and attended.query.shape[2] < attended.key.shape[2]:  # over a cache
            summary = unpadded.profile(**{**self.profiled, "block_map": (1, self.block)})
            assert summary.block_map is not None
            of_row = _folded(summary.block_map.double(), side, 3)  # [batch, heads, queries, key blocks]
            place = _own_keys(attended).div(self.block, rounding_mode="floor").clamp(0, side - 1)
            block_of = F.one_hot(place.expand(len(of_row), -1), side).double()  # [batch, queries, query blocks]
            grid = torch.einsum("bqs,bhqk->hsk", block_of, of_row)
            rows = torch.einsum("bqs,bq->s", block_of, counted.expand(len(of_row), -1).double())
        else:
            summary = profile_rows(attended, non_padding, self.profiled)
            assert summary.block_map is not None
            grid = _folded(_folded(summary.block_map.sum(0, dtype=torch.float64), side, 2), side, 1)
            rows = _folded(_blocks(counted.sum(0, dtype=torch.float64), self.block), side, 0)
        assert summary.received is not None
        received = _folded(_blocks(summary.received.sum(0, dtype=torch.float64), self.block), side, 1)
        offsets = (
            self.offsets if summary.offsets is None else self.offsets + summary.offsets.sum(0, dtype=torch.float64)
        )
        return type(self)(self.block, self.map + grid, self.rows + rows, offsets, self.received + received)

    def merge(self, other: Self) -> Self:
        if self.block != other.block or self.map.shape != other.map.shape:
            raise OptionError(
                "only maps on the same grid can be merged, "
                f"got blocks of {self.block} and {other.block} tokens, "
                f"{list(self.map.shape)} and {list(other.map.shape)}"
            )
        return Sums.merge(self, other)


def _own_keys(attended: Attended) -> Tensor:
    """Return the index of each query's own key in a cache, [batch or 1, queries]; does not wait for the device."""
    queries, keys, device = attended.query.shape[2], attended.key.shape[2], attended.query.device
    mask, index = attended.mask, torch.arange(queries, device=device)[None]
    if mask is not None and mask.placed is not None:
        query_at, key_at = (x.to(device, non_blocking=True) for x in mask.placed)
        sequences = max(len(query_at), len(key_at))
        ordered, order = key_at.expand(sequences, -1).sort(dim=-1)
        nearest = torch.searchsorted(ordered, query_at.expand(sequences, -1).contiguous()).clamp_max(keys - 1)
        return order.gather(1, nearest)
    for padding in () if mask is None else mask.padding:
        if padding.side == "right":
            count = queries if padding.queries is None else padding.queries.to(device, non_blocking=True)[:, None]
            return padding.keys.to(device, non_blocking=True)[:, None] - count + index
    return index + (keys - queries)


def _blocks(x: Tensor, block: int) -> Tensor:
    """Return sums over blocks of the last axis."""
    missing = -x.shape[-1] % block
    padded = torch.nn.functional.pad(x, (0, missing))
    return padded.unflatten(-1, (-1, block)).sum(-1)


def _folded(x: Tensor, size: int, axis: int) -> Tensor:
    """Return `x` with exactly `size` entries along an axis: zero-padded, or with the excess summed into the last."""
    current = x.shape[axis]
    if current > size:
        first, excess = x.split((size - 1, current - size + 1), axis)
        return torch.cat([first, excess.sum(axis, keepdim=True)], axis)
    if current < size:
        return torch.cat([x, x.new_zeros(*x.shape[:axis], size - current, *x.shape[axis + 1 :])], axis)
    return x
