"""`AttentionMaps`: where a head's attention goes, as pictures: by offset, by place, and what each place receives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor

from polyhead.errors import OptionError
from polyhead.observation.collectors import BatchMetadata
from polyhead.observation.statistics import AttentionSite
from polyhead.ops.attended import Attended
from polyhead.ops.profile import BlockMap
from polyhead.ops.profile.request import OFFSET_BINS


@dataclass(frozen=True, slots=True)
class AttentionMaps:
    """Gathers, for each head, the weights summed over a grid of places and over offsets.

    Args:
        tokens: the longest sequence to draw, such as the context; what lies beyond falls into the last block.
        resolution: how many blocks a side of the map has at most.

    The grid is of places counted from the start of the sequence, padding included, so that maps of sequences of
    different lengths lie on top of each other. Rows of padding count nowhere.
    """

    tokens: int
    resolution: int = 64

    def __post_init__(self) -> None:
        for name in ("tokens", "resolution"):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise OptionError(f"{name} must be a positive integer, got {number!r}")

    @property
    def name(self) -> str:
        return "maps"

    @property
    def block(self) -> int:
        """The side of a block in tokens."""
        return BlockMap(resolution=(self.resolution, self.resolution)).block_of(self.tokens, self.tokens)[0]

    @property
    def side(self) -> int:
        """How many blocks a side of the map has."""
        return -(-self.tokens // self.block)

    def empty(self, site: AttentionSite, device: torch.device) -> SiteMaps:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        heads, side = site.num_heads, self.side
        offsets = zeros(heads, OFFSET_BINS) if site.kind == "self" else zeros(heads, 0)
        return SiteMaps(self.block, zeros(heads, side, side), zeros(side), offsets, zeros(heads, side))


@dataclass(frozen=True, slots=True, eq=False)
class SiteMaps:
    """What `AttentionMaps` gathered at one site; sums, so that any two can be added."""

    block: int
    map: Tensor  # [heads, row blocks, column blocks]: the weight from the queries of a block to the keys of another
    rows: Tensor  # [row blocks]: how many queries each block had
    offsets: (
        Tensor  # [heads, bins]: the weight by offset, in the bins of `polyhead.ops.profile.offset_bins`; none for cross
    )
    received: Tensor  # [heads, column blocks]: the weight that the keys of a block received

    def update(self, attended: Attended, real: Tensor | None, metadata: BatchMetadata) -> Self:
        logsumexp = attended.result.logsumexp
        assert logsumexp is not None
        if real is not None:  # a row whose log-sum-exp is -inf sees nothing, and so is in no sum
            logsumexp = torch.where(real[:, None], logsumexp, -torch.inf)
        seen = replace(attended, result=replace(attended.result, logsumexp=logsumexp))
        found = seen.profile(received=True, block_map=(self.block, self.block), offsets=self.offsets.shape[-1] > 0)
        assert found.block_map is not None and found.received is not None
        side = self.rows.shape[0]
        grid = _folded(_folded(found.block_map.sum(0, dtype=torch.float64), side, 2), side, 1)
        received = _folded(_blocks(found.received.sum(0, dtype=torch.float64), self.block), side, 1)
        counted = torch.isfinite(logsumexp).any(1).sum(0, dtype=torch.float64)
        offsets = self.offsets if found.offsets is None else self.offsets + found.offsets.sum(0, dtype=torch.float64)
        rows = self.rows + _folded(_blocks(counted, self.block), side, 0)
        return type(self)(self.block, self.map + grid, rows, offsets, self.received + received)

    def merge(self, other: Self) -> Self:
        if self.block != other.block or self.map.shape != other.map.shape:
            raise OptionError(
                "maps of one grid can be merged, "
                f"got blocks of {self.block} and {other.block} tokens, "
                f"{list(self.map.shape)} and {list(other.map.shape)}"
            )
        device = self.map.device
        sums = [getattr(self, name) + getattr(other, name).to(device) for name in _SUMS]
        return type(self)(self.block, *sums)

    def state(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in _SUMS}

    def with_state(self, state: Mapping[str, Tensor]) -> Self:
        return type(self)(self.block, *(state[name] for name in _SUMS))


_SUMS = tuple(field.name for field in fields(SiteMaps) if field.name != "block")


def _blocks(x: Tensor, block: int) -> Tensor:
    """Sums over blocks of the last axis."""
    missing = -x.shape[-1] % block
    padded = torch.nn.functional.pad(x, (0, missing))
    return padded.unflatten(-1, (-1, block)).sum(-1)


def _folded(x: Tensor, size: int, axis: int) -> Tensor:
    """Of exactly `size` along an axis: zeros where it is shorter, the rest in the last place where it is longer."""
    here = x.shape[axis]
    if here > size:
        first, rest = x.split((size - 1, here - size + 1), axis)
        return torch.cat([first, rest.sum(axis, keepdim=True)], axis)
    if here < size:
        return torch.cat([x, x.new_zeros(*x.shape[:axis], size - here, *x.shape[axis + 1 :])], axis)
    return x
