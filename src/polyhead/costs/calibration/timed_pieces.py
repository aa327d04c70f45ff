"""Pieces of work that a calibration times: they span the sizes of layers, in groups that share the available time."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product

import torch

from polyhead.costs.quantities import dtype_name
from polyhead.costs.timing.limits import MASK_BYTES, route
from polyhead.costs.work import AttentionCore, Device, Direction, Piece, Product, Traffic

ALWAYS = 2  # pieces of a group that are timed even if its time is over


@dataclass(frozen=True, slots=True)
class Group:
    """Pieces of one kind, the most informative first, and their share of the time; what does not fit is skipped."""

    name: str
    share: float
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Sizes of the timed pieces, combined with one another, and limits on a piece.

    `rows`, `columns`, `inner` and `deep` are sizes of matrix products, `copies` of copies, the others of attention.
    """

    rows: Sequence[int]
    columns: Sequence[int]
    inner: Sequence[int]
    deep: Sequence[int] = ()  # inner sizes of weight gradients, which are numbers of tokens
    copies: Sequence[int] = ()  # bytes
    tokens: Sequence[int]
    batch_heads: Sequence[tuple[int, int]]  # (batch, heads)
    middle: Sequence[int] = ()  # tokens of unmasked attention and of shared KV heads, which are timed at few sizes
    dims: Sequence[int]
    cached: Sequence[tuple[int, int]] = ()  # (batch, keys) of decoding
    kv_heads: int = 1
    tiled: Sequence[int] = ()  # tokens of windows without a mask tensor
    windows: Sequence[int] = ()  # window lengths at these tokens; a window of over half of the tokens is left out
    cached_windows: Sequence[int] = ()  # window lengths of decoding, over the last two entries of `cached`
    max_flops: float  # of one piece
    max_windowed_flops: float = math.inf  # of one with a window; there is time for few of them
    max_bytes: float  # of its operands and masks
    min_backward_flops: float = 0  # a smaller backward takes the host longer than the device
    min_tiled_backward_flops: float = 0  # the same for our kernels, which are launched from Python


GPU = Grid(
    rows=(1, 16, 64, 256, 1024, 4096, 16_384, 131_072, 1_048_576),
    columns=(64, 192, 512, 1536, 4096, 12_288, 32_768),
    inner=(64, 256, 1024, 4096, 16_384, 32_768),
    deep=(65_536, 1_048_576),
    copies=tuple(1 << power for power in range(14, 33, 2)),
    tokens=(128, 512, 2048, 8192, 32_768, 131_072),
    batch_heads=((1, 1), (1, 8), (4, 16), (16, 32), (64, 64)),
    middle=(512, 4096, 16_384),
    dims=(64, 128, 256),
    cached=(*product((1, 8), (512, 4096, 32_768)), (1, 131_072), (64, 512), (8, 131_072), (64, 8192)),
    kv_heads=4,
    tiled=(2048, 8192, 32_768, 131_072),
    windows=(64, 512, 4096, 65_536),
    cached_windows=(128, 4096),
    max_flops=2.5e13,
    max_windowed_flops=5e12,
    max_bytes=20e9,
    min_backward_flops=2e10,
    min_tiled_backward_flops=1e11,
)
CPU = Grid(
    rows=(1, 8, 64, 512, 4096),
    columns=(64, 256, 1024, 3072),
    inner=(64, 256, 1024),
    deep=(4096,),
    copies=tuple(1 << power for power in range(14, 29, 2)),
    tokens=(32, 128, 512, 2048),
    batch_heads=((1, 1), (1, 8), (4, 16)),
    middle=(64, 512),
    dims=(64, 128),
    cached=((1, 64), (1, 1024), (1, 8192), (8, 1024)),
    kv_heads=2,
    max_flops=1.5e9,
    max_bytes=1e9,
)
# For dtypes after the first: enough for their rates and the efficiency of their kernels.
BRIEF = Grid(
    rows=(16, 1024, 16_384),
    columns=(512, 4096),
    inner=(512, 4096),
    tokens=(2048,),
    batch_heads=((4, 16),),
    dims=(64, 128),
    max_flops=2e12,
    max_bytes=12e9,
)
BRIEF_SHARE = 1.0


def groups(grid: Grid, dtype: torch.dtype, device: Device) -> list[Group]:
    """Return all pieces that are timed in a dtype on such a device, in order, and their shares of the time.

    Kernels of the backward take the longest to be selected and compiled, so their shares are the largest.
    """
    candidates: list[tuple[str, float, Iterable[Piece]]] = [
        ("copies", 1.0, (Traffic("output", size) for size in grid.copies)),
        ("products", 6.0, _products(grid, dtype)),
        ("forward", 8.0, _plain(grid, dtype, "forward")),
        ("decode", 5.0, _decodes(grid, dtype)),
        ("backward", 12.0, _plain(grid, dtype, "backward")),
        ("masked", 4.0, _masked(grid, dtype, device, "forward")),
        ("masked backward", 5.0, _masked(grid, dtype, device, "backward")),
        ("tiled", 9.0, _tiled(grid, dtype, device, "forward")),
        ("tiled backward", 12.0, _tiled(grid, dtype, device, "backward")),
    ]
    made = (
        Group(name, share, _ordered((piece for piece in pieces if _fits(piece, grid, device)), device))
        for name, share, pieces in candidates
    )
    return [group for group in made if group.pieces]


