"""Pieces of work that a calibration times: they span the sizes of layers, in groups that share the available time."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from polyhead.costs.timing.limits import MASK_BYTES, route
from polyhead.costs.work import AttentionCore, Device, Direction, Piece, Product, Traffic

ALWAYS = 2  # pieces of a group that are timed whatever time there is


@dataclass(frozen=True, slots=True)
class Group:
    """Pieces of one kind, what matters most first, and their part of the time; what it does not suffice for is left."""

    name: str
    share: float
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Grid:
    """Sizes that are combined with one another; a pair is (batch, heads)."""

    rows: Sequence[int]
    columns: Sequence[int]
    inner: Sequence[int]
    deep: Sequence[int]  # inner sizes of gradients of weights: as many as there are tokens
    copies: Sequence[int]  # bytes
    tokens: Sequence[int]
    pairs: Sequence[tuple[int, int]]
    middle: Sequence[int]  # tokens of what is timed at few sizes: no mask at all, and keys that heads share
    dims: Sequence[int]
    cached: Sequence[tuple[int, int]]  # (batch, keys) of decoding
    kv_heads: int
    tiled: Sequence[int]  # tokens of windows that are not handed over as a mask
    windows: Sequence[int]  # of those, up to half of the tokens
    cached_windows: Sequence[int]  # of decoding over the last of the caches
    most_flops: float  # of one piece
    most_windowed_flops: float  # of one with a window, of which there is time for few
    most_bytes: float  # that it keeps in memory
    least_backward_flops: float = 0  # a gradient of fewer takes its host longer than the device
    least_tiled_backward_flops: float = 0  # likewise of our kernels, which are called by Python


GPU = Grid(
    rows=(1, 16, 64, 256, 1024, 4096, 16_384, 131_072, 1_048_576),
    columns=(64, 192, 512, 1536, 4096, 12_288, 32_768),
    inner=(64, 256, 1024, 4096, 16_384, 32_768),
    deep=(65_536, 1_048_576),
    copies=tuple(1 << power for power in range(14, 33, 2)),
    tokens=(128, 512, 2048, 8192, 32_768, 131_072),
    pairs=((1, 1), (1, 8), (4, 16), (16, 32), (64, 64)),
    middle=(512, 4096, 16_384),
    dims=(64, 128, 256),
    cached=(
        (1, 512),
        (1, 4096),
        (1, 32_768),
        (1, 131_072),
        (8, 512),
        (8, 4096),
        (8, 32_768),
        (64, 512),
        (8, 131_072),
        (64, 8192),
    ),
    kv_heads=4,
    tiled=(2048, 8192, 32_768, 131_072),
    windows=(64, 512, 4096, 65_536),
    cached_windows=(128, 4096),
    most_flops=2.5e13,
    most_windowed_flops=5e12,
    most_bytes=20e9,
    least_backward_flops=2e10,
    least_tiled_backward_flops=1e11,
)
CPU = Grid(
    rows=(1, 8, 64, 512, 4096),
    columns=(64, 256, 1024, 3072),
    inner=(64, 256, 1024),
    deep=(4096,),
    copies=tuple(1 << power for power in range(14, 29, 2)),
    tokens=(32, 128, 512, 2048),
    pairs=((1, 1), (1, 8), (4, 16)),
    middle=(64, 512),
    dims=(64, 128),
    cached=((1, 64), (1, 1024), (1, 8192), (8, 1024)),
    kv_heads=2,
    tiled=(),
    windows=(),
    cached_windows=(),
    most_flops=1.5e9,
    most_windowed_flops=1.5e9,
    most_bytes=1e9,
)
# A dtype beside the one that is measured in full: its rates, and how far its kernels are from them.
BRIEF = Grid(
    rows=(16, 1024, 16_384),
    columns=(512, 4096),
    inner=(512, 4096),
    deep=(),
    copies=(),
    tokens=(2048,),
    pairs=((4, 16),),
    middle=(),
    dims=(64, 128),
    cached=(),
    kv_heads=1,
    tiled=(),
    windows=(),
    cached_windows=(),
    most_flops=2e12,
    most_windowed_flops=2e12,
    most_bytes=12e9,
)
# Parts of the time; a gradient's kernels are looked for and built for longer than all others.
SHARES = {
    "copies": 1.0,
    "products": 6.0,
    "forward": 8.0,
    "decode": 5.0,
    "backward": 12.0,
    "masked": 4.0,
    "masked backward": 5.0,
    "tiled": 9.0,
    "tiled backward": 12.0,
}
BRIEF_SHARE = 1.0


def groups(grid: Grid, dtype: torch.dtype, device: Device) -> list[Group]:
    """All that is timed of a dtype on such a device, in the order in which it is."""
    found: dict[str, Iterable[Piece]] = {
        "copies": [Traffic("output", size) for size in grid.copies],
        "products": _products(grid, dtype),
        "forward": _plain(grid, dtype, "forward"),
        "decode": _decodes(grid, dtype),
        "backward": _plain(grid, dtype, "backward"),
        "masked": _masked(grid, dtype, device, "forward"),
        "masked backward": _masked(grid, dtype, device, "backward"),
        "tiled": _tiled(grid, dtype, device, "forward"),
        "tiled backward": _tiled(grid, dtype, device, "backward"),
    }
    made = {name: _ordered([x for x in found[name] if _fits(x, grid, device)], device) for name in SHARES}
    return [Group(name, share, made[name]) for name, share in SHARES.items() if made[name]]


def brief_group(dtype: torch.dtype, device: Device) -> Group:
    """Pieces timed for one more dtype, in one group."""
    pieces = [piece for group in groups(BRIEF, dtype, device) for piece in group.pieces]
    return Group(str(dtype).removeprefix("torch."), BRIEF_SHARE, tuple(pieces))


def computed_flops(piece: Piece, device: Device) -> float:
    """FLOPs of every pair, hidden ones too: with a mask tensor they are computed."""
    if isinstance(piece, AttentionCore) and route(piece, device) == "masked":
        return piece.flops / max(piece.pairs, 1) * piece.batch * piece.queries * piece.keys
    return piece.flops


def held_bytes(piece: Piece, device: Device) -> int:
    """Bytes of its operands and of its mask in every form."""
    if isinstance(piece, AttentionCore) and route(piece, device) == "masked":
        return piece.bytes + MASK_BYTES * piece.queries * piece.keys
    return piece.bytes


def _fits(piece: Piece, grid: Grid, device: Device) -> bool:
    flops = computed_flops(piece, device)
    if isinstance(piece, AttentionCore) and piece.direction == "backward":
        tiled = route(piece, device) == "tiled"
        if flops < (grid.least_tiled_backward_flops if tiled else grid.least_backward_flops):
            return False
    windowed = isinstance(piece, AttentionCore) and piece.left is not None
    most = grid.most_windowed_flops if windowed else grid.most_flops
    return flops <= most and held_bytes(piece, device) <= grid.most_bytes


def _ordered(pieces: Iterable[Piece], device: Device) -> tuple[Piece, ...]:
    """The largest and the smallest, which tell what is reached and what is paid in any case, then the others mixed."""
    found = sorted(pieces, key=lambda piece: (computed_flops(piece, device), piece.bytes))
    ends = [found.pop() for _ in found[:1]] + [found.pop(0) for _ in found[:1]]
    random.Random(0).shuffle(found)
    return (*ends, *found)


def _products(grid: Grid, dtype: torch.dtype) -> Iterator[Product]:
    for rows in grid.rows:
        for columns in grid.columns:
            for inner in grid.inner:
                yield Product("projection", rows, columns, inner, dtype)
    for inner in grid.deep:
        for rows in grid.columns:
            for columns in grid.columns:
                yield Product("projection", rows, columns, inner, dtype)


def _plain(grid: Grid, dtype: torch.dtype, direction: Direction) -> Iterator[AttentionCore]:
    batch, heads = grid.pairs[len(grid.pairs) // 2]
    for dim in grid.dims:
        for tokens in grid.tokens:
            for pair in grid.pairs:
                yield _core(direction, *pair, pair[1], tokens, dim, dtype, right=0)
        for tokens in grid.middle:
            yield _core(direction, batch, heads, heads, tokens, dim, dtype)
            yield _core(direction, 1, 8 * grid.kv_heads, grid.kv_heads, tokens, dim, dtype, right=0)


def _masked(grid: Grid, dtype: torch.dtype, device: Device, direction: Direction) -> Iterator[AttentionCore]:
    """Windows that PyTorch is handed as a mask tensor; how long they are makes no difference."""
    for dim in grid.dims:
        for heads, tokens in _windowed(grid, (*grid.tokens, *grid.middle)):
            core = _core(direction, *heads, tokens, dim, dtype, left=max(tokens // 4, 1), right=0)
            if route(core, device) == "masked":
                yield core


def _tiled(grid: Grid, dtype: torch.dtype, device: Device, direction: Direction) -> Iterator[AttentionCore]:
    for dim in grid.dims:
        for heads, tokens in _windowed(grid, grid.tiled):
            for window in grid.windows:
                core = _core(direction, *heads, tokens, dim, dtype, left=window - 1, right=0)
                if 2 * window <= tokens and route(core, device) == "tiled":
                    yield core


def _windowed(grid: Grid, lengths: Sequence[int]) -> Iterator[tuple[tuple[int, int, int], int]]:
    """(batch, heads, KV heads) and tokens; keys that heads share are timed at few lengths."""
    for tokens in dict.fromkeys(lengths):
        for batch, heads in grid.pairs:
            yield (batch, heads, heads), tokens
    for tokens in grid.middle:
        yield (1, 8 * grid.kv_heads, grid.kv_heads), tokens


def _decodes(grid: Grid, dtype: torch.dtype) -> Iterator[AttentionCore]:
    for dim in grid.dims:
        for group in (1, 8):
            sizes = (group * grid.kv_heads, grid.kv_heads, 1)
            for batch, keys in grid.cached:
                yield AttentionCore("decode", batch, *sizes, keys, dim, dim, dtype, right=0)
            for window in grid.cached_windows:
                for batch, keys in grid.cached[-2:]:
                    if window < keys:
                        yield AttentionCore("decode", batch, *sizes, keys, dim, dim, dtype, window - 1, 0)


def _core(
    direction: Direction,
    batch: int,
    heads: int,
    kv_heads: int,
    tokens: int,
    dim: int,
    dtype: torch.dtype,
    *,
    left: int | None = None,
    right: int | None = None,
) -> AttentionCore:
    return AttentionCore(direction, batch, heads, kv_heads, tokens, tokens, dim, dim, dtype, left, right)
