"""Request and result types of `profile`."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from polyhead.errors import OptionError
from polyhead.ops.common.kernels.sizes import blocks_of, power_of_two
from polyhead.ops.common.visibility import Span, Visibility

Pool = Literal["sum", "mean", "max"]
NEAR = 64  # every offset up to this distance has its own bin
FAR_BINS = 25  # bins on either side beyond it: the last one ends at 64 * 2**25 = 2**31
OFFSET_BINS = 2 * (NEAR + FAR_BINS) + 1
MAX_TOPK = 16


@dataclass(frozen=True, slots=True)
class BlockMap:
    """A grid over queries and keys, and the pooling of the weights within each of its blocks.

    `block` is the height and width of a block in tokens, any sizes. `resolution` is instead the maximum number of rows
    and columns of blocks; the blocks are then the smallest whose sides are a power of two up to 128 or a multiple of
    128, which are the cheapest sizes. The blocks at the lower and right edge may be smaller.

    "sum" adds the weights of a block, "max" takes the largest, "mean" divides the sum by the number of (query, key)
    pairs in the block, masked ones included.

    >>> BlockMap(resolution=(256, 256)).block_of(5000, 5000)
    (32, 32)
    >>> BlockMap(block=(100, 7), pool="max").block_of(5000, 5000)
    (100, 7)
    """

    block: tuple[int, int] | None = None
    resolution: tuple[int, int] | None = None
    pool: Pool = "sum"

    def __post_init__(self) -> None:
        if (self.block is None) == (self.resolution is None):
            raise OptionError(
                f"a block map takes either block or resolution, got block {self.block} and resolution {self.resolution}"
            )
        for name in ("block", "resolution"):
            sides = getattr(self, name)
            if sides is not None and not (
                isinstance(sides, tuple) and len(sides) == 2 and all(_is_count(side) for side in sides)
            ):
                raise OptionError(f"{name} must be two positive integers (queries, keys), got {sides!r}")
        if self.pool not in ("sum", "mean", "max"):
            raise OptionError(f"pool must be 'sum', 'mean' or 'max', got {self.pool!r}")

    def block_of(self, queries: int, keys: int) -> tuple[int, int]:
        """Return the height and width of a block.

        Args:
            queries, keys: numbers of queries and keys.
        """
        if self.block is not None:
            return self.block
        assert self.resolution is not None
        return _cheap_side(queries, self.resolution[0]), _cheap_side(keys, self.resolution[1])


def _cheap_side(tokens: int, blocks: int) -> int:
    """Return the smallest cheap side of blocks, of which at most `blocks` cover the tokens; see `BlockMap`."""
    min_side = max(1, blocks_of(tokens, blocks))  # tokens / blocks, rounded up
    return power_of_two(min_side) if min_side <= 128 else blocks_of(min_side, 128) * 128


def _is_count(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x > 0


def offset_bins() -> Tensor:
    """Return the first and the last offset of each bin of the histogram, int64 [bins, 2].

    An offset is the key's position minus the query's. Each offset of -64 to 64 has its own bin; beyond, the bins end at
    64 * 2**k on either side. The bins are the same for every sequence length, so histograms can be added.
    """
    edges = [NEAR << k for k in range(FAR_BINS + 1)]
    after = [(low + 1, high) for low, high in itertools.pairwise(edges)]
    before = [(-high, -low) for low, high in reversed(after)]
    near = [(offset, offset) for offset in range(-NEAR, NEAR + 1)]
    return torch.tensor([*before, *near, *after], dtype=torch.int64)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionProfile:
    """Result of `polyhead.profile`; fields that were not requested are None.

    Weights are float32 (float64 for float64 input) and not differentiable. `rows` and `columns` are the window that was
    profiled, (first, one past the last); queries and keys below are those of the window, while `argmax` and `top_keys`
    count keys from the start of the sequence.

        received           [batch, heads, keys]       the weight each key receives, summed over the queries
        received_by_group  [batch, kv_heads, keys]    the same, summed over the query heads that share a KV head
        block_map          [batch, heads, row_blocks, column_blocks]   pooled over blocks of `block` tokens
        offsets            [batch, heads, bins]       weight by key position minus query position, over queries
        offset_bins        [bins, 2]                  the first and last offset of each bin, on the CPU
        argmax             [batch, heads, queries]    the key with the largest weight; ties: the lowest; -1: no key
        top_keys           [batch, heads, queries, k] the keys with the largest weights in order, -1 past the last
        top_weights        [batch, heads, queries, k] and their weights, 0 past the last
        key_set_mass       [batch, heads, queries]    the weight on the keys of `key_set`
        pair_weights       [batch, heads, pairs]      the weight of each (query, key) of `pairs`, 0 where masked
        head_divergence    [batch, head_pairs]        Jensen-Shannon divergence in nats, the mean over rows
        head_distance      [batch, head_pairs]        the mean over rows of its square root, the distance

    Both means leave out rows in which neither head of the pair sees a key of the window; they are 0 if no row remains.
    Learned sinks take a share of the weights but are not keys: divergences do not include them.
    """

    rows: Span
    columns: Span
    block: tuple[int, int] | None = None
    received: Tensor | None = None
    received_by_group: Tensor | None = None
    block_map: Tensor | None = None
    offsets: Tensor | None = None
    offset_bins: Tensor | None = None
    argmax: Tensor | None = None
    top_keys: Tensor | None = None
    top_weights: Tensor | None = None
    key_set_mass: Tensor | None = None
    pair_weights: Tensor | None = None
    head_divergence: Tensor | None = None
    head_distance: Tensor | None = None
    backend: str = ""

    def __repr__(self) -> str:
        shapes = [f"{name}={list(x.shape)}" for name in self.__slots__ if isinstance(x := getattr(self, name), Tensor)]
        return f"AttentionProfile(rows={self.rows}, columns={self.columns}, {', '.join(shapes)})"


@dataclass(frozen=True, slots=True, eq=False)
class ProfileRequest:
    """One validated call of `profile`, as the backends take it."""

    query: Tensor  # [batch, heads, queries, head_dim]
    key: Tensor  # [batch, kv_heads, keys, head_dim]
    logsumexp: Tensor  # [batch, heads, queries]
    visibility: Visibility | None  # None: every query sees every key
    positions: Visibility  # positions of queries and keys: `visibility`, or one without a mask where that is None
    scale: float | Tensor  # a number, or one per head [heads]
    softcap: float | None
    rows: Span
    columns: Span
    received: bool
    block: tuple[int, int] | None
    pool: Pool
    offsets: bool
    argmax: bool
    topk: int
    key_set: Tensor | None  # boolean [batch or 1, keys], of the full sequence
    head_pairs: Tensor | None  # int64 [pairs, 2]

    @property
    def accumulation_dtype(self) -> torch.dtype:
        return torch.float64 if self.query.dtype is torch.float64 else torch.float32

    @property
    def map_shape(self) -> tuple[int, int]:
        """Numbers of rows and columns of blocks in the window."""
        assert self.block is not None
        (top, bottom), (left, right) = self.rows, self.columns
        return blocks_of(bottom - top, self.block[0]), blocks_of(right - left, self.block[1])

    @property
    def needs_tiles(self) -> bool:
        """True if some result needs a pass over tiles; weights of single (query, key) pairs do not."""
        return self.received or self.block is not None or self.offsets or self.needs_rows or self.head_pairs is not None

    @property
    def needs_rows(self) -> bool:
        """True if a result per row is requested, so that the pass must iterate along the rows."""
        return self.argmax or self.topk > 0 or self.key_set is not None
