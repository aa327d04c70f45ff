"""Where latents lie, which the decode kernels made for them take, and in which tiles; plain Python, without Triton."""

from __future__ import annotations

import functools
from typing import NamedTuple

from torch import Tensor

from polyhead.ops.common.kernels.sizes import power_of_two

MOST_RANK = 512
MOST_TURNING = 128
_KEYS_BYTES = 40 * 1024  # of one tile, at most


class Latents(NamedTuple):
    """Where latents lie, [batch, kv_heads, slots, rank + turning]; strides in elements, the last axis lies together."""

    held: Tensor
    batch: int
    head: int
    token: int
    lengths: Tensor | None = None  # [batch]: tokens of each sequence, the new ones included; None: every slot
    new_lengths: Tensor | None = None  # [batch]: how many of the queries are real; None: all


class Numbers(NamedTuple):
    """What is asked of the attention and its statistics."""

    scale: float
    softcap: float | None
    sink_keys: int
    window: int


class LatentBlocks(NamedTuple):
    """The tiles of a program, and how many programs an SM holds at once."""

    rows: int
    keys: int
    rank: int
    turning: int
    stages: int
    warps: int
    resident: int
    on_hopper: bool = False  # by the kernel that is made for Hopper

    def smaller(self) -> LatentBlocks | None:
        """The next that takes less shared memory."""
        if self.rows > 16:
            return self._replace(rows=self.rows // 2)
        return self._replace(keys=self.keys // 2) if self.keys > 16 else None


def latent_reasons(width: int, rank: int) -> list[str]:
    """Why the kernels cannot read latents of `rank` channels within keys of `width`, the others of which turn."""
    reasons = []
    if rank % 16 or not 16 <= rank <= MOST_RANK:
        reasons.append(f"latents must have a multiple of 16 channels up to {MOST_RANK}, got {rank}")
    turning = width - rank
    if turning % 8 or not 0 <= turning <= MOST_TURNING:
        reasons.append(f"beside latents a multiple of 8 channels up to {MOST_TURNING} may turn, got {turning}")
    return reasons


@functools.lru_cache(maxsize=256)
def plan_latent_blocks(rows: int, width: int, rank: int, itemsize: int) -> LatentBlocks:
    """Tiles that fit into registers and shared memory by what the compiler reports for sm_90.

    `rows` is the query heads of a key times the new tokens. In float32 more rows would not fit beside the keys.
    """
    block_m = min(max(16, power_of_two(rows)), 16 if itemsize == 4 else 64)
    block_rank, block_turning = power_of_two(rank), max(16, power_of_two(width - rank))
    room = _KEYS_BYTES // ((block_rank + block_turning) * itemsize)
    block_n = min(max(16, power_of_two(room + 1) // 2), 128)
    is_small = block_m == 16 and itemsize == 2
    return LatentBlocks(
        block_m,
        block_n,
        block_rank,
        block_turning,
        stages=3,
        warps=4 if is_small else 8,
        resident=2 if is_small else 1,
    )
