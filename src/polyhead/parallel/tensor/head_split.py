"""Distribution of the heads of a layer over ranks, as plain values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from polyhead.geometry import HeadLayout


@dataclass(frozen=True, slots=True)
class HeadSplit:
    """Heads of a layer in equal blocks, one per rank; the last blocks are padded where heads do not divide the ranks.

    Every rank stores `block` heads. A rank past the last head stores padding alone and computes one zero head.

    >>> split = HeadSplit(num_heads=6, ranks=4)
    >>> split.block, [list(split.heads(rank)) for rank in range(4)]
    (2, [[0, 1], [2, 3], [4, 5], []])
    """

    num_heads: int
    ranks: int

    @property
    def block(self) -> int:
        """Heads that each rank stores, padding included."""
        return -(-self.num_heads // self.ranks)

    @property
    def padding(self) -> int:
        """Zero heads after the last head."""
        return self.block * self.ranks - self.num_heads

    def heads(self, rank: int) -> range:
        """Return the heads of a rank, as indices of the whole layer.

        Args:
            rank: index of the rank in the mesh dimension.
        """
        start = min(rank * self.block, self.num_heads)
        return range(start, min(start + self.block, self.num_heads))

    def computed(self, rank: int) -> range:
        """Return the heads whose masks, gates and biases a rank uses: its own, or head 0 for a zero head.

        Args:
            rank: index of the rank in the mesh dimension.
        """
        return self.heads(rank) or range(1)


def kv_split(layout: HeadLayout, ranks: int) -> HeadSplit | None:
    """Return the split of the KV heads in which each rank stores those that its heads read and no others.

    None if there is none: every rank then stores all KV heads, as with fewer KV heads than ranks, and computes those
    that its heads read.

    >>> kv_split(HeadLayout(64, 8, num_kv_heads=4), ranks=4)
    HeadSplit(num_heads=4, ranks=4)
    >>> kv_split(HeadLayout(64, 8, num_kv_heads=2), ranks=4) is None
    True
    """
    heads, kv_heads = HeadSplit(layout.num_heads, ranks), HeadSplit(layout.num_kv_heads, ranks)
    for rank in range(ranks):
        if {layout.key_head(head) for head in heads.heads(rank)} != {*kv_heads.heads(rank)}:
            return None
    return kv_heads


def kv_heads_read(layout: HeadLayout, heads: range) -> list[int]:
    """Return the KV heads that some heads read, in order."""
    return sorted({layout.key_head(head) for head in heads})


def local_layout(layout: Any, heads: range) -> Any:
    """Return the layout of a layer that has only these heads, and the KV heads that they read, if it has any.

    >>> local_layout(HeadLayout(64, 8, num_kv_heads=2), range(3, 6)).key_heads
    (0, 1, 1)
    """
    if not isinstance(layout, HeadLayout):
        return replace(layout, num_heads=len(heads))
    index = {kv_head: i for i, kv_head in enumerate(kv_heads_read(layout, heads))}
    key_heads = tuple(index[layout.key_head(head)] for head in heads)
    return replace(layout, num_heads=len(heads), num_kv_heads=len(index), key_heads=key_heads)
