"""How long a piece of work must take by physics: its products, exponentials and bytes at the best that was reached.

What fills a machine badly is counted here too: tiles that do not divide evenly among the processors, long rows beside
short ones, few heads. What remains is how well kernels are made, which `polyhead.costs.timing.correction` learns.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from typing import Literal

from polyhead.costs.timing.machine import Device, Machine, Route
from polyhead.costs.work import AttentionCore, Piece, Product, Traffic
from polyhead.ops.attention.fused import LARGEST_DIM
from polyhead.ops.attention.mask_rule import is_mask_too_large, is_window_too_large

Bound = Literal["matrix", "exponentials", "bandwidth", "launch"]

MASK_BYTES = 13  # a pair, at once: distances in int64, three masks of them, and one in the kernel's numbers
MASK_TRAFFIC = 36  # bytes a pair that are read and written to make it
MASK_LAUNCHES = 9
QUERY_TILE = 128  # queries, or keys in the backward, that one processor holds at a time
KEY_TILE = 64
# Keys that a tile of queries under a band takes time for besides those that it sees: half of the tiles at both edges is
# hidden, all of them is compared pair by pair, and a program begins and ends.
EDGE_KEYS = 512
DECODE_ROWS = 16  # the fewest rows that a matrix unit multiplies
# Tiles that a library of products chooses among, each with how much of a processor it makes use of.
GPU_TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.9), (64, 256, 0.8), (64, 128, 0.7), (64, 64, 0.45))
CPU_TILES = ((1, 32, 1.0),)  # few rows are no whole tile there, and bound by what is read
SPLITS = (1, 2, 4, 8, 16, 32, 64)  # of the inner axis, whose partial sums are added up afterwards


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds that each resource needs for a piece; they work at the same time, so the longest counts.

    What is made `before` the kernel can begin, a mask tensor, comes on top of it.
    """

    matrix: float
    exponentials: float
    bandwidth: float
    fixed: float  # at its begin and end, whatever the size
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
    """Of a piece that is `served` in this way; as `auto` would on that machine, unless given."""
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
    """How `auto` serves it: PyTorch's kernels without a mask or with one, or tiles of a band.

    A band other than a causal edge is a mask tensor for PyTorch, and every pair is computed: where that takes too much
    memory, or on a GPU more time than kernels that skip what a window hides, tiles are taken.
    """
    is_causal = core.left is None and core.right == 0 and core.queries in (core.keys, 1)
    if core.direction == "decode" or core.mask is None or is_causal:
        return "plain"
    return "tiled" if is_mask_too_large(core.queries * core.keys) or _is_skipped(core, device) else "masked"


def _is_skipped(core: AttentionCore, device: Device) -> bool:
    """Whether our kernel takes it because it skips the pairs that a window hides."""
    if core.left is None or max(core.head_dim, core.value_dim) > LARGEST_DIM:
        return False
    return is_window_too_large(device, core.dtype, core.batch, core.heads, core.queries, core.keys, core.head_dim)


def copy_seconds(size: int, machine: Machine) -> float:
    """Of so many bytes read and written, along the copies that were timed: a line between two in logarithms."""
    copies = machine.copies
    if size >= machine.uncached_bytes:
        return size / machine.bandwidth
    place = bisect.bisect_right(copies, (size, math.inf))
    if place == 0:
        return copies[0][1]
    (low, quick), (high, slow) = copies[place - 1 : place + 1]
    share = math.log(size / low) / math.log(high / low)
    return quick * (slow / quick) ** share


def _of_product(product: Product, machine: Machine) -> Limits:
    """The best of a few tiles and ways to split the inner axis, in whole rounds over the processors."""
    rate, processors = machine.matrix_rate(product.dtype), machine.processors
    tiles, splits = (GPU_TILES, SPLITS) if machine.device == "cuda" else (CPU_TILES, (1,))
    sums = 8 * product.count * product.rows * product.columns / machine.bandwidth  # float32, written and read
    shortest = math.inf
    for height, width, share in tiles:
        count = product.count * -(-product.rows // height) * -(-product.columns // width)
        for split in splits:
            if split > 1 and product.inner < 256 * split:
                break
            one = 2 * height * width * (product.inner / split) * processors / (rate * share)
            rounds = -(-count * split // processors)
            shortest = min(shortest, rounds * one + (split * sums if split > 1 else 0.0))
    moved = max(copy_seconds(product.bytes, machine) - machine.shortest["traffic"], 0.0)
    return Limits(shortest, 0.0, moved, machine.shortest["product"])


def _of_attention(core: AttentionCore, machine: Machine, served: Route) -> Limits:
    per_pair = core.flops / core.pairs if core.pairs else 0.0  # of all heads
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
            # One walk over the pairs for the keys' gradients, one for the queries': each computes the weights anew.
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
    """How much longer than perfectly shared work: whole rounds of equal tiles, or the longest of unequal ones."""
    if not pairs:
        return 1.0
    held, met = (core.keys, core.queries) if core.direction == "backward" else (core.queries, core.keys)
    tiles = core.batch * core.heads * -(-held // QUERY_TILE)
    if even:
        return -(-tiles // processors) * processors / tiles
    span = met if core.left is None else min(met, core.left + 1 + EDGE_KEYS)
    longest = min(QUERY_TILE, held) * span
    return max(1.0, longest * processors / (pairs * core.heads))


def _of_decode(core: AttentionCore, machine: Machine) -> Limits:
    """Keys are read once for a group of heads, by as many programs as there are tiles of keys."""
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