def brief_group(dtype: torch.dtype, device: Device) -> Group:
    """Return the pieces that are timed in a further dtype, in one group."""
    pieces = chain.from_iterable(group.pieces for group in groups(BRIEF, dtype, device))
    return Group(dtype_name(dtype), BRIEF_SHARE, tuple(pieces))


def computed_flops(piece: Piece, device: Device) -> float:
    """Return the FLOPs of every computed pair, which include masked pairs if there is a mask tensor."""
    if isinstance(piece, AttentionCore) and route(piece, device) == "masked":
        return piece.flops / max(piece.pairs, 1) * piece.batch * piece.queries * piece.keys
    return piece.flops


def held_bytes(piece: Piece, device: Device) -> int:
    """Return the bytes of the operands of a piece, and of its mask in every form."""
    if isinstance(piece, AttentionCore) and route(piece, device) == "masked":
        return piece.bytes + MASK_BYTES * piece.queries * piece.keys
    return piece.bytes


def _fits(piece: Piece, grid: Grid, device: Device) -> bool:
    flops = computed_flops(piece, device)
    if isinstance(piece, AttentionCore):
        if piece.left is not None and flops > grid.max_windowed_flops:
            return False
        is_tiled = route(piece, device) == "tiled"
        least = grid.min_tiled_backward_flops if is_tiled else grid.min_backward_flops
        if piece.direction == "backward" and flops < least:
            return False
    return flops <= grid.max_flops and held_bytes(piece, device) <= grid.max_bytes


def _ordered(pieces: Iterable[Piece], device: Device) -> tuple[Piece, ...]:
    """Return the largest piece (best rates) and the smallest (fixed costs), then the others in random order."""
    others = sorted(pieces, key=lambda piece: (computed_flops(piece, device), piece.bytes))
    ends = [others.pop() for _ in others[:1]] + [others.pop(0) for _ in others[:1]]
    random.Random(0).shuffle(others)
    return (*ends, *others)


def _products(grid: Grid, dtype: torch.dtype) -> Iterator[Product]:
    for sizes in product(grid.rows, grid.columns, grid.inner):
        yield Product("projection", *sizes, dtype)
    for inner, rows, columns in product(grid.deep, grid.columns, grid.columns):
        yield Product("projection", rows, columns, inner, dtype)


def _plain(grid: Grid, dtype: torch.dtype, direction: Direction) -> Iterator[AttentionCore]:
    batch, heads = grid.batch_heads[len(grid.batch_heads) // 2]
    for dim in grid.dims:
        for tokens, pair in product(grid.tokens, grid.batch_heads):
            yield _core(direction, (*pair, pair[1]), tokens, dim, dtype)
        for tokens in grid.middle:
            yield _core(direction, (batch, heads, heads), tokens, dim, dtype, right=None)
            yield _core(direction, (1, 8 * grid.kv_heads, grid.kv_heads), tokens, dim, dtype)


def _masked(grid: Grid, dtype: torch.dtype, device: Device, direction: Direction) -> Iterator[AttentionCore]:
    """Yield windows that PyTorch's kernels need a mask tensor for; their length makes no difference."""
    for dim in grid.dims:
        for heads, tokens in _windowed(grid, (*grid.tokens, *grid.middle)):
            core = _core(direction, heads, tokens, dim, dtype, left=max(tokens // 4, 1))
            if route(core, device) == "masked":
                yield core


def _tiled(grid: Grid, dtype: torch.dtype, device: Device, direction: Direction) -> Iterator[AttentionCore]:
    for dim in grid.dims:
        for (heads, tokens), window in product(_windowed(grid, grid.tiled), grid.windows):
            core = _core(direction, heads, tokens, dim, dtype, left=window - 1)
            if 2 * window <= tokens and route(core, device) == "tiled":
                yield core


def _windowed(grid: Grid, lengths: Sequence[int]) -> Iterator[tuple[tuple[int, int, int], int]]:
    """Yield (batch, heads, KV heads) and tokens; shared KV heads are timed at few lengths."""
    for tokens, (batch, heads) in product(dict.fromkeys(lengths), grid.batch_heads):
        yield (batch, heads, heads), tokens
    for tokens in grid.middle:
        yield (1, 8 * grid.kv_heads, grid.kv_heads), tokens


def _decodes(grid: Grid, dtype: torch.dtype) -> Iterator[AttentionCore]:
    for dim, group in product(grid.dims, (1, 8)):
        heads = (group * grid.kv_heads, grid.kv_heads)
        for batch, keys in grid.cached:
            yield AttentionCore("decode", batch, *heads, 1, keys, dim, dim, dtype, right=0)
        for window, (batch, keys) in product(grid.cached_windows, grid.cached[-2:]):
            if window < keys:
                yield AttentionCore("decode", batch, *heads, 1, keys, dim, dim, dtype, window - 1, 0)


def _core(
    direction: Direction,
    heads: tuple[int, int, int],
    tokens: int,
    dim: int,
    dtype: torch.dtype,
    *,
    left: int | None = None,
    right: int | None = 0,
) -> AttentionCore:
    """Return causal attention of (batch, heads, KV heads) unless `right` is None."""
    return AttentionCore(direction, *heads, tokens, tokens, dim, dim, dtype, left, right)
