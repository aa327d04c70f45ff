"""Roofline limits of a piece of work: its FLOPs, exponentials and bytes at the best measured rates.

Poor occupancy is included: tiles that do not divide evenly among the processors, long rows next to short ones, few
heads. The remaining inefficiency of the kernels is learned by `polyhead.costs.timing.correction`.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from typing import Literal

from polyhead.costs.timing.machine import Machine, Route
from polyhead.costs.work import AttentionCore, Device, Piece, Product, Traffic
from polyhead.ops.attention.fused import LARGEST_DIM
from polyhead.ops.attention.mask_rule import is_mask_too_large, is_window_too_large

Bound = Literal["matrix", "exponentials", "bandwidth", "launch"]

MASK_BYTES = 13  # live bytes per pair of a mask tensor: int64 distances, three boolean masks, one in the kernel's dtype
MASK_TRAFFIC = 36  # bytes read and written per pair to build it
MASK_LAUNCHES = 9
QUERY_TILE = 128  # queries (keys in the backward) per tile
KEY_TILE = 64
# Overhead of a query tile under a band, in keys: half of the tiles at both edges is masked, all of them are compared
# pair by pair, and each program has a prologue and an epilogue.
EDGE_KEYS = 512
DECODE_ROWS = 16  # minimum rows of a matrix instruction
# Tiles that a matmul library chooses among, each with the fraction of a processor that it uses.
GPU_TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.9), (64, 256, 0.8), (64, 128, 0.7), (64, 64, 0.45))
CPU_TILES = ((1, 32, 1.0),)  # few rows waste no tile on a CPU; they are bound by memory reads
SPLITS = (1, 2, 4, 8, 16, 32, 64)  # split-K factors


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds that each resource needs for a piece; they overlap, so the longest counts.

    `before` is added: the time to build a mask tensor before the kernel starts.
    """

    matrix: float
    exponentials: float
    bandwidth: float
    fixed: float  # kernel prologue and epilogue, independent of size
    before: float = 0.0

    @property
    def kernel_seconds(self) -> float:
        return max(self.matrix, self.exponentials, self.bandwidth) + self.fixed

    @property
    def seconds(self) -> float:
        return self.kernel_seconds + self.before

    @property
    def bound(self) -> Bound:
        resources: dict[Bound, float] = {
            "matrix": self.matrix,
            "exponentials": self.exponentials,
            "bandwidth": max(self.bandwidth, self.before),
            "launch": self.fixed,
        }
        return max(resources, key=lambda name: resources[name])


def limits(piece: Piece, machine: Machine, served: Route | None = None) -> Limits:
    """Return the limits of a piece on the route `served`; by default the one that `backend="auto"` takes."""
    if isinstance(piece, Product):
        return _of_product(piece, machine)
    if isinstance(piece, Traffic):
        launches = max(piece.launches, 1)
        moved = launches * copy_seconds(-(-piece.bytes // launches), machine)
        fixed = launches * machine.shortest["traffic"]
        return Limits(0.0, piece.exponentials / machine.exponential_rate, max(moved - fixed, 0.0), fixed)
    if piece.direction == "decode":
        return _of_decode(piece, machine)
    return _of_attention(piece, machine, route(piece, machine.device) if served is None else served)


def route(core: AttentionCore, device: Device) -> Route:
    """Return the route of `backend="auto"`: PyTorch's kernels without or with a mask tensor, or tiles of a band.

    PyTorch needs a mask tensor for any band other than a causal mask, and computes every pair. Tiles are used if the
    tensor is too large, or on a GPU if kernels that skip masked tiles are faster.
    """
    is_causal = core.left is None and core.right == 0 and core.queries in (core.keys, 1)
    if core.direction == "decode" or core.mask is None or is_causal:
        return "plain"
    return "tiled" if is_mask_too_large(core.queries * core.keys) or _is_skipped(core, device) else "masked"


def _is_skipped(core: AttentionCore, device: Device) -> bool:
    """Return True if our kernel serves the call because it skips the tiles outside a window."""
    if core.left is None or max(core.head_dim, core.value_dim) > LARGEST_DIM:
        return False
    return is_window_too_large(device, core.dtype, core.batch, core.heads, core.queries, core.keys, core.head_dim)


def copy_seconds(size: int, machine: Machine) -> float:
    """Return the time to move `size` bytes, log-linearly interpolated between the measured copies."""
    copies = machine.copies
    if size >= machine.uncached_bytes:
        return size / machine.bandwidth
    place = bisect.bisect_right(copies, (size, math.inf))
    if place == 0:
        return copies[0][1]
    (low, low_seconds), (high, high_seconds) = copies[place - 1 : place + 1]
    share = math.log(size / low) / math.log(high / low)
    return low_seconds * (high_seconds / low_seconds) ** share


def _of_product(product: Product, machine: Machine) -> Limits:
    """Return the best of a few tile sizes and split-K factors, in full waves over the processors."""
    rate, processors = machine.matrix_rate(product.dtype), machine.processors
    tiles, splits = (GPU_TILES, SPLITS) if machine.device == "cuda" else (CPU_TILES, (1,))
    # float32 partial sums, write and read
    sums = 8 * product.count * product.rows * product.columns / machine.bandwidth
    shortest = math.inf
    for height, width, share in tiles:
        count = product.count * -(-product.rows // height) * -(-product.columns // width)
        for split in splits:
            if split > 1 and product.inner < 256 * split:
                break
            tile_seconds = 2 * height * width * (product.inner / split) * processors / (rate * share)
            waves = -(-count * split // processors)
            shortest = min(shortest, waves * tile_seconds + (split * sums if split > 1 else 0.0))
    moved = max(copy_seconds(product.bytes, machine) - machine.shortest["traffic"], 0.0)
    return Limits(shortest, 0.0, moved, machine.shortest["product"])


def _of_attention(core: AttentionCore, machine: Machine, served: Route) -> Limits:
    per_pair = core.flops / core.pairs if core.pairs else 0.0  # FLOPs of all heads
    exponentials = core.heads
    pairs, before = core.pairs, 0.0
    if served == "masked":
        pairs = core.batch * core.queries * core.keys
        if core.direction == "forward":
            before = MASK_LAUNCHES * machine.shortest["traffic"]
            before += MASK_TRAFFIC * core.queries * core.keys / machine.bandwidth
    elif served == "tiled":
        pairs = min(core.batch * core.queries * core.keys, pairs + core.batch * core.queries * EDGE_KEYS)
        if core.direction == "backward":
            # One pass over the pairs for key and value gradients, one for query gradients; both recompute the weights.
            per_pair *= (4 * core.head_dim + 3 * core.value_dim) / (3 * core.head_dim + 2 * core.value_dim)
            exponentials *= 2
    stretch = _stretch(core, pairs, machine.processors, even=served == "masked" or core.mask is None)
    return Limits(
        stretch * pairs * per_pair / machine.matrix_rate(core.dtype),
        stretch * pairs * exponentials / machine.exponential_rate,
        core.bytes / machine.bandwidth,
        machine.shortest["forward"] * core.launches,
        before,
    )


def _stretch(core: AttentionCore, pairs: int, processors: int, *, even: bool) -> float:
    """Return the slowdown relative to perfect load balance: full waves of equal tiles, or the longest tile."""
    if not pairs:
        return 1.0
    outer, inner = (core.keys, core.queries) if core.direction == "backward" else (core.queries, core.keys)
    tiles = core.batch * core.heads * -(-outer // QUERY_TILE)
    if even:
        return -(-tiles // processors) * processors / tiles
    span = inner if core.left is None else min(inner, core.left + 1 + EDGE_KEYS)
    longest = min(QUERY_TILE, outer) * span
    return max(1.0, longest * processors / (pairs * core.heads))


def _of_decode(core: AttentionCore, machine: Machine) -> Limits:
    """Return the limits of split-key decoding: keys are read once per group, one program per key tile."""
    group = core.queries * core.heads // max(core.kv_heads, 1)
    programs = core.batch * core.kv_heads * -(-core.visible_keys // KEY_TILE)
    stretch = max(1.0, machine.processors / max(programs, 1))
    padded = max(1.0, DECODE_ROWS / max(group, 1)) if machine.device == "cuda" else 1.0
    return Limits(
        stretch * padded * core.flops / machine.matrix_rate(core.dtype),
        stretch * padded * core.exponentials / machine.exponential_rate,
        stretch * core.bytes / machine.bandwidth,
        machine.shortest.get("decode", machine.shortest["forward"]),
    )
